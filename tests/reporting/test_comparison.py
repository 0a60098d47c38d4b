"""Methods against each other: differences are paired, intervals are Student's, and tasks are not mixed."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from asfl_privacy.reporting.cells import gather_cells
from asfl_privacy.reporting.comparison import check_task, paired_difference

TASK = {
    "status": "ok",
    "mech": "none",
    "data": "digits",
    "partition": "iid",
    "clients": 20,
    "cohort": 10,
    "model": "small-cnn",
    "rounds": 10,
    "bytes_model": 40_000_000,
    "bytes_activations": 0,
    "bytes_labels": 0,
}


def run(method, seed, accuracy, **changes):
    tail = 10 if method == "asfl" else 0
    steps = {"tail_steps": tail, "full_steps": 20 - tail}
    return {**TASK, **steps, "method": method, "seed": seed, "accuracy": accuracy, "lr": 0.1, **changes}


accuracies = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=8)


@given(values=accuracies, confidence=st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_the_interval_is_scipys_for_paired_runs(values, confidence):
    """The second method. Catches: n for n − 1, a normal quantile, the spread of runs in place of that of differences."""
    own, other = ({seed: pair[part] for seed, pair in enumerate(values)} for part in (0, 1))
    found = paired_difference(own, other, confidence=confidence)
    differences = np.array([a - b for a, b in values])
    error = stats.sem(differences)
    low, high = (differences.mean(),) * 2
    if error > 0:
        low, high = stats.t.interval(confidence, len(values) - 1, differences.mean(), error)
    assert found.mean == pytest.approx(differences.mean(), abs=1e-12)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-9)


def test_seeds_are_paired_and_those_of_one_method_alone_are_left_out():
    found = paired_difference({0: 0.5, 1: 0.9, 7: 0.0}, {1: 0.6, 0: 0.4})
    assert (found.mean, found.pairs) == (pytest.approx(0.2), 2)
    assert paired_difference({0: 0.5}, {1: 0.5}) is None
    one = paired_difference({0: 0.5}, {0: 0.25})
    assert (one.mean, one.low, one.high) == (0.25, -math.inf, math.inf)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "mnist5k"}, "data is digits and mnist5k: methods are compared on one task"),
        ({"rounds": 20}, "rounds is 10 and 20"),
        ({"full_steps": 5}, "local steps are 5, 20: methods are compared at equal steps"),
    ],
)
def test_runs_of_other_tasks_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check_task(gather_cells([run("fedavg", 0, 0.5), run("scaffold", 0, 0.5, **changes)]), baseline="fedavg")


def test_what_all_runs_share_is_said_and_tail_and_full_steps_count_together():
    shared = dict(check_task(gather_cells([run("fedavg", 0, 0.5), run("asfl", 0, 0.5)]), baseline="fedavg"))
    assert (shared["local steps"], shared["clients"], shared["data"]) == ("20", "20", "digits")


def test_the_baseline_must_be_one_cell():
    def check(*rows):
        check_task(gather_cells(rows), baseline="fedavg")

    with pytest.raises(ValueError, match="fedavg has 0 cells"):
        check(run("scaffold", 0, 0.5))
    with pytest.raises(ValueError, match="fedavg has 2 cells"):
        check(run("fedavg", 0, 0.5), run("fedavg", 0, 0.5, lr=0.2))
    with pytest.raises(ValueError, match="no run without noise"):
        check_task([], baseline="fedavg")
