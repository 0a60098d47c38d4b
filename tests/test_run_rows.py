"""Rows of runs wherever they lie: each run once, what is missing said, what has changed refused."""

import dataclasses
import json
import shutil

import pytest

from asfl_privacy.cells import make_cells
from asfl_privacy.config import SweepConfig
from asfl_privacy.data import load_dataset
from asfl_privacy.reporting import read_rows, write_rows
from asfl_privacy.reporting.cells import run_name
from asfl_privacy.reporting.records import write_records
from asfl_privacy.run import execute_run, prepare_run
from asfl_privacy.run_files import config_toml
from asfl_privacy.run_rows import gather
from asfl_privacy.worker import run_folder

CONFIG = SweepConfig(
    mech="none",
    clients=4,
    cohort=2,
    rounds=4,
    tail_steps=2,
    full_steps=2,
    evaluate_every=2,
    seeds=2,
    checkpoint_every=0,
)


@pytest.fixture(scope="module")
def sweep_folder(tmp_path_factory):
    """A sweep of ASFL and FedAvg over two seeds whose last run is not there."""
    out = tmp_path_factory.mktemp("runs") / "sweep"
    data = load_dataset("digits", root=out)
    (out / "cells").mkdir(parents=True)
    (out / "config.toml").write_text(config_toml(CONFIG), encoding="utf-8")
    for index, cell in enumerate(make_cells(CONFIG)[:-1]):
        run = prepare_run(CONFIG, cell, data=data)
        execute_run(CONFIG, run, data=data, folder=run_folder(out, index, run))
    return out


def test_a_sweep_that_has_not_finished_gives_what_is_there_and_names_the_rest(sweep_folder):
    found = gather([sweep_folder])
    assert [(row["method"], row["seed"]) for row in found.rows] == [("asfl", 0), ("asfl", 1), ("fedavg", 0)]
    assert found.missing == (f"fedavg-unnoised, seed 1 ({sweep_folder})",)


def test_curves_are_those_of_metrics_csv(sweep_folder):
    """The last evaluation of a run; its row is the mean of both. Catches: bytes of one channel, another run's name."""
    found = gather([sweep_folder])
    for row in found.rows:
        curve = [one for one in found.evaluations if one["run"] == run_name(row)]
        assert [one["round"] for one in curve] == [2, 4]
        assert sum(one["accuracy"] for one in curve) / 2 == pytest.approx(row["accuracy"])
        assert curve[-1]["bytes"] == row["bytes_model"] + row["bytes_activations"] + row["bytes_labels"]


def test_a_run_that_lies_in_several_places_counts_once(sweep_folder, tmp_path):
    whole = gather([sweep_folder])
    single = next((sweep_folder / "cells").glob("0001-*"))
    report = tmp_path / "report"
    report.mkdir()
    write_rows(report / "rows.csv", whole.rows)
    write_records(report / "evaluations.csv", whole.evaluations, table="evaluations")
    again = gather([single, sweep_folder, report, sweep_folder / "cells"])
    assert sorted(map(run_name, again.rows)) == sorted(map(run_name, whole.rows))
    assert len(again.evaluations) == len(whole.evaluations)
    assert read_rows(report / "rows.csv") == list(whole.rows)


def test_names_differ_with_all_that_is_asked_and_not_with_what_came_out(sweep_folder):
    row = gather([sweep_folder]).rows[0]
    assert run_name({**row, "accuracy": 0.1, "seconds": 1.0, "bytes_model": 3}) == run_name(row)
    others = [{**row, "seed": 7}, {**row, "lr": 0.3}, {**row, "options": "mu 2"}, {**row, "method": "moon"}]
    assert len({run_name(one) for one in (row, *others)}) == 5


def test_a_file_that_has_changed_is_refused(sweep_folder, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(next((sweep_folder / "cells").glob("0000-*")), copy)
    metrics = copy / "metrics.csv"
    metrics.write_text(metrics.read_text(encoding="utf-8").replace("2,0.", "2,0.9", 1), encoding="utf-8")
    with pytest.raises(ValueError, match=r"metrics\.csv has changed since it was written"):
        gather([copy])


def test_a_row_without_its_digests_is_refused(sweep_folder, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(next((sweep_folder / "cells").glob("0000-*")), copy)
    stored = json.loads((copy / "row.json").read_text(encoding="utf-8"))
    del stored["sha256"]
    (copy / "row.json").write_text(json.dumps(stored), encoding="utf-8")
    with pytest.raises(ValueError, match="is no finished run"):
        gather([copy])


def test_a_rows_accuracy_must_be_that_of_its_evaluations(sweep_folder, tmp_path):
    """Catches: a better accuracy written into row.json, which holds no digest of itself."""
    copy = tmp_path / "run"
    shutil.copytree(next((sweep_folder / "cells").glob("0000-*")), copy)
    stored = json.loads((copy / "row.json").read_text(encoding="utf-8"))
    stored["row"]["accuracy"] += 0.01
    (copy / "row.json").write_text(json.dumps(stored), encoding="utf-8")
    with pytest.raises(ValueError, match="is not the mean of the last evaluations"):
        gather([copy])


def test_a_rows_epsilon_must_be_that_of_the_ledger_beside_it(tmp_path):
    """Catches: a smaller ε written into row.json, which holds no digest of itself; a ledger taken away."""
    config = CONFIG.model_copy(update={"mech": ("gaussian",), "epsilon": (4.0,), "seeds": 1})
    data = load_dataset("digits", root=tmp_path)
    cell = next(cell for cell in make_cells(config) if cell.target is not None)
    folder = tmp_path / "run"
    execute_run(config, prepare_run(config, cell, data=data), data=data, folder=folder)
    assert gather([folder]).rows[0]["epsilon_total"] > 4.0
    text = (folder / "row.json").read_text(encoding="utf-8")
    stored = json.loads(text)
    stored["row"]["epsilon_total"] /= 2
    (folder / "row.json").write_text(json.dumps(stored), encoding="utf-8")
    with pytest.raises(ValueError, match="the row's ε is not that of its ledger"):
        gather([folder])
    stored = json.loads(text)
    del stored["sha256"]["ledger.json"]
    (folder / "row.json").write_text(json.dumps(stored), encoding="utf-8")
    (folder / "ledger.json").unlink()
    with pytest.raises(ValueError, match="is no finished run"):
        gather([folder])


def test_runs_that_differ_in_what_rows_do_not_hold_are_not_compared(sweep_folder, tmp_path):
    """Catches: a batch size of 8 beside one of 32 as if the task were one."""
    config = CONFIG.model_copy(update={"batch_size": 8, "seeds": 1})
    data = load_dataset("digits", root=tmp_path)
    run = prepare_run(config, make_cells(config)[0], data=data)
    execute_run(config, run, data=data, folder=tmp_path / "run")
    with pytest.raises(ValueError, match="batch_size is 32 in some runs and 8 in others"):
        gather([sweep_folder, tmp_path / "run"])


def test_a_filter_and_a_reference_without_noise_are_compared(tmp_path):
    """Catches: a difference in fields that say nothing of a run without noise."""
    asked = {"mech": "gaussian", "total_epsilon": 20.0, "filter": "individual", "placement": "input", "seeds": 1}
    config = SweepConfig(**{**CONFIG.model_dump(), **asked})
    data = load_dataset("digits", root=tmp_path)
    folders = []
    for cell in make_cells(config):
        folders.append(tmp_path / f"{cell.method}-{cell.mech}")
        execute_run(config, prepare_run(config, cell, data=data), data=data, folder=folders[-1])
    found = gather(folders)
    assert {row["mech"] for row in found.rows} == {"none", "gaussian"}
    assert found.unsaid["filter"] == "individual"


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no run, sweep or report"):
        gather([tmp_path])
    with pytest.raises(ValueError, match="holds no run, sweep or report"):
        gather([tmp_path / "none"])


def test_nothing_and_something_is_something(sweep_folder):
    found = gather([sweep_folder])
    assert dataclasses.replace(gather([]) + found) == found
