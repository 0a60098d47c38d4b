"""Rounded Laplace noise: integers with the distribution of round(Z), Z Laplace with scale b cells."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import mpmath
import numpy as np

from asfl_privacy.accounting.rationals import fraction_up
from asfl_privacy.mechanisms.lattice.alias import Integers, build_alias_table, largest_relative_error
from asfl_privacy.mechanisms.lattice.blocks import (
    BEYOND,
    FLOAT_SLACK,
    SATURATION,
    BlockSampler,
    Floats,
    check_scale_cells,
    make_squeeze,
    position_bits_for,
)
from asfl_privacy.mechanisms.lattice.source import WORD_BITS, WordSource

TABLE_REACH = 14  # scales that the table covers; P(beyond) = 8e-7
NUM_WORDS = 8
MASS_ERROR = 2.0**-500  # relative, of every probability here
_mp: Any = mpmath.MPContext()  # a context of its own, so that nobody else's precision matters
_mp.prec = 640


@dataclass(frozen=True, eq=False, kw_only=True)
class RoundedLaplace(BlockSampler):
    """P(0) = 1 − e^{−1/(2b)} and P(±k) = e^{−k/b}·sinh(1/(2b)) for k ≥ 1; all of |k| ≥ 2^62 is drawn as 2^62.

    Attributes:
        num_blocks: H, the blocks of the table.

    Guarantee:
        For lattice input x in g·Z and b = scale/g, x/g plus this noise has the distribution of round((x + Laplace)/g)
        up to the sampler's error (x/g is an integer), so the release is post-processing of the continuous Laplace
        mechanism. τ = 0, so pure ε stays pure: past the table the distribution is memoryless, so |k| − MH is drawn like
        |k| given k ≠ 0, again and again; the relative errors multiply, at most 2^62/(MH) < 2^56 times. e ≤ 2^-380 per
        draw. The cut at 2^62 is post-processing wherever the sum with |x/g| ≤ 2^61 is cut at ±2^61
        (``LatticeNoise.release``).
    """

    num_blocks: int

    def _ratio_bounds(self, blocks: Integers, positions: Integers) -> tuple[Floats, Floats]:
        ratio = np.exp(-positions.astype(np.float64) / float(self.scale))
        return ratio * (1.0 - FLOAT_SLACK), ratio * (1.0 + FLOAT_SLACK)

    def _ratio(self, block: int, position: int, *, bits: int) -> int:
        return int(_mp.floor(_mp.ldexp(_mp.exp(-position / _real(self.scale)), bits)))

    def _draw_beyond(self, source: WordSource) -> int:
        passed = self.num_blocks << self.position_bits
        magnitude = 0
        while magnitude < SATURATION:
            magnitude += passed
            value = self._draw_block(source)
            if value != BEYOND:
                return magnitude + self._draw_in_block(value - 1, source)
        return SATURATION

    def _draw_block(self, source: WordSource) -> int:
        """|v| given v ≠ 0."""
        drawn, columns, gaps = np.zeros(1, np.int64), np.empty(1, np.int64), np.empty(1, np.uint64)
        while drawn[0] == 0:
            self.table.draw_into(drawn, source, words=source.words(1), scratch=(columns, gaps))
        return abs(int(drawn[0]))


@lru_cache(maxsize=128)
def rounded_laplace(scale: Fraction | float) -> RoundedLaplace:
    """The sampler for one b; built once and kept.

    Args:
        scale: b = scale/g in lattice cells, within [4, 2^40]; taken as the exact rational that it is.

    Returns:
        The sampler, its error bounds computed from the integer weights it really uses.

    Raises:
        ValueError: where the scale is NaN, infinite or outside [4, 2^40].

    Example:
        >>> sampler = rounded_laplace(32.0)
        >>> sampler.tail_probability_per_draw, sampler.epsilon_excess_per_draw < 2.0**-380
        (0.0, True)
    """
    b = check_scale_cells(scale)
    position_bits = position_bits_for(b)
    M = 1 << position_bits
    num_blocks = math.ceil(TABLE_REACH * b / M)
    bits = WORD_BITS * NUM_WORDS
    zero_weight = _scaled(-_mp.expm1(-1 / _real(2 * b)), bits)
    outside_zero = _mp.exp(-1 / _real(2 * b))
    beyond_weight = _scaled(outside_zero * _mp.exp(-_real(num_blocks * M / b)), bits)
    step = _mp.exp(-M / _real(b))
    mass = outside_zero * -_mp.expm1(-M / _real(b)) / 2
    block_weights = []
    for _ in range(num_blocks):
        block_weights.append(_scaled(mass, bits))
        mass *= step
    rest = (1 << bits) - zero_weight - beyond_weight - 2 * sum(block_weights[1:])
    outcomes = [0, BEYOND, 1, -1]
    weights = [zero_weight, beyond_weight, rest // 2, rest - rest // 2]
    for h in range(1, num_blocks):
        outcomes += [h + 1, -h - 1]
        weights += [block_weights[h]] * 2
    table = build_alias_table(outcomes, weights=weights, num_words=NUM_WORDS)

    used = table.weights()
    pairs = [(used[0], zero_weight), (used[BEYOND], beyond_weight)]
    pairs += [(used[sign * (h + 1)], block_weights[h]) for h in range(num_blocks) for sign in (1, -1)]
    # one table draw is right within η; a level of the tail multiplies (1 ± η) for "beyond" and divides by 1 − P̃(0); the
    # cell within the block adds its a(l). For small η every level costs less than 4η in all.
    one_draw = Fraction(largest_relative_error(pairs)) + 8 * Fraction(MASS_ERROR)
    levels = SATURATION // (num_blocks * M) + 2
    sampler = RoundedLaplace(
        scale=b,
        position_bits=position_bits,
        table=table,
        squeeze=np.empty(0, dtype=np.uint64),
        relative_error=fraction_up(4 * levels * one_draw),
        tail_probability_per_draw=0.0,
        num_blocks=num_blocks,
    )
    last = np.full(num_blocks, M - 1, dtype=np.int64)
    lower, _ = sampler._ratio_bounds(np.arange(num_blocks, dtype=np.int64), last)
    object.__setattr__(sampler, "squeeze", make_squeeze(lower, fraction_bits=sampler.fraction_bits))
    return sampler


def _real(number: Fraction) -> Any:  # noqa: ANN401  (mpmath has no types)
    return _mp.mpf(number.numerator) / number.denominator


def _scaled(number: Any, bits: int) -> int:  # noqa: ANN401
    """number·2^bits, rounded down."""
    return int(_mp.floor(_mp.ldexp(number, bits)))
