"""Methods against each other (Table 1): each one tuned on validation records, then compared on test records over seeds.

    python experiments/methods/table1.py experiments/methods/table1-digits.toml --out reports/table1-digits [--workers N]

Every sweep is one `asfl-privacy sweep` whose folder stays under OUT, so an interrupted comparison goes on with the same
command. The learning rate comes from one grid for all methods, with what else a method asks for at its default; then that is
tuned at the learning rate found. OUT/chosen.json says what was chosen and from what; report.md, table.tex and rows.csv are
made from the rows of the sweeps alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from asfl_privacy.reporting import read_rows, write_atomic, write_rows
from asfl_privacy.reporting.comparison import compare_methods
from asfl_privacy.reporting.display import Display
from asfl_privacy.reporting.latex import latex_table
from asfl_privacy.reporting.rows import Row
from asfl_privacy.reporting.words import method_name

TUNING_SEED = 1000
"""First seed of tuning runs, far from those that are reported."""
Options = Mapping[str, float | str]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is compared.

    Attributes:
        title: Of the report.
        methods: Names, FedAvg among them.
        sweep: Fields of the sweep's configuration that all share.
        lr: Grid of learning rates.
        options: Grids of single methods' own fields, by method and field.
        tuning_seeds: Seeds a point of the grid.
        seeds: Seeds of the comparison.
    """

    title: str
    methods: tuple[str, ...]
    sweep: Mapping[str, Any]
    lr: tuple[float, ...]
    options: Mapping[str, Mapping[str, Sequence[float | str]]] = field(default_factory=dict)
    tuning_seeds: int = 1
    seeds: int = 3


@dataclass(frozen=True)
class Trial:
    """One point of a grid: validation accuracy, the mean over seeds; None where a run failed."""

    method: str
    lr: float
    options: Options
    accuracy: float | None


@dataclass(frozen=True)
class Study:
    """A recipe and the folder in which its sweeps are kept."""

    recipe: Recipe
    out: Path
    workers: int | None

    def rows_of(self, name: str, methods: Sequence[str], **changes: object) -> list[Row]:
        """Rows of a sweep without noise, run now or before; `changes` are fields of its configuration."""
        folder = self.out / "sweeps" / name
        values = {**self.recipe.sweep, "mech": ["none"], "method": list(methods), **changes}
        path = self.out / "sweeps" / f"{name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, "".join(f"{key} = {_toml(value)}\n" for key, value in values.items()))
        command = [sys.executable, "-m", "asfl_privacy", "sweep", "--config", str(path), "--out", str(folder)]
        command += ["--resume"] if folder.exists() else []
        command += [] if self.workers is None else ["--workers", str(self.workers)]
        print(f"{name}: {', '.join(methods)}", flush=True)
        done = subprocess.run(command, stdout=subprocess.DEVNULL)
        if done.returncode not in (0, 1):  # 1: some runs failed, which their rows say
            raise SystemExit(done.returncode)
        return read_rows(folder / "rows.csv")

    def tuned(self) -> tuple[dict[str, Trial], list[Trial]]:
        """What each method is given, and all that was tried."""
        recipe, trials = self.recipe, list[Trial]()
        tuning = {"evaluate_on": "validation", "seed": TUNING_SEED, "seeds": recipe.tuning_seeds}
        for lr in recipe.lr:
            rows = self.rows_of(f"tuning-lr-{lr:g}", recipe.methods, lr=lr, **tuning)
            trials += [Trial(method, lr, {}, _accuracy(rows, method)) for method in recipe.methods]
        chosen = {method: _best([one for one in trials if one.method == method]) for method in recipe.methods}
        for method, grids in recipe.options.items():
            for name, values in grids.items():
                found = [chosen[method]]
                for value in values:
                    options = {**chosen[method].options, name: value}
                    lr = chosen[method].lr
                    rows = self.rows_of(f"tuning-{method}-{name}-{value}", [method], lr=lr, **options, **tuning)
                    found.append(Trial(method, lr, options, _accuracy(rows, method)))
                trials += found[1:]
                chosen[method] = _best(found)
        return chosen, trials

    def compared(self, chosen: Mapping[str, Trial]) -> list[Row]:
        """Rows on the test records of each method as it was tuned."""
        groups: dict[tuple[float, tuple[tuple[str, float | str], ...]], list[str]] = {}
        for method, trial in chosen.items():
            groups.setdefault((trial.lr, tuple(trial.options.items())), []).append(method)
        rows: list[Row] = []
        for (lr, options), methods in groups.items():
            found = self.rows_of(f"final-{'-'.join(methods)}", methods, lr=lr, **dict(options), seeds=self.recipe.seeds)
            rows += [row for row in found if row["method"] in methods]
        return rows


def read_recipe(path: Path) -> Recipe:
    """A recipe from TOML.

    Raises:
        ValueError: FedAvg is missing, or an option of a method that is not compared.
    """
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    grid = dict(values.pop("grid"))
    recipe = Recipe(
        title=values["title"],
        methods=tuple(values["methods"]),
        sweep=values["sweep"],
        lr=tuple(grid.pop("lr")),
        tuning_seeds=grid.pop("seeds"),
        options=grid,
        seeds=values["final"]["seeds"],
    )
    if "fedavg" not in recipe.methods:
        raise ValueError(f"{path}: methods lack fedavg, which the others are compared with; add it")
    strangers = set(recipe.options) - set(recipe.methods)
    if strangers:
        raise ValueError(f"{path}: grid.{sorted(strangers)[0]} is of no method that is compared; leave it out")
    return recipe


def report_of(recipe: Recipe, rows: Sequence[Row], trials: Sequence[Trial], *, command: str) -> str:
    """The page, in Markdown."""
    table = compare_methods(rows)
    failed = [f"- {method_name(row['method'])}, seed {row['seed']}" for row in rows if row["status"] != "ok"]
    tried = [
        (
            method_name(one.method),
            f"{one.lr:g}",
            ", ".join(f"{name} {value}" for name, value in one.options.items()) or "—",
            "failed" if one.accuracy is None else f"{100 * one.accuracy:.1f}",
        )
        for one in trials
    ]
    lines = [
        f"# {recipe.title}",
        "",
        "Accuracy on test records, the mean of the last evaluations, mean ± standard deviation over seeds; differences are "
        "paired by seed, with Student's interval.",
        "",
        *_markdown(table.headings, table.lines),
        "",
        *(f"- {name}: {value}" for name, value in table.shared),
        *(f"- {name}: {value}" for name, value in recipe.sweep.items() if name not in ("data", "partition", "model")),
        "",
        *(["## Failed runs", "", *failed, ""] if failed else []),
        "## Tuning",
        "",
        f"On a sixth of the training records, which took no part in these runs' training; {recipe.tuning_seeds} seed(s) from "
        f"{TUNING_SEED} on.",
        "",
        *_markdown(("method", "lr", "options", "validation accuracy %"), tried),
        "",
        f"Made by `{command}`.",
        "",
    ]
    return "\n".join(lines)


def _markdown(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    head = ["| " + " | ".join(headings) + " |", "|" + "|".join([":--"] * len(headings)) + "|"]
    return head + ["| " + " | ".join(line) + " |" for line in lines]


def _accuracy(rows: Sequence[Row], method: str) -> float | None:
    """Mean over the seeds; None where one failed: a rate at which training may diverge is not chosen."""
    mine = [row for row in rows if row["method"] == method]
    values = [row["accuracy"] for row in mine if row["status"] == "ok"]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return fmean(numbers) if numbers and len(numbers) == len(mine) else None


def _best(trials: Sequence[Trial]) -> Trial:
    """The most accurate, the first of equals.

    Raises:
        ValueError: All failed.
    """
    good = [one for one in trials if one.accuracy is not None]
    if not good:
        raise ValueError(f"{trials[0].method} failed at every point of the grid; add smaller learning rates")
    return max(good, key=lambda one: one.accuracy or 0.0)


def _toml(value: object) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(one) for one in value) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


def main(arguments: Sequence[str]) -> None:
    """Tune, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of sweeps, rows and report")
    parser.add_argument("--workers", type=int, help="worker processes of each sweep; default one a core")
    options = parser.parse_args(arguments)
    study = Study(read_recipe(options.recipe), options.out, options.workers)
    chosen, trials = study.tuned()
    facts = {
        "chosen": {method: asdict(one) for method, one in chosen.items()},
        "tried": [asdict(one) for one in trials],
    }
    write_atomic(options.out / "chosen.json", json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    rows = study.compared(chosen)
    write_rows(options.out / "rows.csv", rows)
    command = f"python experiments/methods/table1.py {options.recipe} --out {options.out}"
    write_atomic(options.out / "report.md", report_of(study.recipe, rows, trials, command=command))
    table: Display = compare_methods(rows)
    write_atomic(options.out / "table.tex", latex_table(table, caption=study.recipe.title, label="tab:methods"))
    print(f"report: {options.out / 'report.md'}")


if __name__ == "__main__":
    main(sys.argv[1:])
