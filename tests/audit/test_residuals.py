"""Un-rounding lattice noise, and counting outputs off the lattice."""

from dataclasses import replace

import numpy as np
import pytest

from asfl_privacy.audit import Claim
from asfl_privacy.audit.residuals import count_off_lattice, unround
from asfl_privacy.audit.significance import kolmogorov_smirnov, magnitude, too_small

CLAIM = Claim(family="gaussian", scale=1.0, sensitivity=1.0, spacing=1.0, input_shape=(4,))


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
@pytest.mark.parametrize("spacing", [2.0**-5, 0.5, 1.0, 4.0])
def test_rounded_noise_becomes_exactly_the_claimed_law(family, spacing):
    """Catches: leaving rounded noise as it is, or spreading it evenly over its cell (both fail at coarse spacings)."""
    claim = replace(CLAIM, family=family, spacing=spacing, epsilon=None, delta=None)
    stream = np.random.default_rng(4)
    draw = stream.normal if family == "gaussian" else stream.laplace
    rounded = np.rint(draw(size=200_000) / spacing) * spacing
    u = unround(rounded, claim=claim, stream=stream)
    assert np.abs(u - rounded).max() <= spacing / 2 * (1 + 1e-9)
    assert kolmogorov_smirnov(u, family=family)[1] > 1e-3
    total = magnitude(u, rounding=0.0, family=family).sum()
    assert 1e-3 < float(too_small(total, count=u.size, family=family)) < 1 - 1e-3
    if spacing >= 1.0:
        even = rounded + stream.uniform(-spacing / 2, spacing / 2, rounded.shape)
        assert kolmogorov_smirnov(even, family=family)[1] < 1e-6
        assert kolmogorov_smirnov(rounded, family=family)[1] < 1e-6


def test_values_far_out_and_nan_are_kept():
    u = unround(np.array([1e5, -1e5, np.nan, np.inf]), claim=CLAIM, stream=np.random.default_rng(0))
    assert np.allclose(u[:2], [1e5, -1e5], atol=0.51)
    assert np.isnan(u[2])
    assert np.isinf(u[3])


def test_outputs_off_the_lattice_are_counted():
    claim = replace(CLAIM, spacing=0.25)
    assert count_off_lattice(np.array([0.25, -7.5, 0.3, 0.0, np.nan]), claim=claim) == 2
    assert count_off_lattice(np.array([0.3]), claim=replace(CLAIM, spacing=None)) == 0
