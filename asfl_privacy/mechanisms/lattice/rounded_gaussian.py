"""Rounded Gaussian noise: integers with the distribution of round(Z), Z normal with mean 0 and deviation s cells."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import mpmath
import numpy as np

from asfl_privacy.accounting.rationals import fraction_up
from asfl_privacy.mechanisms.lattice.alias import Integers, build_alias_table, largest_relative_error
from asfl_privacy.mechanisms.lattice.blocks import (
    BEYOND,
    FLOAT_SLACK,
    BlockSampler,
    Floats,
    check_scale_cells,
    make_squeeze,
    position_bits_for,
)
from asfl_privacy.mechanisms.lattice.source import WORD_BITS, WordSource, draw_integer

TABLE_REACH = 7.5  # deviations the alias table covers; P(beyond) = 6e-14
TAIL_REACH = 37.25  # deviations that can be drawn at all; 2^-1022 < P(outside) ≤ 2^-1000
NUM_WORDS = 6
TAIL_WORDS = 20
SERIES_BITS = 192
MASS_ERROR = 2.0**-128  # relative, of _block_masses, _mass_beyond and _cell_factor; see there
TAIL_ERROR = 2.0**-300  # relative, of the tail blocks' integer weights; see ``RoundedGaussian.tail``
_mp: Any = mpmath.MPContext()  # a context of its own, so that nobody else's precision matters
_mp.prec = 256


@dataclass(frozen=True, eq=False, kw_only=True)
class RoundedGaussian(BlockSampler):
    """P(k) = Φ((k + ½)/s) − Φ((k − ½)/s) for integers |k| ≤ 37 s.

    Attributes:
        num_blocks: H, the blocks of the alias table; the tail starts at block H.
        all_blocks: the blocks that can be drawn at all, the tail's included.

    Guarantee:
        For lattice input x in g·Z and s = σ/g, x/g plus this noise has the distribution of round((x + N(0, σ²))/g), up
        to the sampler's error: round(x/g + Z/g) = x/g + round(Z/g), since x/g is an integer. So the release is
        post-processing of the continuous Gaussian mechanism, whose exact accounting carries over. The sampler's error
        is that of ``BlockSampler``: e ≤ 2^-123 and τ ≤ 2^-1000 per draw.
    """

    num_blocks: int
    all_blocks: int

    @cached_property
    def tail(self) -> tuple[int, ...]:
        """Sums of the tail blocks' weights, which total 2^(64·20); made when a draw first falls there, one in 10^13.

        A weight is a block's share of the tail, rounded down by less than 1; the first takes what that leaves, less than
        2^12. A block starts within 37.25 + 1/4 deviations of 0 (1/32 with more than 64 cells a deviation), so its mass is
        above 2^-1020, while the tail's is below 2^-44. So weights are 2^304 and more, and right within 2^-300 beside
        MASS_ERROR.
        """
        masses = _block_masses(
            self.scale, position_bits=self.position_bits, num_blocks=self.all_blocks, first_block=self.num_blocks
        )[1:]
        whole, total = _mp.fsum(masses), 1 << (WORD_BITS * TAIL_WORDS)
        weights = [_scaled(mass / whole, WORD_BITS * TAIL_WORDS) for mass in masses]
        weights[0] += total - sum(weights)
        return tuple(accumulate(weights))

    def _ratio_bounds(self, blocks: Integers, positions: Integers) -> tuple[Floats, Floats]:
        # P(j)/P(j0) = exp(−(j² − j0²)/2s²)·C(j)/C(j0) with C(k) = ∫ cosh(ku/s²)·exp(−u²/2s²) du over |u| ≤ ½, which
        # rises in k > 0, and d log C/dk ≤ sup (u/s²)·tanh(ku/s²) ≤ k/(4s⁴). j² − j0² = l·(2·j0 + l) is exact in float64
        # but for one product, since both factors are integers below 2^53.
        half_rate, rate = 0.5 / float(self.scale) ** 2, 0.25 / float(self.scale) ** 4  # each within 8 units of 2^-53
        l = positions.astype(np.float64)  # noqa: E741
        ends = (blocks << self.position_bits) + positions + 1
        ratio = np.exp((l - 2.0 * ends) * l * half_rate)  # j² − j0² = l·(2j − l), j the cell itself
        growth = ends * l * rate  # j·(j − j0)/(4s⁴)
        return ratio * (1.0 - FLOAT_SLACK), ratio * np.exp(growth) * (1.0 + FLOAT_SLACK)

    def _ratio(self, block: int, position: int, *, bits: int) -> int:
        start = 1 + (block << self.position_bits)
        exponent = Fraction(position * (2 * start + position), 2) / self.scale**2
        factor = _cell_factor(start + position, self.scale) / _cell_factor(start, self.scale)
        return int(_mp.floor(_mp.ldexp(_mp.exp(-_real(exponent)) * factor, bits)))

    def _draw_beyond(self, source: WordSource) -> int:
        step = bisect_right(self.tail, draw_integer(source, num_words=TAIL_WORDS))
        return self._draw_in_block(self.num_blocks + step, source)


@lru_cache(maxsize=128)
def rounded_gaussian(scale: Fraction | float) -> RoundedGaussian:
    """The sampler for one s; built once (about 0.1 s) and kept.

    Args:
        scale: s = σ/g in lattice cells, within [4, 2^40]; taken as the exact rational that it is.

    Returns:
        The sampler, its error bounds computed from the integer weights it really uses.

    Raises:
        ValueError: where the scale is NaN, infinite or outside [4, 2^40].

    Example:
        >>> from asfl_privacy.mechanisms.lattice.source import SystemSource
        >>> sampler = rounded_gaussian(32.0)
        >>> sampler.draw(4, SystemSource()).shape, sampler.epsilon_excess_per_draw < 2.0**-123
        ((4,), True)
    """
    s = check_scale_cells(scale)
    position_bits = position_bits_for(s)
    coarse = s / (1 << position_bits)
    num_blocks = math.ceil(Fraction(TABLE_REACH) * coarse)
    all_blocks = math.ceil(Fraction(TAIL_REACH) * coarse)
    zero, *near = _block_masses(s, position_bits=position_bits, num_blocks=num_blocks)
    bits = WORD_BITS * NUM_WORDS
    beyond = _mass_beyond(s, cells=num_blocks << position_bits)

    zero_weight, beyond_weight = _scaled(zero, bits), _scaled(beyond, bits)
    near_weights = [_scaled(mass, bits) for mass in near]
    rest = (1 << bits) - zero_weight - beyond_weight - 2 * sum(near_weights[1:])
    outcomes = [0, BEYOND, 1, -1]
    weights = [zero_weight, beyond_weight, rest // 2, rest - rest // 2]
    for h in range(1, num_blocks):
        outcomes += [h + 1, -h - 1]
        weights += [near_weights[h]] * 2
    table = build_alias_table(outcomes, weights=weights, num_words=NUM_WORDS)

    used = table.weights()
    pairs = [(used[0], zero_weight), (used[BEYOND], beyond_weight)]
    pairs += [(used[sign * (h + 1)], near_weights[h]) for h in range(num_blocks) for sign in (1, -1)]
    # a tail block's probability is that of "beyond" times its share, a product of two relative errors. 8 errors of masses
    # cover the ideal values above, a(l) in numerator and denominator, and all cross terms
    relative_error = fraction_up(
        Fraction(largest_relative_error(pairs)) + 2 * Fraction(TAIL_ERROR) + 8 * Fraction(MASS_ERROR)
    )
    outside = ((all_blocks << position_bits) + Fraction(1, 2)) / s  # deviations; 2·(1 − Φ(x)) ≤ exp(−x²/2)
    sampler = RoundedGaussian(
        scale=s,
        position_bits=position_bits,
        table=table,
        squeeze=np.empty(0, dtype=np.uint64),
        relative_error=relative_error,
        tail_probability_per_draw=float(_mp.exp(-_real(outside * outside / 2))) * (1.0 + 2.0**-50),
        num_blocks=num_blocks,
        all_blocks=all_blocks,
    )
    last = np.full(num_blocks, (1 << position_bits) - 1, dtype=np.int64)
    lower, _ = sampler._ratio_bounds(np.arange(num_blocks, dtype=np.int64), last)
    object.__setattr__(sampler, "squeeze", make_squeeze(lower, fraction_bits=sampler.fraction_bits))
    return sampler


def _block_masses(s: Fraction, *, position_bits: int, num_blocks: int, first_block: int = 0) -> list[Any]:
    """P(0) and the probabilities of the blocks 1 + hM ≤ k ≤ M + hM from the first h on, each within 2^-128 relative.

    A block is an interval of width M around c = hM + (M + 1)/2, and
    P = φ(c/s)/s · (M/2)·∫ exp(−αt − βt²) dt over |t| ≤ 1, with α = cM/(2s²) and β = M²/(8s²) (substitute k = c + tM/2).
    φ(c/s) comes from the recurrence exp(−(c + M)²/2s²) = exp(−c²/2s²)·r, r ← r·exp(−M²/s²): after h steps its error is
    below h² units of 2^-256, and h < 2^12. The integral's error is below 2^-160 (see ``_integral``).
    """
    M = 1 << position_bits
    centre, half = first_block * M + Fraction(M + 1, 2), Fraction(M, 2)
    square = s * s
    decay = _mp.exp(-_real(centre * centre / (2 * square)))
    ratio = _mp.exp(-_real((2 * centre * M + M * M) / (2 * square)))
    step = _mp.exp(-_real(M * M / square))
    front = _real(half / s) / _mp.sqrt(2 * _mp.pi)
    alpha, alpha_step = centre * half / square, M * half / square
    two_beta = half * half / square
    masses = [_cell_factor(0, s) / (_real(2 * s) * _mp.sqrt(2 * _mp.pi))]
    first, second, square_term = (_fixed(number) for number in (alpha, alpha_step, two_beta))
    for h in range(num_blocks - first_block):
        masses.append(front * decay * _mp.ldexp(_integral(first + h * second, two_beta=square_term), -SERIES_BITS))
        decay *= ratio
        ratio *= step
    return masses


def _mass_beyond(s: Fraction, *, cells: int) -> Any:  # noqa: ANN401  (mpmath has no types)
    """P(|k| > cells), the 2^-1000 that cannot be drawn included; within 2^-128 relative for 2^-43 and less."""
    return _mp.erfc(_real((cells + Fraction(1, 2)) / s) / _mp.sqrt(2))


def _cell_factor(k: int, s: Fraction) -> Any:  # noqa: ANN401  (mpmath has no types)
    """∫ exp(−αt − βt²) dt over |t| ≤ 1 for the cell around k: P(k) is this times exp(−k²/2s²)/(2s·√2π)."""
    half = Fraction(1, 2) / (s * s)
    return _mp.ldexp(_integral(_fixed(half * k), two_beta=_fixed(half / 2)), -SERIES_BITS)


def _integral(alpha: int, *, two_beta: int) -> int:
    """∫ exp(−αt − βt²) dt over |t| ≤ 1 in units of 2^-192, for α + 2β ≤ 5.

    Power series f(t) = Σ f_m·t^m with (m + 1)·f_{m+1} = −α·f_m − 2β·f_{m−1} (from f' = (−α − 2βt)·f); odd terms vanish.
    Guarantee: relative error below 2^-160. Every step rounds by at most two units, α and 2β by 2^12 (a step times h), and
    errors grow at most like exp(α + β) ≤ 2^8 times the number of terms, below 2^7; from m = 24 on two terms below 2^8
    units bound all that follow by halves. The integral is at least 2·exp(−β) > 1.
    """
    before, term = 1 << SERIES_BITS, -alpha
    total = 2 << SERIES_BITS
    m = 1
    while m < 24 or abs(term) + abs(before) > 1 << 8:
        before, term = term, -((alpha * term + two_beta * before) >> SERIES_BITS) // (m + 1)
        m += 1
        if m % 2 == 0:
            total += 2 * term // (m + 1)
    return total


def _fixed(number: Fraction) -> int:
    return (number.numerator << SERIES_BITS) // number.denominator


def _real(number: Fraction) -> Any:  # noqa: ANN401
    return _mp.mpf(number.numerator) / number.denominator


def _scaled(number: Any, bits: int) -> int:  # noqa: ANN401
    """number·2^bits, rounded down."""
    return int(_mp.floor(_mp.ldexp(number, bits)))
