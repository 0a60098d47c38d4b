"""A sweep: every run of the grid on worker processes, kept as it finishes, and the report of them all."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from asfl_privacy.cells import Cell, make_cells
from asfl_privacy.config import SweepConfig, load_config
from asfl_privacy.data import Dataset
from asfl_privacy.folder_lock import locked
from asfl_privacy.pool import run_on_workers
from asfl_privacy.ray_cluster import import_ray
from asfl_privacy.ray_launcher import run_on_ray
from asfl_privacy.reporting import Row, read_rows, write_atomic
from asfl_privacy.run import UNPROTECTED, Run, prepare_run
from asfl_privacy.run_files import CONFIG_FILE, ROW_FILE, config_toml
from asfl_privacy.worker import kept_record, run_folder

if TYPE_CHECKING:
    from asfl_privacy.reporting.section import Section

MAY_CHANGE = ("launcher", "track", "checkpoint_every", "data_root")
"""Fields in which the command that resumes a sweep may differ from the one that began it."""


class SweepStoppedError(Exception):
    """The sweep was interrupted; what had ended is kept."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One run has ended.

    Attributes:
        row: Its row.
        label: What the cell is called.
        done: Runs that are done, those of an earlier part of the sweep included.
        total: All runs of the grid.
        seconds_left: Estimate for the rest, or None before the first has ended.
    """

    row: Row
    label: str
    done: int
    total: int
    seconds_left: float | None


def prepare_sweep(config: SweepConfig, *, data: Dataset) -> tuple[Run, ...]:
    """Check every cell of the grid before anything is written or trained.

    `auto` is decided once for all seeds and budgets of a setting, from the first seed's initial weights, so that a
    curve compares like with like.

    Args:
        config: The grid.
        data: The data set.

    Returns:
        The runs, in the order of rows.csv.

    Raises:
        ValueError: The first thing wrong with the data, the model, a partition, a placement or a calibration.
    """
    decided: dict[Cell, Run] = {}
    runs: dict[Cell, Run] = {}
    for cell in make_cells(config):
        setting = replace(cell, seed=config.seed)
        if setting not in decided:
            decided[setting] = prepare_run(config, setting, data=data)
        first = decided[setting]
        run = replace(first, cell=replace(first.cell, seed=cell.seed))
        runs.setdefault(run.cell, run)
    return tuple(runs.values())


def check_launcher(config: SweepConfig) -> None:
    """Refuse a launcher that is not installed.

    Raises:
        ValueError: launcher ray without Ray.
    """
    if config.launcher == "ray":
        import_ray()


def run_sweep(
    config: SweepConfig,
    runs: Sequence[Run],
    *,
    data: Dataset,
    out: Path,
    workers: int | None,
    resume: bool,
    run_info: Mapping[str, object],
    journal: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> list[Row]:
    """Run what is not done yet, keep each run as it ends, and write the report.

    Args:
        config: The grid.
        runs: From `prepare_sweep`.
        data: The data set; the workers of a machine share one copy.
        out: Folder of the report; run folders go below `cells`.
        workers: Worker processes, one thread each; None for one a core, of the cluster with launcher ray.
        resume: Go on in a folder that holds an interrupted sweep of the same configuration.
        run_info: Provenance, as `write_report` takes it.
        journal: The data set's ledger over all runs, to which every run is added, or None.
        on_progress: Called after every run.

    Returns:
        All rows, in the order of `runs`.

    Raises:
        ValueError: A launcher that cannot start, a folder that is in use without `resume`, or that holds another sweep.
        SweepStoppedError: Ctrl-C or SIGTERM; finished runs are kept.
        OSError: The folder cannot be written.

    Guarantee:
        rows.csv depends on configuration and seeds alone, not on launcher, number of workers or interruptions (but for
        the column `seconds`).
    """
    check_launcher(config)
    if workers is not None and workers < 1:
        raise ValueError(f"workers {workers} must be a whole number from 1 on; give for example 2")
    claim_folder(config, out=out, resume=resume)
    with locked(out, refusal=f"out {out} is being written by another sweep; wait for it, or give another --out"):
        try:
            return _run_claimed(
                config,
                runs,
                data=data,
                out=out,
                workers=workers,
                run_info=run_info,
                journal=journal,
                on_progress=on_progress,
            )
        except KeyboardInterrupt:
            # Counted on disk: a run may have been kept whose row had not come back yet.
            kept = len(list((out / "cells").glob(f"*/{ROW_FILE}")))
            raise SweepStoppedError(f"{kept} of {len(runs)} runs are done and kept in {out}") from None


def _run_claimed(
    config: SweepConfig,
    runs: Sequence[Run],
    *,
    data: Dataset,
    out: Path,
    workers: int | None,
    run_info: Mapping[str, object],
    journal: Path | None,
    on_progress: Callable[[Progress], None],
) -> list[Row]:
    rows: dict[int, Row] = {}
    for index, run in enumerate(runs):
        kept = kept_record(run_folder(out, index, run), config=config, run=run)
        if kept is not None:
            rows[index] = kept.row
    waiting = [index for index in range(len(runs)) if index not in rows]
    started, kept_before = time.monotonic(), len(rows)
    launch = run_on_ray if config.launcher == "ray" else run_on_workers
    with closing(launch(config, runs, waiting, data=data, out=out, workers=workers, journal=journal)) as ended:
        for index, row in ended:
            rows[index] = row
            spent = time.monotonic() - started
            left = len(runs) - len(rows)
            on_progress(
                Progress(
                    row=row,
                    label=runs[index].cell.label,
                    done=len(rows),
                    total=len(runs),
                    seconds_left=spent / (len(rows) - kept_before) * left,
                )
            )
    ordered = [rows[index] for index in range(len(runs))]
    notes = list(dict.fromkeys(note for run in runs for note in run.notes))
    statement, warnings = _statement(config, runs, out=out)
    from asfl_privacy.reporting.report import write_report  # loads the plotting libraries, which workers never need

    write_report(out, rows=ordered, run_info={**run_info, "decided": notes}, statement=statement, warnings=warnings)
    return ordered


def check_reported(runs: Sequence[Run], *, out: Path) -> None:
    """Refuse a folder whose sweep has no report yet, so that none can be made anew from it.

    Raises:
        ValueError: Rows or provenance that are missing, or not those of all runs.
    """
    missing = [name for name in ("rows.csv", "run.json") if not (out / name).is_file()]
    if missing or len(read_rows(out / "rows.csv")) != len(runs):
        what = f"{missing[0]} is missing" if missing else "rows.csv does not hold all its runs"
        raise ValueError(f"{out} holds a sweep without its report ({what}); finish it with sweep --resume first")


def rewrite_report(out: Path, config: SweepConfig, runs: Sequence[Run], attack: Section | None) -> None:
    """Make the report of a finished sweep anew from what its folder holds, with a section on attacks.

    Args:
        out: The sweep's folder.
        config: Its grid.
        runs: From `prepare_sweep`.
        attack: The section, or None.

    Raises:
        ValueError: A sweep that has no report yet, that is running, or whose files do not fit each other.
        OSError: The folder cannot be written.

    Guarantee:
        Rows and provenance stay as they are. Without a section the report is the one that the sweep wrote.
    """
    check_reported(runs, out=out)
    with locked(out, refusal=f"out {out} is being written by another sweep; wait for it, or give another --out"):
        info = json.loads((out / "run.json").read_text(encoding="utf-8"))
        stored = info["config"]  # back in the order of the fields, which run.json does not keep
        info["config"] = {name: stored[name] for name in (*SweepConfig.model_fields, *stored) if name in stored}
        statement, warnings = _statement(config, runs, out=out)
        from asfl_privacy.reporting.report import write_report  # loads the plotting libraries, which workers never need

        write_report(
            out,
            rows=read_rows(out / "rows.csv"),
            run_info=info,
            statement=statement,
            warnings=warnings,
            pictures=() if attack is None else (attack,),
        )


def check_folder(config: SweepConfig, *, out: Path, resume: bool) -> None:
    """Refuse a folder that this sweep must not write to; nothing is written.

    Raises:
        ValueError: The folder is in use without `resume`, holds another sweep or something else, or cannot be made.
    """
    stored = out / CONFIG_FILE
    if stored.is_file():
        if not resume:
            raise ValueError(f"out {out} already holds a sweep; add --resume to go on with it, or give another --out")
        if not load_config(stored, overrides={}).asks_the_same_as(config, but_for=MAY_CHANGE):
            raise ValueError(f"out {out} holds a sweep of another configuration ({stored}); give another --out")
    elif out.is_dir() and any(out.iterdir()):
        raise ValueError(f"out {out} is not empty and holds no sweep; give a new folder")
    parent = next(folder for folder in (out, *out.parents) if folder.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise ValueError(f"out {out} cannot be written ({parent} is no writable folder); give a folder that can")


def claim_folder(config: SweepConfig, *, out: Path, resume: bool) -> None:
    """Make the sweep's folder, or check that it holds the same sweep.

    Raises:
        ValueError: As `check_folder`, or the folder cannot be written.
    """
    check_folder(config, out=out, resume=resume)
    try:
        if not (out / CONFIG_FILE).is_file():
            out.mkdir(parents=True, exist_ok=True)
            write_atomic(out / CONFIG_FILE, config_toml(config))
    except OSError as error:
        raise ValueError(f"out {out} cannot be written ({error.strerror}); give a folder that can") from None


def _statement(config: SweepConfig, runs: Sequence[Run], *, out: Path) -> tuple[str, list[str]]:
    """The statement of the strictest cell of each mechanism and neighbouring relation, and every warning once.

    A cell's statement is that of its seed with the largest total, as the table shows it.
    """
    warnings: dict[str, None] = {}
    cells: dict[tuple[tuple[object, ...], str], tuple[float, str, int]] = {}
    for index, run in enumerate(runs):
        kept = kept_record(run_folder(out, index, run), config=config, run=run)
        if kept is None or (run.privacy is None and any(other.privacy for other in runs)):
            continue
        warnings |= dict.fromkeys(kept.warnings)
        if run.privacy is None:
            continue
        promise = (run.cell.method, run.privacy.mechanism, run.privacy.radius, run.privacy.p)
        worst = (float(kept.row["epsilon_total"] or 0.0), kept.statement, run.cell.seed)
        key = (promise, run.cell.label)
        cells[key] = max(cells.get(key, worst), worst, key=lambda found: found[0])
    strictest: dict[tuple[object, ...], str] = {}
    for relation, label in cells:
        if relation not in strictest or cells[relation, label][0] < cells[relation, strictest[relation]][0]:
            strictest[relation] = label
    parts = []
    for relation, label in strictest.items():
        _, text, seed = cells[relation, label]
        parts.append(
            f"**The cell with the least ε of its mechanism and radius: {label}, its seed with the largest total: {seed}.** Each "
            "run's own statement lies in its folder below `cells`; adversary, assumptions and what is not covered are the "
            f"same for all.\n\n{text.partition(chr(10))[2].lstrip(chr(10))}"
        )
    return "\n".join(parts) or f"**Nothing is promised.** {UNPROTECTED}", list(warnings)
