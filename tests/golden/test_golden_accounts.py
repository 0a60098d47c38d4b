"""Golden totals at δ=1e-5. Source: the project's page on mechanisms and accounting, sections 3 and 7."""

import pytest

from asfl_privacy.accounting.pld import LossEvent, compose
from asfl_privacy.accounting.sampled import sampled_epsilon

DELTA = 1e-5
LABEL = LossEvent(mechanism="randomized-response", noise_multiplier=1.0, count=1, num_classes=10)


def events(mechanism, z, n, k=None):
    return LossEvent(mechanism=mechanism, noise_multiplier=z, count=n, num_classes=k)


@pytest.mark.parametrize(
    ("z", "n", "below", "above"),
    [(10.0, 100, 4.2202, 4.2205), (10.0, 1000, 17.4225, 17.4248), (1.0, 1000, 474.23, 474.38)],
)
def test_laplace_lies_in_the_written_brackets(z, n, below, above):
    """Both brackets hold the truth, so they overlap; ours is the narrower one."""
    bracket = compose([events("laplace", z, n)], delta=DELTA)
    assert below - 5e-5 <= bracket.low <= bracket.high <= above + 5e-5


@pytest.mark.parametrize(
    ("listed", "written", "half_unit"),
    [
        ([events("laplace", 1.0, 100)], 68.25, 0.005),
        ([events("gaussian", 10.0, 100)], 4.377, 0.0005),
        ([events("gaussian", 10.0, 100), LABEL], 5.03, 0.005),
        ([LABEL], 1.0, 0.05),
        ([events("randomized-response", 1.0, 100, 10)], 37.2, 0.05),
        ([events("randomized-response", 1 / 1.0986, 100, 2)], 90.8, 0.05),
        ([events("gaussian", 1.0, 1000)], 633.9, 0.05),
    ],
)
def test_totals_agree_with_the_written_values(listed, written, half_unit):
    """Catches: count ignored for randomised response (1.0987 for 90.8); ε of parts added (5.38 for 5.03)."""
    bracket = compose(listed, delta=DELTA)
    assert written - half_unit <= bracket.low <= bracket.high <= written + half_unit


@pytest.mark.parametrize(
    ("z", "rounds", "q", "written", "half_unit"),
    [
        (10.0, 100, 0.1, 1.352, 0.0005),
        (10.0, 1000, 0.1, 4.475, 0.0005),
        (10.0, 1000, 0.01, 1.366, 0.0005),
        (10.0, 100, 1.0, 4.377, 0.0005),
        (10.0, 1000, 1.0, 17.86, 0.005),
        (1.0, 1000, 1.0, 633.9, 0.05),
    ],
)
def test_observed_sampling_agrees_with_the_written_values(z, rounds, q, written, half_unit):
    """Catches: Poisson amplification for what the recipient sees (.347, 1.209, .098)."""
    bracket = sampled_epsilon(z, num_rounds=rounds, sampling_probability=q, delta=DELTA)
    assert written - half_unit <= bracket.low <= bracket.high <= written + half_unit


def test_a_large_delta_costs_nothing():
    assert compose([events("gaussian", 1.0, 1)], delta=0.9).high == 0.0
