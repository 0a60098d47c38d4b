"""The bytes of a release: lattice integers, losslessly packed, and read back strictly."""

from __future__ import annotations

import math
import struct
import zlib

import numpy as np
import numpy.typing as npt

from asfl_privacy.accounting.checks import check_integer
from asfl_privacy.mechanisms.lattice.alias import Integers
from asfl_privacy.mechanisms.lattice.rounding import MAX_EXPONENT, check_integers, spacing_exponent

MAGIC = b"ASL1"
MAX_VALUES = 1 << 26
MAX_DIMS = 8
RAW, DEFLATED = 0, 1
_HEADER = struct.Struct("<4sIhBB")  # magic, CRC-32 of all that follows it, spacing exponent, dimensions, byte planes
_PLANE = struct.Struct("<BI")  # method, bytes


def encode(integers: Integers, *, spacing: float) -> bytes:
    """Pack integers into few bytes.

    Values are zigzag coded (0, −1, 1, −2, … become 0, 1, 2, 3, …), and each byte plane that is not all zero is stored raw
    or deflated, whichever is smaller: by Huffman codes of bytes and of runs, which the nearly empty upper planes are full
    of; noise has no other repeats for a dictionary to find.

    Args:
        integers: any int64 array of at most 2^26 values and 8 dimensions.
        spacing: g, a power of two.

    Returns:
        The payload. Its length depends on the released integers alone, so it tells nothing that they do not.

    Raises:
        ValueError: for another type, too many values or dimensions, or a spacing that is no power of two.

    Guarantee:
        ``decode`` gives back every int64 array exactly. The checksum finds accidents, not forgeries.

    Example:
        >>> integers, spacing = decode(encode(np.array([[1, -2], [300, 0]]), spacing=0.5))
        >>> integers.tolist(), spacing
        ([[1, -2], [300, 0]], 0.5)
    """
    check_integers(integers, largest=1 << 63)
    exponent = spacing_exponent(spacing)
    if integers.size > MAX_VALUES or integers.ndim > MAX_DIMS or max(integers.shape, default=0) > MAX_VALUES:
        raise ValueError(
            f"integers have shape {integers.shape}: a payload holds at most 2^26 values in {MAX_DIMS} dimensions; send several"
        )
    largest = max(2 * int(integers.max(initial=0)), -2 * int(integers.min(initial=0)) - 1)  # after zigzag coding
    num_planes = (largest.bit_length() + 7) // 8
    width = next(size for size in (2, 4, 8) if size >= num_planes)
    flat = integers.astype(f"<i{width}").reshape(
        -1
    )  # the smallest type that holds the coded values: fewer bytes to move
    zigzag = ((flat << 1) ^ (flat >> (8 * width - 1))).view(np.uint8).reshape(-1, width)
    parts = [struct.pack(f"<{integers.ndim}I", *integers.shape)]
    for place in range(num_planes):
        method, stored = _pack_plane(zigzag[:, place].tobytes())
        parts += [_PLANE.pack(method, len(stored)), stored]
    body = _HEADER.pack(MAGIC, 0, exponent, integers.ndim, num_planes)[8:] + b"".join(parts)
    return MAGIC + struct.pack("<I", zlib.crc32(body)) + body


def decode(payload: bytes, *, max_values: int = MAX_VALUES) -> tuple[Integers, float]:
    """Read a payload back.

    Args:
        payload: what ``encode`` made.
        max_values: the most values accepted; memory stays below about 20 bytes for each, whatever the payload says.

    Returns:
        The integers, int64 in their shape, and the spacing.

    Raises:
        ValueError: where the payload is truncated, corrupted, of another format, too large, or has bytes left over.
    """
    check_integer("max_values", max_values, minimum=1)
    if not isinstance(payload, bytes) or len(payload) < _HEADER.size:
        raise _refusal("it is too short for a header")
    magic, checksum, exponent, num_dims, num_planes = _HEADER.unpack_from(payload)
    if magic != MAGIC:
        raise _refusal(f"it starts with {magic!r} instead of {MAGIC!r}")
    if zlib.crc32(payload[8:]) != checksum:
        raise _refusal("its checksum differs")
    if num_dims > MAX_DIMS or num_planes > 8 or abs(exponent) > MAX_EXPONENT:
        raise _refusal("its header is out of range")
    at = _HEADER.size + 4 * num_dims
    if len(payload) < at:
        raise _refusal("it ends within the shape")
    shape = struct.unpack_from(f"<{num_dims}I", payload, _HEADER.size)
    count = math.prod(shape)
    if max(count, *shape, 0) > max_values:
        raise _refusal(f"it declares shape {shape}, more than {max_values} values")
    zigzag = np.zeros(count, dtype=np.uint64)
    for place in range(num_planes):
        if len(payload) < at + _PLANE.size:
            raise _refusal("it ends within a plane")
        method, size = _PLANE.unpack_from(payload, at)
        at += _PLANE.size
        if len(payload) < at + size:
            raise _refusal("it ends within a plane")
        plane = _unpack_plane(payload[at : at + size], method=method, count=count)
        zigzag |= plane.astype(np.uint64) << np.uint64(8 * place)
        at += size
    if at != len(payload):
        raise _refusal(f"{len(payload) - at} bytes are left over")
    half, sign = (zigzag >> np.uint64(1)).view(np.int64), (zigzag & np.uint64(1)).view(np.int64)
    return (half ^ -sign).reshape(shape), math.ldexp(1.0, exponent)


def _pack_plane(plane: bytes) -> tuple[int, bytes]:
    """The shorter of raw and deflated."""
    packer = zlib.compressobj(6, zlib.DEFLATED, -15, 9, zlib.Z_RLE)
    deflated = packer.compress(plane) + packer.flush()
    return (DEFLATED, deflated) if len(deflated) < len(plane) else (RAW, plane)


def _unpack_plane(stored: bytes, *, method: int, count: int) -> npt.NDArray[np.uint8]:
    """Exactly ``count`` bytes, never more in memory."""
    if method == RAW:
        plane = stored
    elif method == DEFLATED:
        unpacker = zlib.decompressobj(-15)
        try:
            plane = unpacker.decompress(stored, count + 1)
        except zlib.error as error:
            raise _refusal(f"a plane does not inflate ({error})") from None
        if not unpacker.eof or unpacker.unused_data or unpacker.unconsumed_tail:
            raise _refusal("a plane does not end where it should")
    else:
        raise _refusal(f"a plane is packed by method {method}")
    if len(plane) != count:
        raise _refusal(f"a plane holds {len(plane)} bytes instead of {count}")
    return np.frombuffer(plane, dtype=np.uint8)


def _refusal(reason: str) -> ValueError:
    return ValueError(f"the payload cannot be read, {reason}: it must be whole and unchanged; ask for it again")
