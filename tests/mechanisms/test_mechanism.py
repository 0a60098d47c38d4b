"""Gaussian and Laplace as frozen facts."""

import dataclasses
import math
from fractions import Fraction

import pytest
import torch
from torch import nn

from asfl_privacy.accounting import gaussian_epsilon
from asfl_privacy.mechanisms import Gaussian, Laplace
from sensitivity import certify


def test_calibrated_noise_covers_the_sensitivity():
    """Catches: dividing by Δ, forgetting it, or rounding σ down."""
    for sensitivity in (1e-3, 1 / 3, 7.0, 1e5):
        mechanism = Gaussian.calibrate(epsilon=1.0, delta=1e-5, sensitivity=sensitivity)
        assert mechanism.noise_stddev == pytest.approx(3.7306316 * sensitivity, rel=1e-7)
        assert mechanism.noise_multiplier == pytest.approx(3.7306316, rel=1e-7)
        assert Fraction(mechanism.noise_multiplier) * Fraction(sensitivity) <= Fraction(mechanism.noise_stddev)
        assert gaussian_epsilon(1e-5, noise_multiplier=mechanism.noise_multiplier) <= 1.0 + 1e-12
        laplace = Laplace.calibrate(epsilon=0.1, sensitivity=sensitivity)
        assert Fraction(laplace.scale) * Fraction(0.1) >= Fraction(sensitivity)
        assert laplace.scale == pytest.approx(10.0 * sensitivity)


def test_norms_and_standard_deviations():
    """Catches: σ = b for Laplace, and the norms swapped."""
    assert (Gaussian.norm, Laplace.norm) == (2, 1)
    assert Laplace(scale=3.0).noise_stddev == pytest.approx(4.242640687)
    assert (Gaussian(noise_stddev=3.0).scale, Laplace(scale=3.0).scale) == (3.0, 3.0)


def test_releases_compose():
    assert Gaussian.calibrate(epsilon=8.0, delta=1e-5, sensitivity=1.0, releases=1000).scale == pytest.approx(
        18.98, abs=5e-3
    )
    assert Laplace.calibrate(epsilon=8.0, sensitivity=1.0, releases=10).noise_stddev == pytest.approx(1.77, abs=5e-3)
    assert Laplace.calibrate(epsilon=1.0, sensitivity=1.0, delta=0.05).scale == pytest.approx(0.9069578, abs=5e-7)


def test_classic_is_offered_by_name_and_refused_from_one():
    classic = Gaussian.calibrate(epsilon=0.1, delta=1e-5, sensitivity=1.0, method="classic")
    assert classic.noise_stddev == pytest.approx(48.448, abs=5e-4)
    with pytest.raises(ValueError, match="proven for"):
        Gaussian.calibrate(epsilon=16.0, delta=1e-5, sensitivity=1.0, method="classic")


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, True, "1"])
def test_bad_scales_and_sensitivities_are_refused(bad):
    with pytest.raises(ValueError, match="noise_stddev is"):
        Gaussian(noise_stddev=bad)
    with pytest.raises(ValueError, match="scale is"):
        Laplace(scale=bad)
    with pytest.raises(ValueError, match="sensitivity is"):
        Gaussian(noise_stddev=1.0, sensitivity=bad)
    with pytest.raises(ValueError, match="sensitivity is"):
        Laplace.calibrate(epsilon=1.0, sensitivity=bad)


def test_a_certificate_in_another_norm_is_refused():
    """Catches: Laplace noise calibrated from an ℓ2 bound."""
    head = nn.Linear(4, 3).eval()
    certificate = certify(head, p=2, q=2, input_shape=(4,))
    with pytest.raises(ValueError, match="certify with q=1"):
        Laplace.calibrate(epsilon=1.0, sensitivity=certificate.map(0.1), certificate=certificate)
    mechanism = Gaussian.calibrate(epsilon=1.0, delta=1e-5, sensitivity=certificate.map(0.1), certificate=certificate)
    assert mechanism.certificate is certificate


def test_mechanisms_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Gaussian(noise_stddev=1.0).noise_stddev = 2.0


def test_a_multiplier_without_sensitivity_is_refused():
    with pytest.raises(ValueError, match="has no sensitivity"):
        _ = Gaussian(noise_stddev=1.0).noise_multiplier


@pytest.mark.parametrize("mechanism", [Gaussian(noise_stddev=1.0), Laplace(scale=1.0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.complex64])
def test_noise_is_never_drawn_in_half_precision(mechanism, dtype):
    with pytest.raises(ValueError, match="float32 or float64"):
        mechanism.sample_like(torch.ones(3, dtype=dtype), generator=None)
