"""Calibration: asked against spent, and the refusals."""

import math

import pytest

from asfl_privacy.accounting import Ledger, calibrate, laplace_noise_multiplier
from asfl_privacy.accounting.calibration import least_factor


def test_totals_of_eight_agree_with_the_written_values(golden, agrees):
    for row in golden["total_of_eight"]:
        facts = calibrate("gaussian", total_epsilon=8.0, delta=1e-5, num_releases=row["num_releases"])
        assert agrees(facts.noise_multiplier, row["gaussian"]), row
        assert facts.epsilon_total <= 8.0
        if "classic_split" in row:
            split = calibrate(
                "gaussian", total_epsilon=8.0, delta=1e-5, num_releases=row["num_releases"], method="classic"
            )
            assert agrees(split.noise_multiplier, row["classic_split"])


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
@pytest.mark.parametrize("num_releases", [1, 3, 10, 97, 1000])
@pytest.mark.parametrize("asked", [0.1, 1.0, 8.0, 64.0])
def test_a_ledger_of_what_was_calibrated_never_exceeds_the_total(mechanism, num_releases, asked):
    """Catches: a calibration that promises more than the ledger counts, be it by the last bit."""
    delta = 1e-5 if mechanism == "gaussian" else 0.0
    facts = calibrate(mechanism, total_epsilon=asked, delta=delta, num_releases=num_releases)
    ledger = Ledger(p=2, radius=0.1)
    for number in range(num_releases):
        ledger.record(
            channel="activations",
            mechanism=mechanism,
            noise_multiplier=facts.noise_multiplier,
            round=number,
            records=[0, 1],
        )
    spent = ledger.epsilon(delta=delta).high
    assert asked * (1 - 1e-9) <= spent <= asked
    assert spent == facts.epsilon_total
    assert ledger.largest_release(delta=delta) == facts.epsilon_release


@pytest.mark.parametrize("num_releases", [1, 2, 10, 100, 1000])
@pytest.mark.parametrize("asked", [0.1, 4.220, 17.42])
def test_laplace_totals_above_delta_zero_use_the_privacy_loss(num_releases, asked):
    """PLD of (ε0=.1, T=100) is 4.220 at δ=1e-5, so z is about 10, not 23.7. Catches: overspending, and basic sums."""
    facts = calibrate("laplace", total_epsilon=asked, delta=1e-5, num_releases=num_releases)
    ledger = Ledger(p=1, radius=0.1)
    ledger.record(
        channel="activations",
        mechanism="laplace",
        noise_multiplier=facts.noise_multiplier,
        round=0,
        records=[0] * num_releases,
    )
    spent = ledger.epsilon(delta=1e-5).high
    assert asked * 0.999 <= spent <= asked
    assert spent == pytest.approx(facts.epsilon_total, rel=1e-12)
    assert facts.noise_multiplier <= laplace_noise_multiplier(asked, delta=1e-5, num_releases=num_releases) * (1 + 1e-9)
    if (num_releases, asked) in ((100, 4.220), (1000, 17.42)):
        assert facts.noise_multiplier == pytest.approx(10.0, rel=2e-3)
        assert facts.method == "pld"


@pytest.mark.parametrize("target", [1e-6, 0.3, 2.0, 1e6])
@pytest.mark.parametrize(
    "spends",
    [
        lambda factor: 1.0 / factor,
        lambda factor: 5.0 / factor**2,
        lambda factor: 1e-7 + 1.0 / factor,
        lambda factor: math.inf if factor < 3.0 else 1.0 / factor,
        lambda factor: max(0.0, 1.0 / factor - 1e-5),
    ],
)
def test_the_factor_found_fits_and_wastes_little(spends, target):
    """Catches: returning the end that overspends, or a search that stops early."""
    factor = least_factor(spends, target=target)
    assert spends(factor) <= target
    assert spends(factor) >= 0.999 * target or math.isinf(spends(factor * (1 - 1e-9)))


def test_a_total_that_no_noise_reaches_is_refused():
    with pytest.raises(ValueError, match="leaves nothing of it") as caught:
        least_factor(lambda factor: 2.0 + 1.0 / factor, target=2.0)
    assert "\n" not in str(caught.value)


def test_an_epsilon_per_release_gives_the_composed_total():
    facts = calibrate("gaussian", epsilon=1.0, delta=1e-5, num_releases=100)
    assert facts.epsilon_release <= 1.0 < facts.epsilon_total
    assert facts.noise_multiplier == pytest.approx(3.7306, abs=5e-5)
    pure = calibrate("laplace", epsilon=0.1, delta=0.0, num_releases=100)
    assert (pure.epsilon_release, pure.epsilon_total, pure.method) == (0.1, pytest.approx(10.0), "basic")


def test_classic_states_its_true_epsilon():
    facts = calibrate("gaussian", epsilon=0.1, delta=1e-5, method="classic")
    assert facts.noise_multiplier == pytest.approx(48.448, abs=5e-4)
    assert facts.epsilon_release < 0.1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"epsilon": 16.0, "delta": 1e-5, "method": "classic"}, "proven for 0 < epsilon < 1"),
        ({"epsilon": 1.0, "total_epsilon": 8.0, "delta": 1e-5}, "exactly one"),
        ({"delta": 1e-5}, "exactly one"),
        ({"epsilon": 1.0, "delta": 0.0}, "delta is 0.0"),
        ({"epsilon": 1.0, "delta": 1.0}, "delta is 1.0"),
        ({"epsilon": math.nan, "delta": 1e-5}, "epsilon is nan"),
        ({"total_epsilon": -1.0, "delta": 1e-5}, "total_epsilon is -1.0"),
        ({"epsilon": 1.0, "delta": 1e-5, "num_releases": 0}, "num_releases is 0"),
        ({"epsilon": 1.0, "delta": 1e-5, "num_releases": math.nan}, "num_releases is nan"),
        ({"epsilon": 1.0, "delta": 1e-5, "num_releases": 10**400}, "num_releases is inf"),
        ({"epsilon": 1.0, "delta": 1e-5, "method": "clt"}, "analytic, classic"),
    ],
)
def test_bad_requests_are_refused_in_one_line(arguments, words):
    with pytest.raises(ValueError, match=words) as caught:
        calibrate("gaussian", **arguments)
    assert "\n" not in str(caught.value)


def test_unknown_mechanisms_and_classic_laplace_are_refused():
    with pytest.raises(ValueError, match="gaussian, laplace"):
        calibrate("uniform", epsilon=1.0, delta=1e-5)
    with pytest.raises(ValueError, match="one formula"):
        calibrate("laplace", epsilon=0.5, delta=0.0, method="classic")
