"""What other public tools say about a head, in the way each of them is meant to be used.

The tools bound layers, so a head's figure is the product over its layers, batch norms folded into the convolutions before
them; ReLU, Flatten and max-pools whose windows do not overlap count 1. That is more than the tools do by themselves. Tools
are imported when they are asked, and `kind` is what a tool claims, not what holds.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rows import ESTIMATE, FAILED, LOWER, MISSING, REFUSES, UPPER, Answer
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.nn.utils.parametrizations import spectral_norm

Layer = nn.Conv2d | nn.Linear
Rule = Callable[..., Answer]

GRAM_STEPS = 4  # orthogonium's own default
GRAM_FLOPS = 1e12  # of one layer's Gram iterations; the matrices grow, so large layers get fewer of them
NUM_RECORDS = 4  # that deel-torchlip starts from
JACOBIAN_ENTRIES = 1_000_000  # up to which it may unroll Jacobians
SEED = 0
TWO_TWO = (("2", "2"),)


class NoRuleError(Exception):
    """A tool has no rule for a part of a head."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A tool, or one of its functions.

    Attributes:
        name: as in rows.
        pairs: the norms that it speaks of.
        rule: takes the head, input_shape, p and q.
    """

    name: str
    pairs: tuple[tuple[str, str], ...]
    rule: Rule

    def ask(self, head: nn.Module, *, input_shape: tuple[int, ...], p: str, q: str) -> Answer:
        """Its answer about a copy of the head; whatever goes wrong inside it becomes an answer too."""
        try:
            with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(io.StringIO()):
                torch.manual_seed(SEED)
                return self.rule(copy.deepcopy(head), input_shape=input_shape, p=p, q=q)
        except ModuleNotFoundError as error:
            return Answer(MISSING, None, f"{error.name} is not installed")
        except NoRuleError as error:
            return Answer(REFUSES, None, str(error))
        except Exception as error:  # another project's code may raise anything
            return Answer(FAILED, None, f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")


def weighted_layers(head: nn.Module) -> list[Layer]:
    """Convolutions and linear layers of a plain chain in eval mode, batch norms folded in.

    Raises:
        NoRuleError: for anything else, such as a residual sum.

    Example:
        >>> chain = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
        >>> [type(layer).__name__ for layer in weighted_layers(chain.eval())]
        ['Conv2d', 'Linear']
    """
    if isinstance(head, nn.Sequential):
        return _joined(list(head))
    return _joined([head])


def _joined(modules: list[nn.Module]) -> list[Layer]:
    layers: list[Layer] = []
    previous: nn.Module | None = None
    for module in modules:
        if isinstance(module, nn.Sequential):
            layers += weighted_layers(module)
        elif isinstance(module, nn.Conv2d | nn.Linear):
            layers.append(module)
        elif isinstance(module, nn.BatchNorm2d) and isinstance(previous, nn.Conv2d):
            layers[-1] = fuse_conv_bn_eval(previous, module)
        elif not isinstance(module, nn.ReLU | nn.Flatten) and not _is_apart(module):
            raise NoRuleError(f"no rule for {type(module).__name__}")
        previous = module
    return layers


def _is_apart(module: nn.Module) -> bool:
    """Whether a max-pool's windows do not overlap."""
    if not isinstance(module, nn.MaxPool2d):
        return False
    sizes = [torch.as_tensor(size).expand(2) for size in (module.kernel_size, module.stride, module.dilation)]
    return bool((sizes[0] <= sizes[1]).all() and (sizes[2] == 1).all())


def pixeldp(head: nn.Module, *, input_shape: tuple[int, ...], p: str, q: str) -> Answer:
    """The formulas of columbia/pixeldp (models/pixeldp.py, `_conv`), multiplied over layers as `pre_noise_sensitivity` does.

    1→1 and 1→2 take the largest norm of an input channel's kernels, whatever the stride; 2→2 takes the largest singular
    value of the kernel as a matrix, times ⌈k/s⌉.
    """
    total = 1.0
    layers = weighted_layers(head)
    for layer in layers:
        kernel = layer.weight.detach().double()
        if (p, q) == ("2", "2"):
            overlap = math.ceil(kernel.shape[2] / layer.stride[0]) if isinstance(layer, nn.Conv2d) else 1
            total *= float(torch.linalg.matrix_norm(kernel.flatten(1), ord=2)) * overlap
        else:
            columns = kernel.transpose(0, 1).flatten(1)
            total *= float(torch.linalg.vector_norm(columns, ord=int(q), dim=1).max())
    mixed = p != q and len(layers) > 1
    return Answer(UPPER, total, "1→2 bounds multiplied, as its code does" if mixed else "product of layer formulas")


def orthogonium(head: nn.Module, *, input_shape: tuple[int, ...], p: str, q: str) -> Answer:
    """The `get_conv_sv` of orthogonium (Gram iteration, Delattre et al. 2024), multiplied over layers."""
    get_conv_sv = _function("orthogonium.layers.conv.singular_values", "get_conv_sv")
    total, fewest = 1.0, GRAM_STEPS
    for layer in weighted_layers(head):
        if not isinstance(layer, nn.Conv2d):
            raise NoRuleError(f"no rule for {type(layer).__name__}: get_conv_sv takes convolutions")
        steps = gram_steps(layer)
        fewest = min(fewest, steps)
        total *= float(get_conv_sv(layer, n_iter=steps, return_stab_rank=False))
    return Answer(UPPER, total, f"get_conv_sv with {fewest} or more Gram iterations; the stride is ignored")


def gram_steps(layer: nn.Conv2d) -> int:
    """How many Gram iterations fit GRAM_FLOPS: the kernel nearly doubles its side in each of them."""
    channels, inner = max(layer.weight.shape[:2]), min(layer.weight.shape[:2])
    side, total = layer.kernel_size[0], 0.0
    for step in range(1, GRAM_STEPS + 1):
        total += 2.0 * channels**2 * inner * side**2 * (2 * side - 1) ** 2
        if total > GRAM_FLOPS:
            return max(step - 1, 1)
        side, inner = 2 * side - 1, channels
    return GRAM_STEPS


def deel_normalisation(head: nn.Module, *, input_shape: tuple[int, ...], p: str, q: str) -> Answer:
    """What the layers of deel-torchlip would divide these weights by: power iteration over their overlap coefficient."""
    normalise = _function("deel.torchlip.normalizers", "spectral_normalization")
    coefficient = _function("deel.torchlip.utils.lconv_norm", "compute_lconv_coef")
    total = 1.0
    for layer in weighted_layers(head):
        _, _, sigma = normalise(layer.weight.detach().flatten(1))
        overlap = 1.0
        if isinstance(layer, nn.Conv2d):  # lconv_norm passes no input shape
            overlap = float(coefficient(layer.kernel_size, None, layer.stride))
        total *= float(sigma) / overlap
    return Answer(
        ESTIMATE, total, "spectral_normalization / compute_lconv_coef, as SpectralConv2d and SpectralLinear do"
    )


def deel_evaluation(head: nn.Module, *, input_shape: tuple[int, ...], p: str, q: str) -> Answer:
    """deel-torchlip's `evaluate_lip_const` from random records."""
    evaluate = _function("deel.torchlip.utils", "evaluate_lip_const")
    records = torch.randn(NUM_RECORDS, *input_shape)
    with torch.no_grad():
        outputs = head(records[:1])
    kinds = ["noise_norm", "attack"]
    if records[0].numel() * outputs.numel() <= JACOBIAN_ENTRIES:
        kinds.append("jacobian_norm")
    value = float(evaluate(head, records, evaluation_type=kinds))
    return Answer(LOWER, value, f"largest of {', '.join(kinds)} from {NUM_RECORDS} normal records")


def eclipse(head: nn.Module, *, input_shape: tuple[int, ...], p: str, q: str) -> Answer:
    """eclipse-nn's `ECLipsE_Fast`, which reads Linear layers and passes over all others without a word."""
    estimator = _function("eclipse_nn.LipConstEstimator", "LipConstEstimator")(model=head)
    skipped = sum(1 for module in head.modules() if isinstance(module, nn.Conv2d))
    note = f"passes over {skipped} convolutions without a word" if skipped else "ECLipsE_Fast"
    try:
        return Answer(UPPER, float(estimator.estimate("ECLipsE_Fast")), note)
    except IndexError as error:  # no Linear layer was found
        raise NoRuleError(f"{note}, then fails: {type(error).__name__}: {error}") from error


def torch_spectral_norm(head: nn.Module, *, input_shape: tuple[int, ...], p: str, q: str) -> Answer:
    """What `torch.nn.utils.parametrizations.spectral_norm` divides each weight by, multiplied over layers."""
    total = 1.0
    for layer in weighted_layers(head):
        before = layer.weight.detach().clone()
        spectral_norm(layer)
        total *= float(before.norm() / layer.weight.detach().norm())
    return Answer(ESTIMATE, total, "power iteration on the kernel as a matrix, which is not the convolution's")


def _function(module: str, name: str) -> Any:  # noqa: ANN401
    return getattr(importlib.import_module(module), name)


PEERS: tuple[Peer, ...] = (
    Peer(name="PixelDP formula", pairs=(("1", "1"), ("1", "2"), ("2", "2")), rule=pixeldp),
    Peer(name="orthogonium", pairs=TWO_TWO, rule=orthogonium),
    Peer(name="eclipse-nn", pairs=TWO_TWO, rule=eclipse),
    Peer(name="deel-torchlip layers", pairs=TWO_TWO, rule=deel_normalisation),
    Peer(name="deel-torchlip evaluate", pairs=TWO_TWO, rule=deel_evaluation),
    Peer(name="torch spectral_norm", pairs=TWO_TWO, rule=torch_spectral_norm),
)
