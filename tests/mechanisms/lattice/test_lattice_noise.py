"""A planned release covers its multiplier, its truncation and its sampler, and its low bits tell nothing."""

import copy
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asfl_privacy.mechanisms.lattice import (
    LatticeNoise,
    SeededSource,
    SystemSource,
    plan_lattice,
    round_scale_up,
    to_float,
    truncate,
)

FAMILIES = ["gaussian", "laplace"]
numbers = st.floats(1e-6, 1e6)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(FAMILIES), numbers, numbers, st.integers(1, 10**6))
def test_a_clipped_release_keeps_its_multiplier_on_a_fine_enough_lattice(family, sensitivity, z, num_values):
    """Catches a scale rounded down and a lattice coarser than σ/32 (a larger payload below σ/64)."""
    noise = plan_lattice(family, sensitivity=sensitivity, noise_multiplier=z, num_values=num_values, clip_only=True)
    assert noise.sensitivity == sensitivity
    assert Fraction(noise.scale) >= Fraction(z) * Fraction(sensitivity)
    assert noise.scale <= z * sensitivity * (1 + 2.0**-9) * (1 + 1e-12)
    assert 32 <= Fraction(noise.scale) / Fraction(noise.spacing) < 64
    assert noise.noise_multiplier >= z


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(FAMILIES), numbers, st.floats(1e-3, 1e3), st.integers(1, 10**6))
def test_a_metric_release_pays_for_truncation_and_keeps_that_small(family, sensitivity, z, num_values):
    """Catches the sensitivity left as it was, √d for d in ℓ1, and a lattice that costs more than 2^-10."""
    noise = plan_lattice(family, sensitivity=sensitivity, noise_multiplier=z, num_values=num_values, clip_only=False)
    added = Fraction(noise.sensitivity) - Fraction(sensitivity)
    if family == "laplace":
        assert added >= Fraction(noise.spacing) * num_values
    else:
        assert added**2 >= Fraction(noise.spacing) ** 2 * num_values
    has_most_cells = (
        Fraction(noise.scale) / Fraction(noise.spacing) >= 2**38
    )  # more would not fit: 2^40, with room to grow
    assert added <= Fraction(sensitivity) / 1000 or has_most_cells
    assert Fraction(noise.scale) >= Fraction(z) * Fraction(noise.sensitivity)
    assert 32 <= Fraction(noise.scale) / Fraction(noise.spacing) <= 2**40


@pytest.mark.parametrize("family", FAMILIES)
def test_truncated_rows_are_no_further_apart_than_the_plan_says(family):
    """Catches rounding that moves two rows apart by more than g a coordinate; rows straddle lattice points on purpose."""
    order = 1 if family == "laplace" else 2
    rng = np.random.default_rng(0)
    noise = plan_lattice(family, sensitivity=1.0, noise_multiplier=1.0, num_values=50, clip_only=False)
    g = noise.spacing
    for _ in range(200):
        x = np.round(rng.normal(size=50) / g) * g * rng.choice([0.5, 1.0])
        direction = rng.choice([-1.0, 1.0], size=50) * rng.uniform(0.0, 1.0, size=50) ** 4
        y = x + direction / np.linalg.norm(direction, order)
        x, y = x - 1e-9, y + 1e-9 * (direction > 0)
        moved = np.linalg.norm(((truncate(x, spacing=g) - truncate(y, spacing=g)) * g), order)
        assert moved <= np.linalg.norm(x - y, order) + (noise.sensitivity - 1.0)


@given(st.floats(1e-250, 1e250))
def test_scales_round_up_to_ten_bits(scale):
    rounded = round_scale_up(scale)
    assert scale <= rounded <= scale * (1 + 2.0**-9)
    mantissa, _ = math.frexp(rounded)
    assert (mantissa * 2**10).is_integer()


@pytest.mark.parametrize("family", FAMILIES)
def test_errors_of_many_values_are_sums_rounded_up(family):
    """Catches the error of one draw charged for a whole release."""
    noise = plan_lattice(family, sensitivity=1.0, noise_multiplier=1.0, num_values=10, clip_only=True)
    for count in (1, 3, 6272):
        assert Fraction(noise.epsilon_excess(count)) >= count * Fraction(noise.sampler.epsilon_excess_per_draw) > 0
        assert Fraction(noise.tail_probability(count)) >= count * Fraction(noise.sampler.tail_probability_per_draw)
    assert noise.epsilon_excess(6272) < 2.0**-100
    assert (noise.tail_probability(6272) == 0.0) == (family == "laplace")


def test_the_low_bits_of_a_float_release_give_inputs_away_and_ours_do_not():
    """privacy.md §6: "|out| < ½ with bits below 2^-24" has probability .071 at x=0 and 0 at x=1 with float32 noise.

    Catches noise added in floating point behind the lattice's back.
    """
    sigma, draws = 3.7306, 200_000

    def has_low_bits(values):
        scaled = values.astype(np.float64) * 2.0**24
        return float(((np.abs(values) < 0.5) & (scaled != np.round(scaled))).mean())

    random = torch.Generator().manual_seed(0)
    leaky = [has_low_bits((x + sigma * torch.randn(draws, generator=random)).numpy()) for x in (0.0, 1.0)]
    assert leaky[0] == pytest.approx(0.071, abs=0.004)
    assert leaky[1] == 0.0
    noise = plan_lattice("gaussian", sensitivity=1.0, noise_multiplier=sigma, num_values=1, clip_only=True)
    released = [
        noise.release(truncate(np.full(draws, float(x)), spacing=noise.spacing), SeededSource(b"low bits %d" % x))
        for x in (0, 1)
    ]
    assert [has_low_bits(to_float(integers, spacing=noise.spacing)) for integers in released] == [0.0, 0.0]
    for bit in range(3):  # every low bit of the lattice integer too: 5 deviations of a difference of two shares
        shares = [float(((integers >> bit) & 1).mean()) for integers in released]
        assert abs(shares[0] - shares[1]) < 5 * math.sqrt(0.5 / draws)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_release_is_input_plus_fresh_noise(family):
    noise = plan_lattice(family, sensitivity=1.0, noise_multiplier=2.0, num_values=6, clip_only=True)
    integers = np.arange(-3000, 3000).reshape(1000, 6)
    released = noise.release(integers, SeededSource(b"add"))
    assert released.dtype == np.int64
    assert (released - integers == noise.draw((1000, 6), SeededSource(b"add"))).all()
    twin, source = copy.deepcopy(noise), SystemSource()
    torch.manual_seed(0)
    one = noise.draw((400,), source)
    torch.manual_seed(0)
    assert (one != twin.draw((400,), copy.deepcopy(source))).sum() > 300


def test_sums_are_cut_where_uncut_noise_would_be_cut_too(monkeypatch):
    """Catches an overflow, and a cut of the noise alone, which would show the input."""
    noise = LatticeNoise(family="laplace", scale=2.0**40, spacing=1.0, sensitivity=1.0)
    inputs = np.array([-(2**61), 0, 2**61, 5])
    monkeypatch.setattr(type(noise.sampler), "draw", lambda _, count, __: np.full(count, 2**62))
    assert noise.release(inputs, SystemSource()).tolist() == [2**61] * 4
    monkeypatch.setattr(type(noise.sampler), "draw", lambda _, count, __: np.full(count, -(2**62)))
    assert noise.release(inputs, SystemSource()).tolist() == [-(2**61)] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "uniform"}, "family is 'uniform': it must be one of gaussian, laplace"),
        ({"scale": math.nan}, "scale is nan"),
        ({"spacing": 0.3}, "spacing is 0.3: it must be a power of two"),
        ({"spacing": 2.0}, "within .4, 2.40.; choose the spacing"),
        ({"sensitivity": 0.0}, "sensitivity is 0.0"),
    ],
)
def test_wrong_facts_are_refused(change, message):
    with pytest.raises(ValueError, match=message) as refusal:
        LatticeNoise(**{"family": "gaussian", "scale": 4.0, "spacing": 0.125, "sensitivity": 1.0, **change})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_plans_refuse_what_is_no_scale(value):
    for name in ("sensitivity", "noise_multiplier"):
        facts = {"sensitivity": 1.0, "noise_multiplier": 1.0, "num_values": 3, name: value}
        with pytest.raises(ValueError, match=f"{name} is"):
            plan_lattice("gaussian", clip_only=True, **facts)
    with pytest.raises(ValueError, match="num_values is 0"):
        plan_lattice("gaussian", sensitivity=1.0, noise_multiplier=1.0, num_values=0, clip_only=True)
    with pytest.raises(ValueError, match="a lattice holds scales within"):
        plan_lattice("gaussian", sensitivity=1e-300, noise_multiplier=1e-5, num_values=1, clip_only=True)


def test_only_lattice_integers_are_released():
    noise = plan_lattice("gaussian", sensitivity=1.0, noise_multiplier=1.0, num_values=1, clip_only=True)
    with pytest.raises(ValueError, match="integers are float64: lattice points are numpy int64"):
        noise.release(np.zeros(3), SystemSource())
    with pytest.raises(ValueError, match="skip empty batches"):
        noise.release(np.zeros((0, 3), np.int64), SystemSource())
    with pytest.raises(ValueError, match="sums would overflow"):
        noise.release(np.array([2**61 + 1]), SystemSource())
