"""The integers drawn have the distribution of a rounded normal, to the error stated."""

import math
import sys
from dataclasses import replace
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy import special

from asfl_privacy.mechanisms.lattice import rounded_gaussian
from asfl_privacy.mechanisms.lattice.alias import build_alias_table
from asfl_privacy.mechanisms.lattice.blocks import BEYOND
from asfl_privacy.mechanisms.lattice.rounded_gaussian import RoundedGaussian, _block_masses, _mass_beyond
from asfl_privacy.mechanisms.lattice.source import SeededSource

SCALES = [4.0, 5.5, 33.01, 64.0, 64.5, 1000.25, 2.0**30, 2.0**40]


def cell_probabilities(s, reach):
    """P(−reach), …, P(reach) in double precision, by normal distribution functions of the nearer tail."""
    k = np.abs(np.arange(-reach, reach + 1))
    return special.ndtr(-(k - 0.5) / s) - special.ndtr(-(k + 0.5) / s)


def block_pairs(sampler, normal_mass_between):
    """(drawn, ideal) probabilities of every block, tail included, as mpmath numbers."""
    s, M = sampler.scale, sampler.cells_per_block
    used, words = sampler.table.weights(), sampler.table.num_words
    with mpmath.workprec(400):
        drawn = [mpmath.mpf(used[0])] + [mpmath.mpf(used[h + 1]) for h in range(sampler.num_blocks)]
        tail = np.diff([0, *sampler.tail])
        drawn += [mpmath.mpf(used[BEYOND]) * int(weight) / 2 / mpmath.mpf(2) ** (64 * 20) for weight in tail]
        drawn = [weight / mpmath.mpf(2) ** (64 * words) for weight in drawn]
        half = Fraction(1, 2)
        ideal = [2 * normal_mass_between(0, half, s)]
        ideal += [normal_mass_between(1 + h * M - half, (h + 1) * M + half, s) for h in range(len(drawn) - 1)]
        return list(zip(drawn, ideal, strict=True))


@pytest.mark.parametrize("s", [4.0, 64.5, 2.0**40])
def test_no_cell_exceeds_the_stated_relative_error(s, normal_mass_between):
    """Catches a cell of the table, or of the tail at 37 deviations, that is off by more than η, however little."""
    sampler = rounded_gaussian(s)
    pairs = block_pairs(sampler, normal_mass_between)
    with mpmath.workprec(400):
        worst = max(abs(drawn / ideal - 1) for drawn, ideal in pairs)
    assert worst <= sampler.relative_error <= 2.0**-124
    assert sampler.epsilon_excess_per_draw >= -2 * math.log1p(-sampler.relative_error)


@pytest.mark.parametrize("s", SCALES)
def test_what_cannot_be_drawn_is_less_likely_than_stated(s):
    """Catches a tail cut too early, and a τ that underflows."""
    sampler = rounded_gaussian(s)
    reach = (sampler.num_blocks + len(sampler.tail)) * sampler.cells_per_block
    with mpmath.workprec(200):
        outside = mpmath.erfc((reach + mpmath.mpf(0.5)) / s / mpmath.sqrt(2))
    assert outside <= sampler.tail_probability_per_draw <= 2.0**-1000
    assert sampler.tail_probability_per_draw > 2.0**-1022  # a normal float: sums of it round up


@pytest.mark.parametrize("s", [4.0, 33.01, 64.5, 2.0**40])
def test_the_tail_is_made_when_it_is_drawn_from_and_its_mass_is_the_sum_of_its_blocks(s):
    """Catches a tail of one side, or one that starts a block early or late: the table's share is found another way."""
    sampler = rounded_gaussian.__wrapped__(s)
    assert "tail" not in vars(sampler)
    H, m = sampler.num_blocks, sampler.position_bits
    every = _block_masses(sampler.scale, position_bits=m, num_blocks=sampler.all_blocks)
    late = _block_masses(sampler.scale, position_bits=m, num_blocks=sampler.all_blocks, first_block=H)
    with mpmath.workprec(400):
        beyond = _mass_beyond(sampler.scale, cells=H << m)
        assert abs(beyond / (2 * mpmath.fsum(every[1 + H :])) - 1) < 2.0**-128
        assert all(abs(a / b - 1) < 2.0**-128 for a, b in zip(late[1:], every[1 + H :], strict=True))
    weights = np.diff([0, *sampler.tail])
    assert len(weights) == sampler.all_blocks - H
    assert min(weights) > 2**304
    assert sampler.tail[-1] == 2 ** (64 * 20)


def test_both_signs_are_equally_likely_to_the_last_units():
    used = rounded_gaussian(33.01).table.weights()
    assert all(abs(used[v] - used[-v]) <= 1 for v in used if 0 < v < BEYOND)
    assert sum(used.values()) == 2**384


def test_masses_of_blocks_are_sums_of_their_cells():
    """Catches a block one cell too wide or shifted: a second way to the same numbers."""
    blocks_of_four = _block_masses(Fraction(80), position_bits=2, num_blocks=60)
    cells = _block_masses(Fraction(80), position_bits=0, num_blocks=240)
    for h in range(60):
        assert abs(mpmath.fsum(cells[1 + 4 * h : 5 + 4 * h]) / blocks_of_four[1 + h] - 1) < 1e-15


@pytest.mark.parametrize(("s", "draws"), [(4.0, 2**21), (33.01, 2**22), (64.0, 2**22), (100.0, 2**22), (300.0, 2**22)])
def test_draws_fit_the_exact_cells_and_no_other_scale(s, draws, chi_square):
    """Catches a wrong cell, a wrong scale, and (s > 64) a position that is not drawn by the exact ratio."""
    noise = rounded_gaussian(s).draw(draws, SeededSource(b"chi-square %g" % s))
    reach = math.ceil(9 * s)
    assert abs(noise).max() <= reach
    counts = np.bincount(noise + reach, minlength=2 * reach + 1)
    assert chi_square(counts, cell_probabilities(s, reach)) > 1e-4
    for wrong in (0.8, 0.98, 1.02, 1.25):
        assert chi_square(counts, cell_probabilities(wrong * s, reach)) < 1e-12


def test_a_table_with_one_cell_five_percent_off_is_found(chi_square):
    """The chi-square test has the power it needs: this mutant moves 5 % of cell 3 to cell 40."""
    honest = rounded_gaussian(33.01)
    weights = honest.table.weights()
    moved = weights[3] // 20
    weights[3], weights[40] = weights[3] - moved, weights[40] + moved
    table = build_alias_table(list(weights), weights=list(weights.values()), num_words=honest.table.num_words)
    reach = 300
    for sampler, fits in ((honest, True), (replace(honest, table=table), False)):
        noise = sampler.draw(2**23, SeededSource(b"five percent"))
        p = chi_square(np.bincount(noise + reach, minlength=2 * reach + 1), cell_probabilities(33.01, reach))
        assert p > 1e-4 if fits else p < 1e-9


class RedrawsTheBlock(RoundedGaussian):
    """Mutant: a refused position draws its block again too."""

    def _settle(self, drawn, at, signed_blocks, positions, fractions, *, source):
        blocks = np.abs(signed_blocks) - 1
        refused = ~self._keeps(blocks, positions, fractions, source, known_bits=self.fraction_bits)
        drawn[at[refused]] = self.draw(int(refused.sum()), source)


@pytest.mark.parametrize("s", [8448.0, 2.0**31 + 2.0**26])  # 33 coarse cells per deviation, where refusals are most
def test_blocks_and_positions_within_them_fit_the_exact_distribution(s, chi_square):
    """Catches a refused position whose block is drawn again, or a position that is uniform."""
    sampler = rounded_gaussian(s)
    M, H = sampler.cells_per_block, 300
    masses = np.array(
        [float(mass) for mass in _block_masses(sampler.scale, position_bits=sampler.position_bits, num_blocks=H)]
    )
    mutant = RedrawsTheBlock(**{name: getattr(sampler, name) for name in sampler.__dataclass_fields__})
    for drawer, fits in ((sampler, True), (mutant, False)):
        noise = np.abs(drawer.draw(2**22, SeededSource(b"blocks")))
        noise = noise[noise > 0] - 1
        counts = np.bincount(noise >> sampler.position_bits, minlength=H)
        p = chi_square(counts, masses[1:] / masses[1:].sum())
        assert p > 1e-4 if fits else p < 1e-6
    sixteenths = (noise_in := np.abs(sampler.draw(2**23, SeededSource(b"within"))))[noise_in > 0] - 1
    far = sixteenths[sixteenths >> sampler.position_bits >= 40]  # where the density falls most within a block
    observed = np.bincount((far & (M - 1)) >> (sampler.position_bits - 4), minlength=16)
    h = np.arange(40, H)[:, None]
    edges = (1 + h * M + np.arange(17) * M // 16 - 0.5) / s
    expected = (special.ndtr(-edges[:, :-1]) - special.ndtr(-edges[:, 1:])).sum(axis=0)
    assert chi_square(observed, expected / expected.sum()) > 1e-4
    assert chi_square(observed, np.full(16, 1 / 16)) < 1e-9


@pytest.mark.parametrize("s", [64.5, 1000.25, 2.0**40])
def test_ratios_within_a_block_are_exact_and_their_float_bounds_hold(s, normal_mass_between):
    """Catches a density taken at the midpoint instead of the cell's integral, and bounds that cross it."""
    sampler = rounded_gaussian(s)
    M = sampler.cells_per_block
    for h in (0, 1, 40, sampler.num_blocks - 1, sampler.num_blocks + 800):
        for l in {1, M // 2, M - 1}:  # noqa: E741
            start, half = 1 + h * M, Fraction(1, 2)
            with mpmath.workprec(400):
                ideal = normal_mass_between(start + l - half, start + l + half, s) / normal_mass_between(
                    start - half, start + half, s
                )
                assert abs(sampler._ratio(h, l, bits=500) / mpmath.mpf(2) ** 500 / ideal - 1) < mpmath.mpf(2) ** -128
            lower, upper = sampler._ratio_bounds(np.array([h]), np.array([l]))
            assert float(lower[0]) <= ideal <= float(upper[0])
            if h < sampler.num_blocks:
                squeezed = int(sampler.squeeze[h + 1]) + 2 ** (64 - sampler.fraction_bits)
                assert squeezed / 2**64 <= ideal


def test_the_exact_decision_and_the_float_decision_agree(monkeypatch):
    """Catches an exact path, taken once in 10⁶ draws, that differs: here the bounds leave a tenth of all open."""
    sampler = rounded_gaussian(700.0)
    monkeypatch.setattr(sys.modules[RoundedGaussian.__module__], "FLOAT_SLACK", 0.1)
    h, l = np.array([3, 90, 150] * 300), np.arange(900) % sampler.cells_per_block  # noqa: E741
    ratio = np.array([sampler._ratio(int(a), int(b), bits=64) / 2**64 for a, b in zip(h, l, strict=True)])
    below, above = (((ratio + shift) * 2**64).clip(0, 2**64 - 2048).astype(np.uint64) for shift in (-1e-9, 1e-9))
    assert sampler._keeps(h, l, below, SeededSource(b"below"), known_bits=64).all()
    inside = ratio < 1.0
    assert not sampler._keeps(h[inside], l[inside], above[inside], SeededSource(b"above"), known_bits=64).any()


@pytest.mark.parametrize("s", [33.01, 1000.25])
def test_the_tail_past_the_table_is_drawn_by_its_own_distribution(s, scripted, normal_mass_between):
    """Catches a tail that starts at the wrong block, has one sign, or is left at the table's mark."""
    sampler = rounded_gaussian(s)
    source = SeededSource(b"tail")
    drawn = np.array([sampler._draw_beyond(source) for _ in range(4000)])
    start = sampler.num_blocks * sampler.cells_per_block
    assert drawn.min() > start
    middle = start + round(s / 12)
    half = Fraction(1, 2)
    ideal = float(
        normal_mass_between(start + half, middle + half, s)
        / normal_mass_between(start + half, start + half + 20 * int(s), s)
    )
    share = float((drawn <= middle).mean())
    assert abs(share - ideal) < 5 * math.sqrt(ideal * (1 - ideal) / drawn.size)
    column = int(np.flatnonzero(sampler.table.outcomes[::-1][: sampler.table.outcomes.size // 2] == BEYOND)[0])
    first = column << (64 - sampler.table.column_bits)  # not above the cut's first bits in "beyond"'s own column
    signs = set()
    for sign_word in (0, 1):
        position = [0] * 6 if s > 64 else []  # the low bits of the first word, which are the position's, and a tie
        zeros = [0] * 20
        block = [] if s < 64 else [0, *[0] * 6]
        [value] = sampler.draw(1, scripted([first, *position, sign_word, *zeros, *(block or [0])])).tolist()
        assert abs(value) == start + 1
        signs.add(value > 0)
    assert signs == {True, False}


def test_shifted_noise_is_as_private_as_the_continuous_gaussian():
    """The drawn δ(ε) between shifts of d cells never exceeds the continuous one: rounding is post-processing.

    Catches the discrete Gaussian, or a table of densities, put in its place.
    """
    s = 8.0
    sampler = rounded_gaussian(s)
    used = sampler.table.weights()
    reach = sampler.num_blocks
    drawn = np.array([used[v] / 2**384 for v in range(-reach, reach + 1)])
    for shift in (1, 3, 8, 16):
        mu = shift / s
        here, there = drawn[shift:], drawn[:-shift]
        for epsilon in (0.05, 0.5, 1.0, 2.0):
            discrete = np.maximum(here - math.exp(epsilon) * there, 0.0).sum()
            exact = special.ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * special.ndtr(-mu / 2 - epsilon / mu)
            assert discrete <= exact + 1e-12
            if shift >= 3 and exact > 1e-3:
                assert discrete >= 0.8 * exact


@pytest.mark.parametrize("scale", [0.0, -5.0, 3.99, math.nan, math.inf, 2.0**40 + 1, "8", None])
def test_scales_outside_the_range_are_refused(scale):
    with pytest.raises(ValueError, match=r"lattice cells: it must be within \[4, 2\^40\]; choose the spacing"):
        rounded_gaussian(scale)


def test_samplers_are_kept_by_their_exact_scale():
    assert rounded_gaussian(32.5) is rounded_gaussian(Fraction(65, 2))
    assert rounded_gaussian(32.5) is not rounded_gaussian(math.nextafter(32.5, 33.0))
    assert rounded_gaussian(32.5).draw(0, SeededSource(b"")).shape == (0,)
