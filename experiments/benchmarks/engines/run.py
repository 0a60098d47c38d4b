"""Engines against each other on one workload: seconds of a round, processor seconds, and what they grow with.

    python experiments/benchmarks/engines/run.py --environments DIR [--quick] [--repeats N] [--only RACE ...]
        [--out reports/engines]

Each run of an engine is a process of its own and a row of OUT/rows.csv, written as soon as it is known; OUT/report.md and
the figures are made from the rows and run.json alone (report.py). Runs of a race are interleaved, and each is compared
with the floor's run of the same repeat. Peers live in environments of their own under DIR, made there where they are
missing (environments.py); without DIR they get a row that says so. Needs an otherwise idle machine of two cores or more.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from environments import ENVIRONMENTS, make, python_of
from operations import operations_of
from races import CLIENTS, ENGINES, FIXED, LOCAL, RELEASE, SIZE, Entry, Race, races
from report import write_report
from rows import DIFFERS, FAILED, MISSING, OK, Row, judged, write_rows
from task_data import dataset_of, image_data, prepare
from workload import Task, Weights

from asfl_privacy.reporting import write_atomic
from asfl_privacy.reporting.run_info import plain_run_info, to_json

FOLDER = Path(__file__).resolve().parent
PACKAGES = ("asfl-privacy", "torch", "numpy", "matplotlib", "seaborn")
NAMES = (ENGINES, FIXED, LOCAL, RELEASE, SIZE, CLIENTS)
PATIENCE_S = 900.0


class Stable:
    """Tasks' folders, environments and floors of one run of the benchmark."""

    def __init__(self, scratch: Path, environments: Path | None) -> None:
        self.scratch, self.environments = scratch, environments
        self.tasks: dict[Task, tuple[Path, Task]] = {}
        self.missing: dict[str, str] = {}

    def folder_of(self, task: Task) -> tuple[Path, Task]:
        """The folder of a task, written once, and the task with `auto` decided."""
        if task not in self.tasks:
            folder = self.scratch / f"task{len(self.tasks)}"
            self.tasks[task] = (folder, prepare(folder, task))
        return self.tasks[task]

    def python_for(self, environment: str) -> tuple[str, str]:
        """An environment's interpreter, or why there is none."""
        if not environment:
            return sys.executable, ""
        if self.environments is None:
            return "", "no --environments given"
        if environment not in self.missing:
            self.missing[environment] = make(self.environments, ENVIRONMENTS[environment])
        return str(python_of(self.environments, environment)), self.missing[environment]

    def run(
        self, race: Race, entry: Entry, *, repeat: int, floor: Row | None, base: Weights | None
    ) -> tuple[Row, Weights | None]:
        """One run of one entry, judged by the floor's run of the same repeat."""
        row = Row(race=race.race, case=race.case, tool=entry.name, repeat=repeat, status=MISSING, at=race.at)
        python, why = self.python_for(entry.engine.environment)
        if why:
            return replace(row, note=why), None
        folder, task = self.folder_of(entry.task)
        out = self.scratch / "result"
        for suffix in (".json", ".pt"):
            out.with_suffix(suffix).unlink(missing_ok=True)
        error = start(python, str(FOLDER / entry.engine.script), str(folder), str(out), *entry.engine.arguments)
        if error:
            return replace(row, status=FAILED, note=error), None
        facts = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
        weights = torch.load(out.with_suffix(".pt"), weights_only=True)
        row = replace(
            row,
            status=OK,
            walls=" ".join(f"{one:.6f}" for one in facts["walls"]),
            cpu_s=facts["cpu"],
            once_s=facts["once"],
            peak_mib=facts["peak_mib"],
            accuracy=facts["accuracy"],
            loss=facts["loss"],
            steps=facts["steps"],
            drift=None if base is None else drift(weights, base, initial=initial_of(folder)),
            note=" ".join(f"{name} {version}" for name, version in facts["versions"].items()),
        )
        return judged(row, floor, num_steps=task.rounds * task.cohort * task.num_steps), weights


def initial_of(folder: Path) -> Weights:
    """The weights that a task starts from."""
    return dict(torch.load(folder / "data.pt", weights_only=True)["initial"])


def drift(weights: Weights, base: Weights, *, initial: Weights) -> float:
    """Distance of two results, ÷ the way that the second one travelled; 0 where neither moved."""
    flat = [torch.cat([one[name].double().flatten() for name in base]) for one in (weights, base, initial)]
    apart, travelled = float((flat[0] - flat[1]).norm()), float((flat[1] - flat[2]).norm())
    return apart / travelled if travelled > 1e-6 * float(flat[2].norm()) else apart / float(flat[2].norm())


def start(*command: str) -> str:
    """Run an engine's process to its end; returns why it failed, in one line, or nothing."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    environment |= {"BENCHMARK_STARTED": repr(time.time()), "PYTHONPATH": str(FOLDER)}  # the latter for workers
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(
            command, cwd=FOLDER, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = child.wait(timeout=PATIENCE_S)
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return f"not done after {PATIENCE_S:g} s"
            raise
        if code == 0:
            return ""
        log.seek(0)
        lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    return f"exit status {code}: {lines[-1][:300] if lines else 'said nothing'}"


def run_race(race: Race, stable: Stable, *, repeats: int, keep: list[Row], path: Path) -> None:
    """All runs of a race, in turn; every other repeat goes through the entries backwards, the floor first."""
    for repeat in range(repeats):
        floor: Row | None = None
        base: Weights | None = None
        others = race.entries[1:] if repeat % 2 == 0 else race.entries[:0:-1]
        for entry in (race.entries[0], *others):
            is_same = floor is not None and entry.task == race.entries[0].task
            row, weights = stable.run(
                race, entry, repeat=repeat, floor=floor if is_same else None, base=base if is_same else None
            )
            if entry is race.entries[0]:
                floor, base = row, weights
            keep.append(row)
            write_rows(path, keep)
            print(shown(row), flush=True)


def shown(row: Row) -> str:
    """One line for a terminal."""
    if row.status != OK:
        return f"{row.race:8} {row.case}; {row.tool}: {row.status}: {row.note}"
    off = "" if row.drift is None else f", drift {row.drift:.1e}"
    return (
        f"{row.race:8} {row.case}; {row.tool}: {row.round_s:.4f} s a round, {row.cpu_s:.4f} s of processors, "
        f"{row.once_s:.1f} s once, {row.peak_mib:.0f} MiB, accuracy {row.accuracy:.3f}{off}"
    )


def shares_of_operations(found: Sequence[Race]) -> dict[str, float]:
    """Arithmetic of each line of the races of local work, ÷ that of the first line; the same for every engine."""
    shares = {}
    for race in found:
        if race.race == LOCAL:
            shape = tuple(dataset_of(race.entries[0].task.data).train_inputs.shape[1:])
            floor = operations_of(race.entries[0].task, input_shape=shape)
            shares |= {entry.name: operations_of(entry.task, input_shape=shape) / floor for entry in race.entries}
    return shares


def facts_of(command: str, config: dict[str, Any]) -> str:
    """The text of run.json."""
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}
    peers = {one.name: " ".join((*one.requirements, *filter(None, one.pythons[:1]))) for one in ENVIRONMENTS.values()}
    facts = {
        "command": command,
        "commit": commit_of(FOLDER),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": config | {"cores": os.cpu_count() or 0},
        "versions": versions | peers,
    }
    return to_json(plain_run_info(facts))


def commit_of(folder: Path) -> str | None:
    """The checkout's commit, with + where files have changed since; None outside one."""
    git = ["git", "-C", str(folder)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit[:12] + ("+" if changed.strip() else "")


def main(arguments: list[str]) -> None:
    """Measure, write rows, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, help="folder of the peers' environments, outside the checkout")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, engines, sizes and repeats")
    parser.add_argument("--repeats", type=int, help="runs of each engine; default 3, with --quick 1")
    parser.add_argument("--only", nargs="+", metavar="RACE", choices=NAMES, default=NAMES, help=", ".join(NAMES))
    parser.add_argument("--out", type=Path, default=Path("reports/engines"), help="folder of rows, report and figures")
    options = parser.parse_args(arguments)
    path: Path = options.out / "rows.csv"
    repeats = options.repeats or (1 if options.quick else 3)
    if path.exists():
        parser.error(f"{path} exists: a new run would replace it; move it away, or pass another --out")
    image = image_data()
    found = [race for race in races(image=image, quick=options.quick) if race.race in options.only]
    command = " ".join(["python", "experiments/benchmarks/engines/run.py", shlex.join(arguments)]).strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    tasks = {race.case: asdict(race.entries[0].task) for race in found}
    config = {"repeats": repeats, "image data": image, "tasks": tasks, "operations": shares_of_operations(found)}
    write_atomic(options.out / "run.json", facts_of(command, config))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="engines-") as scratch:
        root = None if options.environments is None else options.environments.resolve()
        stable = Stable(Path(scratch), root)
        for race in found:
            run_race(race, stable, repeats=repeats, keep=rows, path=path)
    write_report(options.out)
    print(f"report: {options.out / 'report.md'}")
    if any(row.status in (FAILED, DIFFERS) for row in rows):
        print("some engines failed or did other work than the floor; the report names them")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
