"""Kinks made soft: ReLUs and their kin replaced by softplus, so that a Jacobian changes smoothly with its record."""

# ruff: noqa: ANN401  (arguments of torch functions have no narrower type)
from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode


class SoftenedKinks:
    """Runs a net with soft kinks, and remembers whether it has any.

    Attributes:
        seen: whether a kink was met in the last softened run.
    """

    def __init__(self) -> None:
        self.seen = False

    @contextmanager
    def softened(self, softening: float) -> Iterator[None]:
        """Replace kinks inside the block.

        Args:
            softening: width of a kink relative to the root mean square of its inputs, record by record; 0.0 leaves
                the net as it is.

        Guarantee: none; what runs inside only guides a search. In-place ReLUs do not write to their input here.

        Example:
            >>> with SoftenedKinks().softened(1.0):
            ...     soft = torch.relu(torch.ones(1, 1, requires_grad=True))
            >>> round(float(soft.detach()), 4)
            1.3133
        """
        if softening == 0.0:
            yield
            return
        self.seen = False
        with _Softening(self, softening):
            yield


class _Softening(TorchFunctionMode):
    def __init__(self, kinks: SoftenedKinks, softening: float) -> None:
        super().__init__()
        self.kinks, self.softening = kinks, softening

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").removesuffix("_")
        data = args[0] if args else None
        if isinstance(data, torch.Tensor) and data.requires_grad:
            soft = self.replacement(name, data, args[1:], kwargs)
            if soft is not None:
                self.kinks.seen = True
                return soft
        return func(*args, **kwargs)

    def replacement(self, name: str, data: torch.Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The soft twin of a kinked function, or None for one without a kink known here."""
        if name == "relu":
            return self.ramp(data)
        if name == "relu6":
            return self.ramp(data) - self.ramp(data - 6.0)
        if name == "abs":
            return 2.0 * self.ramp(data) - data
        if name == "leaky_relu":
            slope = rest[0] if rest else kwargs.get("negative_slope", 0.01)
            return slope * data + (1.0 - slope) * self.ramp(data)
        if name in ("hardtanh", "clamp", "clip"):
            names = ("min_val", "max_val") if name == "hardtanh" else ("min", "max")
            ends = dict(zip(names, rest[:2], strict=False)) | {key: kwargs[key] for key in names if key in kwargs}
            default = (-1.0, 1.0) if name == "hardtanh" else (None, None)
            low, high = (ends.get(key, other) for key, other in zip(names, default, strict=True))
            low, high = -math.inf if low is None else low, math.inf if high is None else high
            if not isinstance(low, int | float) or not isinstance(high, int | float):
                return None
            soft = data if math.isinf(low) else low + self.ramp(data - low)
            return soft if math.isinf(high) else soft - self.ramp(data - high)
        return None

    def ramp(self, data: torch.Tensor) -> torch.Tensor:
        """Softplus of a width relative to each record's size."""
        size = data.detach().flatten(1).square().mean(1).sqrt() if data.ndim > 1 else data.detach().abs()
        width = (self.softening * size).clamp_min(1e-30).reshape(-1, *[1] * (data.ndim - 1))
        return width * F.softplus(data / width, threshold=40.0)
