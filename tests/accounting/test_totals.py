"""Totals over records and clients against brute force in exact rationals."""

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asfl_privacy.accounting.columns import column_of_releases
from asfl_privacy.accounting.event import make_event
from asfl_privacy.accounting.totals import LargestSum, LedgerCounts, count_releases, tally_releases


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.1, 100.0), st.lists(st.integers(0, 10**6), min_size=6, max_size=6)),
        min_size=1,
        max_size=12,
        unique_by=lambda pair: pair[0],
    ),
    st.sampled_from([1, 2]),
)
def test_the_largest_sum_encloses_brute_force(columns, power):
    """Catches: a float sum without its error bound, and the wrong power."""
    total, exact = LargestSum(6), [Fraction(0)] * 6
    for multiplier, counts in columns:
        total.add(1 / Fraction(multiplier) ** power, np.array(counts))
        exact = [value + count / Fraction(multiplier) ** power for value, count in zip(exact, counts, strict=True)]
    low, high = total.bounds()
    assert low <= max(exact) <= high
    assert high - low <= high * Fraction(1, 10**12)
    if len(columns) <= 8:
        assert low == high == max(exact)
    assert all(Fraction(float(upper)) >= value for upper, value in zip(total.upper(), exact, strict=True))


def test_sums_closer_than_floats_can_tell_are_compared_exactly():
    """Catches: taking whichever record the float sums put first."""
    total = LargestSum(2)
    total.add(Fraction(1, 3), np.array([3, 3]))
    total.add(Fraction(1, 10**20), np.array([0, 1]))
    assert total.bounds()[1] == 1 + Fraction(1, 10**20)


def test_nothing_sums_to_zero():
    assert LargestSum(3).bounds() == (0, 0)
    assert LargestSum(0).bounds() == (0, 0)
    assert count_releases([]) == LedgerCounts(records=0, releases=0, max_releases_per_record=0)


def test_a_total_that_overflows_is_refused():
    total = LargestSum(2)
    total.add(1 / Fraction(1e-200) ** 2, np.array([1, 0]))
    with pytest.raises(ValueError, match="overflow"):
        total.bounds()


def test_large_ids_are_counted_like_small_ones():
    """Catches: a vector as long as the largest id, and ids cut to 32 bits."""
    columns = [column_of_releases([3, 2**53, 2**40]), column_of_releases([2**40])]
    assert count_releases([columns]) == LedgerCounts(records=3, releases=4, max_releases_per_record=2)


def update(round_number=0, **values):
    fixed = {"channel": "updates", "mechanism": "gaussian", "noise_multiplier": 2.0, "radius": 0.1}
    return make_event(**{**fixed, "round_number": round_number, "whole_record_multiplier": None, **values})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True), min_size=1, max_size=5))
def test_shared_noise_is_charged_as_if_the_records_of_a_client_moved_together(steps):
    """Each step's sum moves by k·Δ: μ² = k²/z². Catches: adding up records (k/z²), which is below the truth."""
    clients = np.array([0, 0, 0, 1, 1])
    apart = {update(number): [column_of_releases(step)] for number, step in enumerate(steps)}
    exact = max(
        sum(Fraction(sum(clients[record] == client for record in step) ** 2, 4) for step in steps) for client in (0, 1)
    )
    assert tally_releases(apart, distance=1.0, clients=clients).squares.bounds() == (exact, exact)
    together = {update(): [column_of_releases(step) for step in steps]}
    high = tally_releases(together, distance=1.0, clients=clients).squares.bounds()[1]
    assert high >= exact
    worst = max(
        sum(Fraction(sum(counts[r] >= level for r in members) ** 2, 4) for level in range(1, len(steps) + 1))
        for counts in [Counter(itertools.chain(*steps))]
        for members in ((0, 1, 2), (3, 4))
    )
    assert high == worst


def test_noise_of_its_own_adds_up_over_the_records_of_a_client():
    """Activations: by hand, client 0 has 1 + 2 releases at z = 2, client 1 one: μ² = 3/4."""
    event = update(channel="activations")
    parts = {event: [column_of_releases([0, 1, 1, 3])]}
    assert tally_releases(parts, distance=1.0, clients=np.array([0, 0, 0, 1])).squares.bounds()[1] == Fraction(3, 4)
    assert tally_releases(parts, distance=1.0).squares.bounds()[1] == Fraction(2, 4)


def test_a_clipped_client_update_counts_once_for_its_client():
    """By hand: three rounds at z = 2 over all records of a client: μ² = 3/4 for the client as for each record."""
    parts = {update(number, client_multiplier=2.0): [column_of_releases([0, 1, 2])] for number in range(3)}
    clients = np.array([0, 0, 0])
    assert tally_releases(parts, distance=1.0, clients=clients).squares.bounds()[1] == Fraction(3, 4)
    without = {update(number): [column_of_releases([0, 1, 2])] for number in range(3)}
    assert tally_releases(without, distance=1.0, clients=clients).squares.bounds()[1] == Fraction(27, 4)


def test_shared_laplace_noise_has_no_total_by_client():
    parts = {update(mechanism="laplace"): [column_of_releases([0])]}
    with pytest.raises(ValueError, match="no total by client"):
        tally_releases(parts, distance=1.0, clients=np.array([0]))


def test_more_classes_than_are_told_apart_are_merged_outward():
    """Catches: merged classes that keep the weaker multiplier, or lose releases."""
    parts = {
        update(number, channel="activations", mechanism="laplace", noise_multiplier=2.0 + number / 100): [
            column_of_releases([number % 7, 70_000])
        ]
        for number in range(400)
    }
    tally = tally_releases(parts, distance=1.0)
    assert len(tally.classes) <= 64
    assert tally.counts[70_000].sum() == 400
    strongest = sum(int(n) / group.strongest for n, group in zip(tally.counts[70_000], tally.classes, strict=True))
    weakest = sum(int(n) / group.weakest for n, group in zip(tally.counts[70_000], tally.classes, strict=True))
    exact = sum(1 / Fraction(2.0 + number / 100) for number in range(400))
    assert weakest <= exact <= strongest <= exact * Fraction(104, 100)
