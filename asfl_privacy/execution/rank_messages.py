"""Messages between ranks: objects of which every tensor travels as bits, in one flat buffer for each kind of device."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes; every tensor begins at a multiple in its buffer, so that it can be viewed in its own type."""

CPU = torch.device("cpu")

Shapes = Sequence[tuple[torch.dtype, tuple[int, ...]]]
"""Type and shape of each of some tensors."""


def shapes_of(tensors: Sequence[Tensor]) -> Shapes:
    """Type and shape of each tensor."""
    return [(value.dtype, tuple(value.shape)) for value in tensors]


def to_bytes(tensors: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """The bits of tensors, one after the other, in one flat buffer.

    Args:
        tensors: Dense, any types, shapes, strides and devices.
        device: Where the buffer is wanted.

    Returns:
        uint8, shape (`count_bytes`,).

    Example:
        >>> values = [torch.tensor(True), torch.tensor([1.5, -0.0])]
        >>> buffer = to_bytes(values, device=torch.device("cpu"))
        >>> len(buffer), from_bytes(buffer, shapes_of(values))
        (32, [tensor(True), tensor([1.5000, -0.0000])])
    """
    shapes = shapes_of(tensors)
    buffer = torch.zeros(count_bytes(shapes), dtype=torch.uint8, device=device)
    for place, value in zip(from_bytes(buffer, shapes), tensors, strict=True):
        place.copy_(value.detach())
    return buffer


def from_bytes(buffer: Tensor, shapes: Shapes) -> list[Tensor]:
    """The tensors of `to_bytes`, as views of the buffer."""
    tensors, start = [], 0
    for dtype, shape in shapes:
        length = dtype.itemsize * torch.Size(shape).numel()
        tensors.append(buffer[start : start + length].view(dtype).view(shape))
        start += _padded(length)
    return tensors


def count_bytes(shapes: Shapes) -> int:
    """Length of the buffer that tensors of these types and shapes make."""
    return sum(_padded(dtype.itemsize * torch.Size(shape).numel()) for dtype, shape in shapes)


@dataclass(frozen=True)
class Packed:
    """An object made ready to travel.

    Attributes:
        skeleton: The object without its tensors' values, pickled.
        host: Bits of its CPU tensors.
        device: Bits of the tensors on the rank's accelerator.
    """

    skeleton: bytes
    host: Tensor
    device: Tensor


def pack(value: object, *, device: torch.device) -> Packed:
    """Make an object ready to travel.

    Args:
        value: What pickle takes; its tensors dense, on the CPU, the rank's device or torch's meta device.
        device: The rank's own.

    Raises:
        ValueError: A tensor that is sparse, quantised or elsewhere.

    Guarantee:
        `unpack` gives back every bit of every tensor, on the receiving rank's device where it was on the sender's. Of a
        meta tensor type and shape come back. Gradients are not carried.

    Example:
        >>> packed = pack({"round": 3, "weights": torch.ones(2)}, device=torch.device("cpu"))
        >>> unpack(packed)
        {'round': 3, 'weights': tensor([1., 1.])}
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream, device=device)
    pickler.dump(value)
    return Packed(
        skeleton=stream.getvalue(),
        host=to_bytes(pickler.tensors["host"], device=CPU),
        device=to_bytes(pickler.tensors["device"], device=device),
    )


def unpack(packed: Packed) -> Any:  # noqa: ANN401  # whatever was packed
    """The object of `pack`; its tensors are views of the buffers."""
    return _Unpickler(packed).load()


class _Pickler(pickle.Pickler):
    """Keeps tensors back; in the skeleton stands where each lies, its type and its shape."""

    def __init__(self, stream: io.BytesIO, *, device: torch.device) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: dict[str, list[Tensor]] = {"host": [], "device": []}
        self._own = device
        self._ends = {"host": 0, "device": 0}

    def persistent_id(self, value: object) -> tuple[str, torch.dtype, tuple[int, ...], int] | None:
        if not isinstance(value, Tensor):
            return None
        shape = tuple(value.shape)
        if (
            value.layout != torch.strided
            or value.is_quantized
            or value.device.type not in ("cpu", "meta", self._own.type)
        ):
            raise ValueError(
                f"a tensor on {value.device} of layout {value.layout} cannot go to another rank: only dense ones on the CPU "
                f"or on {self._own} can; convert it in the method"
            )
        if value.device.type == "meta":
            return "meta", value.dtype, shape, 0
        kind = "host" if value.device.type == "cpu" else "device"
        start = self._ends[kind]
        self._ends[kind] += count_bytes([(value.dtype, shape)])
        self.tensors[kind].append(value)
        return kind, value.dtype, shape, start


class _Unpickler(pickle.Unpickler):
    def __init__(self, packed: Packed) -> None:
        super().__init__(io.BytesIO(packed.skeleton))
        self._buffers = {"host": packed.host, "device": packed.device}

    def persistent_load(self, pid: tuple[str, torch.dtype, tuple[int, ...], int]) -> Tensor:
        kind, dtype, shape, start = pid
        if kind == "meta":
            return torch.empty(shape, dtype=dtype, device="meta")
        return from_bytes(self._buffers[kind][start:], [(dtype, shape)])[0]


def _padded(length: int) -> int:
    return length + -length % ALIGNMENT
