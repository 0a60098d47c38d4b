"""Rounding onto the lattice never lengthens a row, and norms are compared exactly."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asfl_privacy.mechanisms.lattice import coarsen, norm_at_most, to_float, truncate
from asfl_privacy.mechanisms.lattice.rounding import spacing_exponent

cells = st.integers(-(2**61), 2**61)
exponents = st.integers(-40, 40)


@given(st.lists(st.floats(-1e15, 1e15), min_size=1, max_size=8), st.integers(-10, 40))
def test_truncation_is_exact_and_toward_zero(values, exponent):
    """Catches floor, rounding to nearest, and a division that rounds."""
    expected = [math.trunc(Fraction(value) / Fraction(2) ** exponent) for value in values]
    assert truncate(np.array(values), spacing=2.0**exponent).tolist() == expected
    floats = torch.tensor(values, dtype=torch.float32)
    expected = [math.trunc(Fraction(value) / Fraction(2) ** exponent) for value in floats.tolist()]
    assert truncate(floats, spacing=2.0**exponent).tolist() == expected


def test_shapes_and_graphs_pass():
    assert truncate(torch.ones(2, 3, 4, requires_grad=True), spacing=0.5).shape == (2, 3, 4)
    assert truncate(torch.tensor(5e-324, dtype=torch.float64), spacing=1.0).tolist() == 0
    assert truncate(torch.zeros(0, 3), spacing=1.0).shape == (0, 3)
    assert truncate(torch.ones(4, 6)[::2, ::3], spacing=0.25).tolist() == [[4, 4], [4, 4]]


@pytest.mark.parametrize(
    ("values", "spacing", "message"),
    [
        (torch.tensor([1.0, math.nan]), 1.0, "hold NaN or inf"),
        (torch.tensor([1.0, -math.inf]), 1.0, "hold NaN or inf"),
        (torch.tensor([2.0**61]), 1.0, "2.61 cells or more"),
        (torch.tensor([1e300], dtype=torch.float64), 1e-300, "spacing is 1e-300: it must be a power of two"),
        (torch.tensor([1e300], dtype=torch.float64), 2.0**-1000, "2.61 cells or more"),
        (torch.tensor([1.0], dtype=torch.bfloat16), 1.0, "activations are torch.bfloat16"),
        (torch.tensor([1.0], dtype=torch.float16), 1.0, "activations are torch.float16"),
        (torch.tensor([1]), 1.0, "activations are torch.int64"),
        (np.array([1]), 1.0, "activations are int64"),
        ([1.0], 1.0, "activations are list"),
    ],
)
def test_what_has_no_place_on_the_lattice_is_refused(values, spacing, message):
    with pytest.raises(ValueError, match=message) as refusal:
        truncate(values, spacing=spacing)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("spacing", [0.0, -1.0, 0.3, 3.0, math.nan, math.inf, 2.0**-1001, True, "1"])
def test_only_powers_of_two_are_spacings(spacing):
    with pytest.raises(ValueError, match="spacing is"):
        spacing_exponent(spacing)


@given(st.lists(st.lists(cells, min_size=3, max_size=3), min_size=1, max_size=4), st.sampled_from([1, 2]), exponents)
def test_norms_are_compared_as_python_integers_would(rows, norm, exponent):
    """Catches sums that overflow or round: bounds at, just below and just above each row's own norm."""
    spacing = 2.0**exponent
    powers = [sum(abs(k) ** norm for k in row) for row in rows]
    near = [float(math.isqrt(power) if norm == 2 else power) * spacing for power in powers]
    for bound in {b for n in near for b in (math.nextafter(n, 0), n, math.nextafter(n, math.inf)) if b > 0}:
        limit = Fraction(bound) / Fraction(spacing)
        expected = [power <= limit**norm for power in powers]
        assert norm_at_most(np.array(rows), norm=norm, bound=bound, spacing=spacing).tolist() == expected


def test_the_border_itself_is_inside_and_one_cell_more_is_not():
    rows = np.array([[3 * 10**17, 4 * 10**17], [3 * 10**17, 4 * 10**17 + 1], [0, 0]])
    assert norm_at_most(rows, norm=2, bound=5e17, spacing=1.0).tolist() == [True, False, True]
    wide = np.full((2, 1 << 20), 2**61)
    wide[1, 0] = 1 - 2**61
    assert norm_at_most(wide, norm=2, bound=2.0**71, spacing=1.0).tolist() == [True, True]
    assert norm_at_most(wide, norm=2, bound=math.nextafter(2.0**71, 0), spacing=1.0).tolist() == [False, False]
    assert norm_at_most(np.zeros((2, 3, 4), np.int64), norm=1, bound=1e-9, spacing=1.0).tolist() == [True, True]


def test_norms_that_cannot_be_checked_are_refused():
    rows = np.zeros((1, 2), np.int64)
    with pytest.raises(ValueError, match="norm is 3: lattice rows are checked in ℓ1 and ℓ2"):
        norm_at_most(rows, norm=3, bound=1.0, spacing=1.0)
    with pytest.raises(ValueError, match="bound is nan"):
        norm_at_most(rows, norm=2, bound=math.nan, spacing=1.0)
    with pytest.raises(ValueError, match=r"at most 2\^20 values a row"):
        norm_at_most(np.zeros((1, 2**20 + 1), np.int64), norm=2, bound=1.0, spacing=1.0)
    with pytest.raises(ValueError, match="integers are float64"):
        norm_at_most(rows.astype(float), norm=2, bound=1.0, spacing=1.0)


@given(st.lists(cells, min_size=1, max_size=6), st.integers(0, 70))
def test_coarsening_rounds_to_the_nearest_point_halves_up(values, shift):
    expected = [math.floor(Fraction(k, 2**shift) + Fraction(1, 2)) if shift else k for k in values]
    assert coarsen(np.array(values), spacing=0.5, coarse_spacing=0.5 * 2.0**shift).tolist() == expected


def test_a_finer_lattice_is_no_coarsening():
    with pytest.raises(ValueError, match="it must be at least the spacing"):
        coarsen(np.array([1]), spacing=1.0, coarse_spacing=0.5)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-60, 40))
def test_floats_are_the_nearest_float32(value, exponent):
    """Catches a second rounding by way of float64."""
    exact = Fraction(value) * Fraction(2) ** exponent
    found = to_float(np.array([value]), spacing=2.0**exponent)
    assert found.dtype == np.float32
    error = abs(Fraction(float(found[0])) - exact)
    for neighbour in (np.nextafter(found[0], np.float32(np.inf)), np.nextafter(found[0], np.float32(-np.inf))):
        assert error <= abs(Fraction(float(neighbour)) - exact)
    if abs(value) < 2**24:
        assert error == 0


def test_floats_that_overflow_are_refused():
    with pytest.raises(ValueError, match="overflows float32"):
        to_float(np.array([4]), spacing=2.0**127)


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
    st.integers(-149, 140),
)
def test_products_of_powers_of_two_are_what_scaling_gives(values, exponent):
    """Catches a product that rounds where scaling by an exponent does not; both ends of float32 and its subnormals."""
    array = np.array(values, dtype=np.float32)
    with np.errstate(over="ignore", under="ignore"):
        slow = np.trunc(np.ldexp(array.astype(np.float64), -exponent))
    if np.abs(slow).max() < 2**61:
        cells = truncate(array, spacing=2.0**exponent)
        assert cells.tolist() == [int(cell) for cell in slow]
        with np.errstate(over="ignore", under="ignore"):
            back = np.ldexp(cells.astype(np.float32), exponent)
        assert to_float(cells, spacing=2.0**exponent).tolist() == back.tolist()
