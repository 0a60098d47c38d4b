"""`report`: made anew from rows alone, byte for byte, whatever the folder's pages said."""

import json

import pytest

from asfl_privacy.cli import main
from asfl_privacy.reporting import write_rows
from asfl_privacy.reporting.exhibits import EXHIBITS

TASK = {
    "status": "ok",
    "mech": "none",
    "data": "digits",
    "clients": 4,
    "cohort": 4,
    "model": "small-cnn",
    "rounds": 4,
    "bytes_model": 1000,
    "bytes_activations": 0,
    "bytes_labels": 0,
    "tail_steps": 0,
    "full_steps": 2,
    "lr": 0.1,
}


def command(*arguments):
    with pytest.raises(SystemExit) as left:
        main([str(one) for one in arguments])
    return left.value.code


@pytest.fixture
def rows_folder(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    rows = [
        {**TASK, "method": method, "seed": seed, "accuracy": accuracy + 0.01 * seed}
        for method, accuracy in (("fedavg", 0.5), ("scaffold", 0.6))
        for seed in range(2)
    ]
    write_rows(folder / "rows.csv", rows)
    return folder


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_report_is_made_anew_byte_for_byte_from_its_rows(rows_folder, tmp_path, capsys):
    """Catches: a page that holds something that rows do not, a date of today in it, run.json overwritten."""
    out = tmp_path / "report"
    assert command("report", rows_folder, "--as", "methods", "--out", out) == 0
    assert f"report: {out / 'report.html'}" in capsys.readouterr().out
    before = files_of(out)
    assert {path.name for path in before} == {"report.md", "report.html", "table.tex", "rows.csv", "run.json"}
    for name in ("report.md", "report.html", "table.tex"):
        (out / name).write_text("edited by hand", encoding="utf-8")
    assert command("report", out) == 0
    assert files_of(out) == before
    assert command("report", out, "--out", tmp_path / "copy") == 0
    assert files_of(tmp_path / "copy") == before


def test_a_changed_row_changes_the_page(rows_folder, tmp_path):
    out = tmp_path / "report"
    command("report", rows_folder, "--as", "methods", "--out", out)
    before = (out / "report.md").read_text(encoding="utf-8")
    rows = (out / "rows.csv").read_text(encoding="utf-8")
    (out / "rows.csv").write_text(rows.replace(",0.61,", ",0.71,"), encoding="utf-8")
    command("report", out)
    assert "65.5 ±" in (out / "report.md").read_text(encoding="utf-8")
    assert "65.5 ±" not in before


def test_json_is_one_object(rows_folder, tmp_path, capsys):
    out = tmp_path / "report"
    assert command("report", rows_folder, "--as", "methods", "--out", out, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["report"] == str(out / "report.html")
    assert answer["missing"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{rows}"], "as is missing"),
        (["{rows}", "--as", "methods"], "out is missing"),
        (["{rows}", "--as", "table9", "--out", "x"], "as 'table9' is no exhibit; give one of methods"),
        (["{rows}/none", "--as", "methods", "--out", "x"], "holds no run, sweep or report"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(arguments, message, rows_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = files_of(tmp_path)
    assert command("report", *(one.format(rows=rows_folder) for one in arguments)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert files_of(tmp_path) == before


def test_a_report_with_an_edited_table_is_refused_with_its_line(rows_folder, tmp_path, capsys):
    out = tmp_path / "report"
    command("report", rows_folder, "--as", "methods", "--out", out)
    rows = (out / "rows.csv").read_text(encoding="utf-8")
    (out / "rows.csv").write_text(rows.replace(",0.61,", ",6.1,"), encoding="utf-8")
    capsys.readouterr()
    assert command("report", out) == 2
    assert "accuracy is 6.1" in capsys.readouterr().err


def test_every_exhibit_says_what_it_shows():
    assert all(kind.about for kind in EXHIBITS.values())
