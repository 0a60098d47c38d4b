"""DP-SGD's account against opacus' accountants without sampling: each step of a record is one Gaussian release."""

import warnings
from fractions import Fraction

import numpy as np
import pytest

from asfl_privacy.accounting import composed_gaussian_epsilon
from asfl_privacy.federated.private_updates import noise_multiplier_of

CASES = [
    # σ, C, participations, from the golden page where σ/(2C) and T are its (1, 100), (10, 100), (10, 1000), (50, 1000)
    (2.0, 1.0, 100, "91.82"),
    (10.0, 0.5, 100, "4.377"),
    (20.0, 1.0, 1000, "17.86"),
    (300.0, 3.0, 1000, "2.594"),
    (4.0, 0.4, 7, None),
    (1.5, 0.5, 12, None),
]


def opacus_epsilon(kind, *, noise_multiplier, num_steps, delta=1e-5):
    from opacus.accountants import PRVAccountant, RDPAccountant

    accountant = {"rdp": RDPAccountant, "prv": PRVAccountant}[kind]()
    accountant.history = [(noise_multiplier, 1.0, num_steps)]
    # without sampling opacus takes log(1 − q) of 0, and notes where the α grid ends; both leave a valid ε
    with warnings.catch_warnings(), np.errstate(divide="ignore"):
        warnings.filterwarnings("ignore", message="Optimal order is the")
        return accountant.get_epsilon(delta=delta)


def our_epsilon(sigma, clip, num_steps):
    z = Fraction(noise_multiplier_of(sigma, clip=clip))
    return composed_gaussian_epsilon(num_steps / z**2, delta=1e-5)


@pytest.mark.parametrize(("sigma", "clip", "num_steps", "golden"), CASES)
def test_our_account_is_below_opacus_and_close(sigma, clip, num_steps, golden):
    """Catches σ/C charged for replace-one, participations counted once, and any amplification by sampling."""
    ours = our_epsilon(sigma, clip, num_steps)
    if golden is not None:
        assert f"{ours.high:.4g}" == golden
    z = sigma / (2 * clip)  # opacus' own noise multiplier is σ/C, for adding or removing a record of sensitivity C
    prv = opacus_epsilon("prv", noise_multiplier=z, num_steps=num_steps)
    assert ours.low <= prv <= ours.high + 0.02
    rdp = opacus_epsilon("rdp", noise_multiplier=z, num_steps=num_steps)
    assert ours.low <= rdp <= 1.1 * ours.high


@pytest.mark.parametrize(("sigma", "clip", "num_steps", "golden"), CASES)
def test_opacus_on_its_own_scale_would_claim_less_than_replace_one_costs(sigma, clip, num_steps, golden):
    """The mutant: σ/C handed to the ledger. Its ε is refuted by ours, whose low end it does not reach."""
    claimed = opacus_epsilon("prv", noise_multiplier=sigma / clip, num_steps=num_steps)
    assert claimed < 0.6 * our_epsilon(sigma, clip, num_steps).low
