"""Fast draws of blocks and positions give, value by value, what the slow twin makes of the same words."""

from fractions import Fraction

import numpy as np
import pytest

from asfl_privacy.mechanisms.lattice import SeededSource, rounded_gaussian, rounded_laplace
from asfl_privacy.mechanisms.lattice.blocks import CHUNK_WORDS, MIN_FIRST_BITS


def slow_block(table, word, *, spare_bits):
    """The block number of one word by whole integers; a tie has probability below 10⁻³ a test and fails it."""
    column = word >> (64 - table.column_bits)
    first, cut = word >> spare_bits, int(table.cuts[column]) >> spare_bits
    assert first != cut
    return int(table.outcomes[-1 - column if first < cut else column])


def slow_draws(sampler, count, source):
    """Block, position and refusal of one value after the other, every refusal by a(l) to 200 bits."""
    m, spare = sampler.position_bits, sampler.spare_bits
    words = source.words(count).tolist()
    tails = [word % 2**spare for word in words] if spare else source.words(count).tolist()
    bits = spare or 64
    values, blocks = [0] * count, [slow_block(sampler.table, word, spare_bits=spare) for word in words]
    waiting = [(i, tail) for i, tail in enumerate(tails) if blocks[i]]
    while waiting:
        refused = []
        for i, tail in waiting:
            position, fraction = divmod(tail, 2 ** (bits - m))
            h = abs(blocks[i]) - 1
            ratio = Fraction(sampler._ratio(h, position, bits=200), 2**200)
            unit = Fraction(1, 2 ** (bits - m))
            assert not fraction * unit < ratio < (fraction + 1) * unit  # open to the last known bit: never seen here
            if fraction * unit < ratio:
                magnitude = 1 + h * 2**m + position
                values[i] = magnitude if blocks[i] > 0 else -magnitude
            else:
                refused.append(i)
        waiting, bits = [(i, word) for i, word in zip(refused, source.words(len(refused)).tolist(), strict=True)], 64
    return values


@pytest.mark.parametrize(
    ("make", "cells"),
    [
        (rounded_gaussian, 8448.0),
        (rounded_gaussian, 2.0**36 + 2.0**31),
        (rounded_laplace, 2.0**20 + 0.5),
        (rounded_laplace, 2.0**40),
    ],
)
def test_draws_are_those_of_the_slow_twin(make, cells):
    """Catches a bit of the word used twice or left out, a wrong sign, a refusal that is kept, and a word of its own for
    l and U where one word has too few bits.
    """
    sampler = make(cells)
    fast = sampler.draw(2000, SeededSource(b"twin"))
    assert fast.tolist() == slow_draws(sampler, 2000, SeededSource(b"twin"))


@pytest.mark.parametrize("cells", [65.0, 8448.0, 2.0**32, 2.0**34, 2.0**40])
def test_one_word_serves_both_only_where_each_keeps_enough_bits(cells):
    """Catches bits of the column, the comparison, l and U that overlap."""
    for sampler in (rounded_gaussian(cells), rounded_laplace(cells)):
        compared = 64 - sampler.spare_bits - sampler.table.column_bits
        assert sampler.fraction_bits == (sampler.spare_bits or 64) - sampler.position_bits
        assert min(compared, sampler.fraction_bits) >= MIN_FIRST_BITS
        assert (sampler.spare_bits > 0) == (
            64 - sampler.table.column_bits - sampler.position_bits >= 2 * MIN_FIRST_BITS
        )


def test_chunks_join_without_a_seam():
    """Catches an index that is counted from the chunk: the value that a refused position belongs to."""
    sampler, count = rounded_gaussian(8448.0), 2 * CHUNK_WORDS + 5
    drawn = sampler.draw(count, SeededSource(b"seam"))
    words = SeededSource(b"seam").words(count)
    for i in [0, CHUNK_WORDS - 1, CHUNK_WORDS, 2 * CHUNK_WORDS, count - 1, *range(7, count, 997)]:
        v = slow_block(sampler.table, int(words[i]), spare_bits=sampler.spare_bits)
        assert np.sign(drawn[i]) == np.sign(v)
        assert v == 0 or (abs(int(drawn[i])) - 1) >> sampler.position_bits == abs(v) - 1
