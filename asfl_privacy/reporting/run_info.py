"""What made the rows: command, commit, configuration, versions, date."""

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Final

REQUIRED: Final[tuple[str, ...]] = ("command", "commit", "started", "config", "versions")

Plain = str | int | float | bool | None | list["Plain"] | dict[str, "Plain"]


def plain_run_info(run_info: Mapping[str, object]) -> dict[str, Plain]:
    """Check the provenance and turn it into what JSON can hold.

    Args:
        run_info: command (str), commit (str, or None where it is unknown), started (ISO date), config and versions
            (mappings), and whatever else belongs to the record.

    Returns:
        The same tree of dict, list, str, int, float, bool and None; infinity becomes "inf", paths and dates text.

    Raises:
        ValueError: A required key is missing, config or versions is no mapping, a NaN, a type JSON cannot hold.

    Example:
        >>> info = {"command": "x", "commit": None, "started": "2026-01-01", "config": {"norm": math.inf},
        ...         "versions": {}}
        >>> plain_run_info(info)["config"]
        {'norm': 'inf'}
    """
    missing = [key for key in REQUIRED if key not in run_info]
    if missing:
        raise ValueError(f"run_info lacks {missing[0]!r}: a report says what made it; hand in {', '.join(REQUIRED)}")
    for key in ("config", "versions"):
        if not isinstance(run_info[key], Mapping):
            raise ValueError(f"run_info[{key!r}] is {run_info[key]!r}: it maps names to values; hand in a mapping")
    return {str(key): _plain(value, where=str(key)) for key, value in run_info.items()}


def _plain(value: object, *, where: str) -> Plain:
    if isinstance(value, float):
        if math.isnan(value):
            raise ValueError(f"run_info {where} is NaN: JSON holds no NaN; hand in None or a number")
        return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, PurePath | datetime.date):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where=f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_plain(item, where=f"{where}.{index}") for index, item in enumerate(value)]
    raise ValueError(f"run_info {where} is a {type(value).__name__}: JSON cannot hold it; hand in text or numbers")


def to_json(info: Mapping[str, Plain]) -> str:
    """The text of run.json: sorted keys, two spaces, a line end; equal records give equal bytes.

    Example:
        >>> print(to_json({"b": 1, "a": "ε"}), end="")
        {
          "a": "ε",
          "b": 1
        }
    """
    return json.dumps(info, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def flatten(tree: Mapping[str, Plain], *, prefix: str = "") -> list[tuple[str, str]]:
    """Dotted names and texts of a nested record, in its own order; lists become comma-separated.

    Example:
        >>> flatten({"a": {"b": [1, 2]}, "c": None})
        [('a.b', '1, 2'), ('c', 'not set')]
    """
    pairs: list[tuple[str, str]] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            pairs += flatten(value, prefix=f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", _one_line(value)))
    return pairs


def _one_line(value: Plain) -> str:
    if value is None:
        return "not set"
    if isinstance(value, list):
        return ", ".join(_one_line(item) for item in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return json.dumps(value, sort_keys=True, ensure_ascii=False) if isinstance(value, dict) else str(value)
