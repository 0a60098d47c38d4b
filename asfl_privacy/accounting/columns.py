"""Columns: which records had a release, and how many each, in the fewest bytes that keep every digit.

On disk: {"start": first id, "length": n, "gaps": null | PACKED, "counts": m | PACKED}. Gaps are those between
consecutive ids, less one, and null where all are 0 (ids start … start + n − 1); counts is one integer where all are
equal. PACKED is {"width": 1 | 2 | 4 | 8, "data": base64 of zlib of little-endian unsigned integers of that many bytes}.
"""

import base64
import binascii
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from asfl_privacy.accounting.event import LARGEST_INTEGER, as_vector, check_range, check_vector

Ints = NDArray[np.signedinteger[Any]]

_LONGEST = 2**31
_SPARSE = 16  # ids this many times fewer than the largest id are sorted, not counted in a dense vector


@dataclass(frozen=True, kw_only=True, eq=False)
class Column:
    """Releases of distinct records.

    Args:
        start: the least id.
        length: n ≥ 1, how many records.
        ids: the ids, shape (n,), strictly increasing; None for start … start + n − 1.
        counts: releases of each, shape (n,), ≥ 1; None where all are ``every``.
        every: the common count; 0 where ``counts`` is given.
    """

    start: int
    length: int
    ids: Ints | None
    counts: Ints | None
    every: int

    @property
    def stop(self) -> int:
        """One more than the largest id."""
        return self.start + self.length if self.ids is None else int(self.ids[-1]) + 1

    @property
    def releases(self) -> int:
        """Releases in all."""
        return self.every * self.length if self.counts is None else int(self.counts.sum())

    def all_ids(self) -> Ints:
        """The ids, shape (n,)."""
        return np.arange(self.start, self.start + self.length) if self.ids is None else self.ids

    def all_counts(self) -> Ints:
        """The counts, shape (n,)."""
        return np.full(self.length, self.every) if self.counts is None else self.counts

    def equals(self, other: "Column") -> bool:
        """Whether both hold the same ids and counts."""
        return (
            (self.start, self.length, self.every) == (other.start, other.length, other.every)
            and _same(self.ids, other.ids)
            and _same(self.counts, other.counts)
        )


def column_of_releases(records: ArrayLike) -> Column:
    """One release of each record named; a record named twice is counted twice.

    Args:
        records: ids, shape (n,), n ≥ 1, integers in 0…2**53, in any order.

    Returns:
        The column; it shares no memory with ``records``.

    Raises:
        ValueError: if it is no such vector.

    Example:
        >>> column = column_of_releases([7, 3, 7])
        >>> column.all_ids().tolist(), column.all_counts().tolist()
        ([3, 7], [1, 2])
    """
    vector = as_vector("records", records)
    if _increasing(vector):
        check_range("records", int(vector[0]), int(vector[-1]), minimum=0)
        return _made(vector, None, every=1)
    largest = int(vector.max())
    check_range("records", int(vector.min()), largest, minimum=0)
    if largest < _SPARSE * len(vector):
        dense = np.bincount(vector)
        ids = np.flatnonzero(dense.astype(bool))
        return _made(ids, dense[ids])
    ids, counts = np.unique(vector, return_counts=True)
    return _made(ids, counts)


def make_column(ids: ArrayLike, counts: ArrayLike) -> Column:
    """The column of these ids, strictly increasing, and their counts.

    Raises:
        ValueError: if a vector is refused, the ids are not strictly increasing or the lengths differ.
    """
    rows, totals = check_vector("records", ids, minimum=0), check_vector("counts", counts, minimum=1)
    if len(rows) != len(totals) or not _increasing(rows):
        raise ValueError("records must be sorted and distinct, with one count each; sort them and add up their counts")
    return _made(rows, totals)


def merge_columns(columns: Sequence[Column]) -> Column:
    """Add up columns, at least one.

    Example:
        >>> merged = merge_columns([column_of_releases([1, 4]), column_of_releases([4, 4])])
        >>> merged.all_ids().tolist(), merged.all_counts().tolist()
        ([1, 4], [1, 3])
    """
    if len(columns) == 1:
        return columns[0]
    stop, length = max(column.stop for column in columns), sum(column.length for column in columns)
    if stop <= _SPARSE * length:
        dense = np.zeros(stop, dtype=np.int64)
        for column in columns:
            add_column(dense, column)
        ids = np.flatnonzero(dense.astype(bool))
        return _made(ids, dense[ids])
    ids, inverse = np.unique(np.concatenate([column.all_ids() for column in columns]), return_inverse=True)
    totals = np.zeros(len(ids), dtype=np.int64)
    np.add.at(totals, inverse, np.concatenate([column.all_counts() for column in columns]))
    return _made(ids, totals)


def add_column(dense: NDArray[np.int64], column: Column, *, known: Ints | None = None) -> None:
    """Add a column's counts to a dense vector, in place.

    Args:
        dense: counts by id, or by place in ``known``.
        column: what to add.
        known: sorted ids that hold those of the column; None where ``dense`` is by id.
    """
    if column.ids is None and known is None:
        where: Any = slice(column.start, column.start + column.length)
        dense[where] += column.every if column.counts is None else column.counts
        return
    places = column.all_ids() if known is None else np.searchsorted(known, column.all_ids())
    if column.counts is None:
        np.add.at(dense, places, column.every)
    else:
        dense[places] += column.counts


def encode_column(column: Column) -> dict[str, object]:
    """The column as plain JSON values; see the top of the file."""
    return {
        "start": column.start,
        "length": column.length,
        "gaps": None if column.ids is None else encode_integers(np.diff(column.ids) - 1),
        "counts": column.every if column.counts is None else encode_integers(column.counts),
    }


def decode_column(entry: object) -> Column:
    """Read what ``encode_column`` wrote.

    Raises:
        ValueError: if a key, a type or a length is wrong, or a value is out of range.
    """
    if not isinstance(entry, dict) or set(entry) != {"start", "length", "gaps", "counts"}:
        raise ValueError("records must hold exactly start, length, gaps and counts")
    start, length, counts = entry["start"], entry["length"], entry["counts"]
    for name, value, least, most in (("start", start, 0, LARGEST_INTEGER), ("length", length, 1, _LONGEST)):
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"{name} is {value!r}: it must be an integer in {least}…{most}")
    ids = None
    last = start + length - 1
    if entry["gaps"] is not None:
        gaps = decode_integers("gaps", entry["gaps"], length=length - 1)
        if len(gaps) and int(gaps.max()) >= LARGEST_INTEGER:
            raise ValueError(f"gaps hold {int(gaps.max())}: values lie below 2**53")
        steps = np.cumsum(gaps.astype(np.float64) + 1.0)
        last = start + (float(steps[-1]) if len(steps) else 0.0)
    if last > LARGEST_INTEGER:
        raise ValueError(f"records reach {last:.17g}: ids lie in 0…2**53")
    if entry["gaps"] is not None:
        ids = start + np.concatenate(([0], np.cumsum(gaps + 1)))
    if isinstance(counts, dict):
        totals = decode_integers("counts", counts, length=length)
        check_range("counts", int(totals.min()), int(totals.max()), minimum=1)
        return _made(np.arange(start, start + length) if ids is None else ids, totals)
    if isinstance(counts, bool) or not isinstance(counts, int) or not 1 <= counts <= LARGEST_INTEGER:
        raise ValueError(f"counts is {counts!r}: it must be an integer in 1…2**53, or a packed vector")
    if ids is None:
        return Column(start=start, length=length, ids=None, counts=None, every=counts)
    return _made(ids, None, every=counts)


def encode_integers(values: Ints) -> dict[str, object]:
    """Integers ≥ 0 as {"width", "data"}; see the top of the file.

    Example:
        >>> decode_integers("values", encode_integers(np.array([3, 0, 300])), length=3).tolist()
        [3, 0, 300]
    """
    largest = int(values.max(initial=0))
    width = next(width for width in (1, 2, 4, 8) if largest < 256**width)
    packed = zlib.compress(values.astype(f"<u{width}").tobytes(), 1)
    return {"width": width, "data": base64.b64encode(packed).decode("ascii")}


def decode_integers(name: str, packed: object, *, length: int) -> NDArray[np.int64]:
    """Read what ``encode_integers`` wrote, exactly ``length`` of them, or raise ValueError."""
    if not isinstance(packed, dict) or set(packed) != {"width", "data"} or not isinstance(packed["data"], str):
        raise ValueError(f"{name} must hold exactly width and data")
    width = packed["width"]
    if isinstance(width, bool) or width not in (1, 2, 4, 8):
        raise ValueError(f"{name} has width {width!r}: it must be 1, 2, 4 or 8")
    try:
        stream = zlib.decompressobj()
        raw = stream.decompress(base64.b64decode(packed["data"].encode("ascii"), validate=True), length * width + 1)
    except (zlib.error, binascii.Error, UnicodeEncodeError) as error:
        raise ValueError(f"{name} cannot be unpacked ({error})") from None
    if len(raw) != length * width or not stream.eof or stream.unused_data:
        raise ValueError(f"{name} must hold exactly {length} integers of {width} bytes")
    values = np.frombuffer(raw, dtype=f"<u{width}")
    if width == 8 and len(values) and int(values.max()) >= 2**63:
        raise ValueError(f"{name} hold {int(values.max())}: values lie below 2**63")
    return values.astype(np.int64)


def _made(ids: Ints, counts: Ints | None, *, every: int = 1) -> Column:
    """The canonical column, with its own memory: a range where ids are consecutive, one count where all are equal."""
    start, last, length = int(ids[0]), int(ids[-1]), len(ids)
    if counts is not None:
        first = int(counts[0])
        if bool((counts == first).all()):
            counts, every = None, first
        else:
            counts, every = _narrow(counts, int(counts.max())), 0
    consecutive = last - start + 1 == length
    return Column(
        start=start, length=length, ids=None if consecutive else _narrow(ids, last), counts=counts, every=every
    )


def _narrow(values: Ints, largest: int) -> Ints:
    return values.astype(np.int32 if largest < 2**31 else np.int64)


def _increasing(vector: Ints) -> bool:
    return bool((vector[1:] > vector[:-1]).all())


def _same(mine: Ints | None, theirs: Ints | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return np.array_equal(mine, theirs)
