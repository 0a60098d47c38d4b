"""Honest layers pass, and at ε = 1 get a lower bound of at least .9."""

from dataclasses import replace

import pytest
import torch
from audit.mutants import GAUSSIAN, LAPLACE, LATTICE, honest

from asfl_privacy import audit
from asfl_privacy.mechanisms import Gaussian, Laplace, NoiseLayer

CLAIMS = {
    "gaussian": GAUSSIAN,
    "laplace": LAPLACE,
    "gaussian lattice": LATTICE,
    "laplace lattice": replace(LAPLACE, spacing=2.0**-12),
    "coarse lattice": replace(GAUSSIAN, spacing=4.0),
}


@pytest.mark.parametrize("with_tap", [True, False], ids=["tap", "no tap"])
@pytest.mark.parametrize("name", CLAIMS)
def test_honest_clipped_releases_pass(name, with_tap):
    layer = honest(CLAIMS[name])
    report = audit.run(layer, CLAIMS[name], tap=layer.tap if with_tap else None)
    assert report.passed, report.summary()
    assert 0.9 <= report.epsilon_low <= 1.0 or name == "coarse lattice"
    assert all(part.ran for part in report.parts if part.name != "likelihood" or name != "coarse lattice")


@pytest.mark.parametrize(("shape", "dtype"), [((1,), torch.float32), ((7,), torch.float64), ((3, 8, 8), torch.float32)])
@pytest.mark.parametrize("family", [Gaussian, Laplace])
def test_noise_layers_pass(family, shape, dtype):
    delta = 1e-5 if family is Gaussian else 0.0
    layer = NoiseLayer(family.calibrate(epsilon=1.0, delta=delta, sensitivity=0.25))
    report = audit.run(layer, audit.claim_of(layer, input_shape=shape), dtype=dtype)
    assert report.passed, report.summary()
    assert 0.9 <= report.epsilon_low <= 1.0


def test_more_noise_than_claimed_is_never_a_breach_of_scale():
    claim = replace(GAUSSIAN, scale=GAUSSIAN.scale / 1.5, epsilon=None)
    report = audit.run(honest(GAUSSIAN), claim)
    assert {breach.part for breach in report.breaches} == {"family"}
    assert report.epsilon_low < report.epsilon_claimed
