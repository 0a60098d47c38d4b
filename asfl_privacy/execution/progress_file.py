"""The numbers of a run's progress as plain JSON values, and back: all but tensors and the account."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from asfl_privacy.execution.progress import Evaluation, FailureNote, PlanFacts, Progress
from asfl_privacy.federated import Traffic

_ELSEWHERE = ("state", "account")
_NOT_FINITE = "not finite"


def encode_progress(progress: Progress) -> dict[str, Any]:
    """Everything of a run's progress but its state and its account, as JSON values.

    Guarantee:
        `decode_progress` gives equal values: floats to the last bit, infinities and NaN included.
    """
    words = {field.name: getattr(progress, field.name) for field in fields(progress) if field.name not in _ELSEWHERE}
    plan = progress.largest_plan
    words |= {
        "traffic": asdict(progress.traffic),
        "evaluations": [asdict(evaluation) for evaluation in progress.evaluations],
        "failures": [asdict(failure) for failure in progress.failures],
        "largest_plan": None if plan is None else asdict(plan),
    }
    return {name: _plain(value) for name, value in words.items()}


def decode_progress(words: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Progress` but for state and account.

    Raises:
        ValueError: A key is missing or not known: another version wrote it.
    """
    try:
        found: dict[str, Any] = {name: _back(value) for name, value in words.items()}
        plan = found["largest_plan"]
        found |= {
            "traffic": Traffic(**found["traffic"]),
            "evaluations": tuple(
                Evaluation(**(entry | {"traffic": Traffic(**entry["traffic"])})) for entry in found["evaluations"]
            ),
            "failures": tuple(FailureNote(**entry) for entry in found["failures"]),
            "largest_plan": None if plan is None else PlanFacts(**plan),
        }
    except (KeyError, TypeError) as error:
        raise ValueError(f"the progress holds other fields than this version knows ({error})") from None
    due = {field.name for field in fields(Progress)} - set(_ELSEWHERE)
    if set(found) != due:
        raise ValueError(f"the progress holds {sorted(found)} where {sorted(due)} are due")
    return found


def _plain(value: object) -> object:
    """Plain JSON values; a float that is not finite, which JSON has no word for, is {"not finite": its name}."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return {_NOT_FINITE: str(value)}
    return value


def _back(value: object) -> object:
    if isinstance(value, Mapping):
        if set(value) == {_NOT_FINITE}:
            return float(value[_NOT_FINITE])
        return {key: _back(item) for key, item in value.items()}
    return [_back(item) for item in value] if isinstance(value, list) else value
