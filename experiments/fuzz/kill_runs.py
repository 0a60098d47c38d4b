"""Kill runs at random moments and resume them: `python experiments/fuzz/kill_runs.py --kills 50`.

Each trial starts a run of 20 rounds in processes of its own, sends SIGKILL or SIGTERM to the parent or to one of its workers at
a random moment, checks that no process and no shared file is left behind, resumes it to its end, and compares the run
folder with that of a run that nobody disturbed: weights, row, ledger, statement and what reproduces of the metrics, to the
bit. Exit status 1 if one differs, if a killed run cannot be resumed, or if something is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from asfl_privacy.metrics import reproducible_part

ROUNDS = 20
PATIENCE = 600.0
"""Seconds after which a run counts as hung."""


def command(folder: Path, *, executor: str, mech: str, resume: bool) -> list[str]:
    """One attempt of the run."""
    flags = {
        "mech": mech,
        "rounds": ROUNDS,
        "clients": 8,
        "cohort": 4,
        "tail-steps": 4,
        "full-steps": 4,
        "checkpoint-every": 3,
        "evaluate-every": 2,
        "executor": executor,
        "workers": 2,
        "out": folder,
    }
    if mech != "none":
        flags |= {"total-epsilon": 20, "filter": "individual", "labels": "randomized:2", "noise": "once"}
    words = [f"--{name}={value}" for name, value in flags.items()]
    return [sys.executable, "-m", "asfl_privacy", "train", *words, *(["--resume"] if resume else [])]


def children(parent: int) -> list[int]:
    """The processes that a process has started, not its helpers of the standard library."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            after_name = (path / "stat").read_text().rpartition(")")[2].split()
            words = (path / "cmdline").read_text()
        except OSError:
            continue
        if int(after_name[1]) == parent and "resource_tracker" not in words:
            found.append(int(path.name))
    return found


def content(folder: Path) -> dict[str, object]:
    """What must be the same to the bit."""
    row = json.loads((folder / "row.json").read_text())
    row["row"].pop("seconds")
    row.pop("sha256")
    kept: dict[str, object] = {"row.json": row, "metrics.csv": reproducible_part((folder / "metrics.csv").read_text())}
    for path in sorted(folder.iterdir()):
        if path.name not in kept:
            kept[path.name] = path.read_bytes()
    return kept


def shared_files() -> set[str]:
    """Names of the files in shared memory."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def wait(process: subprocess.Popen[str]) -> str:
    """What a process says on standard error until it ends."""
    try:
        return process.communicate(timeout=PATIENCE)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        raise SystemExit("a run hangs") from None


def start(words: list[str]) -> subprocess.Popen[str]:
    """A run in a session of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def trial(folder: Path, *, executor: str, mech: str, seconds: float, rng: random.Random) -> tuple[str, str, list[str]]:
    """Start, kill, resume; what was killed and how, when, and what is wrong."""
    before = shared_files()
    process = start(command(folder, executor=executor, mech=mech, resume=False))
    time.sleep(rng.uniform(0.0, seconds))
    workers = children(process.pid)
    number = rng.choice([signal.SIGKILL, signal.SIGTERM])
    victim = rng.choice(["parent", "worker"])
    if victim == "worker" and not workers:
        victim = "parent"
    if process.poll() is not None:
        return "finished before", "", []
    try:
        os.kill(process.pid if victim == "parent" else rng.choice(workers), number)
    except ProcessLookupError:
        victim = "nobody"
    said = wait(process)
    faults = []
    deadline = time.monotonic() + 10.0
    while (alive := [pid for pid in workers if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    if alive:
        faults.append(f"processes {alive} outlived their parent")
    if left := shared_files() - before:
        faults.append(f"left in shared memory: {left}")
    lines = [line for line in said.splitlines() if line.strip()]
    if victim == "worker" or number == signal.SIGTERM:
        telling = [line for line in lines if line.startswith("asfl-privacy: ")]
        early = not folder.with_name(folder.name + ".unfinished").exists() and not folder.exists()
        if not folder.exists() and not early and (len(telling) != 1 or "Traceback" in said):
            faults.append(f"no one clear line: {said[-500:]!r}")
    if not folder.exists():
        begun = folder.with_name(folder.name + ".unfinished").exists()
        again = start(command(folder, executor=executor, mech=mech, resume=begun))
        said = wait(again)
        if again.returncode:
            faults.append(f"resume failed: {said[-500:]!r}")
    name = f"{victim}, {signal.Signals(number).name}"
    return name, lines[-1] if lines else "", faults


def main() -> int:
    """Run the trials and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--executor", default="processes")
    parser.add_argument("--mech", default="gaussian", choices=["gaussian", "none"])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    counts: Counter[str] = Counter()
    bad = 0
    with tempfile.TemporaryDirectory() as scratch:
        calm = Path(scratch) / "calm"
        began = time.monotonic()
        process = start(command(calm, executor=arguments.executor, mech=arguments.mech, resume=False))
        said = wait(process)
        if process.returncode:
            raise SystemExit(f"the undisturbed run failed: {said}")
        seconds, expected = time.monotonic() - began, content(calm)
        print(f"undisturbed: {seconds:.1f} s; files {', '.join(expected)}")
        number = 0
        while sum(counts.values()) - counts["finished before"] < arguments.kills:
            number += 1
            folder = Path(scratch) / f"run{number}"
            name, last, faults = trial(
                folder, executor=arguments.executor, mech=arguments.mech, seconds=1.05 * seconds, rng=rng
            )
            if not faults:
                found = content(folder)
                faults = [f"{file} differs" for file in {*expected, *found} if expected.get(file) != found.get(file)]
            counts[name] += 1
            bad += bool(faults)
            print(f"{number}: {name}{f': {last}' if last else ''}{' FAULT ' + '; '.join(faults) if faults else ''}")
            shutil.rmtree(folder, ignore_errors=True)
    print(", ".join(f"{count} × {name}" for name, count in sorted(counts.items())))
    print(f"{bad} of {sum(counts.values())} ended otherwise than the undisturbed run")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
