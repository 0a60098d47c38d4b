"""Memory that processes share: files without a name, mapped by each, and messages whose tensors lie in them."""

from __future__ import annotations

import copyreg
import io
import math
import mmap
import os
import pickle
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 64
"""Every tensor begins at a multiple of this many bytes."""
ARRAY_BYTES = 4096
"""Arrays below this go with the message: they are as cheap there."""
PROTOCOL = 5


class Region:
    """Bytes that several processes map; they are given back when the last view of them is gone.

    Args:
        descriptor: Of the file; the caller keeps it or closes it, the mapping stays.
        size: Of the file in bytes, > 0.
        private: Whether what this process writes stays its own; it sees what others write all the same.
    """

    def __init__(self, descriptor: int, size: int, *, private: bool = False) -> None:
        mapped = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE)
        self.size = size
        self.memory = memoryview(mapped)
        self._first = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()

    def offset_of(self, value: Tensor) -> int | None:
        """Where in the region a tensor begins; None where it lies elsewhere."""
        offset = value.data_ptr() - self._first
        return offset if 0 <= offset < self.size else None


class SharedRegion(Region):
    """A region of this process's making.

    Args:
        size: In bytes, > 0; rounded up to whole pages.

    Raises:
        OSError: Neither the memory file system nor the temporary folder has room.

    Guarantee:
        The bytes are reserved, so that a file system that fills up later cannot end a process that writes to them. The
        file has no name: nothing is left of it once no process maps it, however those end.
    """

    def __init__(self, size: int) -> None:
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.descriptor = _reserved_file(size)
        """For other processes to map."""
        weakref.finalize(self, os.close, self.descriptor)
        super().__init__(self.descriptor, size)


def _reserved_file(size: int) -> int:
    """Descriptor of a new file without a name."""
    folders = [folder for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())) if folder.is_dir()]
    for folder in folders:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                else:  # macOS
                    os.ftruncate(file.fileno(), size)
            except OSError:
                if folder == folders[-1]:
                    raise
                continue
            return os.dup(file.fileno())
    raise FileNotFoundError("there is neither /dev/shm nor a temporary folder")


class Slots:
    """A region cut into equal parts, each of which is written again only when nothing views it any more.

    Args:
        region: What is cut.
        size: Bytes of one slot; rounded up to the alignment.

    Guarantee:
        A slot that is taken is given to nobody else until it is given back or, where it was lent, until the last tensor
        over the loan is gone: whoever keeps such a tensor keeps its values.
    """

    def __init__(self, region: SharedRegion, *, size: int) -> None:
        self.region = region
        self.size = aligned(size)
        self.count = region.size // self.size
        self._free = deque(self.size * index for index in range(self.count))
        self._loans: dict[int, weakref.ref[memoryview]] = {}

    def take(self) -> int | None:
        """The offset of a slot that nothing views, or None where there is none."""
        try:
            return self._free.popleft()
        except IndexError:
            return None

    def give_back(self, offset: int) -> None:
        """A slot that was taken, and that nothing views."""
        self._free.append(offset)

    def lend(self, offset: int) -> memoryview:
        """The bytes of a taken slot, which gives itself back once no tensor is left over what is returned here."""
        free, loan = self._free, self.region.memory[offset : offset + self.size]
        self._loans[offset] = weakref.ref(loan, lambda _: free.append(offset))
        return loan

    def bytes_at(self, offset: int) -> memoryview:
        """The bytes of a slot, to be written."""
        return self.region.memory[offset : offset + self.size]


@dataclass(frozen=True)
class Parcel:
    """A value made ready to be sent: a header, and what lies in shared memory.

    Attributes:
        header: Everything but `pieces`; where it refers to them, to their offsets.
        pieces: Tensors and arrays with their offsets in bytes.
        size: Bytes that the pieces need.
    """

    header: bytes
    pieces: tuple[tuple[Tensor | NDArray[Any], int], ...]
    size: int

    def write(self, memory: memoryview) -> None:
        """Copy the pieces to shared memory of at least `size` bytes, aligned."""
        for piece, offset in self.pieces:
            if isinstance(piece, Tensor):
                target = torch.frombuffer(memory, dtype=piece.dtype, count=piece.numel(), offset=offset)
                _laid_out(target, piece.shape, _dense_stride(piece)).copy_(piece)
            else:
                np.frombuffer(memory, dtype=piece.dtype, count=piece.size, offset=offset)[:] = piece.ravel()


def pack(value: object, *, inline: bool = False, known: Mapping[str, Region] | None = None) -> Parcel:
    """Make a value ready to be sent to another process.

    Args:
        value: Anything that can be pickled. Plain dense tensors and large plain arrays become pieces.
        inline: Whether tensors and arrays go into the header, so that no memory is needed.
        known: Regions that the other process maps too: a tensor that lies in one is not copied, only its place is sent.

    Returns:
        The parcel.

    Raises:
        Exception: Whatever pickle raises where something cannot be pickled.

    Guarantee:
        `unpack` gives the same bits, types, shapes and strides of dense tensors; a tensor that occurs twice arrives as one.

    Edge cases:
        Tensors that need gradients, sparse, quantised and meta tensors, and those without elements are pickled as torch
        does it.

    Example:
        >>> parcel = pack({"a": torch.arange(3), "b": torch.tensor(1.5)})
        >>> memory = memoryview(bytearray(parcel.size))
        >>> parcel.write(memory)
        >>> unpack(parcel.header, memory=memory)
        {'a': tensor([0, 1, 2]), 'b': tensor(1.5000)}
    """
    stream, pieces = io.BytesIO(), _Pieces(inline=inline, known=known or {})
    pickler = pickle.Pickler(stream, PROTOCOL)
    # A table of the pickler's own, not a subclass's hook: it is asked for these types alone, and pickle's memo stays.
    pickler.dispatch_table = {**copyreg.dispatch_table, Tensor: pieces.tensor, np.ndarray: pieces.array}
    pickler.dump(value)
    return Parcel(header=stream.getvalue(), pieces=tuple(pieces.placed), size=pieces.size)


def unpack(header: bytes, *, memory: memoryview | None = None, regions: Mapping[str, Region] | None = None) -> Any:  # noqa: ANN401 - whatever was packed
    """The value of a parcel.

    Args:
        header: The parcel's.
        memory: What the parcel was written to; None for one without pieces.
        regions: The regions that were `known` when it was packed.

    Returns:
        The value. Tensors are views of the memory, and keep `memory` itself alive; arrays are copies.
    """
    return _Unpickler(io.BytesIO(header), memory=memory, regions=regions or {}).load()


def aligned(size: int) -> int:
    """The next multiple of the alignment, at least one."""
    return max(1, -(-size // ALIGNMENT)) * ALIGNMENT


class _Pieces:
    """Reduces tensors and arrays for a pickler, and remembers those that need memory."""

    def __init__(self, *, inline: bool, known: Mapping[str, Region]) -> None:
        self._inline, self._known = inline, known
        self.placed: list[tuple[Tensor | NDArray[Any], int]] = []
        self.size = 0

    def tensor(self, value: Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]] | Any:  # noqa: ANN401 - pickle's
        if not _is_plain(value):
            return value.__reduce_ex__(PROTOCOL)  # type: ignore[no-untyped-call]
        facts = (str(value.dtype).removeprefix("torch."), tuple(value.shape))
        if value.device.type == "cpu":
            for name, region in self._known.items():
                offset = region.offset_of(value)
                if offset is not None:
                    return _tensor_of, (name, offset, *facts, value.stride(), None)
        stride = _dense_stride(value)
        device = None if value.device.type == "cpu" else str(value.device)
        if self._inline:
            flat = torch.empty(value.numel(), dtype=value.dtype)
            _laid_out(flat, value.shape, stride).copy_(value)
            return _tensor_of, (bytearray(flat.view(torch.uint8).numpy()), 0, *facts, stride, device)
        return _tensor_of, (None, self._place(value, value.numel() * value.element_size()), *facts, stride, device)

    def array(self, value: NDArray[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]] | Any:  # noqa: ANN401 - pickle's
        plain = value.dtype.kind in "biufc" and value.dtype.isnative and value.flags.c_contiguous
        if self._inline or not plain or value.nbytes < ARRAY_BYTES:
            return value.__reduce_ex__(PROTOCOL)
        return _array_of, (self._place(value, value.nbytes), value.dtype.str, value.shape)

    def _place(self, value: Tensor | NDArray[Any], num_bytes: int) -> int:
        offset = self.size
        self.placed.append((value, offset))
        self.size = offset + aligned(num_bytes)
        return offset


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, *, memory: memoryview | None, regions: Mapping[str, Region]) -> None:
        super().__init__(stream)
        self._memory, self._regions = memory, regions

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - pickle's
        if module == __name__ and name == _tensor_of.__name__:
            memory, regions = self._memory, self._regions
            return lambda *facts: _tensor_of(*facts, memory=memory, regions=regions)
        if module == __name__ and name == _array_of.__name__:
            memory = self._memory
            return lambda *facts: _array_of(*facts, memory=memory)
        return super().find_class(module, name)


def _tensor_of(
    place: bytearray | str | None,
    offset: int,
    dtype: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None,
    device: str | None,
    *,
    memory: memoryview | None,
    regions: Mapping[str, Region],
) -> Tensor:
    source = memory if place is None else regions[place].memory if isinstance(place, str) else place
    count = _extent(shape, stride)
    flat = torch.frombuffer(source, dtype=getattr(torch, dtype), count=count, offset=offset)
    value = _laid_out(flat, shape, stride)
    return value if device is None else value.to(device)


def _array_of(offset: int, dtype: str, shape: tuple[int, ...], *, memory: memoryview | None) -> NDArray[Any]:
    assert memory is not None
    count = int(np.prod(shape))
    return np.frombuffer(memory, dtype=dtype, count=count, offset=offset).reshape(shape).copy()


def _is_plain(value: Tensor) -> bool:
    return (
        value.layout == torch.strided
        and value.device.type != "meta"
        and value.numel() > 0
        and not (value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg() or value.__dict__)
    )


def _dense_stride(value: Tensor) -> tuple[int, ...] | None:
    """Strides of a dense copy of the same layout; None for the usual ones.

    Layouts choose kernels, and so bits, even strides that address nothing: those of sides of one element.
    """
    step = 1
    for side, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if stride != step:
            return torch.empty_like(value, device="meta").stride()
        step *= side
    return None


def _laid_out(flat: Tensor, shape: Sequence[int], stride: Sequence[int] | None) -> Tensor:
    return flat.view(shape) if stride is None else flat.as_strided(shape, stride)


def _extent(shape: Sequence[int], stride: Sequence[int] | None) -> int:
    """Elements from the first to the last of a tensor."""
    if stride is None:
        return math.prod(shape)
    return 1 + sum((side - 1) * step for side, step in zip(shape, stride, strict=True))
