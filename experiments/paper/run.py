"""One table or figure of the paper on one data set: train, measure, report.

    python experiments/paper/run.py table1 --data fashion-mnist --out reports/table1-fashion-mnist

Every run that is done is written down in OUT/runs.jsonl and its folder kept below --runs (default OUT/runs), so the same
command goes on after an interruption, on another day or machine, and several exhibits can share folders. The report is made
of what was measured alone, says what is missing, and `asfl-privacy report OUT` makes it anew.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from material import Measured
from recipe import HERE, PROFILES, Recipe, read_recipe
from runs import KEPT_FILE, OutOfTimeError, open_runs

from asfl_privacy.provenance import provenance
from asfl_privacy.reporting.exhibits import Material
from asfl_privacy.reporting.exhibits.folder import write_exhibit
from asfl_privacy.reporting.run_info import plain_run_info

DECIDED = ("lr", "seed", "seeds", "method", "mech", "evaluate_on")
"""Fields that recipes decide themselves."""


def main(arguments: Sequence[str]) -> None:
    """Run a recipe.

    Raises:
        SystemExit: Bad input, in one line, with exit code 2.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(path.stem for path in HERE.glob("*.toml"))
    parser.add_argument("exhibit", choices=names)
    parser.add_argument("--data", required=True, choices=sorted(path.stem for path in PROFILES.glob("*.toml")))
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    parser.add_argument("--runs", type=Path, help="folder in which runs are kept; default OUT/runs")
    parser.add_argument("--rates", type=Path, help="report of Table 1 whose tuned rates the methods take")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change a field of the runs")
    parser.add_argument("--workers", type=int, default=2, help="worker processes; 0: in this one")
    parser.add_argument("--minutes", type=float, help="begin no run later than that; the same command goes on")
    parser.add_argument("--toy", action="store_true", help="made-up data of the same shape, the least of everything")
    options = parser.parse_args(arguments)
    try:
        if options.workers < 0:
            raise ValueError(f"workers {options.workers} must be a whole number from 0 on; give for example 2")
        if options.minutes is not None and not options.minutes > 0:
            raise ValueError(f"minutes {options.minutes:g} must be above 0; give for example 60, or leave it out")
        changes = dict(_assignment(text) for text in options.set)
        recipe = read_recipe(options.exhibit, options.data, changes=changes, rates=options.rates, toy=options.toy)
        run(
            recipe,
            out=options.out,
            runs=options.runs,
            workers=options.workers,
            command=_command(options),
            minutes=options.minutes,
        )
    except OutOfTimeError:
        print(f"{options.minutes:g} minutes are over; what was trained is kept, and the same command goes on")
        raise SystemExit(1) from None
    except ValueError as error:
        print(f"run.py: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"report: {options.out / 'report.html'}")


def run(
    recipe: Recipe, *, out: Path, runs: Path | None, workers: int, command: str, minutes: float | None = None
) -> None:
    """Train and measure what a recipe asks for and write its report.

    Raises:
        ValueError: What the recipe asks for breaks a rule.
        OutOfTimeError: The time was over before there was anything to report; runs that were done are kept.
    """
    module = importlib.import_module(recipe.measure)
    folder = out / "runs" if runs is None else runs
    with open_runs(folder, workers=workers, kept_in=out / KEPT_FILE, minutes=minutes) as opened:
        measured: Measured = module.measure(recipe.fields, recipe.options, runs=opened)
        evaluations = opened.evaluations_of(measured.rows)
    info = provenance(title=recipe.title, command=command, config={**recipe.to_dict(), **measured.decided})
    tables = {**measured.tables} | ({"evaluations": evaluations} if evaluations else {})
    missing = list(measured.missing)
    whole = plain_run_info({**info, "exhibit": recipe.exhibit, "missing": missing})
    write_exhibit(out, Material(info=whole, rows=measured.rows, tables=tables))


def _assignment(text: str) -> tuple[str, Any]:
    """A field and its value, a number where it reads as one.

    Raises:
        ValueError: No `=`, or a field that recipes decide.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"set {text!r} is no FIELD=VALUE; give for example rounds=30")
    field = name.replace("-", "_")
    if field in DECIDED:
        raise ValueError(f"set {text!r}: the recipe decides {field}; change its file")
    for kind in (int, float):
        try:
            return field, kind(value)
        except ValueError:
            continue
    return field, value


def _command(options: argparse.Namespace) -> str:
    """The command without the folder of runs and the number of workers, which change no figure."""
    parts = ["python", "experiments/paper/run.py", options.exhibit, "--data", options.data, "--out", str(options.out)]
    parts += [] if options.rates is None else ["--rates", str(options.rates)]
    parts += [part for text in options.set for part in ("--set", text)]
    parts += ["--toy"] if options.toy else []
    return shlex.join(parts)


if __name__ == "__main__":
    main(sys.argv[1:])
