"""Symmetric integer noise of any width: an alias table picks a block, and exact rejection the cell within it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from asfl_privacy.accounting.checks import check_integer
from asfl_privacy.accounting.rationals import fraction_up
from asfl_privacy.mechanisms.lattice.alias import AliasTable, Integers
from asfl_privacy.mechanisms.lattice.source import WORD_BITS, Words, WordSource, draw_integer

CHUNK_WORDS = 1 << 14
MAX_SCALE_CELLS = 1 << 40
MIN_SCALE_CELLS = 4
MAX_COARSE_SCALE = 64
SATURATION = 1 << 62
BEYOND = 1 << 62  # the table's outcome for everything past its last block; never a block number
FLOAT_SLACK = 2.0**-40  # relative: numpy's exp and the few products before it are right to 2^-48

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockSampler(ABC):
    """Noise k = 0, or k = ±(1 + h·M + l) with block h ≥ 0 and position l in [0, M).

    The table draws v = 0, v = ±(h + 1) or "beyond" (h past the last block). Within a block the probability falls with l,
    so l is uniform and kept with probability a(l) = P(1 + hM + l)/P(1 + hM); a refused l is drawn again under the SAME
    block: the block's own probability is in the table, and drawing both again would weigh it by its mean a(l) twice.
    A real U in [0, 1) decides, of which the first bits are drawn. It is compared with (1) the least a of the block,
    which keeps about 97 % or more, (2) float bounds of a(l), (3) a(l) to several hundred bits and as many more bits of U,
    where the bounds leave it open (about one draw in 10⁶ at 65 cells, ever fewer above). With M = 1 the table is all.

    Attributes:
        scale: s or b in lattice cells, exact.
        position_bits: log2 M.
        table: distribution of v.
        squeeze: by |v|, the largest first bits of U that are surely below every a of the block, shape (H + 1,).
        relative_error: η, such that (1 − η)·P(k) ≤ P̃(k) ≤ (1 + η)·P(k) for every k that can be drawn, with P the ideal
            distribution and P̃ the drawn one.
        tail_probability_per_draw: τ ≥ P(the k that cannot be drawn).

    Guarantee:
        ``epsilon_excess_per_draw`` e and τ satisfy P̃(S) ≤ e^{e/2}·P(S) and P(S) ≤ e^{e/2}·P̃(S) + τ for every set S of
        outcomes, given uniform words. They are e/2 = η/(1 − η) ≥ −log(1 − η) ≥ log(1 + η): the first inequality sums
        P̃(k) ≤ (1 + η)P(k) over S, the second P(k) ≤ P̃(k)/(1 − η) over the k in S that can be drawn. n independent
        draws are (n·e, n·τ): the factors multiply, and P^n(some coordinate cannot be drawn) ≤ n·τ.
    """

    scale: Fraction
    position_bits: int
    table: AliasTable
    squeeze: Words
    relative_error: float
    tail_probability_per_draw: float

    @property
    def epsilon_excess_per_draw(self) -> float:
        """The excess e = 2η/(1 − η), rounded up."""
        eta = Fraction(self.relative_error)
        return fraction_up(2 * eta / (1 - eta))

    @property
    def cells_per_block(self) -> int:
        """M."""
        return 1 << self.position_bits

    def draw(self, count: int, source: WordSource) -> Integers:
        """Independent noise in lattice cells.

        Args:
            count: ≥ 0.
            source: of uniform words; with a reproducible one there is no privacy towards whoever knows its key.

        Returns:
            int64, shape (count,), |k| ≤ 2^62.

        Raises:
            ValueError: for a negative count.
        """
        drawn = np.empty(check_integer("count", count, minimum=0), dtype=np.int64)
        columns, gaps = np.empty(CHUNK_WORDS, dtype=np.int64), np.empty(CHUNK_WORDS, dtype=np.uint64)
        for start in range(0, drawn.size, CHUNK_WORDS):
            chunk = drawn[start : start + CHUNK_WORDS]
            self.table.draw_into(chunk, source, scratch=(columns[: chunk.size], gaps[: chunk.size]))
            past = np.flatnonzero(chunk == BEYOND).tolist() if chunk.max() == BEYOND else []
            for i in past:
                chunk[i] = 0
            if self.position_bits:
                self._place(chunk, source)
            for i in past:
                sign = 1 - 2 * (draw_integer(source, num_words=1) & 1)
                chunk[i] = sign * min(self._draw_beyond(source), SATURATION)
        return drawn

    def _place(self, chunk: Integers, source: WordSource) -> None:
        """Replace signed block numbers by cells."""
        blocks = np.abs(chunk)
        positions, fractions = self._split(source.words(chunk.size))
        pending = np.flatnonzero(fractions > np.take(self.squeeze, blocks))
        while pending.size:
            kept = self._keeps(blocks[pending] - 1, positions[pending], fractions[pending], source)
            pending = pending[~kept]
            positions[pending], fractions[pending] = self._split(source.words(pending.size))
        cells = ((blocks - 1) << self.position_bits) + positions + 1
        np.multiply(np.sign(chunk), cells, out=chunk)

    def _split(self, words: Words) -> tuple[Integers, Words]:
        """A position from the top bits of each word, and the first bits of U from the others, moved to the top."""
        m = np.uint64(self.position_bits)
        return (words >> (np.uint64(WORD_BITS) - m)).view(np.int64), words << m

    def _keeps(
        self, blocks: Integers, positions: Integers, fractions: Words, source: WordSource
    ) -> npt.NDArray[np.bool_]:
        """Whether U < a(l), each time exactly."""
        lower, upper = self._ratio_bounds(blocks, positions)
        first = fractions.astype(np.float64) * 2.0**-WORD_BITS  # within 2^-53 relative
        kept = first * (1.0 + 2.0**-50) + 2.0 ** (self.position_bits - WORD_BITS) <= lower
        for i in np.flatnonzero(~kept & (first * (1.0 - 2.0**-50) < upper)):
            kept[i] = self._keeps_exactly(int(blocks[i]), int(positions[i]), int(fractions[i]), source)
        return kept

    def _keeps_exactly(self, block: int, position: int, fraction: int, source: WordSource) -> bool:
        """Whether U < a(l), with U's first bits given and all others drawn here."""
        num_words = self.table.num_words
        bits = WORD_BITS - self.position_bits + WORD_BITS * num_words
        first = (fraction >> self.position_bits) << (WORD_BITS * num_words)
        return first + draw_integer(source, num_words=num_words) < self._ratio(block, position, bits=bits)

    def _draw_in_block(self, block: int, source: WordSource) -> int:
        """|k| = 1 + h·M + l for a block of any number, by exact rejection alone."""
        while True:
            word = draw_integer(source, num_words=1)
            position = word >> (WORD_BITS - self.position_bits)
            fraction = (word << self.position_bits) & (2**WORD_BITS - 1)
            if self.position_bits == 0 or self._keeps_exactly(block, position, fraction, source):
                return 1 + (block << self.position_bits) + position

    @abstractmethod
    def _ratio_bounds(self, blocks: Integers, positions: Integers) -> tuple[Floats, Floats]:
        """Floats at or below, and at or above, a(l)."""

    @abstractmethod
    def _ratio(self, block: int, position: int, *, bits: int) -> int:
        """a(l)·2^bits, rounded down, its relative error within the one stated by the family."""

    @abstractmethod
    def _draw_beyond(self, source: WordSource) -> int:
        """|k| past the table's last block, by its conditional distribution."""


def make_squeeze(lower: Floats, *, position_bits: int) -> Words:
    """Thresholds by |v|: U's first bits at or below them put all of U below every a of the block.

    Args:
        lower: by block, a number in (0.1, 1] at or below the least a of the block, shape (H,).
        position_bits: log2 M, ≤ 40.

    Returns:
        uint64, shape (H + 1,); entry 0 (the cell k = 0) keeps everything.
    """
    thresholds = [int(Fraction(ratio) * 2**WORD_BITS) - (1 << position_bits) for ratio in lower.tolist()]
    return np.array([2**WORD_BITS - 1, *thresholds], dtype=np.uint64)


def check_scale_cells(scale: Fraction | float) -> Fraction:
    """Return a scale in lattice cells as an exact rational in [4, 2^40], or raise ValueError."""
    is_number = isinstance(scale, int | float | Fraction) and math.isfinite(scale)
    exact = Fraction(scale) if is_number else Fraction(0)
    if not MIN_SCALE_CELLS <= exact <= MAX_SCALE_CELLS:
        raise ValueError(
            f"scale is {scale!r} lattice cells: it must be within [{MIN_SCALE_CELLS}, 2^40]; choose the spacing as a "
            "power of two near scale/32"
        )
    return exact


def position_bits_for(scale: Fraction) -> int:
    """The least m ≥ 0 with scale/2^m ≤ 64.

    Example:
        >>> position_bits_for(Fraction(64)), position_bits_for(Fraction(65)), position_bits_for(Fraction(2**30))
        (0, 1, 24)
    """
    bits = 0
    while scale > MAX_COARSE_SCALE << bits:
        bits += 1
    return bits
