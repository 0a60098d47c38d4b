"""Figure 3's measuring: every method in every space, each client's own network, kept where it was measured."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import make_federation

from asfl_privacy.execution import begin_run, run_rounds
from asfl_privacy.execution.choice import choose_executor, make_executor
from asfl_privacy.execution.local_results import local_networks
from asfl_privacy.federated import METHODS
from asfl_privacy.federated.latent_space import client_centroids, scatter
from asfl_privacy.reporting.exhibits.exhibit import Material
from asfl_privacy.reporting.exhibits.latent import latent_exhibit
from asfl_privacy.reporting.records import write_records

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "paper"
FIELDS = {
    "data": "digits",
    "partition": "dirichlet:0.5",
    "clients": 6,
    "cohort": 4,
    "rounds": 3,
    "tail_steps": 4,
    "full_steps": 3,
    "batch_size": 16,
}
RATES = {"scaffold": {"lr": 0.05, "server_lr": 0.5}, "asfl": {"lr": 0.1, "exchange_layer": "conv1"}}
OPTIONS = {"methods": ["fedavg", "scaffold", "asfl"], "rates": RATES, "lr": 0.1, "seeds": 2}


@pytest.fixture(scope="module")
def latent(paper):
    return paper("latent")


@pytest.fixture(scope="module")
def runs(paper, tmp_path_factory):
    return paper("runs").Runs(tmp_path_factory.mktemp("runs"), None)


@pytest.fixture(scope="module")
def tables(latent, runs):
    return latent.measure(FIELDS, OPTIONS, runs=runs).tables


def test_every_method_is_measured_in_every_space_on_both_kinds_of_records(tables, tmp_path):
    """Catches: a method cut at a layer of its own, as methods without sharing name none."""
    found = {(one["method"], one["seed"], one["space"], one["layer"], one["records"]): one for one in tables["scatter"]}
    assert set(found) == {
        (method, seed, space, layer, records)
        for method in OPTIONS["methods"]
        for seed in (0, 1)
        for space, layer in (("exchange", "conv1"), ("penultimate", "fc1"))
        for records in ("own", "common")
    }
    assert all(one["within"] > 0 and one["between"] > 0 for one in found.values())
    for table, records in tables.items():
        write_records(tmp_path / f"{table}.csv", records, table=table)
    shown = latent_exhibit(Material(info={"title": "t"}, tables=tables))
    assert "of 4 measures" in shown.findings[0]
    assert len(shown.sections) == 3


def test_numbers_are_those_of_the_last_rounds_local_work_of_all_clients(latent, tables, digits):
    """Catches: networks of one round more or less, the averaged network, the cohort alone, a rate that is not the method's."""
    federation, method = make_federation(digits, exchange_layer="conv1"), METHODS["asfl"]
    states = [begin_run(federation, ledger=None)]
    name = choose_executor("auto", federation, method, workers=1).name
    with make_executor(name, federation, method) as executor:
        run_rounds(federation, method, executor=executor, start=states[0], after_round=states.append)
        networks = local_networks(
            states[2].state, range(6), federation=federation, method=method, executor=executor, round=2
        )
    expected = scatter(client_centroids(federation, networks, after="conv1", records="own"))
    found = next(
        one
        for one in tables["scatter"]
        if (one["method"], one["seed"], one["space"], one["records"]) == ("asfl", 0, "exchange", "own")
    )
    assert (found["within"], found["between"], found["classes"]) == pytest.approx(
        (expected.within, expected.between, expected.num_classes)
    )


def test_the_map_holds_every_centroid_once(latent, tables, digits):
    common = [one for one in tables["centroids"] if one["records"] == "common" and one["method"] == "asfl"]
    assert sorted((one["seed"], one["client"], one["label"]) for one in common) == [
        (seed, client, label) for seed in (0, 1) for client in range(6) for label in range(10)
    ]
    assert all(isinstance(one["x"], float) for one in common)


def test_what_was_measured_is_not_trained_again(latent, runs, tables, monkeypatch):
    monkeypatch.setattr(latent, "trained", None)
    assert latent.measure(FIELDS, OPTIONS, runs=runs).tables == tables
    with pytest.raises(TypeError):  # another least number of records is another measurement
        latent.measure(FIELDS, {**OPTIONS, "min_records": 9}, runs=runs)


def test_runs_for_which_there_is_no_time_are_named_as_missing(paper, latent, runs, tables):
    """Catches: a run begun after the time is over, and a report that keeps quiet about it."""
    late = paper("runs").Runs(runs.folder, None, until=0.0)
    found = latent.measure(FIELDS, {**OPTIONS, "seeds": 3}, runs=late)
    assert found.tables == tables
    assert found.missing == ["fedavg, seed 2", "scaffold, seed 2", "asfl, seed 2"]
    with pytest.raises(paper("runs").OutOfTimeError):
        latent.measure(FIELDS, {**OPTIONS, "min_records": 8}, runs=late)


def test_validation_records_take_the_place_of_test_records_where_that_is_asked(latent, digits):
    """Catches: test records looked at while something is still chosen."""
    config = latent.config_of({**FIELDS, "mech": ["none"], "rounds": 1, "evaluate_on": "validation"})
    federation, _ = latent.trained(config)
    assert len(federation.data.test_labels) < len(digits.test_labels)
    assert federation.data.num_records < digits.num_records


def test_common_records_give_every_class_however_few_and_own_ones_only_classes_with_enough(latent, digits):
    """Catches: one threshold for both, by which a small test set would leave nothing to compare."""
    config = latent.config_of({**FIELDS, "mech": ["none"]})
    federation = make_federation(digits)
    networks = dict.fromkeys(range(6), federation.initial_weights)
    found = latent.tables_of(federation, networks, config=config, min_records=10**6)["scatter"]
    assert {(one["records"], one["classes"]) for one in found} == {("own", 0), ("common", 10)}
    assert all(one["within"] is None and one["between"] is None for one in found if one["records"] == "own")


def test_a_rate_that_ends_at_zero_still_moves_the_clients(latent):
    """Catches: one round after the last, in which a cosine schedule has stopped."""
    config = latent.config_of({**FIELDS, "mech": ["none"], "method": ["fedavg"], "rounds": 2, "lr_schedule": "cosine"})
    federation, networks = latent.trained(config)
    assert sorted(networks) == list(range(6))
    assert any(not torch.equal(networks[0][name], networks[1][name]) for name in networks[0])
    assert federation.settings.rounds == 2


def test_places_repeat_to_the_bit_and_keep_far_groups_apart(latent):
    rng = np.random.default_rng(0)
    centres = np.repeat(100.0 * np.eye(3, 8), 20, axis=0)
    points = centres + rng.normal(size=centres.shape)
    places = latent.plane(points)
    assert latent.plane(points.copy()) == places
    groups = np.array(places).reshape(3, 20, 2)
    widths = np.linalg.norm(groups - groups.mean(1, keepdims=True), axis=2).max()
    gaps = [np.linalg.norm(groups[i].mean(0) - groups[j].mean(0)) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert min(gaps) > 2 * widths


def test_too_few_points_have_no_place(latent):
    """Catches: a toy recipe that stops in t-SNE."""
    assert latent.plane(np.ones((3, 5))) == [(None, None)] * 3
    assert latent.plane(np.ones((9, 5))) == [(None, None)] * 9
    assert len(latent.plane(np.random.default_rng(0).normal(size=(4, 5)))) == 4


def test_what_is_wrong_is_named(latent, runs):
    with pytest.raises(ValueError, match="methods lack fedavg"):
        latent.measure(FIELDS, {**OPTIONS, "methods": ["asfl"]}, runs=runs)
    rates = {"fedavg": {"lr": 0.1, "exchange_layer": ["conv2"]}, **RATES}
    with pytest.raises(ValueError, match="exchange layers conv1 and conv2: ratios are compared in one space"):
        latent.measure(FIELDS, {**OPTIONS, "rates": rates}, runs=runs)
    with pytest.raises(ValueError, match=r"latent space of fedproto, seed 0: .*leaves no client with a network"):
        latent.measure(FIELDS, {**OPTIONS, "methods": ["fedproto", "fedavg"], "seeds": 1}, runs=runs)


def test_the_recipe_runs_at_toy_size_on_a_worker(tmp_path):
    """The command as it is given; a worker process finds everything that the parent does."""
    command = [sys.executable, str(FOLDER / "run.py"), "figure3", "--data", "digits", "--toy", "--out"]
    out = tmp_path / "report"
    done = subprocess.run(
        [*command, str(out), "--workers", "1"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    scatter_csv = (out / "scatter.csv").read_text(encoding="utf-8").splitlines()
    assert len(scatter_csv) == 1 + 3 * 1 * 4
    assert "latent-common.svg" in (out / "report.md").read_text(encoding="utf-8")
