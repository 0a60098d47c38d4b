"""The lower bound on ε: valid as often as it says, and worthless when any of its safeguards is taken out."""

import math

import numpy as np
import pytest
from scipy import stats

from asfl_privacy.accounting import gaussian_epsilon
from asfl_privacy.audit import Claim, likelihood
from asfl_privacy.audit.likelihood import bound_epsilon
from asfl_privacy.audit.pair import Pair

RUNS = 200
ALPHA = 0.05
ALLOWED = int(stats.binom.ppf(1 - 1e-4, RUNS, ALPHA))  # as many exceedances have probability 1e-4 at a rate of alpha


def claim_of(family, epsilon):
    scale = {1.0: 3.7306316, 4.0: 1.0812}[epsilon] if family == "gaussian" else 1.0 / epsilon
    return Claim(family=family, scale=scale, sensitivity=1.0, input_shape=(8,))


def pair_of(claim, stream, rows=128, scale=1.0):
    draw = stream.normal if claim.family == "gaussian" else stream.laplace
    difference = np.full(8, 1.0 / claim.scale * 8 ** (-1.0 / claim.norm))
    return Pair(
        first=draw(size=(rows, 8)) * scale, second=draw(size=(rows, 8)) * scale, difference=difference, where=""
    )


def exceedances(claim, *, truth, scale=1.0, runs=RUNS):
    count = 0
    for seed in range(runs):
        stream = np.random.default_rng(seed)
        bounds = bound_epsilon(pair_of(claim, stream, scale=scale), claim=claim, alpha=ALPHA, stream=stream)
        count += max(bound.epsilon for bound in bounds) > truth
    return count


@pytest.mark.parametrize(("family", "epsilon"), [("gaussian", 1.0), ("laplace", 1.0), ("laplace", 4.0)])
def test_the_bound_exceeds_the_truth_no_more_often_than_alpha(family, epsilon):
    claim = claim_of(family, epsilon)
    assert exceedances(claim, truth=claim.epsilon) <= ALLOWED


def test_the_bound_is_valid_for_noise_of_another_scale():
    claim = claim_of("gaussian", 1.0)
    truth = gaussian_epsilon(1e-5, noise_multiplier=0.5 * claim.scale)
    assert exceedances(claim, truth=truth, scale=0.5) <= ALLOWED


def test_point_estimates_exceed_the_truth(monkeypatch):
    """Catches: rates in place of their upper confidence bounds."""
    monkeypatch.setattr(
        likelihood, "rate_up", lambda count, *, trials, alpha: (np.asarray(count) + 1.0) / (trials + 2.0)
    )
    claim = claim_of("gaussian", 1.0)
    assert exceedances(claim, truth=claim.epsilon, runs=50) > ALLOWED


def test_noise_of_another_law_gets_the_bound_that_holds_for_any():
    """Laplace noise under a Gaussian claim. Catches: the Gaussian curve used for noise that is not Gaussian.

    With ℓ1 distance s the true ε is at most s, pure; single coordinates are Δ apart in one coordinate, so s = Δ/b.
    """
    claim = claim_of("gaussian", 1.0)
    stream = np.random.default_rng(0)
    b = claim.scale / math.sqrt(2.0)
    for _ in range(20):
        noise = [stream.laplace(0.0, b / claim.scale, (8192, 8)) for _ in range(2)]
        pair = Pair(first=noise[0], second=noise[1], difference=np.eye(8)[0] / claim.scale, where="")
        bounds = bound_epsilon(pair, claim=claim, alpha=ALPHA, stream=stream)
        assert all("any law" in bound.where for bound in bounds)
        assert max(bound.epsilon for bound in bounds) <= 1.0 / b


def test_no_noise_and_no_distance():
    claim = claim_of("gaussian", 1.0)
    stream = np.random.default_rng(0)
    zeros = np.zeros((1024, 8))
    silent = Pair(first=zeros, second=zeros, difference=np.full(8, 0.1), where="")
    assert max(bound.epsilon for bound in bound_epsilon(silent, claim=claim, alpha=1e-7, stream=stream)) > 4.0
    nowhere = Pair(first=zeros, second=zeros, difference=np.zeros(8), where="")
    assert bound_epsilon(nowhere, claim=claim, alpha=1e-7, stream=stream) == []


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-2])
@pytest.mark.parametrize(
    ("false_positive", "false_negative"), [(0.02, 0.5), (0.5, 0.01), (0.1, 0.1), (0.5, 0.5), (0.9, 0.9)]
)
def test_epsilon_is_the_least_that_the_rates_allow(false_positive, false_negative, delta, steps):
    """Oracle: a walk over ε in small steps with the defining inequality. Catches: δ of a group counted once."""
    found = likelihood._epsilon(false_positive, false_negative, steps=steps, family="laplace", delta=delta)

    def allowed(epsilon):
        total = sum(delta * math.exp(step * epsilon) for step in range(steps))
        return all(
            1 - missed <= math.exp(steps * epsilon) * wrong + total
            for wrong, missed in ((false_positive, false_negative), (false_negative, false_positive))
        )

    least = next(epsilon for epsilon in np.arange(0.0, 6.0, 1e-3) if allowed(epsilon))
    assert max(0.0, least - 1.1e-3) <= found <= least
