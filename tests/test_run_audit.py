"""Audit and reading back of a run folder: what holds passes, what was changed is named."""

import json
import shutil

import pytest

from asfl_privacy.accounting import Ledger
from asfl_privacy.cells import make_cells
from asfl_privacy.cli import main
from asfl_privacy.config import load_config
from asfl_privacy.run import execute_run, prepare_run
from asfl_privacy.run_audit import audit_run
from asfl_privacy.run_folder import read_run

TINY = {
    "clients": "4", "cohort": "4", "rounds": "2", "tail_steps": "2", "full_steps": "1", "batch_size": "16",
    "seeds": "1", "partition": "iid", "placement": "exchange", "exchange_layer": "conv1", "clip": "4", "radius": "any",
    "total_epsilon": "6", "labels": "randomized:1", "updates": "dp-fedavg", "reproducible": "no",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(digits, tmp_path_factory):
    """A run whose three channels are all protected, with noise from the system's source."""
    config = load_config(None, overrides=TINY)
    (cell,) = [cell for cell in make_cells(config) if cell.method == "asfl" and cell.target is not None]
    out = tmp_path_factory.mktemp("audited") / "run"
    execute_run(config, prepare_run(config, cell, data=digits), data=digits, folder=out)
    return out


@pytest.fixture(scope="module")
def audited(folder):
    """Its audit."""
    return audit_run(read_run(folder))


def test_an_honest_run_passes_in_every_channel(audited):
    assert audited.passed, audited.to_dict()
    assert sorted(audited.reports) == ["activations", "labels", "updates"]
    for report in audited.reports.values():
        assert 0.5 * report.epsilon_claimed < report.epsilon_low <= report.epsilon_claimed
    assert any("statement.json follows from ledger.json alone" in line for line in audited.checked)
    assert any("within the budget 6" in line for line in audited.checked)


def test_the_claims_are_those_of_the_ledger(folder, audited):
    """Catches: an audit of another noise multiplier than the one that was charged."""
    ledger = Ledger.load(folder / "ledger.json")
    for channel in ("activations", "updates"):
        claimed = ledger.largest_release(delta=1e-5, channel=channel)
        assert audited.reports[channel].epsilon_claimed == pytest.approx(claimed, rel=1e-6)
    assert ledger.samplers == ("lattice",)
    assert not ledger.is_reproducible


def test_a_statement_that_does_not_follow_from_the_ledger_is_found(folder, tmp_path):
    """Catches: a statement with a smaller total than its ledger."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    stored = json.loads((copy / "statement.json").read_text())
    stored["total"]["record"]["epsilon"] /= 2
    (copy / "statement.json").write_text(json.dumps(stored))
    audited = audit_run(read_run(copy))
    assert not audited.passed
    assert audited.findings == (
        "statement.json is not what ledger.json gives",
        "changed since written: statement.json",
    )


@pytest.mark.parametrize("name", ["config.toml", "row.json"])
def test_an_edited_run_is_found(folder, tmp_path, name):
    """Catches: an audit that trusts the configuration or the row beside the ledger."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    if name == "row.json":
        stored = json.loads((copy / name).read_text())
        stored["row"]["epsilon_total"] /= 2
        (copy / name).write_text(json.dumps(stored))
    else:
        text = (copy / name).read_text()
        (copy / name).write_text(text.replace("lr = 0.1", "lr = 0.9"))
    audited = audit_run(read_run(copy))
    assert not audited.passed
    assert len(audited.findings) == 1


def test_the_account_command_makes_the_same_statement_from_the_ledger_alone(folder, tmp_path, capsys):
    shutil.copy(folder / "ledger.json", tmp_path / "alone.json")
    for flags, name in ((["--statement"], "statement.md"), (["--statement", "--json"], "statement.json")):
        with pytest.raises(SystemExit) as left:
            main(["account", str(tmp_path / "alone.json"), *flags])
        assert left.value.code == 0
        printed, written = capsys.readouterr().out, (folder / name).read_text()
        if name.endswith("json"):
            assert json.loads(printed) == json.loads(written)
        else:
            assert printed == written


def test_a_statement_shows_no_single_record_and_no_path(folder):
    stored = json.loads((folder / "statement.json").read_text())
    text = json.dumps(stored) + (folder / "statement.md").read_text()
    assert str(folder.parent) not in text
    assert "/" not in json.dumps(stored["released"])
    assert set(stored["released"]) == {"records", "releases", "largest"}


@pytest.mark.parametrize("missing", ["row.json", "checkpoint.safetensors", "config.toml"])
def test_an_unfinished_folder_is_refused_in_one_line(folder, tmp_path, missing):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / missing).unlink()
    with pytest.raises(ValueError, match=f"{missing} is missing"):
        read_run(copy)


def test_a_run_without_noise_has_nothing_to_audit(digits, tmp_path, capsys):
    config = load_config(None, overrides={"mech": "none", "rounds": "1", "clients": "2", "cohort": "2", "seeds": "1"})
    cell = make_cells(config)[0]
    execute_run(config, prepare_run(config, cell, data=digits), data=digits, folder=tmp_path / "plain")
    with pytest.raises(SystemExit) as left:
        main(["audit", str(tmp_path / "plain")])
    assert left.value.code == 2
    assert "claims nothing" in capsys.readouterr().err


def test_the_audit_command_of_a_mechanism(capsys):
    with pytest.raises(SystemExit) as left:
        main(["audit", "--mech", "gaussian", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert left.value.code == 0
    assert found["passed"]
    assert 0.9 <= found["epsilon_low"] <= 1.0


def test_runs_on_one_ledger_add_up_and_other_data_are_refused(digits, tmp_path, capsys):
    """Catches: a second run that starts a fresh account."""
    flags = [
        f"--{k.replace('_', '-')}={v}"
        for k, v in TINY.items()
        if k not in ("seeds", "total_epsilon", "labels", "updates")
    ]
    book = tmp_path / "digits.ledger"
    for number in range(2):
        with pytest.raises(SystemExit) as left:
            main(["train", *flags, "--epsilon=4", "--ledger", str(book), "--out", str(tmp_path / f"run{number}")])
        assert left.value.code == 0
    capsys.readouterr()
    alone = [Ledger.load(tmp_path / f"run{number}" / "ledger.json") for number in range(2)]
    with pytest.raises(SystemExit):
        main(["account", str(book), "--json", "--delta=1e-5"])
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == 2
    assert found["epsilon_high"] > max(ledger.epsilon(delta=1e-5).high for ledger in alone)
    with pytest.raises(SystemExit) as left:
        main(["train", *[f for f in flags if "radius" not in f], "--radius=2", "--epsilon=4", "--ledger", str(book)])
    assert left.value.code == 2
    assert "radius" in capsys.readouterr().err
    with book.open("ab") as file:
        file.write(b"half a line")
    with pytest.raises(SystemExit):
        main(["account", str(book), "--json", "--delta=1e-5"])
    assert "cut short" in json.loads(capsys.readouterr().out)["note"]
