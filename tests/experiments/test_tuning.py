"""Tuning: each method gets what validation chose, from one grid, on records that its training never saw."""

from concurrent.futures import Future

import pytest

from asfl_privacy.config import load_config
from asfl_privacy.configured_data import load_data
from asfl_privacy.data import load_dataset


class Recorded:
    """Stands for runs whose accuracy a function of what is asked gives; None fails."""

    def __init__(self, accuracy):
        self.accuracy = accuracy
        self.asked = []

    def start(self, **fields):
        self.asked.append(fields)
        value = self.accuracy(fields)
        done = Future()
        done.set_result(
            {"accuracy": value, "personal_accuracy": None, "status": "ok" if value is not None else "failed: x"}
        )
        return done


def tune(paper, methods, accuracy, *, lr=(0.1, 0.2, 0.4), options=None, **changes):
    tuning = paper("tuning")
    runs = Recorded(accuracy)
    grid = tuning.Grid(lr=lr, options=options or {}, **changes)
    chosen, trials = tuning.tune(methods, grid=grid, fields={}, runs=runs)
    return chosen, trials, runs


def test_every_method_gets_its_own_best_rate_and_a_rate_that_fails_is_never_chosen(paper):
    """Catches: one rate for all, the last of the grid, a failed run that counts as the rest's mean."""
    best = {"fedavg": 0.2, "scaffold": 0.1}

    def accuracy(asked):
        return None if asked["lr"] in (0.4, 0.05) else 0.9 - abs(asked["lr"] - best[asked["method"][0]])

    chosen, trials, runs = tune(paper, ["fedavg", "scaffold"], accuracy)
    assert {method: one.lr for method, one in chosen.items()} == best
    assert [one.accuracy for one in trials if one.lr in (0.4, 0.05)] == [None, None, None]
    assert all(asked["evaluate_on"] == "validation" and asked["seed"] == 1000 for asked in runs.asked)


def test_the_grid_goes_on_where_its_end_is_the_best_and_stops_inside(paper):
    """Best at .8 from a grid that ends at .4: .8 and 1.6 are tried. Catches: an end taken for the optimum."""
    chosen, trials, _ = tune(paper, ["fedavg"], lambda asked: 0.9 - abs(asked["lr"] - 0.8) / 10)
    assert chosen["fedavg"].lr == 0.8
    assert sorted(one.lr for one in trials) == [0.1, 0.2, 0.4, 0.8, 1.6]
    chosen, trials, _ = tune(paper, ["fedavg"], lambda asked: 0.9 - asked["lr"], widenings=2)
    assert sorted(one.lr for one in trials) == [0.025, 0.05, 0.1, 0.2, 0.4]


def test_the_grid_goes_down_where_every_rate_of_it_failed(paper):
    """SCAFFOLD may diverge where others do not. Catches: hours of other methods lost with it."""
    chosen, trials, _ = tune(paper, ["scaffold"], lambda asked: None if asked["lr"] > 0.03 else asked["lr"])
    assert chosen["scaffold"].lr == 0.025
    assert sorted(one.lr for one in trials) == [0.0125, 0.025, 0.05, 0.1, 0.2, 0.4]


def test_an_option_is_tuned_at_the_rate_found_and_kept_only_where_it_helps(paper):
    grids = {"scaffold": {"server_lr": (0.5, 2.0)}}

    def helps(asked):
        return 0.5 - abs(asked["lr"] - 0.2) - abs(asked.get("server_lr", 1.0) - 0.5)

    chosen, _, runs = tune(paper, ["fedavg", "scaffold"], helps, options=grids)
    assert (chosen["scaffold"].lr, dict(chosen["scaffold"].options)) == (0.2, {"server_lr": 0.5})
    assert dict(chosen["fedavg"].options) == {}
    assert {asked["lr"] for asked in runs.asked if "server_lr" in asked} == {0.2}
    chosen, _, _ = tune(paper, ["scaffold"], lambda asked: 0.5 - abs(asked.get("server_lr", 1.0) - 1.0), options=grids)
    assert dict(chosen["scaffold"].options) == {}


def test_a_method_that_always_fails_is_named(paper):
    with pytest.raises(ValueError, match="scaffold failed at every point of the grid"):
        tune(paper, ["scaffold"], lambda asked: None)


def test_tuning_runs_train_and_are_judged_on_training_records_alone(paper, tmp_path):
    """What a worker is handed for a tuning run holds no test record. Catches: `evaluate_on` that only the row speaks of."""
    runs = paper("runs")
    config = runs.config_of({"data": "digits", "evaluate_on": "validation"})
    handed = runs._data(config.data, config.data_root, config.evaluate_on)
    whole = load_dataset("digits", root=tmp_path)
    assert handed.num_records + len(handed.test_labels) == whole.num_records
    test_records = {one.numpy().tobytes() for one in whole.test_inputs}
    kept = [one.numpy().tobytes() for one in (*handed.train_inputs, *handed.test_inputs)]
    assert sum(one in test_records for one in kept) <= 2  # digits holds a few images twice
    assert load_data(load_config(None, overrides={})).num_records == whole.num_records


FIELDS = {
    "data": "digits",
    "mech": "none",
    "method": "fedavg",
    "clients": 4,
    "cohort": 2,
    "rounds": 1,
    "tail_steps": 1,
    "full_steps": 1,
}


def test_a_run_is_trained_once_and_found_again(paper, tmp_path):
    """On the same day by its folder, on another day or machine by the file beside the report."""
    runs = paper("runs")
    kept = tmp_path / "runs.jsonl"
    with runs.open_runs(tmp_path / "a", workers=0, kept_in=kept) as opened:
        row = opened.start(**FIELDS).result()
        written = next((tmp_path / "a").glob("*/row.json")).stat().st_mtime_ns
        assert opened.start(**FIELDS).result() == row
        other = opened.start(**{**FIELDS, "seed": 1}).result()
        curve = opened.evaluations_of([row])
    assert next((tmp_path / "a").glob("*/row.json")).stat().st_mtime_ns == written
    assert (other["seed"], len(list((tmp_path / "a").iterdir()))) == (1, 2)
    with runs.open_runs(tmp_path / "b", workers=0, kept_in=kept) as opened:
        assert opened.start(**FIELDS).result() == row
        assert opened.evaluations_of([row]) == curve != []
    assert not (tmp_path / "b").exists()


def test_what_was_not_begun_in_time_is_named(paper, tmp_path):
    runs = paper("runs")
    with runs.open_runs(tmp_path, workers=0, minutes=-1.0) as opened:
        started = {"fedavg": opened.start(**FIELDS)}
    assert runs.rows_there(started) == ([], ["fedavg"])
    with pytest.raises(runs.OutOfTimeError):
        runs.rows_of(list(started.values()))


def test_a_failed_run_is_not_kept_and_tried_again(paper, tmp_path):
    runs = paper("runs")
    kept = tmp_path / "runs.jsonl"
    with runs.open_runs(tmp_path, workers=0, kept_in=kept) as opened:
        assert str(opened.start(**FIELDS, lr=1e30).result()["status"]).startswith("failed")
    assert not kept.exists()


def test_a_damaged_file_of_runs_is_refused_with_its_line(paper, tmp_path):
    kept = tmp_path / "runs.jsonl"
    kept.write_text("{}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 1 is no finished run"):
        paper("runs").read_kept(kept)
