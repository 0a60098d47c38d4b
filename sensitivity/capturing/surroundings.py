"""What a recording must leave as it was: attributes of the head's modules, and the random states."""

# ruff: noqa: NPY002  (the legacy state is what a head may have drawn from)
from __future__ import annotations

import collections
import random
from typing import Any

import numpy as np
from torch import nn

_CONTAINERS = (list, dict, set, collections.deque)


class Surroundings:
    """Attributes and random states as they were at the start."""

    def __init__(self, head: nn.Module) -> None:
        self._attributes = [(path, module.__dict__, dict(module.__dict__)) for path, module in head.named_modules()]
        self._contents = [
            (f"{path}.{name}" if path else name, value, _copied(value))
            for path, _, attributes in self._attributes
            for name, value in attributes.items()
            if isinstance(value, _CONTAINERS)
        ]
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def restore_attributes(self) -> list[str]:
        """Put attributes and the contents of lists, dicts, sets and deques back; return the names of those changed."""
        changed: list[str] = []
        for path, now, before in self._attributes:
            names = [name for name in {**before, **now} if now.get(name, _ABSENT) is not before.get(name, _ABSENT)]
            changed.extend(f"{path}.{name}" if path else name for name in names)
            if names:
                now.clear()
                now.update(before)
        for name, value, before in self._contents:
            if not _same(value, before):
                changed.append(name)
                value.clear()
                (value.extend if isinstance(value, list | collections.deque) else value.update)(before)
        return changed

    def restore_random_states(self) -> bool:
        """Put the random states of Python and NumPy back; return whether they had moved."""
        now = np.random.get_state()
        moved = random.getstate() != self._python or any(
            not np.array_equal(a, b) for a, b in zip(now, self._numpy, strict=True)
        )
        if moved:
            random.setstate(self._python)
            np.random.set_state(self._numpy)
        return moved


_ABSENT = object()


def _copied(value: Any) -> Any:  # noqa: ANN401
    return dict(value) if isinstance(value, dict) else list(value)


def _same(value: Any, before: Any) -> bool:  # noqa: ANN401
    """Whether a container holds the very same objects as before."""
    if isinstance(value, dict):
        return value.keys() == before.keys() and all(value[key] is before[key] for key in before)
    return len(value) == len(before) and all(a is b for a, b in zip(value, before, strict=True))
