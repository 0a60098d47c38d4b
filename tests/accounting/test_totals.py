"""Totals over records against brute force in exact rationals."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asfl_privacy.accounting.totals import Group, largest_sum, merge_counts


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.1, 100.0), st.dictionaries(st.integers(0, 5), st.integers(1, 10**6), min_size=1)),
        min_size=1,
        max_size=12,
        unique_by=lambda pair: pair[0],
    ),
    st.sampled_from([1, 2]),
)
def test_the_largest_sum_encloses_brute_force(columns, power):
    """Catches: a float sum without its error bound, and the wrong power."""
    groups, totals = [], dict.fromkeys(range(6), Fraction(0))
    for multiplier, counts in columns:
        ids = np.array(sorted(counts), dtype=np.int64)
        groups.append(
            Group(multiplier=Fraction(multiplier), ids=ids, counts=np.array([counts[i] for i in ids], dtype=np.int64))
        )
        for record, count in counts.items():
            totals[record] += count / Fraction(multiplier) ** power
    low, high = largest_sum(groups, power=power)
    assert low <= max(totals.values()) <= high
    assert high - low <= high * Fraction(1, 10**12)
    if len(groups) <= 8:
        assert low == high == max(totals.values())


def test_sums_closer_than_floats_can_tell_are_compared_exactly():
    """Catches: taking whichever record the float sums put first."""
    groups = [
        Group(multiplier=Fraction(3), ids=np.array([0, 1]), counts=np.array([3, 3])),
        Group(multiplier=Fraction(10**20), ids=np.array([1]), counts=np.array([1])),
    ]
    assert largest_sum(groups, power=1)[1] == 1 + Fraction(1, 10**20)


def test_nothing_sums_to_zero():
    ids, counts = merge_counts([])
    assert largest_sum([], power=2) == (0, 0)
    assert (len(ids), len(counts)) == (0, 0)


def test_a_total_that_overflows_is_refused():
    tiny = Group(multiplier=Fraction(1e-200), ids=np.array([0]), counts=np.array([1]))
    with pytest.raises(ValueError, match="overflow"):
        largest_sum([tiny], power=2)
