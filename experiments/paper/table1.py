"""Methods against each other (Table 1): each one tuned on validation records, then compared on test records over seeds.

    python experiments/paper/table1.py experiments/paper/table1-digits.toml --out reports/table1-digits [--workers N]

Runs are kept under RUNS (default OUT/runs), so an interrupted comparison goes on with the same command. OUT/chosen.json
says what was chosen and from what; report.md, table.tex and rows.csv are made from the rows of the runs alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from runs import Runs, open_pool, rows_of
from tuning import TUNING_SEED, Grid, Trial, tune

from asfl_privacy.reporting import write_atomic, write_rows
from asfl_privacy.reporting.comparison import compare_methods
from asfl_privacy.reporting.display import Display
from asfl_privacy.reporting.latex import latex_table
from asfl_privacy.reporting.rows import Row
from asfl_privacy.reporting.words import method_name


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is compared.

    Attributes:
        title: Of the report.
        methods: Names, FedAvg among them.
        sweep: Fields of the sweep's configuration that all share.
        grid: What tuning tries.
        tuned_as: Methods that take what another one is given, as they are the same by a theorem that tests prove.
        seeds: Seeds of the comparison.
        more_seeds: Further seeds of ASFL and FedAvg, where the claim rests on their difference.
    """

    title: str
    methods: tuple[str, ...]
    sweep: Mapping[str, Any]
    grid: Grid
    tuned_as: Mapping[str, str]
    seeds: int = 3
    more_seeds: int = 0


def compared(recipe: Recipe, chosen: Mapping[str, Trial], *, runs: Runs) -> list[Row]:
    """Rows on the test records of each method as it was tuned."""
    started = [
        runs.start(
            **{**recipe.sweep, "mech": ["none"], "method": [method], "lr": trial.lr, **trial.options, "seed": seed}
        )
        for seed in range(recipe.seeds + recipe.more_seeds)
        for method, trial in chosen.items()
        if seed < recipe.seeds or method in ("asfl", "fedavg")
    ]
    return rows_of(started)


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
        grid=Grid(lr=tuple(grid.pop("lr")), seeds=grid.pop("seeds"), options=grid),
        tuned_as=dict(values.get("tuned_as", {})),
        seeds=values["final"]["seeds"],
        more_seeds=values["final"].get("more_seeds", 0),
    )
    if "fedavg" not in recipe.methods:
        raise ValueError(f"{path}: methods lack fedavg, which the others are compared with; add it")
    strangers = set(recipe.grid.options) - set(recipe.methods)
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
        f"On a sixth of the training records, which took no part in these runs' training; {recipe.grid.seeds} seed(s) from "
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


def main(arguments: Sequence[str]) -> None:
    """Tune, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of sweeps, rows and report")
    parser.add_argument("--runs", type=Path, help="folder of the runs; default OUT/runs")
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    options = parser.parse_args(arguments)
    recipe = read_recipe(options.recipe)
    with open_pool(options.workers) as pool:
        runs = Runs(options.runs or options.out / "runs", pool)
        tuned = [method for method in recipe.methods if method not in recipe.tuned_as]
        chosen, trials = tune(tuned, grid=recipe.grid, fields=recipe.sweep, runs=runs)
        chosen |= {method: replace(chosen[other], method=method) for method, other in recipe.tuned_as.items()}
        facts = {
            "chosen": {method: asdict(one) for method, one in chosen.items()},
            "tried": [asdict(one) for one in trials],
        }
        options.out.mkdir(parents=True, exist_ok=True)
        write_atomic(options.out / "chosen.json", json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
        rows = compared(recipe, chosen, runs=runs)
    write_rows(options.out / "rows.csv", rows)
    command = f"python experiments/paper/table1.py {options.recipe} --out {options.out}"
    write_atomic(options.out / "report.md", report_of(recipe, rows, trials, command=command))
    table: Display = compare_methods(rows)
    write_atomic(options.out / "table.tex", latex_table(table, caption=recipe.title, label="tab:methods"))
    print(f"report: {options.out / 'report.md'}")


if __name__ == "__main__":
    main(sys.argv[1:])
