"""Calibration of a whole run: what a ledger of exactly these releases answers, asked against spent."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asfl_privacy.accounting import Ledger, PlannedReleases, calibrate, calibrate_run


def ledger_of(planned, found):
    """Every release of the plan, one round after the other, for two records."""
    ledger = Ledger(p=2, radius=0.1)
    for plan in planned:
        for number in range(math.ceil(plan.num_releases)):
            ledger.record(
                channel=plan.channel,
                mechanism=plan.mechanism,
                noise_multiplier=found.noise_multipliers[plan.channel],
                round=number,
                records=np.array([0, 3]),
                num_classes=plan.num_classes,
                sampler="lattice",
                epsilon_excess=plan.epsilon_excess,
                tail_probability=plan.tail_probability,
            )
    return ledger


ERRORS = st.sampled_from([(0.0, 0.0), (1e-5, 0.0), (1e-6, 1e-18)])


@settings(max_examples=40, deadline=None)
@given(
    mechanism=st.sampled_from(["gaussian", "laplace"]),
    num_activations=st.one_of(st.none(), st.integers(1, 60), st.floats(0.5, 40.0)),
    num_updates=st.one_of(st.none(), st.integers(1, 60)),
    label_share=st.one_of(st.none(), st.floats(0.05, 0.9)),
    total=st.floats(0.2, 20.0),
    delta=st.sampled_from([1e-3, 1e-5, 1e-9]),
    shares=st.tuples(st.floats(0.1, 5.0), st.floats(0.1, 5.0)),
    errors=ERRORS,
)
def test_a_ledger_of_the_calibrated_run_never_exceeds_the_total(
    mechanism, num_activations, num_updates, label_share, total, delta, shares, errors
):
    """Catches: channels calibrated apart, λ on the labels too, the end of the search that overspends, waste."""
    excess, tail = errors
    planned = []
    if num_activations is not None:
        planned.append(
            PlannedReleases(
                channel="activations",
                mechanism=mechanism,
                num_releases=num_activations,
                share=shares[0],
                epsilon_excess=excess,
                tail_probability=tail,
            )
        )
    if num_updates is not None:
        planned.append(
            PlannedReleases(channel="updates", mechanism="gaussian", num_releases=num_updates, share=shares[1])
        )
    if label_share is not None:
        z = 1.0 / (label_share * total)
        planned.append(
            PlannedReleases(channel="labels", mechanism="randomized-response", noise_multiplier=z, num_classes=10)
        )
    if num_activations is None and num_updates is None:
        return
    found = calibrate_run(planned, total_epsilon=total, delta=delta)
    ledger = ledger_of(planned, found)
    spent = ledger.epsilon(delta=delta)
    assert spent.high <= total
    assert spent.high >= 0.995 * total
    assert spent.high == pytest.approx(found.epsilon, rel=1e-12)
    for channel, alone in found.epsilon_alone.items():
        assert ledger.epsilon(delta=delta, channel=channel).high == pytest.approx(alone, rel=1e-12)
        assert alone <= total * (1 + 1e-9)
    if label_share is not None:
        assert found.noise_multipliers["labels"] == z


def test_one_gaussian_channel_is_calibrated_as_if_alone():
    plan = PlannedReleases(channel="activations", mechanism="gaussian", num_releases=1000)
    found = calibrate_run([plan], total_epsilon=8.0, delta=1e-5)
    alone = calibrate("gaussian", total_epsilon=8.0, delta=1e-5, num_releases=1000)
    assert found.noise_multipliers["activations"] == pytest.approx(alone.noise_multiplier, rel=1e-9)


def test_a_share_gets_its_part_of_the_square():
    """Shares 3 : 1 of two Gaussian channels: μ² = ¾ and ¼ of the whole. Catches: √ on the wrong side."""
    planned = [
        PlannedReleases(channel="activations", mechanism="gaussian", num_releases=10, share=3.0),
        PlannedReleases(channel="updates", mechanism="gaussian", num_releases=10, share=1.0),
    ]
    z = calibrate_run(planned, total_epsilon=4.0, delta=1e-5).noise_multipliers
    assert z["updates"] ** 2 / z["activations"] ** 2 == pytest.approx(3.0)


def test_remembered_labels_leave_most_of_the_total():
    """4.377 of activations at z=10, T=100 and an ε=1 label are 5.03 together, so 5.03 buys about z=10."""
    planned = [
        PlannedReleases(channel="activations", mechanism="gaussian", num_releases=100),
        PlannedReleases(channel="labels", mechanism="randomized-response", noise_multiplier=1.0, num_classes=10),
    ]
    found = calibrate_run(planned, total_epsilon=5.0313, delta=1e-5)
    assert found.noise_multipliers["activations"] == pytest.approx(10.0, rel=2e-3)
    assert found.epsilon_alone["activations"] == pytest.approx(4.377, rel=2e-3)


def test_pure_channels_need_no_delta():
    planned = [
        PlannedReleases(channel="activations", mechanism="laplace", num_releases=10),
        PlannedReleases(channel="labels", mechanism="randomized-response", noise_multiplier=0.5, num_classes=2),
    ]
    found = calibrate_run(planned, total_epsilon=7.0, delta=0.0)
    assert found.noise_multipliers["activations"] == pytest.approx(2.0, rel=2e-3)
    assert 6.993 <= found.epsilon <= 7.0


ACTIVATIONS = PlannedReleases(channel="activations", mechanism="gaussian", num_releases=10)
LABELS = PlannedReleases(channel="labels", mechanism="randomized-response", noise_multiplier=0.25, num_classes=10)


@pytest.mark.parametrize(
    ("planned", "arguments", "words"),
    [
        ([ACTIVATIONS, LABELS], {"total_epsilon": 3.5}, "labels alone spend .* nothing is left"),
        ([LABELS], {}, "nothing to find"),
        ([], {}, "nothing to find"),
        ([ACTIVATIONS, ACTIVATIONS], {}, "each may occur once"),
        ([ACTIVATIONS], {"delta": 0.0}, r"delta is 0\.0"),
        ([ACTIVATIONS], {"delta": math.nan}, "delta is nan"),
        ([ACTIVATIONS], {"total_epsilon": 0.0}, r"total_epsilon is 0\.0"),
        ([ACTIVATIONS], {"total_epsilon": math.nan}, "total_epsilon is nan"),
        ([PlannedReleases(channel="labels", mechanism="randomized-response", num_classes=3)], {}, "chosen beforehand"),
        ([PlannedReleases(channel="activations", mechanism="gaussian", num_releases=0)], {}, "num_releases is 0"),
        ([PlannedReleases(channel="activations", mechanism="gaussian", share=0.0)], {}, r"share is 0\.0"),
        ([PlannedReleases(channel="activations", mechanism="gaussian", share=math.inf)], {}, "share is inf"),
        ([PlannedReleases(channel="activations", mechanism="uniform")], {}, "mechanism is 'uniform'"),
        (
            [PlannedReleases(channel="activations", mechanism="gaussian", epsilon_excess=9.0)],
            {},
            "leaves nothing of it",
        ),
        (
            [PlannedReleases(channel="activations", mechanism="laplace", tail_probability=1e-3)],
            {},
            "leaves nothing of it",
        ),
        (
            [PlannedReleases(channel="activations", mechanism="laplace", tail_probability=1e-9)],
            {"delta": 0.0},
            "delta is 0",
        ),
    ],
)
def test_bad_plans_are_refused_in_one_line(planned, arguments, words):
    with pytest.raises(ValueError, match=words) as caught:
        calibrate_run(planned, **{"total_epsilon": 8.0, "delta": 1e-5, **arguments})
    assert "\n" not in str(caught.value)
