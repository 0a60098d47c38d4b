"""The claim: ε from the noise multiplier, the worst distance, and refusals."""

from dataclasses import replace

import pytest
import torch

from asfl_privacy.audit import Claim, claim_of
from asfl_privacy.mechanisms import Gaussian, Laplace, NoiseLayer


@pytest.mark.parametrize(("scale", "epsilon"), [(3.7306, 1.0), (1.0812, 4.0), (0.3442, 16.0)])
def test_epsilon_follows_from_scale_and_sensitivity(scale, epsilon):
    """Expected: exact σ/Δ at δ=1e-5 of Balle & Wang (2018). Catches: Δ or its square left out."""
    claim = Claim(family="gaussian", scale=2.0 * scale, sensitivity=2.0, input_shape=(4,))
    assert claim.epsilon == pytest.approx(epsilon, rel=1e-3)


def test_any_two_records_are_two_clips_apart():
    """Catches: C where 2C is due."""
    claim = Claim(family="laplace", scale=4.0, clip=1.0, unit="any", input_shape=(4,))
    assert claim.worst_distance == 2.0
    assert claim.epsilon == 0.5
    assert replace(claim, epsilon=None, sensitivity=1.0).worst_distance == 2.0
    assert replace(claim, epsilon=None, sensitivity=1.0, unit="metric").worst_distance == 1.0


def test_what_is_said_governs_what_follows():
    stated = Claim(family="gaussian", scale=1.0, sensitivity=1.0, epsilon=0.5, input_shape=(4,))
    assert stated.epsilon == 0.5
    multiplied = Claim(family="laplace", scale=1.0, sensitivity=1.0, noise_multiplier=10.0, input_shape=(4,))
    assert multiplied.epsilon == 0.1
    assert Claim(family="gaussian", scale=1.0, input_shape=(4,)).epsilon is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "uniform"}, "family"),
        ({"scale": 0.0}, "scale"),
        ({"scale": float("nan")}, "scale"),
        ({"sensitivity": -1.0}, "sensitivity"),
        ({"clip": float("inf")}, "clip"),
        ({"spacing": 0.0}, "spacing"),
        ({"unit": "any", "sensitivity": None}, "any two records"),
        ({"input_shape": ()}, "input_shape"),
        ({"input_shape": (0, 3)}, "input_shape"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"epsilon": -1.0}, "epsilon"),
    ],
)
def test_refusals(change, message):
    facts = {"family": "gaussian", "scale": 1.0, "sensitivity": 1.0, "input_shape": (4,)}
    with pytest.raises(ValueError, match=message) as refusal:
        Claim(**{**facts, **change})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("mechanism", [Gaussian(noise_stddev=2.0, sensitivity=0.5), Laplace(scale=2.0)])
def test_a_seeded_noise_layer_claims_what_its_mechanism_says(mechanism):
    claim = claim_of(NoiseLayer(mechanism, generator=torch.Generator()), input_shape=(3, 2))
    assert (claim.family, claim.scale, claim.sensitivity) == (mechanism.family, 2.0, mechanism.sensitivity)
    assert (claim.size, claim.spacing) == (6, None)


def test_a_noise_layer_on_a_lattice_claims_the_lattice_and_no_less_privacy():
    """Catches: the mechanism's own scale, which truncation to the lattice has to raise."""
    mechanism = Gaussian.calibrate(epsilon=1.0, delta=1e-5, sensitivity=0.5)
    claim = claim_of(NoiseLayer(mechanism), input_shape=(3, 2))
    assert claim.spacing is not None
    assert claim.scale > mechanism.scale
    assert claim.sensitivity > 0.5
    assert 0.99 < claim.epsilon <= 1.0


def test_a_layer_without_a_mechanism_is_refused():
    with pytest.raises(ValueError, match="no mechanism"):
        claim_of(lambda x: x, input_shape=(3,))
