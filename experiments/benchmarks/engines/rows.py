"""Rows of the engines benchmark: one run of one engine each; and what the runs of a race say together."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median

from asfl_privacy.reporting import write_atomic

OK, FAILED, MISSING, DIFFERS = "ok", "failed", "not installed", "other result"
DRIFT = 1e-2  # of the way that the floor's weights travelled; rounding alone has been seen to make 2e-3
LOSS, ACCURACY = 0.02, 0.01  # relative, absolute


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run.

    Attributes:
        race: "engines", "fixed", "clients", "size", "release" or "local".
        case: The task, in words.
        tool: The engine and how it ran.
        at: What the case is plotted over (clients, parameters), or None.
        repeat: Number of the run, from 0.
        status: One of the constants above.
        walls: Seconds of each timed round, separated by blanks.
        cpu_s: Processor seconds of a round, children included.
        once_s: Seconds that the run paid once: imports, data, workers, what the first round took longer.
        peak_mib: Peak memory, summed over processes.
        accuracy: Of the last weights on the test records, 0–1.
        loss: Their mean cross-entropy.
        steps: Local steps taken in the whole run.
        drift: Distance of the last weights from the floor's, ÷ the way that those travelled; None without a floor.
        note: Versions, or why there is no number.
    """

    race: str
    case: str
    tool: str
    repeat: int
    status: str
    at: float | None = None
    walls: str = ""
    cpu_s: float | None = None
    once_s: float | None = None
    peak_mib: float | None = None
    accuracy: float | None = None
    loss: float | None = None
    steps: int | None = None
    drift: float | None = None
    note: str = ""

    @property
    def seconds(self) -> list[float]:
        """Of each timed round."""
        return [float(one) for one in self.walls.split()]

    @property
    def round_s(self) -> float:
        """Median seconds of a round; NaN without one."""
        return median(self.seconds) if self.walls else math.nan


COLUMNS = tuple(field.name for field in fields(Row))


def judged(row: Row, floor: Row | None, *, num_steps: int) -> Row:
    """The row, marked where the engine did other work than the floor.

    Example:
        >>> floor = Row(race="", case="", tool="", repeat=0, status=OK, accuracy=0.8, loss=0.5, steps=10)
        >>> judged(replace(floor, steps=9), floor, num_steps=10).note
        'took 9 steps of 10'
    """
    if row.status != OK:
        return row
    faults = [] if row.steps == num_steps else [f"took {row.steps} steps of {num_steps}"]
    if row.drift is not None and not row.drift <= DRIFT:
        faults.append(f"weights {row.drift:.2g} of the way off")
    if floor is not None and floor.status == OK and row.drift is not None:
        loss, base = row.loss or 0.0, floor.loss or 0.0
        if not abs(loss - base) <= LOSS * base:
            faults.append(f"loss {loss:.4g}, not {base:.4g}")
        if not abs((row.accuracy or 0.0) - (floor.accuracy or 0.0)) <= ACCURACY:
            faults.append(f"accuracy {row.accuracy or 0.0:.3f}, not {floor.accuracy or 0.0:.3f}")
    if row.loss is not None and not math.isfinite(row.loss):
        faults.append("loss is not finite")
    return replace(row, status=DIFFERS, note="; ".join(faults)) if faults else row


@dataclass(frozen=True)
class Summary:
    """What the runs of one tool say: medians over repeats, and medians of the ratios to the floor of the same repeat."""

    tool: str
    status: str
    round_s: float
    cpu_s: float
    once_s: float
    peak_mib: float
    wall_ratio: float
    cpu_ratio: float
    low: float
    high: float
    drift: float
    note: str


def summaries(rows: Sequence[Row], *, floor: str) -> list[Summary]:
    """One summary a tool, in the order of the rows, all of one case."""
    floors = {row.repeat: row for row in rows if row.tool == floor and row.status == OK}
    found = []
    for tool in dict.fromkeys(row.tool for row in rows):
        mine = [row for row in rows if row.tool == tool]
        good = [row for row in mine if row.status == OK]
        bad = next((row for row in mine if row.status != OK), None)
        pairs = [(row, floors[row.repeat]) for row in good if row.repeat in floors]
        walls = [row.round_s / base.round_s for row, base in pairs if base.round_s > 0.0]
        cpus = [(row.cpu_s or 0.0) / base.cpu_s for row, base in pairs if base.cpu_s]
        found.append(
            Summary(
                tool=tool,
                status=bad.status if bad else OK,
                round_s=_median(row.round_s for row in good),
                cpu_s=_median(row.cpu_s for row in good),
                once_s=_median(row.once_s for row in good),
                peak_mib=_median(row.peak_mib for row in good),
                wall_ratio=_median(walls),
                cpu_ratio=_median(cpus),
                low=min(walls, default=math.nan),
                high=max(walls, default=math.nan),
                drift=max((row.drift for row in good if row.drift is not None), default=math.nan),
                note=bad.note if bad else "",
            )
        )
    return found


def _median(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return median(known) if known else math.nan


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


_TEXTS, _COUNTS = ("race", "case", "tool", "status", "walls", "note"), ("repeat", "steps")


def _row(line: dict[str, str]) -> Row:
    texts = {name: line[name] for name in _TEXTS}
    counts = {name: int(line[name]) if line[name] else None for name in _COUNTS}
    numbers = {n: float(line[n]) if line[n] else None for n in COLUMNS if n not in (*_TEXTS, *_COUNTS)}
    return Row(**texts, **counts, **numbers)  # type: ignore[arg-type]
