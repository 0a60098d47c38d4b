"""`asfl-privacy attack`, end to end on digits: the picture, its figures, and one clear line for whatever is wrong."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest

from asfl_privacy.accounting import Ledger
from asfl_privacy.attacks import Effort
from asfl_privacy.cli import main
from asfl_privacy.config import load_config
from asfl_privacy.data import load_dataset
from asfl_privacy.sweep import prepare_sweep, rewrite_report, run_sweep

GRID = {
    "clients": 6, "cohort": 4, "rounds": 1, "tail_steps": 2, "full_steps": 2, "batch_size": 16, "seeds": 2,
    "partition": "iid", "placement": "input", "exchange_layer": "conv1", "epsilon": ["0.5", "64"],
}  # fmt: skip
RUN_INFO = {
    "command": "asfl-privacy sweep", "commit": None, "started": "2026-01-01", "versions": {"torch": "2", "python": "3"},
}  # fmt: skip
EFFORT = Effort(
    inversion_steps=40, restarts=0, decoder_steps=15, search_steps=5, membership_pairs=2, membership_trials=150
)


def call(capsys, *arguments):
    """Exit code, standard output and the lines of standard error."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err.strip().splitlines()


@pytest.fixture(autouse=True)
def _little_effort(monkeypatch):
    monkeypatch.setattr("asfl_privacy.cli.attack.QUICK", EFFORT)
    monkeypatch.setattr("asfl_privacy.run_attack.MOST_AUXILIARY", 150)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A finished sweep of two ε, two seeds and their references."""
    out = tmp_path_factory.mktemp("sweep") / "report"
    config = load_config(None, overrides=GRID)
    data = load_dataset("digits", root=Path("data"))
    runs = prepare_sweep(config, data=data)
    info = {**RUN_INFO, "config": config.model_dump(mode="json")}
    run_sweep(config, runs, data=data, out=out, workers=1, resume=False, run_info=info)
    return out, config, runs


@pytest.fixture
def copy(sweep, tmp_path):
    """A copy of the sweep's folder, to be spoilt."""
    return Path(shutil.copytree(sweep[0], tmp_path / "copy"))


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_sweep_gets_the_picture_in_its_report(sweep, copy, capsys):
    before = files(copy)
    code, out, errors = call(capsys, "attack", copy, "--quick", "--records", "5")
    assert (code, errors) == (0, [])  # quiet when piped
    assert "at ε = 64" in out
    made = files(copy)
    attack = {"attack/attack.json", "attack/attack.csv", "attack/figures/attack.svg", "attack/figures/attack.png"}
    assert set(made) - set(before) == attack
    assert {name for name in before if made[name] != before[name]} == {"report.html", "report.md"}

    svg = made["attack/figures/attack.svg"].decode()
    words = re.findall(r">([^<>]+)</(?:text|tspan)>", svg)
    order = [
        words.index(word) for word in ("originals", "rebuilt without noise", "rebuilt at ε = 64", "rebuilt at ε = 0.5")
    ]
    assert order == sorted(order)
    assert svg.count("<image") == 4 * 5

    rows = list(csv.DictReader(made["attack/attack.csv"].decode().splitlines()))
    assert [row["run_seed"] for row in rows] == ["0", "0"]  # the first seed's private cells, each once
    strong, weak = sorted(rows, key=lambda row: float(row["epsilon_release"]))
    assert float(strong["psnr_without_noise"]) > float(strong["psnr_with_noise"]) + 10
    assert float(weak["psnr_with_noise"]) > float(strong["psnr_with_noise"]) + 2

    page = made["report.html"].decode()
    assert "What a curious recipient rebuilds" in page
    assert not re.search(r"https?:|<script|<link|@import|url\((?!#)", page)
    hrefs = set(re.findall(r'(?:href|src)="([^"#][^"]*)"', page))
    assert {href for href in hrefs if not href.startswith("data:image/png;base64,")} == {
        "rows.csv", "table.tex", "run.json"
    }  # fmt: skip
    markdown = made["report.md"].decode()
    (figure,) = re.findall(r"\]\((attack/[^)]*)\)", markdown)
    assert (copy / figure).is_file()
    # catches: a statement, a warning or a setting lost on the way from the folder to the new report
    without = re.sub(r"## What a curious.*?(?=## )", "", markdown, flags=re.DOTALL)
    assert without.split() == before["report.md"].decode().split()

    code, again, _ = call(capsys, "attack", copy, "--quick", "--records", "5", "--json")
    assert code == 0
    assert again.encode() == made["attack/attack.json"]  # the same twice, and what is printed is what is kept
    assert files(copy) == made
    assert str(copy.parent) not in again
    record = json.loads(again)
    assert [run["records"] for run in record["runs"]] == [5, 5]
    assert record["breaches"] == []

    _, config, runs = sweep
    rewrite_report(copy, config, runs, None)
    assert {name: content for name, content in files(copy).items() if name not in attack} == before


def test_a_single_run_gets_a_page_of_its_own(copy, capsys):
    (cell,) = (copy / "cells").glob("*eps0.5*seed1")
    before = files(cell)
    code, _, errors = call(capsys, "attack", cell, "--quick", "--records", "3", "--seed", "4")
    assert (code, errors) == (0, [])
    made = files(cell)
    assert {name: made[name] for name in before} == before
    page = made["attack/report.html"].decode()
    assert "rebuilt at ε = 0.5" in page
    assert "<image" in page
    assert "What is promised" in page  # the run's own statement
    assert json.loads(made["attack/attack.json"])["runs"][0]["attack_seed"] == 4


def test_a_ledger_that_claims_too_little_is_a_breach(copy, capsys):
    # Catches: exit code 0 in spite of a refuted ε.
    (cell,) = (copy / "cells").glob("*eps64*seed0")
    ledger = Ledger(p=2, radius=1.0)
    fixed = {"channel": "activations", "mechanism": "gaussian", "whole_record_multiplier": 100.0}
    ledger.record(**fixed, noise_multiplier=100.0, round=0, records=[0])
    ledger.save(cell / "ledger.json")
    code, out, errors = call(capsys, "attack", cell, "--quick", "--records", "2")
    assert (code, errors) == (1, [])
    assert "BREACH: " in out
    assert "Breach: " in (cell / "attack" / "report.html").read_text()
    code, out, errors = call(capsys, "attack", cell, "--quick", "--records", "2", "--json")
    assert code == 1
    assert json.loads(out)["breaches"] == [line.removeprefix("BREACH: ") for line in errors] != []


def test_a_folder_that_cannot_be_attacked_is_refused_in_one_line_and_left_alone(copy, tmp_path, capsys):
    kept = copy / "attack" / "attack.json"
    kept.parent.mkdir()
    kept.write_text("of before")
    (fedavg,) = (copy / "cells").glob("*fedavg*seed0")
    unfinished = Path(shutil.copytree(copy, tmp_path / "unfinished"))
    (unfinished / "rows.csv").unlink()
    (tmp_path / "empty" / "cells").mkdir(parents=True)
    changed = Path(shutil.copytree(copy, tmp_path / "changed"))
    (cell,) = (changed / "cells").glob("*eps64*seed0")
    (cell / "ledger.json").write_bytes((cell / "ledger.json").read_bytes() + b" ")
    for arguments, words in (
        ([tmp_path / "nowhere"], "holds no finished run"),
        ([tmp_path / "empty"], "holds no sweep"),
        ([fedavg], "nothing to attack"),
        ([unfinished], "without its report"),
        ([changed], "has changed since it was written"),
        ([copy, "--records", "0"], "records"),
        ([copy, "--records", "1000"], "at most 589"),
        ([copy, "--seed", "-1"], "seed"),
        ([], "RUN"),
    ):
        code, out, errors = call(capsys, "attack", *arguments)
        assert (code, out, len(errors)) == (2, "", 1), arguments
        assert words in errors[0]
    assert kept.read_text() == "of before"
    assert not (fedavg / "attack").exists()
