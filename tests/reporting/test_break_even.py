"""Break-even: a measured ε, from which on the whole interval lies above the reference."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asfl_privacy.reporting.break_even import break_even, series_of, threshold
from asfl_privacy.reporting.cells import gather_cells

# Student's two-sided 95 % quantile with 2 degrees of freedom is 4.3027; differences of mean m and deviation 1 over 3 seeds
# have the interval m ± 4.3027/√3 = m ± 2.484 points.
SURELY_ABOVE = (2.0, 3.0, 4.0)  # 0.516 to 5.484
NOT_SURELY = (1.0, 2.0, 3.0)  # −0.484 to 4.484; a normal quantile would give 0.868
BELOW = (-4.0, -3.0, -2.0)
FEDAVG = (0.80, 0.82, 0.79)


@pytest.fixture
def make(fedavg, gaussian, unnoised):
    """Cells of ASFL with noise, by ε, from the points that each seed is above FedAvg; then FedAvg, and ASFL without noise."""

    def cells(points, *, clean=SURELY_ABOVE, **changes):
        rows = []
        for seed, base in enumerate(FEDAVG):
            rows.append(fedavg(seed=seed, accuracy=base))
            rows.append(unnoised(seed=seed, accuracy=base + clean[seed] / 100))
            for epsilon, above in points.items():
                if len(above) > seed:
                    rows.append(
                        gaussian(
                            seed=seed,
                            accuracy=base + above[seed] / 100,
                            target_epsilon=epsilon,
                            epsilon_release=epsilon,
                            epsilon_total=6 * epsilon,
                            **changes,
                        )
                    )
        found = gather_cells(rows)
        reference = next(cell for cell in found if cell.settings["method"] == "fedavg")
        asfl = next(cell for cell in found if cell.settings["method"] == "asfl" and not cell.is_noised)
        return [cell for cell in found if cell.is_noised], reference, asfl

    return cells


def test_the_lower_end_must_be_above_not_the_mean(make):
    """Catches: mean > 0 (would say 4), a normal quantile (4), FedAvg minus ASFL (1)."""
    series, reference, _ = make({1.0: BELOW, 4.0: NOT_SURELY, 16.0: SURELY_ABOVE, 64.0: SURELY_ABOVE})
    found = break_even(series, reference)
    assert (found.epsilon, found.epsilon_total, found.first, found.fails_last) == (16.0, 96.0, 16.0, 4.0)
    assert found.measured == (1.0, 4.0, 16.0, 64.0)
    assert found.is_monotone
    assert not found.is_censored
    assert found.reason == ""
    assert (found.difference.mean, found.difference.pairs) == (pytest.approx(0.03), 3)
    assert found.difference.low == pytest.approx(0.03 - 0.043027 / math.sqrt(3), abs=1e-6)


def test_a_gain_that_fails_again_at_a_larger_epsilon_is_no_break_even(make):
    """Catches: the smallest ε at which it holds at all."""
    series, reference, _ = make({1.0: SURELY_ABOVE, 4.0: NOT_SURELY, 16.0: SURELY_ABOVE})
    found = break_even(series, reference)
    assert (found.epsilon, found.first, found.fails_last, found.is_monotone) == (16.0, 1.0, 4.0, False)


def test_a_gain_at_every_epsilon_is_censored(make):
    series, reference, _ = make({4.0: SURELY_ABOVE, 16.0: SURELY_ABOVE})
    found = break_even(series, reference)
    assert (found.epsilon, found.fails_last, found.is_censored) == (4.0, None, True)


def test_the_epsilon_is_the_largest_of_its_seeds(make, gaussian):
    """Catches: the mean, the first seed, the ε that was asked: each too small."""
    series, reference, _ = make({4.0: SURELY_ABOVE})
    rows = [
        {**run, "epsilon_release": 4.0 + seed / 10, "epsilon_total": 24.0 - seed}
        for seed, run in enumerate(series[0].runs)
    ]
    found = break_even([cell for cell in gather_cells(rows) if cell.is_noised], reference)
    assert (found.epsilon, found.epsilon_total) == (4.2, 24.0)


@pytest.mark.parametrize(
    ("points", "clean", "reason"),
    [
        ({4.0: BELOW}, SURELY_ABOVE, "a larger ε than those measured may be too"),
        ({4.0: BELOW}, NOT_SURELY, "no ε can be expected to be"),
        ({4.0: (9.0,)}, SURELY_ABOVE, "1 paired seed: an interval needs at least two"),
    ],
)
def test_no_break_even_says_why(make, points, clean, reason):
    series, reference, asfl = make(points, clean=clean)
    found = break_even(series, reference, without_noise=asfl)
    assert found.epsilon is None
    assert found.epsilon_total is None
    assert reason in found.reason


def test_a_gain_at_infinite_epsilon_alone_is_none(make):
    """ε = ∞ promises nothing, so it is no break-even. Catches: returning it."""
    series, reference, asfl = make({4.0: BELOW, 16.0: SURELY_ABOVE})
    rows = [run for cell in series for run in cell.runs]
    rows = [{**run, "epsilon_release": math.inf} if run["target_epsilon"] == 16 else run for run in rows]
    found = break_even(gather_cells(rows), reference, without_noise=asfl)
    assert (found.epsilon, found.first) == (None, None)
    assert "only where ε is infinite" in found.reason


def test_an_epsilon_with_a_failed_run_does_not_count(make):
    """Catches: a mean over the seeds that happened to survive."""
    series, reference, _ = make({4.0: SURELY_ABOVE, 16.0: SURELY_ABOVE})
    rows = [run for cell in series for run in cell.runs]
    lost = {**rows[0], "seed": 9, "status": "failed: loss is NaN", "accuracy": None}
    assert lost["target_epsilon"] == 16
    found = break_even(gather_cells([*rows, {**lost, "target_epsilon": 4.0, "epsilon_release": 4.0}]), reference)
    assert (found.epsilon, found.fails_last) == (16.0, 4.0)
    found = break_even(gather_cells([*rows, lost]), reference)
    assert (found.epsilon, found.first, found.reason) == (None, 4.0, "runs failed at the largest ε measured")


def test_cells_that_differ_in_more_than_epsilon_are_no_series(make, gaussian):
    series, reference, _ = make({4.0: SURELY_ABOVE})
    other = gather_cells([gaussian(radius=2.0), gaussian(radius=2.0, target_epsilon=8.0, epsilon_release=8.0)])
    with pytest.raises(ValueError, match="radius differs between the cells"):
        break_even([*series, *other], reference)
    with pytest.raises(ValueError, match="no cell with noise"):
        break_even([], reference)
    assert [len(one) for one in series_of([*series, *other, reference])] == [1, 2]
    assert series_of(gather_cells([gaussian(epsilon_release=None)])) == []


steps = st.lists(st.tuples(st.sampled_from([0.5, 1.0, 2.0, 4.0, math.inf]), st.booleans()), min_size=1, max_size=9)


@given(measured=steps)
def test_a_threshold_is_what_trying_every_epsilon_finds(measured):
    """The slow twin. Catches: one of several cells at an ε enough, an order that depends on the input."""
    values = sorted({epsilon for epsilon, _ in measured})
    holds = {value: all(held for epsilon, held in measured if epsilon == value) for value in values}
    everywhere = [v for v in values if v < math.inf and all(holds[w] for w in values if w >= v)]
    anywhere = [v for v in values if v < math.inf and holds[v]]
    fails = [v for v in values if not holds[v]]
    found = threshold(measured)
    assert found.holds_from == min(everywhere, default=None)
    assert found.holds_first == min(anywhere, default=None)
    assert found.fails_last == max(fails, default=None)
    assert found == threshold(reversed(measured))


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan])
def test_an_epsilon_that_is_none_is_refused(epsilon):
    with pytest.raises(ValueError, match="must be above 0"):
        threshold([(epsilon, True)])
    with pytest.raises(ValueError, match="no ε was measured"):
        threshold([])


def test_without_any_gain_a_break_even_is_named_once_in_forty(make):
    """The claim of the guarantee, however many ε. Catches: the first ε that holds (named nearly six times as often)."""
    rng = np.random.default_rng(0)
    trials, named, at_all = 300, 0, 0
    for _ in range(trials):
        points = {epsilon: tuple(rng.normal(size=3)) for epsilon in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)}
        series, reference, _ = make(points)
        found = break_even(series, reference)
        named += found.epsilon is not None
        at_all += found.first is not None
    assert 1 <= named <= 18  # 7.5 expected; 18 is 3.9 standard deviations above
    assert at_all > 24  # 1 − 0.975⁶ = 14 % of 300 is 42; 24 is 3 standard deviations below
