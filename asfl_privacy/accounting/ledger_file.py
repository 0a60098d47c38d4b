"""A ledger's classes as plain JSON values, and back: version 2 packs them, version 1 lists every id and count."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from asfl_privacy.accounting.columns import (
    Column,
    decode_column,
    decode_integers,
    encode_column,
    encode_integers,
    make_column,
)
from asfl_privacy.accounting.event import EventClass, make_event
from asfl_privacy.accounting.totals import Ints

FORMAT, VERSION, VERSIONS = "asfl-privacy ledger", 2, (1, 2)

_FIRST_FIELDS = ("channel", "mechanism", "noise_multiplier", "round", "whole_record_multiplier")


def encode_class(event: EventClass, column: Column) -> dict[str, object]:
    """A class of version 2: the fields of the event, and "records" as in columns.py."""
    return {**asdict(event), "records": encode_column(column)}


def decode_classes(entries: object, *, version: int, radius: float | str) -> Iterator[tuple[EventClass, Column]]:
    """Read the classes of a ledger file.

    Args:
        entries: what stands under "classes".
        version: of the file.
        radius: of the ledger.

    Yields:
        Events and their columns, each event once. Classes of version 1 were drawn by sampler "float".

    Raises:
        ValueError: if a key, a type, a length or a value is wrong, or a class occurs twice.
    """
    if not isinstance(entries, list):
        raise ValueError("classes must be a list")
    seen = set()
    for entry in entries:
        fields = _FIRST_FIELDS if version == 1 else tuple(EventClass.__dataclass_fields__)
        names = {*fields, "records", *(("counts",) if version == 1 else ())}
        if not isinstance(entry, dict) or set(entry) != names:
            raise ValueError(f"a class must hold exactly {sorted(names)}")
        values: dict[str, Any] = {name: entry[name] for name in fields if name != "round"}
        event = make_event(**values, round_number=entry["round"], radius=radius)
        if event in seen:
            raise ValueError(f"the class {event} occurs twice")
        seen.add(event)
        try:
            packed = entry["records"]
            column = make_column(packed, entry["counts"]) if version == 1 else decode_column(packed)
        except ValueError as error:
            raise ValueError(f"round {event.round}: {error}") from None
        yield event, column


def encode_clients(clients: Ints | None) -> object:
    """None, or {"length", "width", "data"}: the client of every record, packed as in columns.py."""
    return None if clients is None else {"length": len(clients), **encode_integers(clients)}


def decode_clients(entry: object) -> Ints | None:
    """Read what ``encode_clients`` wrote, or raise ValueError."""
    if entry is None:
        return None
    if not isinstance(entry, dict) or set(entry) != {"length", "width", "data"}:
        raise ValueError("clients must be null or hold exactly length, width and data")
    length = entry["length"]
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ValueError(f"clients has length {length!r}: it must be an integer ≥ 1")
    packed = {name: entry[name] for name in ("width", "data")}
    return decode_integers("clients", packed, length=length)


def check_facts(facts: object) -> dict[str, object] | None:
    """Return ``facts`` if JSON reads them back as they are, or raise ValueError."""
    if facts is None:
        return None
    fix = "pass a dict of text keys and plain values: text, numbers, booleans, None, lists and dicts of them"
    if not isinstance(facts, dict):
        raise ValueError(f"facts is a {type(facts).__name__}: a ledger keeps plain JSON values; {fix}")
    try:
        back = json.loads(json.dumps(facts, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"facts cannot be written as JSON ({error}): a ledger keeps plain JSON values; {fix}"
        ) from None
    if back != facts or not _is_plain(facts):
        raise ValueError(f"facts would change when written as JSON: a ledger keeps plain JSON values; {fix}")
    return facts


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str)
