"""The files of a run folder: their names, what goes into them, and that they appear all at once."""

from __future__ import annotations

import contextlib
import csv
import glob
import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tomli_w

from asfl_privacy.accounting.storage import sync_path
from asfl_privacy.cells import Cell
from asfl_privacy.config import SweepConfig
from asfl_privacy.execution import FailureNote, Progress
from asfl_privacy.federated.settings import UPDATES_ONLY
from asfl_privacy.federated.tensor_file import encode_tensors
from asfl_privacy.metrics import metrics_csv
from asfl_privacy.reporting import Row

ROW_FILE, CONFIG_FILE, LEDGER_FILE, STATEMENT_FILE = "row.json", "config.toml", "ledger.json", "statement.md"
STATEMENT_JSON_FILE = "statement.json"
CHECKPOINT_FILE, METRICS_FILE, FAILURES_FILE = "checkpoint.safetensors", "metrics.csv", "failures.csv"
NOISE_FIELDS = (
    *("labels", "updates", "update_clip", "update_share", "filter", "planned_releases", "planned_steps"),
    *("calibration", "noisy_training"),
)
"""Fields of a configuration that are refused where nothing is noised."""
UNFINISHED = ".unfinished"
"""Ends the name of a folder in which a run is kept while it is under way."""


def check_writable(folder: Path) -> None:
    """Refuse a run folder that is in use or cannot be written, before time is spent.

    Raises:
        ValueError: Naming the folder and what to do.
    """
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    is_own = UNFINISHED in names and ROW_FILE not in names  # of a run that was stopped, also while it was written
    if folder.exists() and (not folder.is_dir() or (names and not is_own)):
        raise ValueError(f"out {folder} is in use; give a new folder")
    parents = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder if folder.exists() else folder.parent):
            pass
    except OSError as error:
        raise ValueError(f"out {folder} cannot be written ({error.strerror}); give a folder that can") from None
    finally:
        for parent in parents:
            with contextlib.suppress(OSError):
                parent.rmdir()


def write_run_folder(
    folder: Path,
    *,
    config: SweepConfig,
    cell: Cell,
    result: Progress,
    row: Row,
    statement: str,
    statement_json: str,
    warnings: Sequence[str],
    notes: Sequence[str],
) -> None:
    """Write a run folder under another name and give it its own in one step; row.json, the mark of a whole one, is last.

    An existing empty folder (a mounted volume, say) is filled instead, row.json last.

    Args:
        folder: Run folder.
        config: The configuration.
        cell: The run's cell, nothing left to decide.
        result: The run after its last round.
        row: Its line of rows.csv.
        statement: What it promises, Markdown; empty without noise.
        statement_json: The same as JSON.
        warnings: What a reader must be told.
        notes: What was decided, and why.

    Raises:
        OSError: The folder cannot be written; nothing of it is left then.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    where, prefix = folder if folder.exists() else folder.parent, f".{folder.name}{UNFINISHED}-"
    for left in where.glob(f"{glob.escape(prefix)}*"):  # by a process that was ended here
        shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=where))
    try:
        (scratch / CONFIG_FILE).write_text(config_toml(run_config(config, cell)), encoding="utf-8")
        (scratch / METRICS_FILE).write_text(metrics_csv(result.evaluations), encoding="utf-8")
        if result.failures:
            (scratch / FAILURES_FILE).write_text(_failures_csv(result.failures), encoding="utf-8")
        if result.ledger is not None:  # an empty account would say that nothing was given away
            result.ledger.save(scratch / LEDGER_FILE)
        if statement:
            (scratch / STATEMENT_FILE).write_text(statement, encoding="utf-8")
            (scratch / STATEMENT_JSON_FILE).write_text(statement_json, encoding="utf-8")
        (scratch / CHECKPOINT_FILE).write_bytes(encode_tensors(result.state.weights))
        digests = {file.name: file_digest(file) for file in sorted(scratch.iterdir())}
        record = {"row": row, "warnings": tuple(warnings), "notes": tuple(notes), "sha256": digests}
        (scratch / ROW_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        scratch.chmod(0o755)
        for file in (*scratch.iterdir(), scratch):
            sync_path(file)
        if folder.exists():
            for name in (*digests, ROW_FILE):
                os.replace(scratch / name, folder / name)  # noqa: PTH105 - one atomic step each
            scratch.rmdir()
        else:
            os.replace(scratch, folder)  # noqa: PTH105 - the atomic rename is the point
        sync_path(where)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def file_digest(file: Path) -> str:
    """SHA-256 of a file's bytes, hexadecimal."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def run_config(config: SweepConfig, cell: Cell) -> SweepConfig:
    """The configuration of this run alone, nothing left to decide; `train --config` repeats the run from it."""
    target = cell.target
    changes: dict[str, object] = {"method": (cell.method,), "mech": (cell.mech,), "seed": cell.seed, "seeds": 1}
    changes |= {"epsilon": (), "total_epsilon": (), "delta": ()}
    if cell.exchange_layer is not None:
        changes["exchange_layer"] = (cell.exchange_layer,)
    if target is None:
        changes |= {name: SweepConfig.model_fields[name].default for name in NOISE_FIELDS}
    else:
        changes |= {
            "epsilon": () if target.epsilon is None else (target.epsilon,),
            "total_epsilon": () if target.total_epsilon is None else (target.total_epsilon,),
            "delta": (target.delta,) if target.delta else (),
            "radius": (target.radius,),
            "norm": (target.norm,),
            "placement": (target.placement,),
        }
        if target.placement == UPDATES_ONLY:  # what concerns activations alone has no meaning here
            changes |= {"placement": ("auto",), "labels": "clear", "own": "clean", "planned_releases": None}
            changes |= {"noisy_training": "no"}
    return config.model_copy(update=changes)


def config_toml(config: SweepConfig) -> str:
    """A configuration as TOML that `load_config` reads back; fields without a value are left out."""
    return tomli_w.dumps({key: value for key, value in config.model_dump(mode="json").items() if value is not None})


def _failures_csv(failures: Sequence[FailureNote]) -> str:
    """Clients that the run went on without, one a line."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["round", "client", "phase", "reason"])
    writer.writerows([note.round, note.client, note.phase, note.reason] for note in failures)
    return buffer.getvalue()
