"""Alias tables with multi-word integer weights: an outcome's probability is its weight over 2^(64·w), exactly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from asfl_privacy.accounting.checks import check_integer
from asfl_privacy.accounting.rationals import fraction_up
from asfl_privacy.mechanisms.lattice.source import WORD_BITS, WordSource, draw_integer

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, kw_only=True)
class AliasTable:
    """A discrete distribution that is drawn with one word or less, one comparison and two look-ups.

    A uniform U in [0, 2^(64·w)) falls into one of 2^c equal columns, which its top c bits name. Below the column's cut
    the column's own outcome is drawn, else its alias. Only U's first bits are drawn, one word or all of it but some spare
    bits at its end, which the caller may use; the others matter only where the first equal the cut's, which happens with
    probability about 2^(c−64) without spare bits, and are drawn then.

    Attributes:
        column_bits: c ≥ 1.
        num_words: w ≥ 2.
        cuts: first word of each column's cut, shape (2^c,).
        cut_rests: the other words of each cut, as integers.
        outcomes: aliases by column, then own outcomes by column from the last to the first, shape (2^(c+1),).

    Guarantee:
        Each draw is independent and has exactly the distribution of ``weights()``, given uniform words.

    Source:
        Walker (1977); Vose (1991), whose two work lists are run here on integers, hence without rounding.
    """

    column_bits: int
    num_words: int
    cuts: npt.NDArray[np.uint64]
    cut_rests: tuple[int, ...]
    outcomes: Integers

    def draw_into(
        self,
        drawn: Integers,
        source: WordSource,
        *,
        words: npt.NDArray[np.uint64],
        scratch: tuple[Integers, npt.NDArray[np.uint64]],
        spare_bits: int = 0,
    ) -> None:
        """Fill ``drawn`` with independent outcomes.

        Args:
            drawn: int64, shape (n,), contiguous; overwritten.
            source: of the words that ties need, w each, or w − 1 without spare bits.
            words: fresh from the source, shape (n,); left as they are.
            scratch: two arrays of the same shape, overwritten: kept by the caller so that they stay in the cache.
            spare_bits: how many low bits of each word must not matter, at most 64 − c: they stay uniform and independent
                of what is drawn.
        """
        columns, gaps = scratch
        spare = np.uint64((1 << spare_bits) - 1)
        np.right_shift(words, np.uint64(WORD_BITS - self.column_bits), out=columns.view(np.uint64))
        np.take(self.cuts & ~spare, columns, out=gaps, mode="clip")
        # word and cut lie in the same column, so they differ by less than 2^63 and the top bit says which is larger
        np.subtract(words, gaps, out=gaps)
        has_ties = gaps.size and gaps.min() <= spare
        tied = [(int(i), int(columns[i])) for i in np.flatnonzero(gaps <= spare)] if has_ties else ()
        np.right_shift(gaps.view(np.int64), 63, out=gaps.view(np.int64))  # −1 below the cut, else 0
        np.bitwise_xor(columns, gaps.view(np.int64), out=columns)  # −1 − column below the cut, else column
        np.take(self.outcomes, columns, out=drawn, mode="wrap")  # −1 − column wraps to the column's own outcome
        rest_bits = WORD_BITS * (self.num_words - 1)
        num_words = -(-(rest_bits + spare_bits) // WORD_BITS)
        for i, column in tied:
            others = draw_integer(source, num_words=num_words) >> (WORD_BITS * num_words - rest_bits - spare_bits)
            cut = (int(self.cuts[column] & spare) << rest_bits) + self.cut_rests[column]
            drawn[i] = self.outcomes[-1 - column if others < cut else column]

    def weights(self) -> dict[int, int]:
        """The integer weight of each outcome, added up from the columns that are really used."""
        rest_bits = WORD_BITS * (self.num_words - 1)
        height = 1 << (WORD_BITS * self.num_words - self.column_bits)
        total: dict[int, int] = {}
        for column, (cut, rest) in enumerate(zip(self.cuts.tolist(), self.cut_rests, strict=True)):
            below = (cut << rest_bits) + rest - column * height
            own, alias = int(self.outcomes[-1 - column]), int(self.outcomes[column])
            total[own] = total.get(own, 0) + below
            total[alias] = total.get(alias, 0) + height - below
        return total


def build_alias_table(outcomes: Sequence[int], *, weights: Sequence[int], num_words: int) -> AliasTable:
    """An alias table with exactly these weights.

    Args:
        outcomes: what is drawn, int64, all different.
        weights: integers ≥ 0 that sum to 2^(64·num_words).
        num_words: w ≥ 2.

    Returns:
        The table.

    Raises:
        ValueError: where the numbers differ, an outcome repeats, a weight is negative, or the sum is another.

    Example:
        >>> table = build_alias_table([5, 7], weights=[2**126, 3 * 2**126], num_words=2)
        >>> table.weights() == {5: 2**126, 7: 3 * 2**126}
        True
    """
    check_integer("num_words", num_words, minimum=2)
    if len(outcomes) != len(weights) or len(set(outcomes)) != len(outcomes) or not outcomes:
        raise ValueError(
            f"{len(set(outcomes))} different outcomes have {len(weights)} weights: each outcome needs one weight; "
            "pass as many weights as outcomes, none twice"
        )
    if min(weights) < 0 or sum(weights) != 1 << (WORD_BITS * num_words):
        raise ValueError(
            f"the weights sum to {float(Fraction(sum(weights), 1 << (WORD_BITS * num_words))):g}·2^(64·{num_words}): they "
            "must be ≥ 0 and sum to it exactly; give the remainder to the largest"
        )
    column_bits = max(1, (len(outcomes) - 1).bit_length())
    num_columns = 1 << column_bits
    height = 1 << (WORD_BITS * num_words - column_bits)
    left = [*weights, *[0] * (num_columns - len(weights))]
    aliases, cuts = list(range(num_columns)), [0] * num_columns  # a column left alone is its own alias
    low = [i for i, weight in enumerate(left) if weight < height]
    high = [i for i, weight in enumerate(left) if weight > height]
    while low:
        poor, rich = low.pop(), high[-1]
        cuts[poor], aliases[poor] = left[poor], rich
        left[rich] -= height - left[poor]
        if left[rich] <= height:
            high.pop()
            if left[rich] < height:
                low.append(rich)
    rest_bits = WORD_BITS * (num_words - 1)
    absolute = [column * height + cut for column, cut in enumerate(cuts)]
    padded = [*outcomes, *[outcomes[0]] * (num_columns - len(outcomes))]  # columns of weight 0 never draw their own
    return AliasTable(
        column_bits=column_bits,
        num_words=num_words,
        cuts=np.array([cut >> rest_bits for cut in absolute], dtype=np.uint64),
        cut_rests=tuple(cut & ((1 << rest_bits) - 1) for cut in absolute),
        outcomes=np.array([*(padded[alias] for alias in aliases), *reversed(padded)], dtype=np.int64),
    )


def largest_relative_error(pairs: Iterable[tuple[int, int]]) -> float:
    """An upper bound of |drawn/ideal − 1| over pairs (drawn, ideal) of integers on one scale.

    Args:
        pairs: weights as drawn and ideal weights > 0, each ideal one rounded down by less than 1.

    Returns:
        The least float at or above the largest error over every ideal weight that rounds down to the given one.

    Example:
        >>> largest_relative_error([(1000, 1000), (3, 4)])
        0.5
    """
    # with ideal in [i, i + 1): |drawn − ideal|/ideal ≤ max(|drawn − i|, |drawn − i − 1|)/i
    error, unit = 0, 1
    for drawn, ideal in pairs:
        here = max(abs(drawn - ideal), abs(drawn - ideal - 1))
        if (
            here * unit > error * ideal
        ):  # compared as they are: reducing every fraction would take longer than the table
            error, unit = here, ideal
    return fraction_up(Fraction(error, unit))
