"""Randomised response under audit: honest draws pass, every mutant is flagged."""

import math

import numpy as np
import pytest
import torch

from asfl_privacy.audit import run_response

K, EPSILON = 4, 1.0
NUM_LABELS = 4_000


def keep_probability(epsilon):
    return math.exp(epsilon) / (math.exp(epsilon) + K - 1)


def responder(*, epsilon=EPSILON, seed=None, reuse=None, tilt=0):
    """k-ary randomised response written out here; ``tilt`` moves changed labels to the next one ever so often."""
    rng = np.random.default_rng(seed)
    kept = {}

    def randomize(labels):
        values = labels.numpy()
        if reuse is not None and reuse in kept:
            return torch.from_numpy(kept[reuse])
        change = rng.random(len(values)) >= keep_probability(epsilon)
        shift = rng.integers(1, K, size=len(values))
        shift = np.where(rng.random(len(values)) < tilt, 1, shift)
        answers = np.where(change, (values + shift) % K, values)
        if reuse is not None:
            kept[reuse] = answers
        return torch.from_numpy(answers)

    return randomize


def report_of(randomize, **changes):
    claim = {"num_classes": K, "epsilon": EPSILON, "num_labels": NUM_LABELS, "alpha": 1e-6} | changes
    return run_response(randomize, **claim)


def test_an_honest_randomiser_passes_and_its_bound_never_exceeds_the_truth():
    """20 runs; a false alarm has probability 1e-6 in each."""
    for seed in range(20):
        report = report_of(responder(seed=seed))
        assert report.passed, report.breaches
        assert 0.6 < report.epsilon_low <= EPSILON


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "mutant",
    [{"epsilon": 1.3}, {"tilt": 0.5}, {"reuse": "one draw for all"}],
    ids=["keeps too often", "uneven", "one draw"],
)
def test_a_dishonest_one_is_flagged(mutant, seed):
    """Catches: labels kept too often, answers that are not spread evenly, draws that are not fresh."""
    report = report_of(responder(seed=seed, **mutant))
    assert not report.passed
    assert all(breach.part == "response" for breach in report.breaches)


def test_clear_labels_have_an_unbounded_ratio_and_strays_are_found():
    clear = report_of(lambda labels: labels)
    assert not clear.passed
    assert clear.epsilon_low > 4 * EPSILON
    strays = report_of(lambda labels: responder(seed=0)(labels) + 1)
    assert any("outside the classes" in breach.meaning for breach in strays.breaches)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_classes": 1}, "num_classes is 1"),
        ({"epsilon": math.nan}, "epsilon is nan"),
        ({"num_labels": 5}, "num_labels"),
    ],
)
def test_bad_values_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        report_of(responder(seed=0), **changes)


def test_answers_of_another_kind_are_refused():
    with pytest.raises(ValueError, match="integer labels"):
        report_of(lambda labels: labels.float())
