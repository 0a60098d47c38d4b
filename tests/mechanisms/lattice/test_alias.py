"""An alias table draws each outcome with exactly its integer weight."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asfl_privacy.mechanisms.lattice.alias import build_alias_table, largest_relative_error
from asfl_privacy.mechanisms.lattice.source import SeededSource


def draw(table, source, count, *, spare_bits=0):
    drawn, words = np.empty(count, np.int64), source.words(count)
    scratch = (np.empty(count, np.int64), np.empty(count, np.uint64))
    table.draw_into(drawn, source, words=words, scratch=scratch, spare_bits=spare_bits)
    return drawn


def slow_twin(table, number):
    """The outcome of U = ``number``, by whole integers."""
    column = number >> (64 * table.num_words - table.column_bits)
    cut = (int(table.cuts[column]) << (64 * (table.num_words - 1))) + table.cut_rests[column]
    return int(table.outcomes[-1 - column] if number < cut else table.outcomes[column])


def weights_from(parts, num_words):
    total = 1 << (64 * num_words)
    scaled = [part * total // (sum(parts) + 1) for part in parts]
    scaled[parts.index(max(parts))] += total - sum(scaled)
    return scaled


@given(st.lists(st.integers(0, 2**100), min_size=1, max_size=70), st.integers(2, 5))
def test_columns_add_up_to_the_weights_asked_for(parts, num_words):
    """Catches any rounding or loss in the two work lists."""
    weights = weights_from(parts, num_words)
    outcomes = [7 * i - 100 for i in range(len(parts))]
    table = build_alias_table(outcomes, weights=weights, num_words=num_words)
    used = table.weights()
    assert sum(used.values()) == 1 << (64 * num_words)
    assert {outcome: weight for outcome, weight in used.items() if weight} == {
        outcome: weight for outcome, weight in zip(outcomes, weights, strict=True) if weight
    }


def test_a_cut_splits_its_column_at_the_last_bit(scripted):
    """Catches ≤ for <, a cut compared by its first word alone, and rest words that are not drawn."""
    table = build_alias_table([0, 1, 2], weights=weights_from([5, 3, 11], 3), num_words=3)
    for column, (cut, rest) in enumerate(zip(table.cuts.tolist(), table.cut_rests, strict=True)):
        if not rest:
            continue  # a column with one outcome
        own, alias = table.outcomes[-1 - column], table.outcomes[column]
        assert own != alias
        for number, expected in ((rest - 1, own), (rest, alias), (rest + 1, alias)):
            source = scripted([cut, number & (2**64 - 1), number >> 64])
            assert draw(table, source, 1)[0] == expected == slow_twin(table, (cut << 128) + number)
            assert not source.left
        assert draw(table, scripted([cut - 1]), 1)[0] == own
        assert draw(table, scripted([cut + 1]), 1)[0] == alias


def test_every_word_goes_where_the_slow_twin_says():
    """Catches wrong column bits, a signed comparison, and swapped outcomes; ties are dense on purpose."""
    table = build_alias_table(
        list(range(-6, 5)), weights=weights_from([1, 2, 3, 4, 5, 60, 7, 8, 9, 10, 11], 2), num_words=2
    )
    words = SeededSource(b"words").words(5000)
    words[:16] = np.arange(16, dtype=np.uint64) << np.uint64(60)
    words[16:32] = words[:16] - np.uint64(1)

    class Source:
        def words(self, count, /):
            return words if count == len(words) else np.zeros(count, np.uint64)

    expected = [slow_twin(table, int(word) << 64) for word in words]
    assert draw(table, Source(), len(words)).tolist() == expected


@pytest.mark.parametrize("spare_bits", [1, 40, 60])
def test_spare_bits_do_not_matter(scripted, spare_bits):
    """Catches a comparison that reads them, and a tie whose missing bits are not drawn anew, or in another place."""
    table = build_alias_table([0, 1, 2], weights=weights_from([5, 3, 11], 3), num_words=3)
    low = 2**spare_bits - 1
    for column, (cut, rest) in enumerate(zip(table.cuts.tolist(), table.cut_rests, strict=True)):
        own, alias = table.outcomes[-1 - column], table.outcomes[column]
        missing = ((cut & low) << 128) + rest  # the cut's last spare_bits + 128 bits
        if own == alias or not missing:
            continue  # a column with one outcome
        for number, expected in ((missing - 1, own), (missing, alias), (missing + 1, alias)):
            placed = number << (64 - spare_bits)  # the first of three words' bits
            for first in (cut & ~low, cut | low):
                source = scripted([first, *(placed >> (64 * i) & (2**64 - 1) for i in range(3))])
                assert draw(table, source, 1, spare_bits=spare_bits)[0] == expected
                assert not source.left
        for word, expected in (((cut & ~low) - 1, own), ((cut | low) + 1, alias)):
            if word >> (64 - table.column_bits) == column:
                assert draw(table, scripted([word]), 1, spare_bits=spare_bits)[0] == expected


def test_one_outcome_is_always_drawn():
    table = build_alias_table([42], weights=[2**128], num_words=2)
    assert (draw(table, SeededSource(b"one"), 100) == 42).all()


@pytest.mark.parametrize(
    ("outcomes", "weights", "words", "message"),
    [
        ([1, 2], [2**128], 2, "each outcome needs one weight"),
        ([1, 1], [2**127, 2**127], 2, "1 different outcomes have 2 weights"),
        ([1, 2], [2**127, 2**127 - 1], 2, "must be ≥ 0 and sum to it exactly"),
        ([1, 2], [2**128 + 1, -1], 2, "must be ≥ 0"),
        ([], [], 2, "0 different outcomes"),
        ([1], [2**64], 1, "num_words is 1"),
    ],
)
def test_weights_that_are_no_distribution_are_refused(outcomes, weights, words, message):
    with pytest.raises(ValueError, match=message):
        build_alias_table(outcomes, weights=weights, num_words=words)


@given(st.integers(1, 10**6), st.integers(-2, 2), st.floats(0.0, 0.999))
def test_the_relative_error_covers_every_ideal_that_rounds_down_alike(ideal, step, fraction):
    """Catches an error that takes the rounded ideal for the ideal."""
    drawn = max(0, ideal + step)
    exact = ideal + Fraction(fraction)
    assert abs(drawn / exact - 1) <= Fraction(largest_relative_error([(drawn, ideal)]))
