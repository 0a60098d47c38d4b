"""All benchmarks of what makes a run private: accountants, release, payload, ledger and audit, with their peers and floors.

    python experiments/benchmarks/privacy/run.py [--quick] [--out reports/privacy]

Each number is a row of OUT/rows.csv, written as soon as its benchmark is done; OUT/report.md and the figures are made from
the rows and run.json alone (report.py). dp-accounting comes with the extra `dev`; opendp is measured where it is installed.
Everything runs on one thread. --quick took three to five minutes on a busy core; the whole takes several times as long.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import accountants
import audit_power
import faults
import payload_size
import release_speed
from report import write_report
from rows import MEASURED, MISSING, Row, commit_of, write_rows

from asfl_privacy.reporting import write_atomic
from asfl_privacy.reporting.run_info import plain_run_info, to_json

FOLDER = Path(__file__).resolve().parent
PACKAGES = (
    "asfl-privacy",
    "torch",
    "numpy",
    "scipy",
    "dp-accounting",
    "opacus",
    "opendp",
    "mpmath",
    "matplotlib",
    "seaborn",
)
FULL: dict[str, Any] = {
    "counts": accountants.COUNTS,
    "interval": faults.INTERVAL,
    "seconds": 2.0,
    "payload_records": 8,
    "ledger": {"rounds": 1000, "records": 60_000, "repeats": 3},
    "factors": audit_power.FACTORS,
    "residuals": audit_power.COUNTS,
    "audit_runs": 100,
    "seed": 0,
}
QUICK: dict[str, Any] = {
    **FULL,
    "counts": accountants.QUICK_COUNTS,
    "interval": faults.QUICK_INTERVAL,
    "seconds": 0.3,
    "payload_records": 2,
    "ledger": {"rounds": 100, "records": 60_000, "repeats": 2},
    "factors": audit_power.QUICK_FACTORS,
    "residuals": audit_power.QUICK_COUNTS,
    "audit_runs": 10,
}


def release(seconds: float) -> Iterator[Row]:
    """Speed of samplers, and the time their tables take."""
    for name, milliseconds in release_speed.table_times():
        yield Row(benchmark="release", case="table", tool=name, quantity="ms", kind=MEASURED, value=milliseconds)
    for name, rate in release_speed.rates(values=32 * 6272, seconds=seconds):
        kind = MISSING if rate is None else MEASURED
        yield Row(benchmark="release", case="rate", tool=name, quantity="M values/s", kind=kind, value=rate)


def payload(records: int) -> Iterator[Row]:
    """Sizes of payloads."""
    for family, multiplier, cells, found in payload_size.shares(records):
        for code, share in found.items():
            yield Row(
                benchmark="payload",
                case=family,
                tool=code,
                quantity="bytes ÷ float32's",
                kind=MEASURED,
                value=share,
                at=multiplier,
                note=f"{cells:.1f}",
            )


def ledger(config: dict[str, int]) -> Iterator[Row]:
    """Time and memory of the ledger, in a process of its own, so that its peak is not that of the other benchmarks."""
    code = (
        "import dataclasses, json, sys, ledger_speed;"
        "print(json.dumps([dataclasses.asdict(one) for one in ledger_speed.measure(**json.loads(sys.argv[1]))]))"
    )
    command = [sys.executable, "-c", code, json.dumps(config)]
    child = subprocess.run(command, cwd=FOLDER, check=True, stdout=subprocess.PIPE, text=True)
    for found in json.loads(child.stdout):
        case = f"{config['rounds']} rounds × {config['records']} records, {found['name']}, {found['multipliers']} multipliers"
        for tool, quantity, name in (
            ("record", "s", "recorded"),
            ("total", "s", "totalled"),
            ("numpy count", "s", "floor"),
            ("peak memory", "MiB", "peak_mib"),
            ("file", "bytes a release", "bytes_per_release"),
        ):
            yield Row(benchmark="ledger", case=case, tool=tool, quantity=quantity, kind=MEASURED, value=found[name])


def audit(config: dict[str, Any]) -> Iterator[Row]:
    """How often each part of the audit sees a σ that is too small."""
    for factor in config["factors"]:
        for count in config["residuals"]:
            for found in audit_power.measure(factor, count, runs=config["audit_runs"], seed=config["seed"]):
                yield Row(
                    benchmark="audit",
                    case=f"σ × {factor:g}",
                    tool=found["part"],
                    quantity="share of runs",
                    kind=MEASURED,
                    value=found["rate"],
                    at=count,
                    note=f"{found['runs']} runs of each cell.",
                )


def benchmarks(config: dict[str, Any]) -> dict[str, Callable[[], Iterator[Row]]]:
    """By name, in the order in which they run."""
    return {
        "release": lambda: release(config["seconds"]),
        "payload": lambda: payload(config["payload_records"]),
        "ledger": lambda: ledger(config["ledger"]),
        "accountants": lambda: accountants.measure(counts=config["counts"]),
        "faults": lambda: faults.measure(interval=config["interval"]),
        "audit": lambda: audit(config),
    }


def facts_of(command: str, config: dict[str, Any]) -> str:
    """The text of run.json."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    facts = {
        "command": command,
        "commit": commit_of(FOLDER),
        "started": started,
        "config": config,
        "versions": versions,
    }
    return to_json(plain_run_info(facts))


def shown(row: Row) -> str:
    """One line for a terminal."""
    value = row.kind if row.value is None else f"{row.value:.6g} {row.quantity}"
    at = "" if row.at is None else f" × {row.at:g}"
    return f"{row.benchmark:12} {row.case}{at}; {row.tool}: {value}"


def main(arguments: list[str]) -> None:
    """Measure, write rows, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer releases, rounds, residuals and repeats")
    parser.add_argument("--out", type=Path, default=Path("reports/privacy"), help="folder of rows, report and figures")
    options = parser.parse_args(arguments)
    path: Path = options.out / "rows.csv"
    if path.exists():
        parser.error(f"{path} exists: a new run would replace it; move it away, or pass another --out")
    config = QUICK if options.quick else FULL
    command = " ".join(["python", "experiments/benchmarks/privacy/run.py", shlex.join(arguments)]).strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(options.out / "run.json", facts_of(command, config))
    rows: list[Row] = []
    for measure in benchmarks(config).values():
        for row in measure():
            rows.append(row)
            print(shown(row), flush=True)
        write_rows(path, rows)
    write_report(options.out)
    print(f"report: {options.out / 'report.md'}")


if __name__ == "__main__":
    main(sys.argv[1:])
