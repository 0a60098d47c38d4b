"""Lower bounds by search: pairs of records that a head really pulls apart. Nothing here may calibrate noise.

A step replaces the direction between two records by the one that its gradient prefers among directions of p-norm 1
(Boyd 1974's power method, which for p = 2 on a linear head is power iteration) and moves the base record uphill.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parametrize

from sensitivity.capturing.inspection import require_certifiable_tree
from sensitivity.norms import Norm, parse_norm
from sensitivity.shapes import InputBox, parse_input_box, parse_input_shape
from sensitivity.stochastic import StochasticArithmetic

FORWARD_ERROR = 1e-12  # relative allowance when pairs are compared; the best one is judged by `cautious_ratio`
NUM_REPEATS = 8  # runs in stochastic arithmetic that judge the best pair
CHUNK = 256
CLIMB = 0.1  # length of a base record's step, relative to the record


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """A ratio that a pair of records attains; the true p→q sensitivity is at least this, and may be far above.

    Attributes:
        value: ‖y(x) − y(x')‖_q / ‖x − x'‖_p, less an allowance for rounding.
        p: norm of the input.
        q: norm of the output.
        first: the record x, float64.
        second: the record x', float64.
    """

    value: float
    p: float
    q: float
    first: torch.Tensor
    second: torch.Tensor


def lower_bound(
    head: nn.Module,
    *,
    p: Norm,
    q: Norm,
    input_shape: int | Sequence[int],
    input_box: InputBox | None = None,
    num_starts: int = 16,
    num_steps: int = 60,
    generator: torch.Generator | None = None,
) -> LowerBound:
    """Search for a pair of records that a head pulls far apart.

    Args:
        head: the module, in the mode in which it will release.
        p: norm of the input distance: 1, 2, math.inf or "inf".
        q: norm of the output distance: likewise; all nine pairs are searched.
        input_shape: shape of one record, batch dimension excluded.
        input_box: (low, high) that both records stay in, or None for the whole space.
        num_starts: pairs that are improved side by side.
        num_steps: improvement steps.
        generator: source of the starting points, on the CPU; None takes a new one of seed 0, so results repeat.

    Returns:
        The best pair found and its ratio, computed in float64 on a copy of the head.

    Raises:
        UnsupportedModuleError: for a head that draws random numbers, mixes records or has hooks.
        ValueError: for a bad norm, shape, box or count, a box that is a point, a head that cannot be copied or does
            not run in float64, or one whose output is not finite.

    Guarantee: a pair of records attains `value`, up to rounding, which is estimated by stochastic arithmetic and
        taken off, not proven: a head that cancels large numbers gets a smaller value, not a larger one. It says
        nothing from above.

    Edge cases: a constant head gives 0.0.

    Source: D. W. Boyd (1974), The power method for lp norms, Linear Algebra Appl. 9, for the direction step.

    Example:
        >>> found = lower_bound(nn.Identity(), p=2, q=2, input_shape=(3,))
        >>> 0.999999 < found.value <= 1.0
        True
    """
    p_norm, q_norm = parse_norm(p, name="p"), parse_norm(q, name="q")
    shape = parse_input_shape(input_shape)
    box = parse_input_box(input_box, input_shape=shape)
    for name, count in (("num_starts", num_starts), ("num_steps", num_steps)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name}={count!r} is no count: it must be an integer of at least 1; pass for example 16")
    if box is not None and not bool((box[0] < box[1]).any()):
        raise ValueError(
            "input_box is a single point: no two records differ in it; pass a box with low < high somewhere"
        )
    net = _float64_copy(require_certifiable_tree(head))
    random = torch.Generator().manual_seed(0) if generator is None else generator
    pairs = _Pairs(net, p_norm, q_norm, box)
    base = _starting_records(shape, box, num_starts, random)
    direction = torch.randn(base.shape, generator=random, dtype=torch.float64)
    steps = 10.0 ** (torch.rand(num_starts, generator=random, dtype=torch.float64) * 3.0 - 3.0)
    if p_norm == 1:
        direction = _best_coordinates(pairs, base, steps)
    for _ in range(num_steps):
        base, direction = pairs.improve(base, direction, steps)
    if pairs.best is None:
        raise ValueError(f"no pair of two different records of shape {shape} was found in the box: widen input_box")
    _, first, second = pairs.best
    return LowerBound(value=pairs.cautious_ratio(first, second), p=p_norm, q=q_norm, first=first, second=second)


class _Pairs:
    """Evaluates pairs and remembers the best one seen."""

    def __init__(self, net: nn.Module, p: float, q: float, box: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        self.net, self.p, self.q, self.box = net, p, q, box
        self.best: tuple[float, torch.Tensor, torch.Tensor] | None = None

    def second_records(self, base: torch.Tensor, direction: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Records at p-distance `steps` along the directions, pulled back into the box."""
        unit = direction / _norms(direction, self.p).clamp_min(1e-300).reshape(-1, *[1] * (direction.ndim - 1))
        moved = base + unit * steps.reshape(-1, *[1] * (base.ndim - 1))
        return moved if self.box is None else torch.minimum(torch.maximum(moved, self.box[0]), self.box[1])

    def outputs(self, batch: torch.Tensor) -> torch.Tensor:
        """The net on a float64 batch."""
        try:
            outputs: torch.Tensor = self.net(batch)
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"the head does not run in float64 ({' '.join(str(error).split())[:150]}): the search computes in "
                "float64; keep constants in buffers and leave casts out, or do without the search"
            ) from error
        return outputs

    @torch.no_grad()
    def cautious_ratio(self, first: torch.Tensor, second: torch.Tensor) -> float:
        """Ratio of one pair: the least of repeated runs in stochastic arithmetic, less their spread."""
        arithmetic = StochasticArithmetic(generator=torch.Generator().manual_seed(0))
        batch = torch.cat([first.expand(NUM_REPEATS, *first.shape), second.expand(NUM_REPEATS, *second.shape)])
        noisy = arithmetic.moved(batch, in_place=False)
        with arithmetic:
            outputs = self.outputs(noisy)
        moved = _norms(outputs[NUM_REPEATS:] - outputs[:NUM_REPEATS], self.q)
        lowest, highest = float(moved.min()), float(moved.max())
        distance = float(_norms((second - first)[None], self.p))
        ratio = (lowest - (highest - lowest)) / distance * (1.0 - FORWARD_ERROR)
        return max(ratio, 0.0) if math.isfinite(ratio) else 0.0

    def try_out(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output distances, and ratios rounded down, one per pair; the best pair is remembered."""
        outputs = self.outputs(torch.cat([first, second]))
        left, right = outputs[: len(first)], outputs[len(first) :]
        distance = _norms(second - first, self.p)
        moved = _norms(right - left, self.q)
        with torch.no_grad():
            allowance = FORWARD_ERROR * (_norms(left, self.q) + _norms(right, self.q) + moved)
            safe = torch.where(distance > 0, (moved - allowance) / distance.clamp_min(1e-300), torch.zeros_like(moved))
            if not bool(torch.isfinite(safe).all()):
                raise ValueError(
                    "the head's output is not finite on ordinary records: no ratio exists; check its weights or the box"
                )
            index = int(safe.argmax())
            value = max(float(safe[index]), 0.0)
            if bool(distance[index] > 0) and (self.best is None or value > self.best[0]):
                self.best = (value, first[index].detach().clone(), second[index].detach().clone())
        return moved, safe

    def improve(
        self, base: torch.Tensor, direction: torch.Tensor, steps: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step for every pair: a better direction, then a base record uphill."""
        base = base.detach().requires_grad_(True)
        second = self.second_records(base.detach(), direction, steps).requires_grad_(True)
        moved, _ = self.try_out(base, second)
        if not moved.requires_grad:
            return base.detach(), direction
        at_base, at_second = torch.autograd.grad(moved.clamp_min(1e-300).log().sum(), (base, second), allow_unused=True)
        if at_base is None or at_second is None:
            return base.detach(), direction
        uphill = at_base + at_second
        length = _norms(uphill, 2).clamp_min(1e-300).reshape(-1, *[1] * (base.ndim - 1))
        climbed = (
            base.detach()
            + CLIMB * torch.maximum(_norms(base.detach(), 2), steps).reshape(length.shape) * uphill / length
        )
        if self.box is not None:
            climbed = torch.minimum(torch.maximum(climbed, self.box[0]), self.box[1])
        turned = _dual_direction(at_second, self.p)
        flat = (turned.flatten(1).abs().sum(1) == 0).reshape(length.shape)
        return climbed.detach(), torch.where(flat, direction, turned)


def _norms(batch: torch.Tensor, order: float) -> torch.Tensor:
    lengths: torch.Tensor = torch.linalg.vector_norm(batch.reshape(len(batch), -1), ord=order, dim=1)
    return lengths


def _dual_direction(gradient: torch.Tensor, p: float) -> torch.Tensor:
    """The direction of p-norm 1 along which a linear function of this gradient grows most."""
    if p == 2:
        return gradient
    if math.isinf(p):
        return gradient.sign()
    flat = gradient.flatten(1)
    chosen = flat.abs().argmax(dim=1, keepdim=True)
    return torch.zeros_like(flat).scatter(1, chosen, flat.gather(1, chosen).sign()).reshape(gradient.shape)


def _starting_records(
    shape: tuple[int, ...], box: tuple[torch.Tensor, torch.Tensor] | None, num_starts: int, random: torch.Generator
) -> torch.Tensor:
    if box is None:
        scales = 10.0 ** (torch.rand(num_starts, generator=random, dtype=torch.float64) * 2.0 - 1.0)
        return torch.randn((num_starts, *shape), generator=random, dtype=torch.float64) * scales.reshape(
            -1, *[1] * len(shape)
        )
    low, high = (side.clamp(-1e6, 1e6) for side in box)
    return low + (high - low) * torch.rand((num_starts, *shape), generator=random, dtype=torch.float64)


@torch.no_grad()
def _best_coordinates(pairs: _Pairs, base: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """For p = 1: the coordinates that move the output most, tried one by one around the first records."""
    size = base[0].numel()
    unit = torch.eye(size, dtype=torch.float64).reshape(size, *base.shape[1:])
    scores = torch.zeros(size, dtype=torch.float64)
    for record_index in range(min(2, len(base))):
        for start in range(0, size, CHUNK):
            directions = unit[start : start + CHUNK]
            first = base[record_index].expand_as(directions)
            second = pairs.second_records(first, directions, steps[record_index].expand(len(directions)))
            scores[start : start + CHUNK] = torch.maximum(
                scores[start : start + CHUNK], pairs.try_out(first, second)[1]
            )
    ranked = scores.argsort(descending=True)
    return unit[ranked[torch.arange(len(base)) % size]]


def _float64_copy(head: nn.Module) -> nn.Module:
    """A float64 copy with effective weights in place of parametrised ones: the head that a certificate speaks of."""
    try:
        net = copy.deepcopy(head).to("cpu")
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"the head cannot be copied ({' '.join(str(error).split())[:150]}): the search runs on a copy; keep "
            "computed tensors, locks and files out of its attributes, or do without the search"
        ) from error
    for module in list(net.modules()):
        if parametrize.is_parametrized(module):
            with torch.no_grad():
                effective = {name: getattr(module, name).clone() for name in module.parametrizations}  # type: ignore[union-attr]
            # The class made by parametrisation is shared with the original, so it is left, never edited.
            module.__class__ = parametrize.type_before_parametrizations(module)
            del module.parametrizations
            for name, weight in effective.items():
                module.register_parameter(name, nn.Parameter(weight))
    return net.double().requires_grad_(False)
