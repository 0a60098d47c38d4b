"""Rows and accuracy curves of run folders, wherever they lie, and which runs are not there yet."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from asfl_privacy.accounting import Ledger
from asfl_privacy.cells import make_cells
from asfl_privacy.config import load_config
from asfl_privacy.reporting import Row, complete_row, read_rows
from asfl_privacy.reporting.cells import SETTINGS
from asfl_privacy.reporting.records import Record, read_records
from asfl_privacy.run import epsilon_columns
from asfl_privacy.run_files import CONFIG_FILE, LEDGER_FILE, METRICS_FILE, ROW_FILE, file_digest

CELLS = "cells"
"""Folder of a sweep in which its runs lie."""
UNSAID = (
    *("batch_size", "evaluate_every", "last_evaluations", "precision", "clip", "update_clip", "update_share"),
    *("filter", "planned_releases", "planned_steps"),
)
"""Fields of a configuration that change figures and that rows do not hold: runs in which they differ are not compared."""


@dataclass(frozen=True)
class Gathered:
    """What folders of runs hold.

    Attributes:
        rows: One a run, each run once.
        evaluations: Accuracy after each evaluated round, as the table `evaluations` of a report holds it.
        missing: Runs that a sweep asks for and that are not there, one line each.
        unsaid: What the runs were given of `UNSAID`; empty for rows without their configurations.
    """

    rows: tuple[Row, ...] = ()
    evaluations: tuple[Record, ...] = ()
    missing: tuple[str, ...] = ()
    unsaid: Mapping[str, object] = field(default_factory=dict)

    def __add__(self, other: Gathered) -> Gathered:
        """Both, a row that both hold once.

        Raises:
            ValueError: They differ in something that rows do not hold.
        """
        for name, value in other.unsaid.items():
            if self.unsaid.get(name, value) != value:
                raise ValueError(
                    f"{name} is {self.unsaid[name]} in some runs and {value} in others, which their rows do not say: such runs "
                    "are not compared; report them apart"
                )
        kept = {run_name(row) for row in self.rows}
        rows = tuple(row for row in other.rows if run_name(row) not in kept)
        names = {run_name(row) for row in rows}
        evaluations = tuple(one for one in other.evaluations if one["run"] in names)
        return Gathered(
            rows=self.rows + rows,
            evaluations=self.evaluations + evaluations,
            missing=self.missing + other.missing,
            unsaid={**self.unsaid, **other.unsaid},
        )


def gather(folders: Sequence[Path]) -> Gathered:
    """Read run folders, sweeps (finished or not) and reports.

    Args:
        folders: Each one a run folder, a sweep, a report, or a folder whose folders are runs.

    Returns:
        What is there and what is not.

    Raises:
        ValueError: A folder that holds nothing of this kind, or a file that has changed since it was written.
    """
    found = Gathered()
    for folder in folders:
        found += _gather_one(folder)
    return found


def run_name(row: Mapping[str, object]) -> str:
    """A short name of a run, the same wherever its row is read: a digest of what was asked and its seed."""
    asked = {column: row[column] for column in (*SETTINGS, "seed") if row[column] is not None}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]


def _gather_one(folder: Path) -> Gathered:
    if (folder / ROW_FILE).is_file():
        return _run(folder)
    if (folder / CELLS).is_dir() and (folder / CONFIG_FILE).is_file():
        return _sweep(folder)
    if (folder / "rows.csv").is_file():
        kept = folder / "evaluations.csv"
        evaluations = read_records(kept, table="evaluations") if kept.is_file() else []
        return Gathered(tuple(read_rows(folder / "rows.csv")), tuple(evaluations))
    runs = sorted(path for path in folder.glob("*") if (path / ROW_FILE).is_file()) if folder.is_dir() else []
    if not runs:
        raise ValueError(f"{folder} holds no run, sweep or report; give folders that train, sweep or report wrote")
    return gather(runs)


def _run(folder: Path) -> Gathered:
    row = _row(folder)
    config = load_config(folder / CONFIG_FILE, overrides={})
    unsaid = {name: getattr(config, name) for name in UNSAID}
    return Gathered((row,), tuple(_evaluations(folder, row)), unsaid=unsaid)


def _row(folder: Path) -> Row:
    """A run's row, held against the digests of its files and, where there is noise, against its ledger."""
    try:
        stored = json.loads((folder / ROW_FILE).read_text(encoding="utf-8"))
        for name, digest in stored["sha256"].items():
            if file_digest(folder / name) != digest:
                raise ValueError(f"{name} has changed since it was written")
        row = complete_row(stored["row"])
        delta = row["delta"]
        if row["mech"] != "none" or (folder / LEDGER_FILE).exists():
            spent = epsilon_columns(Ledger.load(folder / LEDGER_FILE), delta=delta if isinstance(delta, float) else 0.0)
            if any(row[column] != value for column, value in spent.items()):
                raise ValueError("the row's ε is not that of its ledger")
        return row
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder} is no finished run ({reason}); delete it and train again") from None


def _evaluations(folder: Path, row: Row) -> list[Record]:
    """metrics.csv of a run, as far as its accuracy goes; nothing of a method without a global network."""
    with (folder / METRICS_FILE).open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    channels = ("bytes_model", "bytes_activations", "bytes_labels")
    seed = row["seed"]
    return [
        {
            "run": run_name(row),
            "method": str(row["method"]),
            "seed": seed if isinstance(seed, int) else 0,
            "round": int(line["round"]),
            "accuracy": float(line["accuracy"]),
            "bytes": sum(int(line[channel]) for channel in channels),
        }
        for line in lines
        if line["accuracy"]
    ]


def _sweep(folder: Path) -> Gathered:
    """The finished runs of a sweep, and those that its configuration asks for beside them."""
    config = load_config(folder / CONFIG_FILE, overrides={})
    found = Gathered()
    there = set[int]()
    for path in sorted((folder / CELLS).glob("*")):
        number = path.name.partition("-")[0]
        if number.isdigit() and (path / ROW_FILE).is_file():
            found += _run(path)
            there.add(int(number))
    cells = make_cells(config)
    missing = [f"{cell.label}, seed {cell.seed} ({folder})" for index, cell in enumerate(cells) if index not in there]
    return replace(found, missing=tuple(missing))
