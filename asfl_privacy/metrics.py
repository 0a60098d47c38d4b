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
        All of `REPRODUCIBLE`, what the method itself measures, and `MEASURED`, in order: accuracy 0–1, bytes so far,
        seconds since the evaluation before (0.0 for a phase that did not run; clients' phases are summed over clients),
        most bytes of memory so far. None where there is nothing to say: accuracy of a method without a global network,
        noise of a run without private releases, memory where the platform does not tell.

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
        **evaluation.measures,
    }
    values |= {f"seconds_{phase}": evaluation.seconds.get(phase, 0.0) for phase in PHASES}
    return values | {"peak_memory_bytes": evaluation.peak_memory or None}


def metrics_csv(evaluations: Sequence[Evaluation]) -> str:
    """The evaluations as CSV, a heading and one line each.

    Args:
        evaluations: In order of rounds.

    Returns:
        The columns `REPRODUCIBLE`, what the method itself measures in any of the evaluations, then `MEASURED`; blank where
        there is nothing to say.

    Guarantee:
        Reading a number back gives the same float: none is rounded.

    Example:
        >>> text = metrics_csv([Evaluation(round=2, accuracy=0.5, loss=0.1 + 0.2, sensitivity=None, noise_scale=None)])
        >>> reproducible_part(text).splitlines()[1]
        '2,0.5,0.30000000000000004,,,0,0,0'
    """
    own = tuple(dict.fromkeys(name for evaluation in evaluations for name in evaluation.measures))
    columns = REPRODUCIBLE + own + MEASURED
    lines = [figures(evaluation) for evaluation in evaluations]
    return _csv([columns, *([_text(line.get(column)) for column in columns] for line in lines)])


def reproducible_part(metrics_text: str) -> str:
    """The columns of a metrics.csv that the same seed gives again, all but `MEASURED`, as CSV: what runs are compared by.

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
    kept = [name for name in heading if name not in MEASURED]
    return _csv([kept, *([line[name] for name in kept] for line in lines)])


def headline(values: Mapping[str, object]) -> str:
    """The accuracy among figures or in a row, in words: of the global network, or where there is none the personal one.

    Example:
        >>> headline({"accuracy": 0.912}), headline({"accuracy": None, "personal_accuracy": 0.5})
        ('accuracy 91.2 %', 'personal accuracy 50.0 %')
    """
    for name in ("accuracy", "personal_accuracy"):
        value = values.get(name)
        if isinstance(value, int | float):
            return f"{name.replace('_', ' ')} {100 * value:.1f} %"
    return "no accuracy"


def _text(value: float | int | None) -> str:
    return "" if value is None else repr(value)


def _csv(lines: Sequence[Sequence[str]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(lines)
    return buffer.getvalue()
