import math

import pytest

from asfl_privacy.reporting.cells import gather_cells
from asfl_privacy.reporting.table import summarise


def three_seeds(make, accuracies, **changes):
    return [make(seed=seed, accuracy=accuracy, **changes) for seed, accuracy in enumerate(accuracies)]


def line_of(frame, **settings):
    for column, value in settings.items():
        frame = frame[frame[column] == value]
    assert len(frame) == 1
    return frame.iloc[0]


def test_means_deviations_and_paired_losses_by_hand(unnoised, fedavg, gaussian):
    rows = (
        three_seeds(gaussian, [0.80, 0.85, 0.84])
        + three_seeds(unnoised, [0.90, 0.92, 0.94])
        + three_seeds(fedavg, [0.81, 0.83])
    )
    frame = summarise(rows)
    noised = line_of(frame, mech="gaussian")
    assert noised["accuracy_mean"] == pytest.approx(0.83)
    assert noised["accuracy_sd"] == pytest.approx(math.sqrt(0.0014 / 2))  # catches n in place of n - 1
    assert (noised["accuracy_min"], noised["accuracy_max"], noised["runs"], noised["failed"]) == (0.80, 0.85, 3, 0)
    # 10, 7 and 10 points; unpaired deviations would give sqrt(7 + 4) = 3.3 and not sqrt(3).
    assert noised["loss_asfl_mean"] == pytest.approx(9.0)
    assert noised["loss_asfl_sd"] == pytest.approx(math.sqrt(3.0))
    # 1 and -2 points over the two seeds that FedAvg has; the difference of all means would be -1.
    assert noised["loss_fedavg_mean"] == pytest.approx(-0.5)
    assert noised["loss_fedavg_sd"] == pytest.approx(math.sqrt(4.5))
    assert (noised["loss_asfl_pairs"], noised["loss_fedavg_pairs"]) == (3, 2)
    averaged = line_of(frame, method="fedavg")
    assert averaged["loss_asfl_mean"] == pytest.approx(9.0)
    assert averaged["loss_fedavg_mean"] is None


def test_privacy_is_the_largest_over_seeds_never_the_mean(gaussian):
    # Catches: mean or first value for ε, δ, sensitivity.
    spent = [(4.0, 30.0, 1e-6, 500.0, 0.9), (3.9, 31.5, 1e-5, 400.0, 1.1), (4.2, 29.0, 1e-6, 450.0, 1.0)]
    columns = ("epsilon_release", "epsilon_total", "delta_total", "epsilon_whole_record", "sensitivity")
    rows = [gaussian(seed=seed, **dict(zip(columns, values, strict=True))) for seed, values in enumerate(spent)]
    (line,) = summarise(rows).to_dict("records")
    assert tuple(line[column] for column in columns) == (4.2, 31.5, 1e-5, 500.0, 1.1)


@pytest.mark.parametrize("unknown", [None, math.inf])
def test_an_unknown_or_infinite_epsilon_of_one_seed_is_not_hidden_by_the_others(gaussian, unknown):
    # Catches: skipping blanks, which would show 30 as the total of a run that recorded none.
    (line,) = summarise([gaussian(seed=0), gaussian(seed=1, epsilon_total=unknown)]).to_dict("records")
    assert line["epsilon_total"] == unknown


def test_failed_runs_are_counted_and_enter_no_mean(gaussian, unnoised):
    # Catches: a failed run averaged as it stands or as 0.
    rows = [gaussian(seed=0, accuracy=0.5), gaussian(seed=1, accuracy=0.1, status="failed: out of memory")]
    rows.append(unnoised(seed=1))
    line = line_of(summarise(rows), mech="gaussian")
    assert (line["runs"], line["failed"], line["accuracy_mean"], line["accuracy_sd"]) == (1, 1, 0.5, None)
    assert (line["loss_asfl_mean"], line["loss_asfl_pairs"]) == (None, 0)


def test_a_cell_whose_runs_all_failed_keeps_its_line(gaussian):
    (line,) = summarise([gaussian(status="failed: x", accuracy=None, epsilon_total=None)]).to_dict("records")
    assert (line["runs"], line["failed"], line["accuracy_mean"], line["epsilon_total"]) == (0, 1, None, None)


def test_a_failed_run_with_blank_settings_joins_the_one_cell_it_can_belong_to(gaussian):
    failed = gaussian(seed=1, status="failed: x", accuracy=None, placement=None, exchange_layer=None)
    (line,) = summarise([failed, gaussian(seed=0)]).to_dict("records")
    assert (line["runs"], line["failed"], line["placement"]) == (1, 1, "input")
    two_cells = [gaussian(seed=0), gaussian(seed=0, placement="exchange"), failed]
    assert [cell.settings["placement"] for cell in gather_cells(two_cells)] == ["exchange", "input", None]


def test_losses_pair_only_runs_of_the_same_settings(unnoised, fedavg, gaussian):
    # Catches: any reference taken for all cells.
    rows = [
        gaussian(accuracy=0.5),
        unnoised(accuracy=0.9, rounds=99),
        unnoised(accuracy=0.7, tail_steps=2),
        unnoised(accuracy=0.8, exchange_layer="conv2"),
        fedavg(accuracy=0.6, full_steps=6),
    ]
    line = line_of(summarise(rows), mech="gaussian")
    assert (line["loss_asfl_mean"], line["loss_fedavg_mean"]) == (None, None)
    rows += [unnoised(accuracy=0.75), fedavg(accuracy=0.65)]
    line = line_of(summarise(rows), mech="gaussian")
    assert line["loss_asfl_mean"] == pytest.approx(25.0)
    assert line["loss_fedavg_mean"] == pytest.approx(15.0)


def test_references_come_first_then_weak_to_strong(grid, gaussian):
    rows = [*reversed(grid), gaussian(target_epsilon=None, target_total_epsilon=8.0)]
    frame = summarise(rows)
    order = list(zip(frame["method"], frame["mech"], frame["target_epsilon"], frame["delta"], strict=True))
    assert order == [
        ("asfl", "none", None, None),
        ("fedavg", "none", None, None),
        ("asfl", "gaussian", 64.0, 1e-5),
        ("asfl", "gaussian", 16.0, 1e-2),
        ("asfl", "gaussian", 16.0, 1e-5),
        ("asfl", "gaussian", 16.0, 1e-7),
        ("asfl", "gaussian", 4.0, 1e-5),
        ("asfl", "gaussian", 1.0, 1e-5),
        ("asfl", "gaussian", None, 1e-5),
    ]


def test_measured_differences_do_not_split_a_cell(gaussian):
    rows = [gaussian(seed=0), gaussian(seed=1, bytes_activations=7, remote_fraction=0.1, noise_stddev=9.0, seconds=9.0)]
    assert len(summarise(rows)) == 1


def test_one_run_counts_once(gaussian):
    with pytest.raises(ValueError, match="seed 0 of asfl with mech gaussian appears twice"):
        summarise([gaussian(accuracy=0.5), gaussian(accuracy=0.6)])


def test_a_table_of_nothing_is_refused():
    with pytest.raises(ValueError, match="rows is empty"):
        summarise([])


def test_runs_without_a_global_network_have_personal_means_and_no_losses(fedavg, unnoised):
    # Catches: a blank accuracy read as 0, which would be a loss of the whole of FedAvg's accuracy.
    own = [
        fedavg(method="fedproto", seed=seed, accuracy=None, personal_accuracy=value, prototype_accuracy_all=value / 2)
        for seed, value in enumerate([0.5, 0.7])
    ]
    frame = summarise([*own, fedavg(seed=0), fedavg(seed=1), unnoised(seed=0)])
    line = line_of(frame, method="fedproto")
    assert (line["runs"], line["accuracy_mean"], line["accuracy_sd"], line["accuracy_max"]) == (2, None, None, None)
    assert line["personal_accuracy_mean"] == pytest.approx(0.6)
    assert line["personal_accuracy_sd"] == pytest.approx(math.sqrt(0.02))
    assert line["prototype_accuracy_all_mean"] == pytest.approx(0.3)
    assert line["prototype_accuracy_local_mean"] is None
    assert (line["loss_fedavg_mean"], line["loss_fedavg_pairs"], line["loss_asfl_pairs"]) == (None, 0, 0)
    assert line_of(frame, method="fedavg")["personal_accuracy_mean"] is None
