"""Table 1's recipe: each method gets what validation chose, from one grid, and is compared on other seeds and records."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from asfl_privacy.config import load_config

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "methods"


@pytest.fixture(scope="module")
def table1():
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("table1")
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("table1", None)


class Recorded:
    """Stands for sweeps whose accuracy a function of method and configuration gives."""

    def __init__(self, study, accuracy):
        self.asked = []
        self.accuracy = accuracy
        object.__setattr__(study, "rows_of", self)

    def __call__(self, name, methods, **changes):
        self.asked.append((methods, changes))
        rows = []
        for method in dict.fromkeys(("fedavg", *methods)):
            for seed in range(changes["seeds"]):
                value = self.accuracy(method, changes)
                status = "failed" if value is None else "ok"
                rows.append({"status": status, "method": method, "mech": "none", "seed": seed, "accuracy": value})
        return rows


def a_recipe(table1, **changes):
    values = {"title": "t", "methods": ("fedavg", "scaffold"), "sweep": {}, "lr": (0.1, 0.2, 0.4), "seeds": 3}
    return table1.Recipe(**(values | changes))


def test_every_method_gets_its_own_best_rate_and_a_rate_that_fails_is_never_chosen(table1, tmp_path):
    """Catches: one rate for all, the last of the grid, a failed run that counts as the rest's mean."""
    best = {"fedavg": 0.2, "scaffold": 0.1}
    study = table1.Study(a_recipe(table1), tmp_path, 1)
    sweeps = Recorded(
        study, lambda method, asked: None if asked["lr"] == 0.4 else 0.9 - abs(asked["lr"] - best[method])
    )
    chosen, trials = study.tuned()
    assert {method: one.lr for method, one in chosen.items()} == best
    assert [one.accuracy for one in trials if one.lr == 0.4] == [None, None]
    assert all(asked["evaluate_on"] == "validation" and asked["seed"] == 1000 for _, asked in sweeps.asked)
    sweeps.asked.clear()
    rows = study.compared(chosen)
    assert all("evaluate_on" not in asked and "seed" not in asked for _, asked in sweeps.asked)
    assert sorted((row["method"], row["seed"]) for row in rows) == [(m, s) for m in sorted(best) for s in range(3)]


def test_an_option_is_tuned_at_the_rate_found_and_kept_only_where_it_helps(table1, tmp_path):
    recipe = a_recipe(table1, options={"scaffold": {"server_lr": (0.5, 2.0)}})
    study = table1.Study(recipe, tmp_path, 1)
    sweeps = Recorded(study, lambda method, asked: 0.5 + asked["lr"] - abs(asked.get("server_lr", 1.0) - 0.5))
    chosen, _ = study.tuned()
    assert (chosen["scaffold"].lr, dict(chosen["scaffold"].options)) == (0.4, {"server_lr": 0.5})
    assert dict(chosen["fedavg"].options) == {}
    assert [asked["lr"] for methods, asked in sweeps.asked if methods == ["scaffold"]] == [0.4, 0.4]
    Recorded(study, lambda method, asked: 0.5 - abs(asked.get("server_lr", 1.0) - 1.0))
    assert dict(study.tuned()[0]["scaffold"].options) == {}


def test_a_method_that_always_fails_is_named(table1, tmp_path):
    study = table1.Study(a_recipe(table1), tmp_path, 1)
    Recorded(study, lambda method, asked: None if method == "scaffold" else 0.5)
    with pytest.raises(ValueError, match="scaffold failed at every point of the grid"):
        study.tuned()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_recipes_are_sweeps_that_the_command_takes(table1, path):
    recipe = table1.read_recipe(path)
    config = load_config(None, overrides={**recipe.sweep, "method": list(recipe.methods), "mech": ["none"]})
    assert set(config.methods) == set(recipe.methods)
    assert recipe.seeds >= 3
    for grids in recipe.options.values():
        assert all(name in type(config).model_fields for name in grids)


def test_a_toy_comparison_runs_end_to_end_and_goes_on_where_it_stopped(table1, tmp_path):
    """The command as a user gives it, at toy size; the second time nothing is trained again."""
    recipe = tmp_path / "toy.toml"
    recipe.write_text(
        'title = "Toy"\nmethods = ["asfl", "fedavg"]\n[sweep]\ndata = "digits"\nclients = 4\ncohort = 4\nrounds = 2\n'
        "tail_steps = 2\nfull_steps = 2\n[grid]\nlr = [0.1]\nseeds = 1\n[final]\nseeds = 2\n",
        encoding="utf-8",
    )
    out = tmp_path / "out"
    table1.main([str(recipe), "--out", str(out), "--workers", "1"])
    report = (out / "report.md").read_text(encoding="utf-8")
    assert "| method | accuracy % | points above FedAvg |" in report
    assert "ASFL, conv2" in report
    chosen = json.loads((out / "chosen.json").read_text(encoding="utf-8"))["chosen"]
    assert {method: one["lr"] for method, one in chosen.items()} == {"asfl": 0.1, "fedavg": 0.1}
    assert "\\begin{tabular}" in (out / "table.tex").read_text(encoding="utf-8")
    before = (out / "rows.csv").read_bytes()
    table1.main([str(recipe), "--out", str(out), "--workers", "1"])
    assert (out / "rows.csv").read_bytes() == before
