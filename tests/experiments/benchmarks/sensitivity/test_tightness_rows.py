"""Rows: a killed run goes on, a changed head is measured again, and a report shows what was beaten."""

from dataclasses import replace

import pytest
import torch
from torch import nn


@pytest.fixture
def row(scripts):
    return scripts.rows.Row(
        head="two",
        about="two layers, trained",
        digest="0123",
        accuracy=0.9,
        p="1",
        q="2",
        tool="certificate",
        kind=scripts.rows.UPPER,
        value=8.000000000000002,
        seconds=0.1,
        steps=None,
        note="columns",
        commit="abc",
        code="def",
        versions="python 3",
        command="python run.py",
    )


def report_rows(scripts, row, *, found, peer):
    rows = scripts.rows
    return [
        row,
        replace(row, tool="lower bound", kind=rows.LOWER, value=found, steps=320, note="32 starts × 10 gradient steps"),
        replace(row, tool="PixelDP formula", value=peer, note="1→2 bounds multiplied, as its code does"),
        replace(row, tool="eclipse-nn", kind=rows.REFUSES, value=None, note="passes over | convolutions"),
    ]


def test_rows_survive_the_file(scripts, row, tmp_path):
    written = [row, replace(row, tool="lower bound", accuracy=None, value=None, steps=20_000, note='a, "b"')]
    scripts.rows.write_rows(tmp_path / "deep" / "rows.csv", written)
    assert scripts.rows.read_rows(tmp_path / "deep" / "rows.csv") == written


def test_other_columns_are_refused(scripts, tmp_path):
    (tmp_path / "rows.csv").write_text("head,p\ntwo,1\n")
    with pytest.raises(SystemExit, match="other columns"):
        scripts.rows.read_rows(tmp_path / "rows.csv")


def test_a_resumed_run_asks_only_what_is_missing_or_changed(scripts, tmp_path):
    run, rows = scripts.run, scripts.rows
    source = rows.Source(commit="abc", code="def", versions="python 3", command="python run.py")
    asked = []

    def questions(steps):
        def ask(tool):
            asked.append(tool)
            if tool == "second":
                raise ValueError("no bound")
            return rows.Answer(rows.UPPER, 1.0, "")

        for tool, count in (("first", None), ("second", None), ("search", steps)):
            yield run.Question("1", "2", tool, lambda tool=tool: ask(tool), count)

    def work(*, steps=10, weights="w", source=source):
        asked.clear()
        kept = rows.read_rows(tmp_path / "rows.csv") if (tmp_path / "rows.csv").exists() else []
        ledger = run.Ledger(tmp_path / "rows.csv", source=source, kept=kept)
        ledger.work_through(questions(steps), name="mlp", about="", weights=weights, acc=None)
        return list(asked)

    assert work() == ["first", "second", "search"]
    assert work() == []
    assert work(steps=20) == ["search"]
    assert work(steps=20, weights="v") == ["first", "second", "search"]
    assert work(steps=20, weights="v", source=replace(source, code="new")) == ["first", "second", "search"]
    ledger = run.Ledger(tmp_path / "rows.csv", source=source, kept=rows.read_rows(tmp_path / "rows.csv"))
    ledger.work_through(questions(1), name="digits", about="", weights="w", acc=None)
    assert [row.head for row in rows.read_rows(tmp_path / "rows.csv")] == 3 * ["digits"] + 3 * ["mlp"]
    kinds = {row.tool: row.kind for row in rows.read_rows(tmp_path / "rows.csv")}
    assert kinds == {"first": rows.UPPER, "second": rows.FAILED, "search": rows.UPPER}


def test_a_beaten_upper_bound_is_called_unsound(scripts, row):
    """Mutation caught: a report that never compares peers with the found pair."""
    page = scripts.report.report_of(report_rows(scripts, row, found=7.9, peer=1.0))
    assert "**UNSOUND** on two, 1→2: PixelDP formula is 1, a found pair reaches 7.9 (0.1266 of it claimed)" in page
    assert "our certificate is" not in page
    page = scripts.report.report_of(report_rows(scripts, row, found=8.1, peer=9.0))
    assert "**UNSOUND** on two, 1→2: our certificate is 8" in page
    assert "PixelDP formula is" not in page
    assert "UNSOUND" not in scripts.report.report_of(report_rows(scripts, row, found=8.0, peer=9.0)).replace(
        "UNSOUND:", ""
    )


def test_the_report_names_command_commit_code_and_weights(scripts, row):
    page = scripts.report.report_of(report_rows(scripts, row, found=7.9, peer=9.0))
    for fact in ("`python run.py`", "commit: abc", "`def`", "`0123`", "90.0 %", "python 3", "refuses"):
        assert fact in page


def test_the_figure_repeats_and_names_heads(scripts, row):
    rows = report_rows(scripts, row, found=7.9, peer=1.0)
    svg = scripts.figure.draw(rows, image_format="svg")
    assert svg == scripts.figure.draw(rows, image_format="svg")
    for text in (b">two<", b"PixelDP formula", b"below a found pair", b"log scale"):
        assert text in svg


def test_certified_and_found_values_of_a_small_head_enclose_the_truth(scripts):
    head = nn.Linear(2, 1, bias=False)
    head.weight.data = torch.tensor([[3.0, 4.0]])
    upper = scripts.run.certified(head, p="2", q="2", input_shape=(2,), method="auto").value
    lower = scripts.run.found(head, p="2", q="2", input_shape=(2,), num_starts=2, num_steps=3).value
    assert 5.0 - 1e-6 < lower <= 5.0 <= upper < 5.0 + 1e-6


def test_a_run_refuses_to_replace_rows(scripts, row, tmp_path, capsys):
    scripts.rows.write_rows(tmp_path / "rows.csv", [row])
    with pytest.raises(SystemExit):
        scripts.run.main(["--out", str(tmp_path), "--only", "mlp"])
    assert "--resume" in capsys.readouterr().err


def test_every_trained_head_has_the_fixed_recipe(scripts):
    epochs = {"digits": 15, "mnist": 5, "mnist32": 3}
    for spec in scripts.heads.HEADS:
        if spec.recipe is not None:
            expected = 2 if spec.name == "vgg11" else epochs[spec.recipe.data]
            recipe = spec.recipe
            assert (recipe.epochs, recipe.batch, recipe.lr, recipe.weight_decay) == (expected, 50, 0.05, 5e-4)


@pytest.mark.parametrize("name", ["conv3-3-32-32-s2", "digits", "init28", "convbn3-28", "mlp", "resnet20", "vgg11"])
def test_heads_take_their_input_shape(scripts, name):
    (spec,) = [spec for spec in scripts.heads.HEADS if spec.name == name]
    outputs = {
        "conv3-3-32-32-s2": (32, 16, 16),
        "digits": (32, 4, 4),
        "init28": (64, 7, 7),
        "convbn3-28": (64, 7, 7),
        "mlp": (64,),
        "resnet20": (64, 8, 8),
        "vgg11": (512, 1, 1),
    }
    with torch.no_grad():
        assert spec.build().eval()(torch.zeros(1, *spec.input_shape)).shape[1:] == outputs[name]


def test_training_repeats_and_is_cached(scripts, tmp_path):
    spec = replace(scripts.heads.HEADS[6], recipe=scripts.heads.Recipe(data="digits", epochs=3))
    head, accuracy = scripts.training.prepare(spec, cache=tmp_path)
    again, _ = scripts.training.train(spec, spec.recipe)
    cached, accuracy_cached = scripts.training.prepare(spec, cache=tmp_path)
    assert scripts.training.digest(head) == scripts.training.digest(again) == scripts.training.digest(cached)
    assert accuracy == accuracy_cached > 0.5
    assert len(list(tmp_path.iterdir())) == 1
