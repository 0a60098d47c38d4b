"""`profile`: where a round's time goes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from asfl_privacy.cli.budget import to_json
from asfl_privacy.cli.one_cell import check_workers, one_cell
from asfl_privacy.config import SweepConfig
from asfl_privacy.configured_data import load_data
from asfl_privacy.execution import WorkerDiedError
from asfl_privacy.execution.choice import available_cores
from asfl_privacy.execution.executor import ExecutorRefusedError
from asfl_privacy.execution.heap import keep_freed_memory
from asfl_privacy.run import prepare_run
from asfl_privacy.run_profile import Profile, check_profile, profile_run

BY_CLIENTS = ("head", "noise", "exchange", "tail", "full")
"""Phases that clients spend time in."""


def profile(*, config: SweepConfig, measure: int, trace: Path | None, workers: int | None, as_json: bool) -> int:
    """Run a few rounds as train would and print where a round's time goes: phases, bytes, memory.

    Takes the flags of train; --rounds sets budgets and noise alone. Rounds are measured after a warm-up, from one
    evaluation to another. Nothing is written but --trace, and nothing leaves: noised activations stay on this machine
    and are forgotten, so no budget is spent. Checkpoints and the run folder are not part of it. Examples:

    asfl-privacy profile --mech gaussian --epsilon 4

    asfl-privacy profile --method fedavg --mech none --executor threads --json
    """
    wanted, cell = one_cell(config, command="profile")
    check_profile(wanted, num_rounds=measure)
    check_workers(workers)
    _check_trace(trace)
    data = load_data(wanted)
    run = prepare_run(wanted, cell, data=data)
    console = Console(stderr=as_json, soft_wrap=True)
    for note in run.notes:
        console.print(note, highlight=False, style="dim")
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        found = profile_run(
            wanted,
            run,
            data=data,
            num_rounds=measure,
            workers=workers if workers is not None else available_cores(),
            trace=trace,
            on_note=lambda note: console.print(note, highlight=False, style="dim"),
        )
    except ExecutorRefusedError:
        raise
    except Exception as error:  # the run failed, not its input
        print(f"asfl-privacy: run failed: {_failure(error)}", file=sys.stderr)  # noqa: T201
        return 1
    if as_json:
        print(to_json(found.to_dict()))  # noqa: T201
    else:
        _print(found, console=console, every=wanted.evaluate_every)
        if trace is not None:
            console.print(f"trace of one round, clients one after the other: {trace}", highlight=False)
    return 0


def _check_trace(trace: Path | None) -> None:
    if trace is None:
        return
    if trace.exists():
        raise ValueError(f"trace {trace} is in use; give a new file")
    if not trace.parent.is_dir() or not os.access(trace.parent, os.W_OK):
        raise ValueError(f"trace {trace} cannot be written; give a file in a folder that can")


def _failure(error: Exception) -> str:
    """Why the run failed, in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, ValueError | OSError | WorkerDiedError):
        return text
    where = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))
    return f"{where}{type(error).__name__}: {text}; train with the same flags keeps the traceback"


def _print(found: Profile, *, console: Console, every: int) -> None:
    """The table and what belongs to it."""
    table = Table(box=SIMPLE_HEAD)
    for heading in ("phase", "seconds a round", "share"):
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    spent = {**found.seconds, "other": found.other_seconds}
    total = sum(spent.values())
    for name, value in spent.items():
        share = f"{100 * value / total:.1f} %" if total > 0 else ""
        table.add_row(f"{name} (clients)" if name in BY_CLIENTS else name, f"{value:.5f}", share)
    console.print(table)
    cpu = "" if found.cpu_seconds is None else f", {found.cpu_seconds:.5f} CPU-seconds"
    lines = [
        f"{found.cell}, executor {found.choice.name} on {found.device}",
        f"measured: {found.rounds_measured} rounds with {found.evaluations} evaluations, after {found.rounds_warm_up} of "
        "warm-up" + (f" (train evaluates every {every} rounds)" if every > found.rounds_measured else ""),
        f"a round: {found.wall_seconds:.5f} s of wall{cpu}",
        _clients_line(found),
        "bytes a round: " + ", ".join(f"{name} {value:,.0f}" for name, value in found.bytes_a_round.items()),
    ]
    if found.peak_memory_bytes:
        workers = found.peak_memory_workers_bytes
        lines.append(
            f"peak memory: {found.peak_memory_bytes / 1e6:,.0f} MB"
            + (f", and {workers / 1e6:,.0f} MB in workers" if workers else "")
        )
    for line in lines:
        console.print(line, highlight=False, markup=False)


def _clients_line(found: Profile) -> str:
    """How the clients' seconds, which are summed over clients, relate to the wall time."""
    seconds, wall = found.client_seconds, found.clients_wall_seconds
    if found.one_after_the_other:
        return f"clients: {seconds:.5f} client seconds, one after the other; phases and other make up the wall time"
    return (
        f"clients: {seconds:.5f} client seconds, summed over clients, in {wall:.5f} s of wall: {seconds / wall:.2f} at a "
        "time; phases of clients may add up to more than the wall time, and other is outside the clients' work"
    )
