"""2→2 on a torus against the largest output that slopes really reach, Fourier transforms and what must be refused."""

import math

import numpy as np
import pytest
import torch
from scipy import sparse
from torch import nn

from sensitivity.capturing.capture import record
from sensitivity.composing.linear_map import Work
from sensitivity.composing.network import build_network
from sensitivity.composing.norm_dp import compose
from sensitivity.composing.relaxed import program_of
from sensitivity.operators.operator import Effort
from sensitivity.semidefinite.constraints import Slopes
from sensitivity.semidefinite.footprints import Grids
from sensitivity.semidefinite.program import Program
from sensitivity.semidefinite.torus import torus_up

EFFORT = Effort(dense_entries=600_000, symbol_flops=2e7)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def program(head: nn.Module, shape: tuple[int, ...]) -> tuple[Program, Grids, float]:
    recording = record(head.eval(), input_shape=shape, dtype=torch.float32)
    composed = compose(recording, p=2, q=2, effort=EFFORT, same_norm=False)
    network = build_network(recording, tables=composed.tables, joint=composed.joint, work=Work(flops=1e10))
    return program_of(network)


def bound(head: nn.Module, shape: tuple[int, ...]) -> float | None:
    made, grids, factor = program(head, shape)
    found = torus_up(made, grids, spend=lambda _: True)
    return None if found is None else factor * found


def reached(made: Program, *, starts: int, seed: int) -> float:
    """The largest ‖y‖₂/‖x‖₂ over slopes at the ends of their intervals that coordinate ascent finds."""
    random = np.random.default_rng(seed)
    reads = [{i: np.asarray(A.toarray()) for i, A in terms.items()} for terms in made.reads]
    best = 0.0
    for _ in range(starts):
        slopes = [np.where(random.random(c.size) < 0.5, c.low, c.high) for c in made.constraints]
        last = 0.0
        for step in range(60):
            J = [np.eye(made.num_in)]
            inputs = []
            for k, terms in enumerate(reads):
                inputs.append(sum(A @ J[i] for i, A in terms.items()))
                if k < len(slopes):
                    J.append(slopes[k][:, None] * inputs[k])
            left, values, right = np.linalg.svd(inputs[-1], full_matrices=False)
            if values[0] <= last * (1 + 1e-9):
                break
            last = float(values[0])
            pulls = [np.zeros(size) for size in made.sizes]
            for i, A in reads[-1].items():
                pulls[i] = pulls[i] + A.T @ left[:, 0]
            for k in range(len(slopes) - 1, -1, -1):
                u = inputs[k] @ right[0]
                if step % len(slopes) == k:
                    constraint = made.constraints[k]
                    slopes[k] = np.where(pulls[k + 1] * u > 0, constraint.high, constraint.low)
                for i, A in reads[k].items():
                    pulls[i] = pulls[i] + A.T @ (slopes[k] * pulls[k + 1])
        best = max(best, last)
    return best


def random_head(seed: int) -> tuple[nn.Module, tuple[int, ...]]:
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    activation = [nn.ReLU, nn.GELU, lambda: nn.LeakyReLU(0.3), nn.Tanh, lambda: nn.LeakyReLU(-0.5)][seed % 5]
    kernel, stride = int(random.integers(1, 5)), int(random.integers(1, 4))
    padding = int(random.integers(0, kernel))
    if seed % 4 == 0:
        layers = [nn.Conv1d(2, 3, kernel, stride=stride, padding=padding), activation(), nn.Conv1d(3, 2, 2, padding=1)]
        return nn.Sequential(*layers, activation()), (2, int(random.integers(11, 16)))
    norm = nn.BatchNorm2d(4)
    norm.running_var.uniform_(0.3, 2.0)
    layers = [nn.Conv2d(2, 4, kernel, stride=stride, padding=padding), norm, activation()]
    if seed % 4 == 1:
        layers += [Residual(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=2), activation()))]
    elif seed % 4 == 2:
        layers += [nn.Conv2d(4, 3, 2, stride=2, padding=1, dilation=int(random.integers(1, 3))), activation()]
    layers += [nn.Conv2d(layers[-2].out_channels if seed % 4 == 2 else 4, 2, 2)]
    return nn.Sequential(*layers), (2, int(random.integers(11, 14)), int(random.integers(11, 14)))


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_of_slopes_reaches_beyond_the_torus(seed: int) -> None:
    """Catches: a torus too small for the farthest tap, a tap at the wrong cell or phase, slopes without 0 outside."""
    head, shape = random_head(seed)
    made, grids, _ = program(head, shape)
    found = torus_up(made, grids, spend=lambda _: True)
    assert found is not None
    truth = reached(made, starts=3, seed=seed)
    assert found >= truth * (1 - 1e-12)
    assert found <= 3.0 * truth  # border effects are large on so small grids, yet bounded


@pytest.mark.parametrize(("size", "kernel"), [(3, 5), (4, 4), (9, 3)])
def test_a_linear_program_has_the_norm_of_its_circulant(size: int, kernel: int) -> None:
    """One convolution: the largest singular value over the discrete frequencies of size n + farthest tap."""
    torch.manual_seed(size)
    conv = nn.Conv2d(2, 3, kernel, padding=kernel // 2, bias=False).double()
    rows = [conv(e.reshape(1, 2, size, size)).reshape(-1) for e in torch.eye(2 * size * size, dtype=torch.float64)]
    matrix = torch.stack(rows, 1).detach().numpy()
    out = conv(torch.zeros(1, 2, size, size, dtype=torch.float64)).shape[1:]
    grids = Grids(x=(2, size, size), u=(tuple(out),), z=())
    made = Program(
        num_in=matrix.shape[1], num_out=matrix.shape[0], reads=({0: sparse.csr_array(matrix)},), constraints=()
    )
    found = torus_up(made, grids, spend=lambda _: True)
    assert found is not None
    side = max(size, out[1]) + min(kernel // 2, max(size, out[1]) - 1)
    taps = np.fft.fft2(conv.weight.detach().numpy(), s=(side, side))
    circulant = np.linalg.svd(np.moveaxis(taps, (0, 1), (2, 3)), compute_uv=False).max()
    assert found >= np.linalg.norm(matrix, 2) * (1 - 1e-12)
    if kernel <= size:  # larger kernels have taps that no place of the grid uses
        assert math.isclose(found, circulant, rel_tol=1e-9)


def test_slopes_that_exclude_zero_are_widened() -> None:
    """A slope of at least ½ everywhere would forbid the zeros outside the grid."""
    head = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.LeakyReLU(0.5), nn.Conv2d(2, 1, 3, padding=1))
    made, grids, _ = program(head, (1, 6, 6))
    assert isinstance(made.constraints[0], Slopes)
    assert made.constraints[0].low.min() == 0.5
    wide = Program(
        num_in=made.num_in,
        num_out=made.num_out,
        reads=made.reads,
        constraints=(Slopes(low=np.zeros(72), high=np.ones(72)),),
    )
    narrow_bound, wide_bound = (torus_up(p, grids, spend=lambda _: True) for p in (made, wide))
    assert narrow_bound == pytest.approx(wide_bound, rel=1e-9)


@pytest.mark.parametrize(
    "head",
    [
        nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.ReLU(), nn.Conv2d(2, 1, 3)),
        nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3)),
        nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(2, 1, 3)),
        nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), nn.ReLU(), nn.Conv2d(2, 1, 3)),
    ],
)
def test_programs_that_differ_from_place_to_place_have_no_torus(head: nn.Module) -> None:
    assert bound(head, (1, 6, 6)) is None


def test_slopes_that_differ_from_place_to_place_have_no_torus() -> None:
    head = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 1, 3, padding=1))
    made, grids, _ = program(head, (1, 6, 6))
    high = np.ones(72)
    high[7] = 2.0
    odd = Program(
        num_in=made.num_in,
        num_out=made.num_out,
        reads=made.reads,
        constraints=(Slopes(low=np.zeros(72), high=high),),
    )
    assert torus_up(made, grids, spend=lambda _: True) is not None
    assert torus_up(odd, grids, spend=lambda _: True) is None


def test_work_that_is_not_there_is_not_done() -> None:
    head = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 1, 3, padding=1))
    made, grids, _ = program(head, (1, 6, 6))
    assert torus_up(made, grids, spend=lambda _: False) is None
