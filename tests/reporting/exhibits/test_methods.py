"""Table 1: differences are paired, the target is FedAvg's, and personal accuracy is never beside the global one."""

import pytest

from asfl_privacy.reporting.cells import run_name
from asfl_privacy.reporting.exhibits.exhibit import Material
from asfl_privacy.reporting.exhibits.methods import methods_exhibit
from asfl_privacy.reporting.rows import complete_row

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
INFO = {"title": "Methods"}


def run(method, seed, accuracy, **changes):
    tail = 10 if method == "asfl" else 0
    steps = {"tail_steps": tail, "full_steps": 20 - tail}
    return {**TASK, **steps, "method": method, "seed": seed, "accuracy": accuracy, "lr": 0.1, **changes}


def point(row, number, accuracy):
    name, seed = run_name(complete_row(row)), row["seed"]
    return {"run": name, "method": row["method"], "seed": seed, "round": number, "accuracy": accuracy, "bytes": 1}


def three_methods():
    rows = [run("fedavg", seed, 0.80 + 0.01 * seed) for seed in range(3)]
    rows += [run("asfl", seed, 0.85 + 0.01 * seed, lr=0.05, exchange_layer="conv1") for seed in range(3)]
    return rows + [run("scaffold", seed, 0.70, options="server_lr 0.5", bytes_model=80_000_000) for seed in range(2)]


def test_each_method_has_a_line_the_best_first_with_its_own_learning_rate():
    rows = [*three_methods(), run("asfl", 0, 0.5, mech="gaussian", exchange_layer="conv1")]
    table = methods_exhibit(Material(info=INFO, rows=rows)).table
    assert [line[0] for line in table.lines] == ["ASFL, conv1", "FedAvg", "SCAFFOLD"]
    asfl, fedavg, scaffold = table.lines
    assert asfl[1:5] == ("86.0 ± 1.0", "+5.0", "+5.0 to +5.0", "3")
    assert (asfl[6], asfl[7]) == ("4", "0.05")
    assert fedavg[2:5] == ("—", "—", "—")
    assert scaffold[2] == "-10.5"
    assert (scaffold[4], *scaffold[6:]) == ("2", "8", "0.1", "server_lr 0.5")


def test_findings_say_the_place_and_whether_the_interval_leaves_out_nothing():
    """By hand: differences .05 three times, so an interval of no width. Catches: a verdict from the mean alone."""
    found = methods_exhibit(Material(info=INFO, rows=three_methods())).findings
    assert found[0].startswith("ASFL is number 1 of 3")
    assert found[1].endswith("over 3 paired seeds, 95 % interval +5.0 to +5.0: above.")
    assert found[2:] == ("SCAFFOLD is -15.5 points from ASFL over 2 paired seeds, 95 % interval -21.9 to -9.1.",)
    rows = [run("fedavg", 0, 0.8), run("fedavg", 1, 0.8), run("asfl", 0, 0.7), run("asfl", 1, 0.95)]
    unsure = methods_exhibit(Material(info=INFO, rows=rows)).findings[1]
    assert "+2.5 points" in unsure
    assert unsure.endswith("not distinguishable from FedAvg at that confidence.")


def test_rounds_to_target_are_the_first_at_fedavgs_own_accuracy_by_the_mean_over_seeds():
    """FedAvg's mean is .81. ASFL: .80 in round 2, .82 in 4; SCAFFOLD never; a round of one seed alone counts for nothing.

    Catches: a single seed's curve, the last round, curves of noised runs or of another exchange layer under one name.
    """
    rows = three_methods()
    asfl, scaffold = ([row for row in rows if row["method"] == name] for name in ("asfl", "scaffold"))
    curves = [point(row, 2, value) for row, value in zip(asfl, (0.90, 0.70, 0.80), strict=True)]
    curves += [point(row, 4, 0.82) for row in asfl] + [point(asfl[0], 1, 0.99)]
    curves += [point({**row, "exchange_layer": "conv2"}, 2, 0.99) for row in asfl]
    curves += [point({**row, "mech": "gaussian"}, 2, 0.99) for row in asfl]
    curves += [point(row, number, 0.5) for row in scaffold for number in (2, 10)]
    table = methods_exhibit(Material(info=INFO, rows=rows, tables={"evaluations": curves})).table
    assert {line[0]: line[5] for line in table.lines} == {"ASFL, conv1": "4", "FedAvg": "—", "SCAFFOLD": "over 10"}


def test_a_method_without_a_global_network_has_a_table_of_its_own():
    personal = {"personal_accuracy": 0.9, "prototype_accuracy_local": 0.8, "prototype_accuracy_all": 0.5}
    rows = [*three_methods(), run("fedproto", 0, None, bytes_model=1000, **personal)]
    shown = methods_exhibit(Material(info=INFO, rows=rows))
    assert all("FedProto" not in line[0] for line in shown.table.lines)
    apart = next(section for section in shown.sections if section.title == "Methods without a global network")
    assert apart.lines[0][:4] == ("FedProto", "90.0", "80.0", "50.0")


def test_what_tuning_tried_is_shown_failures_too():
    trials = [
        {"method": "scaffold", "lr": 0.1, "options": "", "accuracy": 0.5, "seeds": 1},
        {"method": "scaffold", "lr": 0.2, "options": "", "accuracy": None, "seeds": 1},
    ]
    shown = methods_exhibit(Material(info=INFO, rows=three_methods(), tables={"trials": trials}))
    assert [line[3:] for line in shown.sections[-1].lines] == [("50.0", "best"), ("failed", "")]


def test_failed_runs_are_named_and_enter_no_mean():
    rows = [*three_methods(), {**run("scaffold", 2, None), "options": "server_lr 0.5", "status": "failed: it diverged"}]
    shown = methods_exhibit(Material(info=INFO, rows=rows))
    assert any("SCAFFOLD, no noise, seed 2: failed: it diverged" in one for one in shown.sections[0].sentences)
    assert [line[4] for line in shown.table.lines if line[0] == "SCAFFOLD"] == ["2"]


def test_without_fedavg_there_is_nothing_to_compare_with():
    with pytest.raises(ValueError, match="fedavg has 0 cells"):
        methods_exhibit(Material(info=INFO, rows=[run("asfl", 0, 0.5)]))
