"""Rounding errors made visible: every result of a float64 run moved by a random unit in the last place."""

# ruff: noqa: ANN401  (arguments of dispatched operators have no narrower type)
from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

UNIT_IN_THE_LAST_PLACE = 2.0**-52


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
