"""One row is one run: a cell of the grid and a seed."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Final

from asfl_privacy.reporting.atomic import write_atomic

Value = str | int | float | None
Row = dict[str, Value]

COLUMNS: Final[tuple[str, ...]] = (
    "status",
    "method",
    "data",
    "partition",
    "clients",
    "cohort",
    "model",
    "mech",
    "target_epsilon",
    "target_total_epsilon",
    "delta",
    "radius",
    "p",
    "q",
    "placement",
    "noise",
    "own",
    "exchange_layer",
    "sensitivity",
    "noise_scale",
    "noise_stddev",
    "epsilon_release",
    "epsilon_total",
    "delta_total",
    "epsilon_whole_record",
    "accuracy",
    "seed",
    "rounds",
    "tail_steps",
    "full_steps",
    "remote_fraction",
    "lr",
    "bytes_model",
    "bytes_activations",
    "bytes_labels",
    "seconds",
    # beyond the design's columns, so that files keep their order
    "labels",
    "updates",
    "calibration",
    "reproducible",
    "update_multiplier",
    "epsilon_claimed",
    "epsilon_client",
    "epsilon_activations",
    "epsilon_labels",
    "epsilon_updates",
    "held_back",
    "options",
    "personal_accuracy",
    "prototype_accuracy_local",
    "prototype_accuracy_all",
)

PERSONAL: Final = ("personal_accuracy", "prototype_accuracy_local", "prototype_accuracy_all")
"""Means over clients of what each one's own network gets right of its own classes; never beside the global `accuracy`."""

_TEXT: Final = frozenset(
    {
        "status",
        "method",
        "data",
        "partition",
        "model",
        "mech",
        "placement",
        "noise",
        "own",
        "labels",
        "updates",
        "calibration",
        "reproducible",
        "exchange_layer",
        "options",
    }
)
_COUNTS: Final = frozenset(
    {
        "clients",
        "cohort",
        "seed",
        "rounds",
        "tail_steps",
        "full_steps",
        "bytes_model",
        "bytes_activations",
        "bytes_labels",
        "held_back",
    }
)
_NORMS: Final = frozenset({"p", "q"})
_MAY_BE_INFINITE: Final = frozenset(
    {
        "epsilon_release",
        "epsilon_total",
        "epsilon_whole_record",
        "epsilon_client",
        "epsilon_activations",
        "epsilon_labels",
        "epsilon_updates",
    }
)
_AT_MOST_ONE: Final = frozenset({"delta", "delta_total", "accuracy", "remote_fraction", *PERSONAL})

# Without noise nothing is promised, so none of these has a meaning.
PRIVACY_COLUMNS: Final[tuple[str, ...]] = (
    "target_epsilon",
    "target_total_epsilon",
    "delta",
    "radius",
    "p",
    "q",
    "placement",
    "noise",
    "own",
    "labels",
    "updates",
    "calibration",
    "reproducible",
    "sensitivity",
    "noise_scale",
    "noise_stddev",
    "update_multiplier",
    "epsilon_claimed",
    "epsilon_release",
    "epsilon_total",
    "delta_total",
    "epsilon_whole_record",
    "epsilon_client",
    "epsilon_activations",
    "epsilon_labels",
    "epsilon_updates",
    "held_back",
)


def complete_row(values: Mapping[str, object]) -> Row:
    """Check one run and give it every column, blank (None) where none was handed in.

    Args:
        values: Column name to value; None or "" means blank. Numbers may be numpy scalars. p and q are 1, 2 or
            infinity; radius is a distance above 0 or "any"; status is "ok" or "failed: " and one line.

    Returns:
        A dict in the order of COLUMNS, with plain str, int, float and None.

    Raises:
        ValueError: Unknown column, NaN, a negative number, infinity outside the ε columns, text of more than one
            line, an "ok" run without seed or without any accuracy, a privacy figure in a run without noise.

    Guarantee:
        No row with mech "none" carries ε, δ, radius or noise, so a run without noise never claims privacy.

    Example:
        >>> run = {"status": "ok", "method": "fedavg", "mech": "none", "seed": 0, "accuracy": 0.5}
        >>> row = complete_row(run)
        >>> len(row) == len(COLUMNS), row["epsilon_total"]
        (True, None)
        >>> complete_row({**run, "epsilon_total": 1.0})
        Traceback (most recent call last):
        ValueError: a row with mech none has epsilon_total 1.0: without noise there is no guarantee; leave it blank
    """
    unknown = [name for name in values if name not in COLUMNS]
    if unknown:
        raise ValueError(f"unknown column {unknown[0]!r}: a row has only these; valid are {', '.join(COLUMNS)}")
    row: Row = {column: _plain(column, values.get(column)) for column in COLUMNS}
    _check_meaning(row)
    return row


def failed_status(reason: str) -> str:
    r"""The status of a run that failed: "failed: " and one printable line, whatever the reason holds.

    Args:
        reason: Any text, such as an error's message; its first line that is not blank is kept.

    Example:
        >>> failed_status("RuntimeError: loss\tis NaN\nTraceback …")
        'failed: RuntimeError: loss is NaN'
    """
    printable = ("".join(c if c.isprintable() else " " for c in line).split() for line in reason.splitlines())
    return "failed: " + " ".join(next(filter(None, printable), ["no reason given"]))


def _plain(column: str, value: object) -> Value:
    if value is None or (isinstance(value, str) and not value):
        return None
    if column in _TEXT or (column == "radius" and isinstance(value, str)):
        return _text(column, value)
    if column in _NORMS and isinstance(value, str):
        value = _parse(column, value)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{column} is {value!r}: it holds a number or is blank; hand in an int, a float or None")
    number = float(value)
    if math.isnan(number) or number < 0:
        raise ValueError(f"{column} is {value!r}: it must be a number of at least 0; leave it blank if it is unknown")
    if column in _NORMS:
        if number not in (1.0, 2.0, math.inf):
            raise ValueError(f"{column} is {value!r}: norms are 1, 2 or inf; choose one of them")
        return number
    if math.isinf(number) and column not in _MAY_BE_INFINITE:
        raise ValueError(f"{column} is infinite: only ε and the norms may be; leave it blank if it is unknown")
    if column in _COUNTS:
        if not isinstance(value, Integral):
            raise ValueError(f"{column} is {value!r}: it counts something; hand in a whole number as int")
        return int(value)
    if column in _AT_MOST_ONE and number > 1:
        raise ValueError(f"{column} is {value!r}: it lies between 0 and 1; hand in a fraction, not per cent")
    if column == "radius" and number == 0:
        raise ValueError("radius is 0: it would protect nothing; give a distance above 0 or 'any'")
    return number + 0.0  # turns -0.0 into 0.0


def _text(column: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{column} is {value!r}: it holds text; hand in a str or None")
    if value.splitlines() != [value] or not value.isprintable():
        raise ValueError(f"{column} is {value!r}: a cell is one printable line; keep the first line only")
    if column == "radius" and value != "any":
        raise ValueError(f"radius is {value!r}: it is a distance above 0 or 'any'; hand in a float or 'any'")
    return value


def _check_meaning(row: Mapping[str, Value]) -> None:
    status = row["status"]
    if status != "ok" and not (isinstance(status, str) and status.startswith("failed: ")):
        raise ValueError(f"status is {status!r}: it is 'ok' or 'failed: ' and one line; say which")
    accuracy = ("accuracy",) if status == "ok" and row["personal_accuracy"] is None else ()
    for column in ("method", "mech", "seed", *accuracy):
        if row[column] is None:
            raise ValueError(f"{column} is blank in a row of status {status!r}: every such run has one; fill it in")
    if row["mech"] == "none":
        for column in PRIVACY_COLUMNS:
            if row[column] is not None:
                raise ValueError(
                    f"a row with mech none has {column} {row[column]}: without noise there is no guarantee; "
                    "leave it blank"
                )


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write rows.csv in one step.

    Args:
        path: The file; its folder must exist.
        rows: Runs; each is checked and completed by `complete_row`.

    Raises:
        ValueError: A row that `complete_row` refuses; nothing is written.
        OSError: The folder is missing or not writable; nothing is written.

    Guarantee:
        Equal rows give equal bytes on every machine (UTF-8, line feeds, floats by repr), and `read_rows` gives back
        the same values bit for bit.

    Edge cases:
        No rows write the header alone. -0.0 is written as 0.0.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "rows.csv"
        >>> write_rows(path, [{"status": "ok", "method": "asfl", "mech": "none", "seed": 0, "accuracy": 0.1}])
        >>> read_rows(path)[0]["accuracy"]
        0.1
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([_cell(column, value) for column, value in complete_row(row).items()])
    write_atomic(path, buffer.getvalue())


def _cell(column: str, value: Value) -> str:
    if value is None:
        return ""
    if column in _NORMS:
        return f"{value:g}"
    return value if isinstance(value, str) else repr(value)


def read_rows(path: Path) -> list[Row]:
    """Read rows.csv, refusing anything that `write_rows` would not have written.

    Args:
        path: The file.

    Returns:
        One dict a run in the order of the file; blank cells are None.

    Raises:
        ValueError: An empty file, missing, unknown or reordered columns, a number that cannot be read, a line of the
            wrong length, a file without its last line end, a value that `complete_row` refuses. The message names
            file and line.
        OSError: The file cannot be opened.

    Edge cases:
        A header alone gives an empty list. A file cut exactly at a line end cannot be told from a shorter one.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "rows.csv"
        >>> write_rows(path, [])
        >>> read_rows(path)
        []
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: rows are stored as UTF-8; write the file again") from error
    if not text:
        raise ValueError(f"{path} is empty: rows start with a header line; write the file again")
    if not text.endswith("\n"):
        raise ValueError(f"{path} ends inside a line: its last run is cut off; write the file again")
    try:
        lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise ValueError(f"{path} is no CSV file ({error}): rows are comma-separated; write the file again") from error
    _check_header(path, lines[0])
    return [_read_line(path, number, cells) for number, cells in enumerate(lines[1:], start=2)]


def _check_header(path: Path, header: Sequence[str]) -> None:
    if tuple(header) == COLUMNS:
        return
    missing = [column for column in COLUMNS if column not in header]
    unknown = [column for column in header if column not in COLUMNS]
    if missing:
        what = f"lacks the column {missing[0]!r}"
    elif unknown:
        what = f"has the unknown column {unknown[0]!r}"
    else:
        what = "has its columns twice or in another order"
    raise ValueError(f"{path} {what}: the header must be {','.join(COLUMNS)}; write the file again")


def _read_line(path: Path, number: int, cells: Sequence[str]) -> Row:
    if len(cells) != len(COLUMNS):
        raise ValueError(
            f"{path} line {number} has {len(cells)} cells: a run has {len(COLUMNS)}; remove or repair that line"
        )
    try:
        return complete_row({column: _parse(column, cell) for column, cell in zip(COLUMNS, cells, strict=True)})
    except ValueError as error:
        raise ValueError(f"{path} line {number}: {error}") from error


def _parse(column: str, cell: str) -> Value:
    if not cell or column in _TEXT or (column == "radius" and cell == "any"):
        return cell or None
    try:
        return int(cell) if column in _COUNTS else float(cell)
    except ValueError:
        kind = "a whole number" if column in _COUNTS else "a number"
        raise ValueError(f"{column} is {cell!r}: it holds {kind} or is blank; correct that cell") from None
