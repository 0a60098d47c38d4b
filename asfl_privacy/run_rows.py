"""Rows and accuracy curves of run folders, wherever they lie, and which runs are not there yet."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from asfl_privacy.cells import make_cells
from asfl_privacy.config import SweepConfig, load_config
from asfl_privacy.configured_data import load_data
from asfl_privacy.reporting import Row, read_rows
from asfl_privacy.reporting.cells import run_name
from asfl_privacy.reporting.records import Record, read_records
from asfl_privacy.run import Run
from asfl_privacy.run_files import CONFIG_FILE, LEDGER_FILE, METRICS_FILE, NOISE_FIELDS, ROW_FILE
from asfl_privacy.sweep import prepare_sweep
from asfl_privacy.worker import failed_row, kept_record, run_folder

CELLS = "cells"
"""Folder of a sweep in which its runs lie."""
UNSAID = (
    *("batch_size", "evaluate_every", "last_evaluations", "precision", "clip", "update_clip", "update_share"),
    *("filter", "planned_releases", "planned_steps", "tolerate_failures"),
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
            ValueError: They differ in something that rows do not hold, or hold two runs of the same settings and seed.
        """
        for name, value in other.unsaid.items():
            if self.unsaid.get(name, value) != value:
                raise ValueError(
                    f"{name} is {self.unsaid[name]} in some runs and {value} in others, which their rows do not say: such runs "
                    "are not compared; report them apart"
                )
        kept = {run_name(row): row for row in self.rows}
        for row in other.rows:
            if kept.get(run_name(row), row) != row:
                raise ValueError(
                    f"{row['method']}, seed {row['seed']}, is there twice with the same settings and another outcome: two runs "
                    "are two, not one; report them apart"
                )
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
    """A run, held against its configuration, the digests of its files and, where there is noise, its ledger."""
    config = load_config(folder / CONFIG_FILE, overrides={})
    private = (folder / LEDGER_FILE).is_file()
    cells = [
        cell for cell in make_cells(config) if cell.method == config.methods[0] and (cell.target is not None) == private
    ]
    if len(cells) != 1:
        raise ValueError(f"{folder / CONFIG_FILE} gives {len(cells)} runs where one is due; restore the file")
    return _kept(folder, config, Run(cell=cells[0], privacy=None, notes=()))


def _kept(folder: Path, config: SweepConfig, run: Run) -> Gathered:
    record = kept_record(folder, config=config, run=run)
    if record is None:
        raise ValueError(f"{folder} holds no finished run ({ROW_FILE} is missing); give a folder that train wrote")
    says_nothing = () if record.row["mech"] != "none" else NOISE_FIELDS
    unsaid = {name: getattr(config, name) for name in UNSAID if name not in says_nothing}
    evaluations = _evaluations(folder, record.row)
    last, accuracy = evaluations[-config.last_evaluations :], record.row["accuracy"]
    if isinstance(accuracy, float) and last:
        mean = math.fsum(float(one["accuracy"] or 0.0) for one in last) / len(last)
        if not math.isclose(accuracy, mean, rel_tol=1e-9, abs_tol=1e-12):
            raise ValueError(
                f"{folder / ROW_FILE}: accuracy {accuracy} is not the mean of the last evaluations of {METRICS_FILE}, {mean}; "
                "delete the run and train again"
            )
    return Gathered((record.row,), tuple(evaluations), unsaid=unsaid)


def _evaluations(folder: Path, row: Row) -> list[Record]:
    """metrics.csv of a run, as far as its accuracy goes; nothing of a method without a global network."""
    channels = ("bytes_model", "bytes_activations", "bytes_labels")
    seed = row["seed"]
    try:
        with (folder / METRICS_FILE).open(encoding="utf-8", newline="") as file:
            return [
                {
                    "run": run_name(row),
                    "method": str(row["method"]),
                    "seed": seed if isinstance(seed, int) else 0,
                    "round": int(line["round"]),
                    "accuracy": float(line["accuracy"]),
                    "bytes": sum(int(line[channel]) for channel in channels),
                }
                for line in csv.DictReader(file)
                if line["accuracy"]
            ]
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{folder / METRICS_FILE} cannot be read ({error}); delete the run and train again") from None


def _sweep(folder: Path) -> Gathered:
    """The finished and the failed runs of a sweep, and those that its configuration asks for beside them."""
    config = load_config(folder / CONFIG_FILE, overrides={})
    rows = folder / "rows.csv"
    failed = [row for row in read_rows(rows) if row["status"] != "ok"] if rows.is_file() else []
    found, names = Gathered(tuple(failed)), {run_name(row) for row in failed}
    missing = []
    for index, run in enumerate(prepare_sweep(config, data=load_data(config))):
        path = run_folder(folder, index, run)
        if (path / ROW_FILE).is_file():
            found += _kept(path, config, run)
        elif run_name(failed_row(config, run, "not there")) not in names:
            missing.append(f"{run.cell.label}, seed {run.cell.seed} ({folder})")
    return replace(found, missing=tuple(missing))
