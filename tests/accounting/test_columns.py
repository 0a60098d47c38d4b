"""Columns against dictionaries, and their packed form against tampering."""

import base64
import zlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asfl_privacy.accounting.columns import (
    add_column,
    column_of_releases,
    decode_column,
    decode_integers,
    encode_column,
    encode_integers,
    make_column,
    merge_columns,
)

IDS = st.one_of(
    st.integers(0, 12), st.integers(0, 300), st.integers(2**31 - 3, 2**31 + 3), st.integers(2**53 - 3, 2**53)
)
RELEASES = st.lists(IDS, min_size=1, max_size=20)


def as_dict(column):
    return dict(zip(column.all_ids().tolist(), column.all_counts().tolist(), strict=True))


@settings(max_examples=200, deadline=None)
@given(st.lists(RELEASES, min_size=1, max_size=4))
def test_columns_add_up_like_counters(lists):
    """Catches: lost duplicates, ids cut to 32 bits, a merge that drops what only one column has."""
    columns = [column_of_releases(releases) for releases in lists]
    for releases, column in zip(lists, columns, strict=True):
        assert as_dict(column) == Counter(releases)
        assert column.releases == len(releases)
        assert column.stop == max(releases) + 1
    merged, expected = merge_columns(columns), Counter(record for releases in lists for record in releases)
    assert as_dict(merged) == expected
    assert merged.equals(column_of_releases([record for releases in lists for record in releases]))
    known = np.array(sorted({*expected, 5, 2**40}))
    dense = np.zeros(len(known), dtype=np.int64)
    for column in columns:
        add_column(dense, column, known=known)
    assert dense.tolist() == [expected[record] for record in known.tolist()]
    small = [column for column in columns if column.stop < 400]
    by_id = np.zeros(400, dtype=np.int64)
    for column in small:
        add_column(by_id, column)
    assert by_id.sum() == sum(column.releases for column in small)
    assert all(by_id[record] >= count for column in small for record, count in as_dict(column).items())


@settings(max_examples=200, deadline=None)
@given(RELEASES)
def test_columns_read_back_equal(releases):
    column = column_of_releases(releases)
    back = decode_column(encode_column(column))
    assert back.equals(column)
    assert as_dict(back) == Counter(releases)


def test_columns_share_no_memory_with_the_caller():
    """Catches: a view, by which a caller's buffer that is used again rewrites the account."""
    for dtype in (np.int32, np.int64):
        ids = np.array([1, 5, 9], dtype=dtype)
        column = column_of_releases(ids)
        ids[:] = 0
        assert as_dict(column) == {1: 1, 5: 1, 9: 1}


def test_consecutive_ids_and_equal_counts_take_a_few_bytes():
    packed = encode_column(column_of_releases(np.tile(np.arange(100, 60_100), 3)))
    assert packed == {"start": 100, "length": 60_000, "gaps": None, "counts": 3}
    assert decode_column(packed).releases == 180_000


def packed_like(values, width):
    raw = np.asarray(values, dtype=f"<u{width}").tobytes()
    return {"width": width, "data": base64.b64encode(zlib.compress(raw)).decode()}


GOOD = {"start": 3, "length": 3, "gaps": packed_like([0, 4], 1), "counts": packed_like([1, 2, 3], 1)}


def test_the_packed_form_is_as_documented():
    """By hand: ids 3, 4, 9 and counts 1, 2, 3."""
    assert as_dict(decode_column(GOOD)) == {3: 1, 4: 2, 9: 3}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"extra": 1}, "exactly start"),
        ({"start": -1}, "start is -1"),
        ({"start": 1.0}, r"start is 1\.0"),
        ({"start": True}, "start is True"),
        ({"length": 0}, "length is 0"),
        ({"length": 2**40}, "length is"),
        ({"length": 4}, "gaps must hold exactly 3"),
        ({"length": 2}, "gaps must hold exactly 1"),
        ({"counts": 0}, "counts is 0"),
        ({"counts": -2}, "counts is -2"),
        ({"counts": 1.0}, r"counts is 1\.0"),
        ({"counts": True}, "counts is True"),
        ({"counts": None}, "counts is None"),
        ({"counts": [1, 2, 3]}, "counts is"),
        ({"counts": packed_like([1, 2], 1)}, "counts must hold exactly 3"),
        ({"counts": packed_like([1, 2, 3, 4], 1)}, "counts must hold exactly 3"),
        ({"counts": packed_like([0, 2, 3], 1)}, "counts holds 0"),
        ({"counts": packed_like([1, 2, 2**54], 8)}, "counts holds 1"),
        ({"counts": packed_like([1, 2, 2**63], 8)}, "below 2"),
        ({"gaps": packed_like([0, 2**54], 8)}, "gaps hold"),
        ({"gaps": packed_like([2**52, 2**52], 8)}, "records reach"),
        ({"start": 2**53, "gaps": None}, "records reach"),
        ({"gaps": {"width": 3, "data": ""}}, "width 3"),
        ({"gaps": {"width": True, "data": ""}}, "width True"),
        ({"gaps": {"width": 1, "data": "a!"}}, "cannot be unpacked"),
        ({"gaps": {"width": 1, "data": "é"}}, "cannot be unpacked"),
        ({"gaps": {"width": 1, "data": base64.b64encode(b"plain").decode()}}, "cannot be unpacked"),
        ({"gaps": {"width": 1, "data": packed_like([0, 4], 1)["data"][:-8]}}, "gaps"),
        ({"gaps": {"width": 1, "data": base64.b64encode(zlib.compress(b"\0\4") + b"more").decode()}}, "exactly 2"),
        ({"gaps": {"width": 1}}, "width and data"),
    ],
)
def test_every_other_packed_form_is_refused(change, words):
    """Catches: cut or lengthened vectors, counts of 0, ids past the largest integer a double holds."""
    with pytest.raises(ValueError, match=words) as caught:
        decode_column({**GOOD, **change})
    assert "\n" not in str(caught.value)


def test_ids_out_of_order_are_refused():
    for ids in ([3, 3], [7, 3]):
        with pytest.raises(ValueError, match="sorted and distinct"):
            make_column(ids, [1, 1])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2**62), max_size=10))
def test_integers_read_back(values):
    packed = encode_integers(np.array(values, dtype=np.int64))
    assert decode_integers("values", packed, length=len(values)).tolist() == values
