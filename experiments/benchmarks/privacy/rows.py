"""Rows of the privacy benchmarks: one measured or claimed number each, with what it stands for."""

from __future__ import annotations

import csv
import io
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from asfl_privacy.reporting import write_atomic

# Kinds of number, as their tool claims them.
UPPER, LOWER, ESTIMATE, EXACT, MEASURED = "upper bound", "lower bound", "estimate", "truth", "measured"
MISSING, REFUSES, FAILED = "not installed", "refuses", "failed"

ROUNDING = 1e-9  # relative: what two correct figures, each computed in float64, may differ by


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number.

    Attributes:
        benchmark: "accountants", "faults", "release", "payload", "ledger" or "audit".
        case: what was asked, in words.
        tool: who answers.
        quantity: what the number is, with its unit.
        kind: of number, one of the constants above, as the tool claims it.
        value: the number, or None where there is none.
        at: what the case is plotted over (releases, noise multiplier, residuals), or None.
        note: how it came about, or why there is none.
    """

    benchmark: str
    case: str
    tool: str
    quantity: str
    kind: str
    value: float | None
    at: float | None = None
    note: str = ""


COLUMNS = tuple(field.name for field in fields(Row))


def wrong_side(row: Row, *, low: float, high: float) -> str:
    """What a reference low ≤ truth ≤ high says against a claimed number: "" where nothing.

    Example:
        >>> claim = Row(benchmark="faults", case="", tool="", quantity="ε", kind=UPPER, value=1.1)
        >>> wrong_side(claim, low=90.8, high=90.9), wrong_side(claim, low=1.0, high=1.2)
        ('TOO LOW', '')
    """
    if row.value is None:
        return ""
    if row.kind in (UPPER, ESTIMATE) and not row.value >= low * (1.0 - ROUNDING):
        return "TOO LOW"
    if row.kind == LOWER and not row.value <= high * (1.0 + ROUNDING):
        return "TOO HIGH"
    return ""


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replace the file in one step, so that a killed run leaves whole rows."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: "" if value is None else value for name, value in asdict(row).items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.getvalue())


def read_rows(path: Path) -> list[Row]:
    """The rows of a file.

    Raises:
        SystemExit: with one line, if the file has other columns.
    """
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise SystemExit(f"{path} has other columns than this benchmark writes: move it away and run again")
        return [_row(line) for line in reader]


def _row(line: dict[str, str]) -> Row:
    texts = {name: line[name] for name in COLUMNS if name not in ("value", "at")}
    value, at = (float(line[name]) if line[name] else None for name in ("value", "at"))
    return Row(value=value, at=at, **texts)


def commit_of(folder: Path) -> str | None:
    """The checkout's commit, with + where files have changed since; None outside one."""
    git = ["git", "-C", str(folder)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit[:12] + ("+" if changed.strip() else "")
