"""metrics.csv of a run folder: one line an evaluation, what reproduces to the bit and then what was measured."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

from asfl_privacy.execution import Evaluation
from asfl_privacy.federated.stopwatch import PHASES

REPRODUCIBLE = (
    "round",
    "accuracy",
    "loss",
    "sensitivity",
    "noise_scale",
    "bytes_model",
    "bytes_activations",
    "bytes_labels",
)
"""Columns that the same seed gives again to the bit, whichever executor runs it; batched steps: within rounding."""

MEASURED = (*(f"seconds_{phase}" for phase in PHASES), "peak_memory_bytes")
"""Columns that were measured and are never the same twice."""


def figures(evaluation: Evaluation) -> dict[str, float | int | None]:
    """An evaluation's figures by the name of their column.

    Args:
        evaluation: One evaluation.

    Returns:
        All of `REPRODUCIBLE` and `MEASURED`, in order: accuracy 0–1, bytes so far, seconds since the evaluation before
        (0.0 for a phase that did not run; clients' phases are summed over clients), most bytes of memory so far. None
        where there is nothing to say: noise of a run without private releases, memory where the platform does not tell.

    Edge cases:
        Seconds outside the named phases are in no column, so the phases add up to less than the wall time of a serial
        run, and to more than that of clients that work side by side.
    """
    traffic = evaluation.traffic
    values: dict[str, float | int | None] = {
        "round": evaluation.round,
        "accuracy": evaluation.accuracy,
        "loss": evaluation.loss,
        "sensitivity": evaluation.sensitivity,
        "noise_scale": evaluation.noise_scale,
        "bytes_model": traffic.model,
        "bytes_activations": traffic.activations,
        "bytes_labels": traffic.labels,
    }
    values |= {f"seconds_{phase}": evaluation.seconds.get(phase, 0.0) for phase in PHASES}
    return values | {"peak_memory_bytes": evaluation.peak_memory or None}


def metrics_csv(evaluations: Sequence[Evaluation]) -> str:
    """The evaluations as CSV, a heading and one line each.

    Args:
        evaluations: In order of rounds.

    Returns:
        The columns `REPRODUCIBLE`, then `MEASURED`; blank where there is nothing to say.

    Guarantee:
        Reading a number back gives the same float: none is rounded.

    Example:
        >>> text = metrics_csv([Evaluation(round=2, accuracy=0.5, loss=0.1 + 0.2, sensitivity=None, noise_scale=None)])
        >>> reproducible_part(text).splitlines()[1]
        '2,0.5,0.30000000000000004,,,0,0,0'
    """
    return _csv([REPRODUCIBLE + MEASURED, *([_text(v) for v in figures(e).values()] for e in evaluations)])


def reproducible_part(metrics_text: str) -> str:
    """The columns of a metrics.csv that the same seed gives again, as CSV: what two runs are compared by.

    Args:
        metrics_text: The file's text.

    Raises:
        ValueError: Text that lacks one of the columns.
    """
    lines: Sequence[Mapping[str, str]] = list(csv.DictReader(io.StringIO(metrics_text)))
    heading = metrics_text.partition("\n")[0].split(",")
    missing = [name for name in REPRODUCIBLE if name not in heading]
    if missing:
        raise ValueError(
            f"metrics.csv has no column {missing[0]!r}, which every run writes; give the text of a run's file"
        )
    return _csv([REPRODUCIBLE, *([line[name] for name in REPRODUCIBLE] for line in lines)])


def _text(value: float | int | None) -> str:
    return "" if value is None else repr(value)


def _csv(lines: Sequence[Sequence[str]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(lines)
    return buffer.getvalue()
