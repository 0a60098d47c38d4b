"""A run's row says what the ledger says, and its folder repeats it."""

import csv
import json
import math
from dataclasses import replace

import pytest

from asfl_privacy.accounting import Ledger, gaussian_epsilon, gaussian_noise_multiplier
from asfl_privacy.cells import make_cells
from asfl_privacy.config import load_config
from asfl_privacy.federated import METHODS
from asfl_privacy.federated.methods.fedproto import FedProto
from asfl_privacy.metrics import reproducible_part
from asfl_privacy.run import Run, base_row, execute_run, prepare_run
from asfl_privacy.run_files import run_config

TINY = {
    "clients": "6", "cohort": "4", "rounds": "3", "tail_steps": "2", "full_steps": "2", "batch_size": "16",
    "seeds": "1", "evaluate_every": "1", "last_evaluations": "2", "partition": "iid", "placement": "input",
}  # fmt: skip


def outcome_of(digits, folder=None, **overrides):
    config = load_config(None, overrides={**TINY, **overrides})
    cell = make_cells(config)[-1]
    return execute_run(config, prepare_run(config, cell, data=digits), data=digits, folder=folder)


def test_epsilon_columns_come_from_the_ledger_of_what_ran(digits, tmp_path):
    row = outcome_of(digits, tmp_path / "run", epsilon="4").row
    ledger = Ledger.load(tmp_path / "run" / "ledger.json")
    assert row["epsilon_total"] == ledger.epsilon(delta=1e-5).high
    assert row["epsilon_whole_record"] == ledger.epsilon(delta=1e-5, distance=math.inf).high
    assert ledger.counts.max_releases_per_record == 2
    assert row["epsilon_release"] <= 4.0
    assert row["epsilon_release"] == pytest.approx(4.0, rel=1e-9)
    z = gaussian_noise_multiplier(4.0, delta=1e-5)
    assert row["epsilon_total"] == pytest.approx(gaussian_epsilon(1e-5, noise_multiplier=z / math.sqrt(2)), rel=1e-9)
    # Δ = R = 1 at the input; truncation and the 10 bits of the scale add noise, of which no ε is claimed
    assert z * row["sensitivity"] <= row["noise_scale"] <= z * (1 + 2**-10) * (1 + 2**-9)
    assert row["delta_total"] == 1e-5


@pytest.mark.parametrize("noise", ["fresh", "once"])
@pytest.mark.parametrize("mech", ["gaussian", "laplace"])
def test_a_whole_run_never_spends_more_than_its_total(digits, mech, noise):
    row = outcome_of(digits, mech=mech, total_epsilon="3", noise=noise).row
    assert 0.0 < row["epsilon_total"] <= 3.0
    assert row["target_total_epsilon"] == 3.0
    assert row["target_epsilon"] is None
    if noise == "once":
        assert row["epsilon_total"] == pytest.approx(3.0, rel=1e-9)
        assert row["epsilon_total"] == row["epsilon_release"]


def test_laplace_with_an_l2_radius_pays_the_root_of_the_pixels(digits):
    """√64 = 8: privacy.md §2."""
    row = outcome_of(digits, mech="laplace", epsilon="2", norm="2", radius="0.5").row
    assert row["sensitivity"] == 4.0
    assert 2.0 <= row["noise_scale"] <= 2.0 * (1 + 2**-10) * (1 + 2**-9)
    assert row["noise_stddev"] == pytest.approx(math.sqrt(2) * row["noise_scale"], rel=1e-12)
    assert (row["p"], row["q"], row["delta_total"]) == (2.0, 1.0, 0.0)


def test_any_two_records_within_a_clip_differ_by_twice_its_norm(digits):
    """Catches C where 2C is due; one release of any two records costs what was asked."""
    row = outcome_of(digits, epsilon="4", radius="any", clip="1.5").row
    assert row["sensitivity"] == 3.0
    assert row["epsilon_whole_record"] == row["epsilon_total"]


def test_the_last_evaluations_are_averaged(digits, tmp_path):
    row = outcome_of(digits, tmp_path / "run", epsilon="4").row
    lines = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    accuracies = [float(line.split(",")[1]) for line in lines[1:]]
    assert len(accuracies) == 3
    assert row["accuracy"] == pytest.approx(sum(accuracies[-2:]) / 2, abs=1e-15)


def test_a_run_folder_repeats_its_run_to_the_last_bit(digits, tmp_path):
    first = outcome_of(digits, tmp_path / "first", epsilon="4", placement="auto", exchange_layer="auto")
    config = load_config(tmp_path / "first" / "config.toml", overrides={})
    assert config.placement != ("auto",)
    assert config.exchange_layer == ("conv2",)
    cell = make_cells(config)[-1]
    second = execute_run(config, prepare_run(config, cell, data=digits), data=digits, folder=tmp_path / "second")
    assert {**second.row, "seconds": 0} == {**first.row, "seconds": 0}
    for name in ("config.toml", "ledger.json", "statement.md", "statement.json", "checkpoint.safetensors"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    metrics = [reproducible_part((tmp_path / name / "metrics.csv").read_text()) for name in ("first", "second")]
    assert metrics[0] == metrics[1]


def test_unnoised_and_fedavg_runs_claim_nothing(digits, tmp_path):
    config = load_config(None, overrides=TINY)
    for cell in make_cells(config)[:2]:
        folder = tmp_path / cell.label
        outcome = execute_run(config, prepare_run(config, cell, data=digits), data=digits, folder=folder)
        assert outcome.statement == ""
        assert any("protect nothing" in line for line in outcome.warnings)
        assert sorted(file.name for file in folder.iterdir()) == [
            "checkpoint.safetensors",
            "config.toml",
            "metrics.csv",
            "row.json",
        ]
        assert outcome.row["epsilon_total"] is None
        assert outcome.row["radius"] is None
    assert outcome.row["method"] == "fedavg"
    assert (outcome.row["tail_steps"], outcome.row["full_steps"]) == (0, 4)


def test_noise_off_is_the_plain_run_bit_for_bit_whatever_privacy_was_asked(digits):
    """The reference beside a grid is the run that `--mech none` trains."""
    rows = []
    for overrides in ({"epsilon": "1", "radius": "0.1", "own": "released", "clip": "2"}, {"mech": "none"}):
        config = load_config(None, overrides={**TINY, **overrides})
        cell = make_cells(config)[0]
        assert (cell.method, cell.mech) == ("asfl", "none")
        rows.append(execute_run(config, prepare_run(config, cell, data=digits), data=digits, folder=None).row)
    assert {**rows[0], "seconds": 0} == {**rows[1], "seconds": 0}


def test_the_statement_names_unit_radius_adversary_assumptions_and_open_channels(digits):
    text = outcome_of(digits, epsilon="4").statement
    for words in (
        "Privacy unit: one record",
        "ℓ2 distance at most 1",
        "collude",
        "Labels",
        "Model updates",
    ):
        assert words in text, words


def test_a_seeded_run_warns_that_its_noise_can_be_removed(digits):
    """Catches a statement that hides where the noise came from, or says so of noise from the system's source."""
    outcome = outcome_of(digits, epsilon="4")
    assert any("seeded generator" in line for line in outcome.warnings)
    assert "seeded generator" in outcome.statement
    assert "**REPRODUCE ONLY, no guarantee" in outcome.statement
    assert json.loads(outcome.statement_json)["reproduce_only"] is True
    private = outcome_of(digits, epsilon="4", reproducible="no")
    assert not any("seed" in line for line in private.warnings)
    assert "seed" not in private.statement
    assert "drawn on a lattice" in private.statement
    assert "ideal arithmetic" not in private.statement
    assert json.loads(private.statement_json)["reproduce_only"] is False


def test_the_statement_of_noise_once_counts_noised_inputs(digits):
    """2·4·16 activations of iid clients are sent over three rounds, but each record's input is noised once."""
    outcome = outcome_of(digits, epsilon="4", noise="once")
    assert "noised inputs, at most 1 of one record; every activation sent was computed from them" in outcome.statement


def test_a_delta_of_one_in_n_is_flagged(digits):
    flagged = outcome_of(digits, epsilon="4", delta="1e-2").warnings
    assert any("1/n or more (n = 1198)" in line for line in flagged)
    assert not any("1/n" in line for line in outcome_of(digits, epsilon="4").warnings)


def test_a_folder_is_whole_or_not_there(digits, tmp_path, monkeypatch):
    """A run that fails while writing leaves nothing behind."""

    def full(self, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Ledger, "save", full)
    with pytest.raises(OSError, match="No space left"):
        outcome_of(digits, tmp_path / "cells" / "run", epsilon="4")
    assert list((tmp_path / "cells").iterdir()) == []


def test_the_record_of_a_run_is_plain_json(digits, tmp_path):
    outcome = outcome_of(digits, tmp_path / "run", epsilon="4", placement="auto")
    record = json.loads((tmp_path / "run" / "row.json").read_text())
    assert record["row"] == outcome.row
    assert any(note.startswith("placement ") for note in record["notes"])


def test_auto_is_decided_without_looking_at_any_record(digits):
    """Catches a placement chosen on private data: other records, the same decision."""
    config = load_config(None, overrides={**TINY, "placement": "auto", "epsilon": "4"})
    cell = make_cells(config)[-1]
    other = replace(digits, train_inputs=1.0 - digits.train_inputs, test_inputs=digits.test_inputs * 0.5)
    first, second = (prepare_run(config, cell, data=data) for data in (digits, other))
    assert first.cell == second.cell
    assert first.notes == second.notes


def test_every_budget_of_a_setting_gets_the_same_placement(digits):
    config = load_config(None, overrides={**TINY, "placement": "auto"})
    placements = {
        prepare_run(config, cell, data=digits).cell.target.placement for cell in make_cells(config) if cell.target
    }
    assert len(placements) == 1


@pytest.mark.parametrize("cell", [-1, -2])
def test_a_protected_run_is_read_back_as_it_was_asked(cell):
    """Catches: a δ that is lost beside Laplace noise, and a placement that only updates have."""
    overrides = TINY | {"mech": "laplace", "updates": "dp-sgd", "delta": "1e-7", "total_epsilon": "8"}
    config = load_config(None, overrides=overrides | {"labels": "randomized:1"})
    asked = make_cells(config)[cell]
    run = Run(cell=replace(asked, exchange_layer=asked.exchange_layer and "conv2"), privacy=None, notes=())
    again = load_config(
        None, overrides={k: v for k, v in run_config(config, run.cell).model_dump().items() if v is not None}
    )
    (found,) = [c for c in make_cells(again) if c.method == asked.method and c.target is not None]
    assert found == run.cell
    assert found.target.delta == 1e-7


@pytest.mark.parametrize(
    "asked",
    [
        {"epsilon": "4", "calibration": "paper"},
        {"epsilon": "4", "noisy_training": "yes", "labels": "randomized:1"},
        {"total_epsilon": "8", "filter": "individual", "planned_releases": "3"},
        {"total_epsilon": "8", "updates": "dp-sgd", "update_clip": "2", "update_share": "0.3"},
    ],
)
def test_every_run_of_a_private_sweep_is_read_back_from_its_own_configuration(asked):
    """Catches: a reference without noise that still asks for what is refused beside mech none."""
    config = load_config(None, overrides={**TINY, **asked})
    cells = [replace(cell, exchange_layer=cell.exchange_layer and "conv2") for cell in make_cells(config)]
    assert any(cell.target is None for cell in cells)
    assert any(cell.target is not None for cell in cells)
    for cell in cells:
        kept = {name: value for name, value in run_config(config, cell).model_dump().items() if value is not None}
        assert cell in make_cells(load_config(None, overrides=kept))


def test_noise_in_training_stands_in_the_rows_of_private_runs_alone(digits):
    """Catches: two cells taken for one, a reference that seems noised, and an option that reaches no client."""
    asked = {"epsilon": "4", "noisy_training": "yes"}
    config = load_config(None, overrides={**TINY, **asked})
    options = {cell.mech: base_row(config, cell)["options"] for cell in make_cells(config)}
    assert options == {"none": None, "gaussian": "noisy_training yes"}
    noisy, quiet = outcome_of(digits, **asked).row, outcome_of(digits, epsilon="4").row
    assert noisy["accuracy"] != quiet["accuracy"]
    assert noisy["epsilon_total"] == quiet["epsilon_total"]


def test_a_method_without_a_global_network_leaves_the_accuracy_blank(digits, tmp_path, monkeypatch):
    """Catches the initial network's accuracy, or a personal one, in the column that FedAvg is compared in."""
    monkeypatch.setitem(METHODS, "fedproto", FedProto())
    row = outcome_of(digits, tmp_path / "run", method="fedproto", mech="none", tail_steps="1").row
    lines = list(csv.DictReader((tmp_path / "run" / "metrics.csv").read_text().splitlines()))
    assert (row["method"], row["accuracy"], row["tail_steps"], row["full_steps"]) == ("fedproto", None, 0, 3)
    assert {line["accuracy"] for line in lines} == {""}
    for column in ("personal_accuracy", "prototype_accuracy_local", "prototype_accuracy_all"):
        assert row[column] == pytest.approx(sum(float(line[column]) for line in lines[-2:]) / 2, abs=1e-15)
    other = outcome_of(digits, tmp_path / "other", method="fedavg", mech="none").row
    assert other["personal_accuracy"] is None
    assert "personal_accuracy" not in (tmp_path / "other" / "metrics.csv").read_text()
