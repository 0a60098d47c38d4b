"""Tables of measurements beside rows.csv: one file a kind, its columns fixed here."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from asfl_privacy.reporting.atomic import write_atomic

Value = str | int | float | None
Record = Mapping[str, Value]

TABLES: Final[Mapping[str, Mapping[str, type]]] = {
    # accuracy of a run after some of its rounds
    "evaluations": {"run": str, "method": str, "seed": int, "round": int, "accuracy": float, "bytes": int},
    # one point of a tuning grid; accuracy on validation records, blank where a run failed
    "trials": {"method": str, "lr": float, "options": str, "accuracy": float, "seeds": int},
    # local work of one client in one round; the certificate is the server's, once a round, blank without noise
    "timings": {
        "data": str,
        "model": str,
        "method": str,
        "mech": str,
        "exchange_layer": str,
        "device": str,
        "repeat": int,
        "client": int,
        "records": int,
        "seconds_sharing": float,
        "seconds_training": float,
        "seconds_certificate": float,
    },
    # where a client's mean of a class lies before the last layer, drawn in the plane; records: own or common
    "centroids": {
        "method": str,
        "seed": int,
        "records": str,
        "client": int,
        "label": int,
        "x": float,
        "y": float,
    },
    # scatter of these means in the latent space itself; space: exchange or penultimate, the output of the block named
    "scatter": {
        "method": str,
        "seed": int,
        "space": str,
        "layer": str,
        "records": str,
        "classes": int,
        "within": float,
        "between": float,
    },
    # what each block would be as exchange layer
    "layers": {"data": str, "model": str, "exchange_layer": str, "automatic": str},
    # gradients after a round, drift of that round, share of remote records so far
    "diagnostics": {
        "method": str,
        "seed": int,
        "round": int,
        "loss": float,
        "squared_gradient_norm": float,
        "dissimilarity": float,
        "drift": float,
        "remote_fraction": float,
        "planned_remote_fraction": float,
    },
    # means over the rounds of a run on the problem with known smoothness; gradients at the start of each round
    "decay": {
        "method": str,
        "seed": int,
        "rounds": int,
        "lr": float,
        "smoothness": float,
        "squared_gradient_norm": float,
        "first_squared_gradient_norm": float,
        "dissimilarity": float,
        "drift": float,
        "remote_fraction": float,
    },
}
"""Columns of each kind of table and what they hold; any may be blank but the texts and whole numbers."""


def write_records(path: Path, records: Iterable[Record], *, table: str) -> None:
    """Write a table in one step.

    Args:
        path: The file; its folder must exist.
        records: One a line.
        table: Its kind, of `TABLES`.

    Raises:
        ValueError: Columns that are not the kind's, a value of another type, NaN or infinity; nothing is written.

    Guarantee:
        `read_records` gives back the same values bit for bit.
    """
    columns = TABLES[table]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    for record in records:
        if set(record) != set(columns):
            raise ValueError(f"a record of {table} has {', '.join(record)}; its columns are {', '.join(columns)}")
        writer.writerow([_cell(record[column], column=column, kind=kind) for column, kind in columns.items()])
    write_atomic(path, buffer.getvalue())


def read_records(path: Path, *, table: str) -> list[Record]:
    """Read a table, refusing what `write_records` would not have written.

    Args:
        path: The file.
        table: Its kind, of `TABLES`.

    Raises:
        ValueError: Another header, a line of another length, a value that cannot be read; the message names the line.
        OSError: The file cannot be opened.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "layers.csv"
        >>> one = {"data": "digits", "model": "small-cnn", "exchange_layer": "conv1", "automatic": "no"}
        >>> write_records(path, [one], table="layers")
        >>> read_records(path, table="layers") == [one]
        True
    """
    columns = TABLES[table]
    try:
        lines = list(csv.reader(io.StringIO(path.read_text(encoding="utf-8"), newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is no CSV file ({error}); write it again") from error
    if not lines or tuple(lines[0]) != tuple(columns):
        raise ValueError(f"{path} has another header than {','.join(columns)}; write it again")
    return [_line(cells, columns, where=f"{path} line {number}") for number, cells in enumerate(lines[1:], start=2)]


def _line(cells: list[str], columns: Mapping[str, type], *, where: str) -> Record:
    if len(cells) != len(columns):
        raise ValueError(f"{where} has {len(cells)} cells: its table has {len(columns)}; repair that line")
    try:
        return {column: _parse(cell, kind) for (column, kind), cell in zip(columns.items(), cells, strict=True)}
    except ValueError as error:
        raise ValueError(f"{where}: {error}; repair that line") from None


def _parse(cell: str, kind: type) -> Value:
    if kind is str:
        return cell
    if not cell and kind is float:
        return None
    value: float = kind(cell)
    if not math.isfinite(value):
        raise ValueError(f"{cell} is not finite")
    return value


def _cell(value: Value, *, column: str, kind: type) -> str:
    if value is None and kind is float:
        return ""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(f"{column} is {value!r}: it holds {kind.__name__}; hand in that")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{column} is {value}: only finite numbers are kept; leave it blank")
        return repr(value + 0.0)
    text = str(value)
    if not text.isprintable():
        raise ValueError(f"{column} is {text!r}: a cell is one printable line; shorten it")
    return text
