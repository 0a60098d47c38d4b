"""A batch size that stands for every batch size from 2 on.

It is a `torch.SymInt`. Comparing it, converting it to a number or looping over it leaves a guard in its environment;
printing or hashing it would leave none, so both are refused while a recording runs.
"""

# ruff: noqa: ANN401  (methods of symbolic numbers answer in several types)
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

import torch

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

SYMBOLIC_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_REVEALING = ("__repr__", "__hash__")
_clean: list[AnyBatchSize] = []
_refuse_now: ContextVar[Callable[[str], NoReturn] | None] = ContextVar("refuse", default=None)


class AnyBatchSize:
    """An unknown batch size of at least 2.

    Attributes:
        size: the number that a head sees.
    """

    def __init__(self, *, hint: int) -> None:
        # Imported here: these modules take a second to import, and only certificates need them.
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StrictMinMaxConstraint
        from torch.utils._sympy.value_ranges import ValueRanges

        self._environment: ShapeEnv = ShapeEnv()
        source = ConstantSource("batch")
        symbol = self._environment.create_symbol(
            hint,
            source=source,
            dynamic_dim=DimDynamic.DYNAMIC,
            constraint_dim=StrictMinMaxConstraint(vr=ValueRanges(2, 2**40), warn_only=False),
        )
        self.size: Any = self._environment.create_symintnode(symbol, hint=hint, source=source)

    def is_size(self, number: object) -> bool:
        """Whether a number is this very size, not something computed from it."""
        return isinstance(number, torch.SymInt) and number.node.expr == self.size.node.expr

    def was_inspected(self) -> bool:
        """Whether anything branched on the size or turned it into a number."""
        environment = self._environment
        return bool(environment.guards or environment.replacements or environment.deferred_runtime_asserts)


@contextlib.contextmanager
def any_batch_size(*, hint: int) -> Iterator[AnyBatchSize]:
    """An unknown batch size; one that nothing branched on is used again, since making one is slow."""
    symbol = _clean.pop() if _clean else AnyBatchSize(hint=hint)
    yield symbol
    if not symbol.was_inspected():
        _clean.append(symbol)


@contextlib.contextmanager
def refusing_to_reveal(refuse: Callable[[str], NoReturn]) -> Iterator[None]:
    """Refuse to print or hash symbolic numbers in this thread."""
    _watch_symbolic_numbers()
    token = _refuse_now.set(refuse)
    try:
        yield
    finally:
        _refuse_now.reset(token)


def _watch_symbolic_numbers() -> None:
    """Make printing and hashing of symbolic numbers ask `_refuse_now` first; once per process, no change elsewhere."""
    for kind in SYMBOLIC_NUMBERS:
        for name in _REVEALING:
            original = getattr(kind, name)
            if not getattr(original, "_asks_sensitivity", False):
                setattr(kind, name, _asking(original, name))


def _asking(original: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
    def method(self: Any) -> Any:
        refuse = _refuse_now.get()
        if refuse is not None:
            refuse(name)
        return original(self)

    method._asks_sensitivity = True  # type: ignore[attr-defined]
    return method
