"""Rounding errors made visible: every result of a float64 run moved by a random unit in the last place."""

# ruff: noqa: ANN401  (arguments of dispatched operators have no narrower type)
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

UNIT_IN_THE_LAST_PLACE = 2.0**-52
NUM_REPEATS = 8  # runs that judge a pair


@torch.no_grad()
def cautious_distance(
    run: Callable[[torch.Tensor], torch.Tensor], first: torch.Tensor, second: torch.Tensor, *, order: float
) -> float:
    """Distance of two outputs by repeated runs in stochastic arithmetic: every entry's mean, less its spread.

    Args:
        run: maps a float64 batch to its outputs.
        first: a record, float64.
        second: another of the same shape.
        order: norm of the distance: 1, 2 or math.inf.

    Returns:
        The distance, or less; 0.0 where rounding hides it or it is not finite.

    Guarantee: none; an estimate of what exact arithmetic would give at least. Spreads come off entry by entry, since
        the noise of many entries adds up in a norm.

    Example:
        >>> a, b = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        >>> 2.9999 < cautious_distance(lambda batch: batch, a, b, order=1) <= 3.0
        True
        >>> cautious_distance(lambda batch: (batch * 1e-20 + 1.0) - 1.0, a, b, order=1)
        0.0
    """
    arithmetic = StochasticArithmetic(generator=torch.Generator().manual_seed(0))
    batch = torch.cat([first.expand(NUM_REPEATS, *first.shape), second.expand(NUM_REPEATS, *second.shape)])
    noisy = arithmetic.moved(batch, in_place=False)
    with arithmetic:
        left, right = run(noisy).flatten(1).chunk(2)
    moved = right - left
    spread = moved.amax(0) - moved.amin(0)
    sure = (moved.mean(0).abs() - spread).clamp_min(0.0)
    distance = float(torch.linalg.vector_norm(sure, ord=order))
    return distance if distance < float("inf") else 0.0


class StochasticArithmetic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Multiplies every float64 result by 1 − 2⁻⁵², 1 or 1 + 2⁻⁵², element by element, at random.

    Guarantee: none; the spread of repeated runs estimates the rounding error of one run, cancellation included.

    Source: J. Vignes (1993), A stochastic arithmetic for reliable scientific computation, Math. Comput. Simul. 35.
    """

    def __init__(self, *, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aliases = [value.alias_info for value in func._schema.returns if value.alias_info is not None]
        if any(not alias.is_write for alias in aliases):
            return result  # a view: its memory was moved when it was made
        return pytree.tree_map(lambda leaf: self.moved(leaf, in_place=bool(aliases)), result)

    def moved(self, value: Any, *, in_place: bool) -> Any:
        """One value with its last place moved, if it is a float64 tensor."""
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float64:
            return value
        places = torch.randint(-1, 2, value.shape, generator=self.generator, dtype=torch.float64)
        factors = places * UNIT_IN_THE_LAST_PLACE + 1.0
        return value.mul_(factors) if in_place else value * factors
