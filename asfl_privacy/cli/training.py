"""`sweep` and `train`."""

from __future__ import annotations

import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from asfl_privacy.accounting.journal import Journal
from asfl_privacy.cells import DEFAULT_DELTA
from asfl_privacy.cli.budget import to_json
from asfl_privacy.cli.one_cell import check_workers, for_launcher, one_cell
from asfl_privacy.config import SweepConfig
from asfl_privacy.configured_data import load_data
from asfl_privacy.data import Dataset
from asfl_privacy.data_ledger import check_journal
from asfl_privacy.execution import RunStoppedError, WorkerDiedError
from asfl_privacy.execution.choice import available_cores
from asfl_privacy.execution.executor import ExecutorRefusedError, reason_of
from asfl_privacy.execution.heap import keep_freed_memory
from asfl_privacy.folder_lock import FolderInUseError
from asfl_privacy.metrics import figures, headline
from asfl_privacy.provenance import provenance
from asfl_privacy.reporting import Row, write_atomic
from asfl_privacy.reporting.numerals import bound
from asfl_privacy.run import Run, execute_run, prepare_run, resolve_device, serve_run
from asfl_privacy.run_files import check_writable
from asfl_privacy.signals import stop_on_signals
from asfl_privacy.sweep import Progress, check_folder, check_launcher, prepare_sweep, run_sweep
from asfl_privacy.trackers import check_tracker
from asfl_privacy.unfinished import forget_finished, is_resumable, unfinished_folder
from asfl_privacy.worker import kept_record

REPRODUCE_ONLY = " (reproduce only, no guarantee)"


def sweep(
    *, config: SweepConfig, out: Path | None, workers: int | None, resume: bool, ledger: Path | None, as_json: bool
) -> int:
    """Train every cell of a grid and write the privacy–utility table, curve and statement.

    Flags that show several values in their default, and epsilon, total-epsilon, delta, radius, norm, placement and
    exchange-layer, take lists: --epsilon 1 4 16. Examples:

    asfl-privacy sweep --mech gaussian

    asfl-privacy sweep --mech laplace --epsilon 1 4 16 --placement input --noise once --seeds 5
    """
    console = Console(stderr=as_json, soft_wrap=True)
    started = time.monotonic()
    folder = out if out is not None else _default_folder(config, resume=resume)
    check_folder(config, out=folder, resume=resume)
    check_workers(workers)
    check_launcher(config)
    check_tracker(config.track)
    if config.executor == "torchrun":
        raise ValueError("executor torchrun runs one cell on many ranks; use train, or give sweep another executor")
    data = load_data(config)
    runs = prepare_sweep(config, data=data)
    check_journal(ledger, [run.privacy for run in runs], data=data, evaluate_on=config.evaluate_on)
    if workers is None and config.launcher == "local":
        workers = available_cores()
    for note in dict.fromkeys(note for run in runs for note in run.notes):
        console.print(note, highlight=False, style="dim")
    where = "the cluster's" if workers is None else str(min(workers, len(runs)))
    console.print(f"{len(runs)} runs on {where} workers, kept in {folder}", highlight=False)
    with _Shown(console, total=len(runs)) as shown:
        rows = run_sweep(
            config,
            runs,
            data=data,
            out=folder,
            workers=workers,
            resume=resume,
            journal=ledger,
            run_info=_run_info(config, private=any(run.privacy is not None for run in runs)),
            on_progress=shown.advance,
        )
    if as_json:
        print(to_json(rows))  # noqa: T201
    else:
        console.print(f"\n{_table(rows)}\n", highlight=False, markup=False)
        if any(row["reproducible"] == "yes" for row in rows):
            console.print(f"ε{REPRODUCE_ONLY}: the noise came from the seed", highlight=False)
        _print_total(console, ledger)
        console.print(f"{time.monotonic() - started:.0f} s; report: {folder / 'report.html'}", highlight=False)
    return 0 if all(row["status"] == "ok" for row in rows) else 1


def train(
    *, config: SweepConfig, out: Path | None, workers: int | None, resume: bool, ledger: Path | None, as_json: bool
) -> int:
    """Train one run and write its folder: config.toml, metrics.csv, ledger.json, statement.md, checkpoint.safetensors.

    Takes the flags of sweep with one value each. Without noise: --mech none. A run that was stopped, however, goes on
    with the same command and --resume. On several machines or GPUs: torchrun --nproc-per-node N -m asfl_privacy train …
    Examples:

    asfl-privacy train --mech gaussian --epsilon 4 --seeds 1

    asfl-privacy train --method fedavg --mech none
    """
    check_workers(workers)
    wanted, cell = one_cell(for_launcher(config), command="train")
    check_tracker(wanted.track)
    data = load_data(wanted)
    run = prepare_run(wanted, cell, data=data)
    torch.set_num_threads(1)
    keep_freed_memory()
    if wanted.executor != "torchrun":
        return _train_here(
            wanted, run, data=data, out=out, workers=workers, resume=resume, ledger=ledger, as_json=as_json, device=None
        )
    from asfl_privacy.execution.distributed import init_ranks  # loads torch.distributed

    if os.environ["RANK"] == "0" and out is not None and not resume:  # before the others wait for this one
        check_writable(out.resolve())
    try:
        with init_ranks(resolve_device(wanted.device)) as ranks:
            if ranks.rank:
                serve_run(wanted, run, data=data, device=ranks.device)
                return 0
            return _train_here(
                wanted,
                run,
                data=data,
                out=out,
                workers=1,
                resume=resume,
                ledger=ledger,
                as_json=as_json,
                device=ranks.device,
            )
    except WorkerDiedError as error:
        print(f"asfl-privacy: run failed: {error}", file=sys.stderr)  # noqa: T201
        return 1


def _train_here(
    wanted: SweepConfig,
    run: Run,
    *,
    data: Dataset,
    out: Path | None,
    workers: int | None,
    resume: bool,
    ledger: Path | None,
    as_json: bool,
    device: torch.device | None,
) -> int:
    """Train a prepared run, as rank 0 where there are several, and say what came out."""
    check_journal(ledger, [run.privacy], data=data, evaluate_on=wanted.evaluate_on)
    folder = (
        out if out is not None else _run_folder(Path("runs") / f"{run.cell.label}-seed{run.cell.seed}", resume=resume)
    )
    folder = folder.resolve()
    console = Console(stderr=as_json, soft_wrap=True)
    if resume and (finished := kept_record(folder, config=wanted, run=run)) is not None:
        forget_finished(folder)
        console.print(f"{folder} holds the finished run; nothing is left to do", highlight=False)
        print(to_json(finished.row)) if as_json else console.print(_line(finished.row, run.cell.label), highlight=False)  # noqa: T201
        return 0
    check_writable(folder)
    if resume and not is_resumable(folder):
        console.print(f"nothing is kept of a run in {folder}: it starts anew", highlight=False)
    for note in run.notes:
        console.print(note, highlight=False, style="dim")
    try:
        with stop_on_signals() as should_stop:
            outcome = execute_run(
                wanted,
                run,
                data=data,
                folder=folder,
                journal=ledger,
                workers=workers if workers is not None else available_cores(),
                resume=resume,
                device=device,
                should_stop=should_stop,
                on_evaluation=lambda e: console.print(
                    f"round {e.round} of {wanted.rounds}: {headline(figures(e))}", highlight=False
                ),
                on_note=lambda note: console.print(note, highlight=False, style="dim"),
            )
    except RunStoppedError as error:
        kept = unfinished_folder(folder)
        what = "go on with the same command and --resume" if is_resumable(folder) else "nothing was kept of it"
        raise RunInterruptedError(f"{error}{f', kept in {kept}' if is_resumable(folder) else ''}; {what}") from None
    except (FolderInUseError, ExecutorRefusedError):
        raise
    except Exception as error:  # the run failed, not its input: one line, and for a bug the traceback beside the folder
        print(f"asfl-privacy: run failed: {_failure(error, folder)}", file=sys.stderr)  # noqa: T201
        return 1
    if as_json:
        print(to_json(outcome.row))  # noqa: T201
    else:
        console.print(_line(outcome.row, run.cell.label), highlight=False)
        for warning in outcome.warnings:
            console.print(f"warning: {warning}", highlight=False, style="yellow")
        _print_total(console, ledger)
        console.print(f"run folder: {folder}", highlight=False)
    return 0


def _print_total(console: Console, ledger: Path | None) -> None:
    """What all runs together have spent of the data set's ledger."""
    if ledger is None or not ledger.is_file():
        return
    book = Journal.read(ledger)
    total = book.spent(delta=DEFAULT_DELTA)
    console.print(
        f"{ledger}: {len(book.runs)} noised runs on these records together (others have no bound): "
        f"ε {bound(total.high)} at δ {total.delta:g}" + (REPRODUCE_ONLY if book.ledger().is_reproducible else ""),
        highlight=False,
        markup=False,
    )


def _failure(error: Exception, folder: Path) -> str:
    """Why a run failed, in one line, and where the rest of it is."""
    kept = (
        f"; what was done is kept in {unfinished_folder(folder)}: go on with --resume" if is_resumable(folder) else ""
    )
    if isinstance(error, ValueError | OSError | WorkerDiedError):
        return " ".join(str(error).split()) + kept
    trace = folder.with_name(f"{folder.name}.traceback.txt")
    trace.parent.mkdir(parents=True, exist_ok=True)
    remote = getattr(error, "traceback", "")  # of a worker process or another rank
    write_atomic(trace, f"{traceback.format_exc()}{remote}")
    return f"{reason_of(error)}; traceback in {trace}{kept}"


class RunInterruptedError(Exception):
    """The run was interrupted; what was done is kept."""


class _Shown:
    """Progress as a live bar on a terminal, as one plain line a run elsewhere."""

    def __init__(self, console: Console, *, total: int) -> None:
        self._console = console
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("runs", total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def advance(self, progress: Progress) -> None:
        """Show that a run has ended."""
        self._bar.update(self._task, completed=progress.done)
        left = "" if progress.seconds_left is None else f", about {progress.seconds_left:.0f} s left"
        line = f"[{progress.done}/{progress.total}] {_line(progress.row, progress.label)}"
        self._console.print(line + ("" if self._console.is_terminal else left), highlight=False, markup=False)


def _line(row: Row, label: str) -> str:
    """A run in one line."""
    if row["status"] != "ok":
        return f"{label} seed {row['seed']}: {row['status']}"
    total = row["epsilon_total"]
    spent = f", total ε {bound(total)} at δ {row['delta_total']}" if isinstance(total, float) else ""
    if row["reproducible"] == "yes":
        spent += REPRODUCE_ONLY
    return f"{label} seed {row['seed']}: {headline(row)}{spent} ({row['seconds']:.0f} s)"


HIDDEN_ON_TERMINALS = ("ε whole record", "points below FedAvg", "runs", "sensitivity")


def _table(rows: Sequence[Row]) -> str:
    """The report's table in plain columns, the widest ones left to the report; never cut, whatever the terminal."""
    from asfl_privacy.reporting.cells import gather_cells
    from asfl_privacy.reporting.display import display_table

    shown = display_table(gather_cells(rows))
    wanted = [number for number, heading in enumerate(shown.headings) if heading not in HIDDEN_ON_TERMINALS]
    lines = [[line[number] for number in wanted] for line in (shown.headings, *shown.lines)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(wanted))]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )


def _default_folder(config: SweepConfig, *, resume: bool) -> Path:
    """reports/<slug>, numbered from the second sweep on; with `resume` the newest one there is."""
    base = Path("reports") / f"{'-'.join(config.mech)}-{config.data.replace(':', '-')}"
    if not resume:
        return _unused(base)
    existing = [path for path in _names(base) if path.exists()]
    if not existing:
        raise ValueError(f"resume: there is no {base} to go on with; name the folder with --out, or leave --resume out")
    return existing[-1]


def _run_folder(base: Path, *, resume: bool) -> Path:
    """runs/<slug>, numbered from the second on; with `resume` the newest that was begun and not finished."""
    if not resume:
        return next(path for path in _names(base) if not path.exists() and not unfinished_folder(path).exists())
    begun = [path for path in _names(base) if unfinished_folder(path).exists()]
    if not begun:
        raise ValueError(f"resume: no run of {base} was begun and not finished; leave --resume out")
    return begun[-1]


def _unused(base: Path) -> Path:
    return next(path for path in _names(base) if not path.exists())


def _names(base: Path) -> Iterator[Path]:
    yield base
    yield from (_numbered(base, number) for number in range(2, 10_000))


def _numbered(base: Path, number: int) -> Path:
    return base.with_name(f"{base.name}-{number}")


def _run_info(config: SweepConfig, *, private: bool) -> dict[str, object]:
    """What made the rows."""
    title = (
        f"Privacy and utility: {', '.join(config.mech)} noise on {config.data}"
        if private
        else f"Utility without noise, and without privacy, on {config.data}"
    )
    command = shlex.join(["asfl-privacy", *sys.argv[1:]])
    return provenance(title=title, command=command, config=config.model_dump(mode="json"))
