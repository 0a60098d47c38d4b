"""The integers drawn have the distribution of a rounded Laplace, and pure ε stays pure."""

import math
import sys
from fractions import Fraction

import mpmath
import numpy as np
import pytest

from asfl_privacy.mechanisms.lattice import rounded_laplace
from asfl_privacy.mechanisms.lattice.blocks import BEYOND, SATURATION
from asfl_privacy.mechanisms.lattice.rounded_laplace import RoundedLaplace
from asfl_privacy.mechanisms.lattice.source import SeededSource


def laplace_mass(low, high, b):
    """P(low < Laplace(b) < high) for 0 ≤ low < high, from the distribution function at 1000 bits."""
    with mpmath.workprec(1000):
        scale = mpmath.mpf(Fraction(b).numerator) / Fraction(b).denominator
        ends = [
            mpmath.exp(-mpmath.mpf(Fraction(end).numerator) / Fraction(end).denominator / scale) for end in (low, high)
        ]
        return (ends[0] - ends[1]) / 2


def cell_probabilities(b, reach):
    k = np.abs(np.arange(-reach, reach + 1))
    return np.where(k == 0, -np.expm1(-1 / (2 * b)), np.exp(-k / b) * np.sinh(1 / (2 * b)))


@pytest.mark.parametrize("b", [4.0, 33.01, 64.5, 2.0**40])
def test_no_block_exceeds_the_stated_relative_error(b):
    """Catches any cell of the table, or "beyond", that is off by more than η."""
    sampler = rounded_laplace(b)
    M, half = sampler.cells_per_block, Fraction(1, 2)
    used = sampler.table.weights()
    with mpmath.workprec(1000):
        total = mpmath.mpf(2) ** 512
        scale = mpmath.mpf(Fraction(b).numerator) / Fraction(b).denominator
        pairs = [(used[0], 2 * laplace_mass(0, half, b))]
        pairs += [
            (used[sign * (h + 1)], laplace_mass(1 + h * M - half, (h + 1) * M + half, b))
            for h in range(sampler.num_blocks)
            for sign in (1, -1)
        ]
        pairs.append((used[BEYOND], mpmath.exp(-(sampler.num_blocks * M + mpmath.mpf(0.5)) / scale)))
        worst = max(abs(drawn / total / ideal - 1) for drawn, ideal in pairs)
        levels = SATURATION // (sampler.num_blocks * M) + 2
        assert 2 * levels * worst <= sampler.relative_error <= 2.0**-381
    assert sampler.tail_probability_per_draw == 0.0


def test_pure_epsilon_stays_pure_for_every_shift():
    """log P̃(k)/P̃(k + d) ≤ d/b + e on all drawn cells, past the table too. Catches a tail that is cut or too thin."""
    b = 5.5
    sampler = rounded_laplace(b)
    H, used = sampler.num_blocks, sampler.table.weights()
    with mpmath.workprec(1500):
        total = mpmath.mpf(2) ** 512
        one_side = [mpmath.mpf(used[v]) / total for v in range(1, H + 1)]
        given_nonzero = [2 * mass / (1 - used[0] / total) for mass in one_side]
        positive = [used[0] / total, *one_side]
        beyond = used[BEYOND] / total / 2
        positive += [beyond * mass for mass in given_nonzero]  # second level
        beyond *= used[BEYOND] / total / (1 - used[0] / total)
        positive += [beyond * mass for mass in given_nonzero]  # third level
        excess = mpmath.mpf(sampler.epsilon_excess_per_draw)
        for d in (1, 2, 7, 50):
            for k in range(len(positive) - d):
                loss = mpmath.log(positive[k] / positive[k + d])
                assert abs(loss) <= mpmath.mpf(d) / b + excess
                if k > 0:
                    assert abs(loss - mpmath.mpf(d) / b) <= excess


@pytest.mark.parametrize(("b", "draws"), [(4.0, 2**21), (33.01, 2**22), (64.0, 2**22), (100.0, 2**22), (300.0, 2**22)])
def test_draws_fit_the_exact_cells_and_no_other_scale(b, draws, chi_square):
    """Catches a wrong cell or scale, the discrete Laplace in its place (cell 0), and a wrong position within a block."""
    noise = rounded_laplace(b).draw(draws, SeededSource(b"chi-square %g" % b))
    reach = math.ceil(40 * b)
    counts = np.bincount(noise + reach, minlength=2 * reach + 1)
    assert chi_square(counts, cell_probabilities(b, reach)) > 1e-4
    for wrong in (0.8, 0.98, 1.02, 1.25):
        assert chi_square(counts, cell_probabilities(wrong * b, reach)) < 1e-12


def test_the_discrete_laplace_is_told_apart(chi_square):
    """P(0) is 1 − e^{−1/2b} when rounded and tanh(1/2b) when discrete, which is 3 % less at b=4.

    privacy.md: the discrete one is worse under composition, so its account would be too small.
    """
    b, reach = 4.0, 160
    noise = rounded_laplace(b).draw(2**22, SeededSource(b"discrete"))
    discrete = np.exp(-np.abs(np.arange(-reach, reach + 1)) / b) * math.tanh(1 / (2 * b))
    counts = np.bincount(noise + reach, minlength=2 * reach + 1)
    assert chi_square(counts, discrete) < 1e-12


@pytest.mark.parametrize("b", [6.0, 500.0])
def test_past_the_table_the_distribution_has_no_memory(b):
    """Catches an offset of one between levels, and a second level by another distribution."""
    sampler = rounded_laplace(b)
    source = SeededSource(b"memoryless")
    start = sampler.num_blocks * sampler.cells_per_block
    drawn = np.array([sampler._draw_beyond(source) for _ in range(4000)]) - start
    assert drawn.min() >= 1
    mean = 1 / -math.expm1(-1 / b)
    assert abs(drawn.mean() - mean) < 5 * b / math.sqrt(drawn.size)
    first = -math.expm1(-math.ceil(b / 3) / b)
    assert abs((drawn <= math.ceil(b / 3)).mean() - first) < 5 * math.sqrt(first * (1 - first) / drawn.size)


def test_levels_add_up_and_end_at_the_largest_integer(scripted, monkeypatch):
    """Catches an overflow of int64, and an endless loop when every draw is "beyond"; 2^52 stands for 2^62."""
    sampler = rounded_laplace(2.0**40)
    monkeypatch.setattr(sys.modules[RoundedLaplace.__module__], "SATURATION", 1 << 52)
    column = int(np.flatnonzero(sampler.table.outcomes[::-1][: sampler.table.outcomes.size // 2] == BEYOND)[0])
    beyond = column << (64 - sampler.table.column_bits)
    passed = sampler.num_blocks * sampler.cells_per_block
    levels = -(-(1 << 52) // passed)
    place = [0]  # a position for the block that "beyond" has not got
    [value] = sampler.draw(1, scripted([beyond, *place, 1, *[beyond] * levels])).tolist()
    assert value == -(1 << 52)
    outcomes, cuts = sampler.table.outcomes, sampler.table.cuts
    firsts = [column << (64 - sampler.table.column_bits) for column in range(cuts.size)]
    drawn = [
        int(outcomes[-1 - column] if cuts[column] > first else outcomes[column]) for column, first in enumerate(firsts)
    ]
    column = next(column for column in range(cuts.size) if drawn[column] not in (0, 1, -1, BEYOND))
    word, block = firsts[column], abs(drawn[column])
    source = scripted([beyond, *place, 0, beyond, word, 0, *[0] * 8])
    [value] = sampler.draw(1, source).tolist()
    assert not source.left
    assert value == 2 * passed + 1 + (block - 1) * sampler.cells_per_block


@pytest.mark.parametrize("b", [64.5, 1000.25, 2.0**40])
def test_ratios_within_a_block_are_exact_and_their_float_bounds_hold(b):
    sampler = rounded_laplace(b)
    M, half = sampler.cells_per_block, Fraction(1, 2)
    for h in (0, 40, sampler.num_blocks - 1):
        for l in {1, M // 2, M - 1}:  # noqa: E741
            k = 1 + h * M + l
            with mpmath.workprec(1000):
                ideal = laplace_mass(k - half, k + half, b) / laplace_mass(k - l - half, k - l + half, b)
                assert abs(sampler._ratio(h, l, bits=600) / mpmath.mpf(2) ** 600 / ideal - 1) < mpmath.mpf(2) ** -500
            lower, upper = sampler._ratio_bounds(np.array([h]), np.array([l]))
            assert float(lower[0]) <= ideal <= float(upper[0])
            assert (int(sampler.squeeze[h + 1]) + 2 ** (64 - sampler.fraction_bits)) / 2**64 <= ideal


@pytest.mark.parametrize("scale", [0.0, -5.0, 3.99, math.nan, math.inf, 2.0**40 + 1])
def test_scales_outside_the_range_are_refused(scale):
    with pytest.raises(ValueError, match=r"lattice cells: it must be within \[4, 2\^40\]; choose the spacing"):
        rounded_laplace(scale)
