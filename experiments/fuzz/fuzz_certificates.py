"""Try to beat certificates by pair search on random heads: `python experiments/fuzz/fuzz_certificates.py --seconds 600`.

Every head comes from one seed, which a violation prints; `--seed` starts there again. Linear heads are compared with
their dense matrices too. Heads that are refused are counted, not hidden.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from sensitivity import UnsupportedModuleError, certify, lower_bound

NORMS = (1, 2, math.inf)
WIDE = 1e4  # half the side of the box in which corners are looked for where there is none
NUM_WIDE = 12
ROUNDING = 1e-9  # relative: what a pair's ratio, computed in float64, may exceed a certificate by
PADDING_MODES: tuple[Literal["zeros", "reflect", "replicate", "circular"], ...] = (
    *("zeros", "zeros", "zeros"),
    *("reflect", "replicate", "circular"),
)
METHODS = ("auto", "fast", "auto", "fast", "product")
Box = tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class Case:
    """One random head with a question about it."""

    seed: int
    head: nn.Module
    input_shape: tuple[int, ...]
    p: float
    q: float
    method: str
    box: Box
    linear: bool


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum."""
        total: torch.Tensor = x + self.branch(x)
        return total


class Concatenated(nn.Module):
    """Two branches side by side, along the first dimension of a record."""

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The concatenation."""
        return torch.cat([self.left(x), self.right(x)], dim=1)


def random_case(seed: int) -> Case:
    """The head and the question of a seed."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    linear = bool(rng.random() < 0.2)
    kind = rng.choice(["vector", "signal", "image"])
    channels = int(rng.integers(1, 4))
    shape: tuple[int, ...] = {
        "vector": (int(rng.integers(1, 9)),),
        "signal": (channels, int(rng.integers(3, 12))),
        "image": (channels, int(rng.integers(3, 7)), int(rng.integers(3, 7))),
    }[str(kind)]
    layers: list[nn.Module] = []
    current = shape
    for _ in range(int(rng.integers(1, 6))):
        layer = _layer(rng, current, linear=linear)
        try:
            with torch.no_grad():
                made = tuple(layer.eval()(torch.randn(2, *current)).shape[1:])
        except (RuntimeError, ValueError):
            continue  # a window larger than its input
        if not made or math.prod(made) == 0 or math.prod(made) > 400:
            continue
        layers.append(layer)
        current = made
    head = nn.Sequential(*(layers or [nn.Identity()])).eval()
    if rng.random() < 0.3:
        for parameter in head.parameters():
            parameter.data.mul_(float(10.0 ** rng.uniform(-2.0, 1.0)))
    if rng.random() < 0.5:
        head = head.double()
    p, q = (NORMS[int(rng.integers(3))] for _ in range(2))
    method = str(rng.choice(METHODS))
    box = None
    if rng.random() < 0.4:
        low = float(rng.uniform(-2.0, 0.5))
        box = (low, low + float(rng.uniform(0.1, 3.0)))
    return Case(
        seed=seed,
        head=head,
        input_shape=shape,
        p=p,
        q=p if method == "product" else q,
        method=method,
        box=box,
        linear=linear,
    )


def _layer(rng: np.random.Generator, shape: tuple[int, ...], *, linear: bool) -> nn.Module:
    """One random layer for records of this shape."""
    makers: list[Callable[[np.random.Generator, tuple[int, ...]], nn.Module]] = [_mixing, _mixing, _averaging]
    if not linear:
        makers += [_activation, _activation, _activation, _max_pool, _normalisation, _joined]
    return makers[int(rng.integers(len(makers)))](rng, shape)


def _mixing(rng: np.random.Generator, shape: tuple[int, ...]) -> nn.Module:
    bias = bool(rng.random() < 0.7)
    if len(shape) == 1:
        return nn.Linear(shape[0], int(rng.integers(1, 9)), bias=bias)
    if rng.random() < 0.2:
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), int(rng.integers(1, 9)), bias=bias))
    inputs, outputs = shape[0], int(rng.integers(1, 5))
    groups = inputs if rng.random() < 0.2 else 1
    if rng.random() < 0.2:
        transposed = nn.ConvTranspose1d if len(shape) == 2 else nn.ConvTranspose2d
        return transposed(
            inputs, outputs, 3, stride=int(rng.integers(1, 3)), padding=int(rng.integers(0, 2)), bias=bias
        )
    convolution = nn.Conv1d if len(shape) == 2 else nn.Conv2d
    padding_mode = PADDING_MODES[int(rng.integers(len(PADDING_MODES)))]
    layer: nn.Module = convolution(
        inputs,
        outputs * groups,
        int(rng.integers(1, 4)),
        stride=int(rng.integers(1, 3)),
        padding=int(rng.integers(0, 3)),
        dilation=int(rng.integers(1, 3)),
        groups=groups,
        bias=bias,
        padding_mode=padding_mode,
    )
    if rng.random() < 0.15:
        layer = nn.utils.parametrizations.weight_norm(layer)
    return layer


def _averaging(rng: np.random.Generator, shape: tuple[int, ...]) -> nn.Module:
    if len(shape) == 1:
        return nn.Identity()
    window, stride = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    padding = int(rng.integers(0, window // 2 + 1))
    ceil, include = bool(rng.random() < 0.3), bool(rng.random() < 0.5)
    if len(shape) == 2:
        if rng.random() < 0.3:
            return nn.AdaptiveAvgPool1d(int(rng.integers(1, 4)))
        return nn.AvgPool1d(window, stride, padding, ceil_mode=ceil, count_include_pad=include)
    if rng.random() < 0.3:
        return nn.AdaptiveAvgPool2d(int(rng.integers(1, 4)))
    return nn.AvgPool2d(window, stride, padding, ceil_mode=ceil, count_include_pad=include)


def _max_pool(rng: np.random.Generator, shape: tuple[int, ...]) -> nn.Module:
    if len(shape) == 1:
        return nn.ReLU()
    window = int(rng.integers(1, 4))
    pool = nn.MaxPool1d if len(shape) == 2 else nn.MaxPool2d
    return pool(
        window,
        int(rng.integers(1, 3)),
        int(rng.integers(0, window // 2 + 1)),
        dilation=int(rng.integers(1, 3)),
        ceil_mode=bool(rng.random() < 0.3),
    )


def _activation(rng: np.random.Generator, shape: tuple[int, ...]) -> nn.Module:
    makers: list[Callable[[], nn.Module]] = [
        nn.ReLU,
        nn.ReLU,
        nn.ReLU,
        lambda: nn.LeakyReLU(float(rng.uniform(-1.0, 2.0))),
        lambda: nn.PReLU(init=float(rng.uniform(-2.0, 2.0))),
        lambda: nn.ELU(float(rng.uniform(0.2, 2.0))),
        lambda: nn.GELU(approximate=str(rng.choice(["none", "tanh"]))),
        lambda: nn.Hardtanh(-1.0, float(rng.uniform(0.0, 2.0))),
        lambda: nn.Softplus(beta=float(rng.uniform(0.5, 3.0))),
        lambda: nn.Softshrink(float(rng.uniform(0.0, 1.0))),
        lambda: nn.Softmax(dim=1),
        lambda: nn.LogSoftmax(dim=1),
        *(nn.SiLU, nn.Mish, nn.SELU, nn.CELU, nn.Tanh, nn.Sigmoid, nn.ReLU6, nn.Hardswish, nn.Hardsigmoid, nn.Softsign),
        *(nn.LogSigmoid, nn.Tanhshrink, nn.Hardshrink),
    ]
    return makers[int(rng.integers(len(makers)))]()


def _normalisation(rng: np.random.Generator, shape: tuple[int, ...]) -> nn.Module:
    epsilon = float(10.0 ** rng.uniform(-5.0, 0.0))
    if rng.random() < 0.4 and len(shape) > 1:
        batch_norm = (nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d)(shape[0], eps=epsilon)
        batch_norm.running_var = torch.rand(shape[0]) + 0.1
        batch_norm.running_mean = torch.randn(shape[0])
        nn.init.normal_(batch_norm.weight)
        return batch_norm
    if rng.random() < 0.4 and len(shape) > 1:
        return nn.GroupNorm(1, shape[0], eps=epsilon)
    normalisation: nn.Module = (
        nn.RMSNorm(shape, eps=epsilon) if rng.random() < 0.3 else nn.LayerNorm(shape, eps=epsilon)
    )
    return normalisation


def _joined(rng: np.random.Generator, shape: tuple[int, ...]) -> nn.Module:
    if len(shape) == 1:
        branch: nn.Module = nn.Linear(shape[0], shape[0])
    else:
        branch = (nn.Conv1d if len(shape) == 2 else nn.Conv2d)(shape[0], shape[0], 3, padding=1)
    branch = nn.Sequential(branch, _activation(rng, shape))
    return Residual(branch) if rng.random() < 0.6 else Concatenated(branch, nn.Identity())


def violation(case: Case, *, num_starts: int, num_steps: int) -> str | None:
    """Words about a pair or a matrix that beats the certificate, or None.

    Raises:
        UnsupportedModuleError: for a head that is refused.
    """
    certificate = certify(
        case.head, p=case.p, q=case.q, input_shape=case.input_shape, input_box=case.box, method=case.method
    )
    random = torch.Generator().manual_seed(case.seed)
    found = lower_bound(
        case.head,
        p=case.p,
        q=case.q,
        input_shape=case.input_shape,
        input_box=case.box,
        num_starts=num_starts,
        num_steps=num_steps,
        generator=random,
    )
    distance = float(torch.linalg.vector_norm((found.second - found.first).flatten(), ord=case.p))
    if distance > 0.0 and found.value * distance > certificate.map(distance) * (1 + ROUNDING):
        return f"a pair reaches {found.value!r}, certified {certificate.value!r} + {certificate.slack!r}/distance"
    net = float64_net(case.head)
    for first, second in wide_pairs(case, net):
        far = float(torch.linalg.vector_norm((second - first).flatten(), ord=case.p))
        with torch.no_grad():
            outputs = net(torch.stack([first, second])).flatten(1)
        moved = float(torch.linalg.vector_norm(outputs[1] - outputs[0], ord=case.q))
        allowed = ROUNDING * float(
            torch.linalg.vector_norm(outputs, ord=1)
        )  # of two passes in float64, cancellation too
        if far > 0.0 and moved > certificate.map(far) * (1 + ROUNDING) + allowed:
            return f"records {far!r} apart move {moved!r}, certified {certificate.map(far)!r}"
    if case.linear and case.box is None:
        truth = dense_norm(case, net)
        if truth is not None and truth > certificate.value * (1 + 1e-13):
            return f"the dense matrix has norm {truth!r}, certified {certificate.value!r}"
    return None


def float64_net(head: nn.Module) -> nn.Module:
    """A float64 copy with the weights that parametrisations compute in the head's own element type."""
    net = copy.deepcopy(head)
    for module in list(net.modules()):
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
    return net.double()


def wide_pairs(case: Case, net: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Opposite corners of the box, or of a wide one: those that gradients of single outputs point to, and of their sum.

    Outputs in a range, and every output over a box, have a largest distance; ratios of close pairs never see it.
    """
    low, high = (-WIDE, WIDE) if case.box is None else case.box
    centre = torch.full((1, *case.input_shape), (low + high) / 2.0, dtype=torch.float64)
    generator = torch.Generator().manual_seed(case.seed)
    starts = centre + (high - low) * 0.1 * torch.randn(
        NUM_WIDE, *case.input_shape, generator=generator, dtype=torch.float64
    )
    starts = starts.clamp(low, high).requires_grad_(True)
    outputs = net(starts).flatten(1)
    kinds = torch.arange(NUM_WIDE) % (outputs.shape[1] + 1)
    aims = torch.cat([outputs, outputs.sum(1, keepdim=True)], 1).gather(1, kinds[:, None])
    (slopes,) = torch.autograd.grad(aims.sum(), starts)
    signs = torch.where(slopes == 0.0, torch.sign(starts - centre), torch.sign(slopes)).detach()
    middle, half = (low + high) / 2.0, (high - low) / 2.0
    return [(middle - half * sign, middle + half * sign) for sign in signs]


def dense_norm(case: Case, net: nn.Module) -> float | None:
    """The norm of a linear head's matrix, or None where it would take long."""
    size = math.prod(case.input_shape)
    zero = torch.zeros(1, *case.input_shape, dtype=torch.float64)
    jacobian: torch.Tensor = torch.autograd.functional.jacobian(net, zero)  # type: ignore[no-untyped-call]
    W = jacobian.reshape(-1, size).numpy()  # differences of outputs would cancel where biases are large
    p, q = case.p, case.q
    if (p, q) == (2, 1):
        W, p, q = W.T, math.inf, 2
    if p == 1:
        return float(np.linalg.norm(W, ord=q, axis=0).max())
    if q == math.inf:
        return float(np.linalg.norm(W, ord={2: 2, math.inf: 1}[p], axis=1).max())
    if (p, q) == (2, 2):
        return float(np.linalg.norm(W, 2))
    if W.shape[1] > 12:
        return None
    signs = np.array(np.meshgrid(*[[-1.0, 1.0]] * W.shape[1])).reshape(W.shape[1], -1)
    return float(np.linalg.norm(W @ signs, ord=q, axis=0).max())


def main() -> int:
    """Fuzz until the time is over; 1 if a certificate was beaten."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long to go on")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first head")
    parser.add_argument("--starts", type=int, default=8, help="pairs of each search")
    parser.add_argument("--steps", type=int, default=60, help="gradient steps of each pair")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    end = time.monotonic() + arguments.seconds
    counts: Counter[str] = Counter()
    seed = arguments.seed
    while time.monotonic() < end:
        case = random_case(seed)
        try:
            words = violation(case, num_starts=arguments.starts, num_steps=arguments.steps)
            counts["violations" if words else "held"] += 1
            if words:
                print(f"VIOLATION seed={seed} {case.p}→{case.q} {case.method} box={case.box}: {words}: {case.head}")
        except UnsupportedModuleError:
            counts["refused"] += 1
        except ValueError as error:
            counts["refused"] += 1
            print(f"refused seed={seed}: {error}")
        seed += 1
        if (seed - arguments.seed) % 100 == 0:
            print(f"heads {arguments.seed}–{seed - 1}: {dict(counts)}", flush=True)
    print(f"heads {arguments.seed}–{seed - 1}: {dict(counts)}")
    return 1 if counts["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
