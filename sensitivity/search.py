"""Lower bounds by search: pairs of records that a head really pulls apart. Nothing here may calibrate noise."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parametrize

from sensitivity.ascent import FINALISTS, FORWARD_ERROR, Pairs, PairSearch, per_record, record_norms
from sensitivity.capturing.inspection import require_certifiable_tree
from sensitivity.norms import Norm, parse_norm
from sensitivity.shapes import InputBox, parse_input_box, parse_input_shape
from sensitivity.stochastic import cautious_distance

WIDENINGS = (1.0, 1e1, 1e3, 1e5, 0.0)  # distances at which finalists are judged, relative to close ones; 0 means 1.0


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
        num_steps: gradient steps of each of them; every 100 the search starts anew, half of it near the best so far.
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
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(
            f"generator={generator!r} is no torch.Generator: pass torch.Generator().manual_seed(0), or None"
        )
    net = _float64_copy(require_certifiable_tree(head))
    random = torch.Generator().manual_seed(0) if generator is None else generator
    search = PairSearch(net, p=p_norm, q=q_norm, shape=shape, box=box, random=random)
    try:
        return _judged(search, search.run(num_starts=num_starts, num_steps=num_steps))
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"the search failed in the head ({' '.join(str(error).split())[:150]}): it needs gradients of every "
            "operator; give yours a backward, or do without the search"
        ) from error


@torch.no_grad()
def _judged(search: PairSearch, best: Pairs) -> LowerBound:
    """The best pair by stochastic arithmetic among the finalists, close pairs and wide ones."""
    finalists = best.take(torch.arange(min(FINALISTS, len(best))))
    found = LowerBound(
        value=0.0, p=search.p, q=search.q, first=finalists.base[0].clone(), second=finalists.base[0].clone()
    )
    for widening in WIDENINGS:
        distances = (
            search.distances(finalists.base) if widening else per_record(torch.ones(len(finalists)), finalists.base)
        )
        distances = distances * (widening or 1.0)
        firsts, seconds = search.pair_of(finalists, distances)
        rank = search.ratios_of(firsts, seconds).argmax()
        first, second = firsts[rank], seconds[rank]
        distance = float(record_norms((second - first)[None], search.p))
        if distance == 0.0:
            continue
        moved = cautious_distance(search.outputs, first, second, order=search.q)
        value = moved / distance * (1.0 - FORWARD_ERROR)
        if value > found.value or bool((found.first == found.second).all()):
            found = LowerBound(value=value, p=search.p, q=search.q, first=first.clone(), second=second.clone())
    if bool((found.first == found.second).all()):
        raise ValueError(
            f"no pair of two different records of shape {search.shape} was found in the box: widen input_box"
        )
    return found


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
