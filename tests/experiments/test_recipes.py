"""Every recipe runs on every data set's shape at toy size, and its report is made anew from what lies beside it."""

import json
from concurrent.futures import Future

import pytest

from asfl_privacy.reporting.exhibits.folder import read_material, write_exhibit

from .conftest import PAPER

REPORT = PAPER.parents[1] / "reports" / "table1-fashion-mnist-03-quarter"

EXHIBITS = sorted(path.stem for path in PAPER.glob("*.toml"))
PROFILES = sorted(path.stem for path in (PAPER / "data").glob("*.toml"))


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "runs" not in path.parts}


OTHERS = [profile for profile in PROFILES if profile not in ("digits", "cifar10")]


@pytest.mark.parametrize(
    ("exhibit", "profile"),
    [
        *((exhibit, profile) for exhibit in EXHIBITS for profile in ("digits", "cifar10")),
        *(
            (exhibit, profile)
            for exhibit in ("table1", "figure4")
            for profile in PROFILES
            if profile not in ("digits", "cifar10")
        ),
    ],
)
def test_the_recipe_runs_and_its_report_comes_from_its_tables_alone(paper, exhibit, profile, tmp_path):
    """Catches: a layer, method or field that a network or data set does not have; a page with more than its tables."""
    out = tmp_path / "report"
    paper("run").main([exhibit, "--data", profile, "--out", str(out), "--toy", "--workers", "0"])
    before = files_of(out)
    assert {"report.md", "report.html", "table.tex", "run.json"} <= set(before)
    info = json.loads(before["run.json"])
    assert info["command"].startswith(f"python experiments/paper/run.py {exhibit} --data {profile}")
    for name in ("report.md", "report.html", "table.tex"):
        (out / name).unlink()
    write_exhibit(out, read_material(out))
    assert files_of(out) == before


def test_rates_that_are_not_there_are_one_line_and_nothing_is_trained(paper, tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        paper("run").main(
            [
                "table3",
                "--data",
                "digits",
                "--out",
                str(tmp_path / "r"),
                "--rates",
                str(tmp_path / "none"),
                "--workers",
                "0",
            ]
        )
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert "no report of tuned methods lies there" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "r").exists()


def test_tuned_rates_are_taken_from_a_report_of_table_1(paper, tmp_path):
    """Catches: one rate for all methods, options left behind."""
    chosen = {
        "asfl": {"lr": 0.2, "options": {"exchange_layer": "conv1"}},
        "fedavg": {"lr": 0.05, "options": {}},
    }
    (tmp_path / "run.json").write_text(json.dumps({"config": {"chosen": chosen}}), encoding="utf-8")
    recipe = paper("recipe").read_recipe("table3", "digits", changes={"rounds": 7}, rates=tmp_path)
    rate_of = paper("recipe").rate_of
    assert rate_of("asfl", recipe.options) == {"lr": 0.2, "exchange_layer": "conv1"}
    assert rate_of("fedavg", recipe.options) == {"lr": 0.05}
    assert (recipe.fields["rounds"], recipe.fields["data"]) == (7, "digits")


def test_lists_of_a_cell_are_crossed_and_its_own_number_of_seeds_wins(paper):
    cells = paper("cells")
    cell = {"method": "asfl", "epsilon": [1.0, 2.0], "radius": [0.1, 0.5, 1.0], "seeds": 5}
    found = list(cells.crossed(cell))
    assert len(found) == 6
    assert all(set(one) == {"method", "epsilon", "radius"} for one in found)


@pytest.mark.parametrize("profile", PROFILES)
def test_every_table_1_compares_all_eight_methods_of_the_paper_over_three_seeds(paper, profile):
    recipe = paper("recipe").read_recipe("table1", profile, changes={})
    named = {method.partition("-v")[0] for method in recipe.options["methods"] if not method.endswith("+sharing")}
    assert named == {"fedavg", "asfl", "scaffold", "fedproto", "moon", "fedpvr", "fedvarp", "splitfed"}
    assert recipe.options["seeds"] >= 3
    assert recipe.options["grid"]["lr"] == sorted(recipe.options["grid"]["lr"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workers", "-1"], "workers -1 must be"),
        (["--minutes", "nan"], "minutes nan must be above 0"),
        (["--set", "lr=0.3"], "the recipe decides lr"),
        (["--set", "rounds"], "is no FIELD=VALUE"),
    ],
)
def test_bad_flags_are_one_line_and_nothing_is_trained(paper, flags, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        paper("run").main(["table2", "--data", "digits", "--out", str(tmp_path / "r"), *flags])
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "r").exists()


def test_cells_that_differ_in_a_field_of_all_runs_are_several(paper):
    """Number exchanged on digits: FedAvg and five splits of 20 steps. Catches: the first cell taken for all of them."""

    class Asked:
        def __init__(self):
            self.fields = []

        def start(self, **fields):
            self.fields.append(fields)
            done = Future()
            done.set_exception(paper("runs").OutOfTimeError())
            return done

    recipe, asked = paper("recipe").read_recipe("activations", "digits", changes={}, rates=REPORT), Asked()
    found = paper("cells").measure(recipe.fields, recipe.options, runs=asked)
    steps = [(one["method"], one["tail_steps"], one["full_steps"]) for one in asked.fields if one["seed"] == 0]
    assert steps == [("fedavg", 10, 10), *(("asfl", tail, 20 - tail) for tail in (2, 6, 10, 14, 18))]
    assert len(found.missing) == len(set(found.missing)) == len(asked.fields) == 18
