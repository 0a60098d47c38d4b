"""Trackers: a run's evaluations written to TensorBoard or MLflow too, while it is under way."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from asfl_privacy.config import SweepConfig
from asfl_privacy.execution import Evaluation, RunStoppedError
from asfl_privacy.metrics import figures
from asfl_privacy.reporting import Row
from asfl_privacy.run_files import ROW_FILE
from asfl_privacy.unfinished import unfinished_folder

T = TypeVar("T")
Value = str | int | float

NOT_TOLD = ("data_root", "track")
"""Fields of the configuration that trackers are not told: where this machine keeps things is no setting of the run."""
EVENTS = "tensorboard"
"""Folder of a run's TensorBoard events, inside its run folder."""
EXPERIMENT = "asfl-privacy"
"""MLflow's experiment, where MLFLOW_EXPERIMENT_NAME names no other."""

_MLFLOW_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # a run tells nobody but the tracker that it was asked to tell
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # by default a server that has gone holds a run up for minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class Tracker:
    """What a run tells a tracker; whatever goes wrong there ends the telling and never the run.

    Args:
        kind: `tensorboard`, `mlflow` or `none`.
        writer: Opens the writer.
        on_warning: Told once, in one line, that the tracker failed.

    Guarantee:
        Told are the run's configuration, figures of the global network, sums over clients and the row of rows.csv;
        nothing of a single record or client: no record, weight, activation, ledger, or name of a client that failed.
    """

    def __init__(self, kind: str, writer: Callable[[], _Writer | None], *, on_warning: Callable[[str], None]) -> None:
        self._kind = kind
        self._on_warning = on_warning
        self._writer = self._guarded(writer)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Tell an evaluation: its finite figures, named as in metrics.csv with a slash after `bytes` and `seconds`."""
        values = {_tag(name): value for name, value in figures(evaluation).items() if name != "round"}
        writer = self._writer
        if writer is not None:
            self._guarded(lambda: writer.scalars(_finite(values), step=evaluation.round))

    def finish(self, row: Row) -> None:
        """Tell the row of the finished run, each figure as `final/<column>`."""
        writer = self._writer
        if writer is not None:
            told = {f"final/{name}": value for name, value in row.items() if value is not None}
            self._guarded(lambda: writer.summary(told))

    def close(self, *, status: str) -> None:
        """Close the writer; nothing is told from here on.

        Args:
            status: `FINISHED`, `FAILED` or `KILLED`.
        """
        writer = self._writer
        if writer is not None:
            self._guarded(lambda: writer.close(status=status))
        self._writer = None

    def _guarded(self, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except Exception as error:  # a server that is gone, a full disk: anything, and the run is worth more
            self._writer = None
            self._on_warning(f"track {self._kind} ended, the run goes on without it: {_reason(error)}")
            return None


def check_tracker(kind: str) -> None:
    """Refuse a tracker that is not installed or does not answer, before time is spent.

    Args:
        kind: `none`, `tensorboard` or `mlflow`.

    Raises:
        ValueError: Naming the extra to install or, for MLflow, what is wrong with the place that it writes to.
    """
    if kind == "none":
        return
    if importlib.util.find_spec(kind) is None:
        raise ValueError(
            f"track {kind} needs the package {kind}, which is not installed; pip install 'asfl-privacy[{kind}]', or use "
            "track none"
        )
    if kind == "mlflow":
        try:
            _mlflow_client().search_experiments(max_results=1)
        except Exception as error:  # a database, a server, a scheme: each fails in its own way; the line says how
            raise ValueError(
                f"track mlflow cannot write to its place ({_reason(error)}); set MLFLOW_TRACKING_URI to a server that "
                "answers or to sqlite:///FILE, or use track none"
            ) from error


@contextmanager
def open_tracker(
    kind: str, *, folder: Path | None, config: SweepConfig, name: str, on_warning: Callable[[str], None]
) -> Iterator[Tracker]:
    """Track a run.

    TensorBoard's events are written beside the run folder while the run is under way and move into it, to
    `tensorboard`, once it has a row; a run that is opened again begins its events anew, and must be told again what was
    evaluated before. MLflow is written to where MLFLOW_TRACKING_URI says, else to its own default, a run of its own
    each time.

    Args:
        kind: `none`, `tensorboard` or `mlflow`.
        folder: Run folder that will be written, or None.
        config: The run's configuration, nothing left to decide.
        name: Of the run.
        on_warning: Told once, in one line, if the tracker fails: the run goes on.

    Yields:
        The tracker.

    Raises:
        ValueError: A kind that there is not, or TensorBoard without a folder.
    """
    if kind not in ("none", "tensorboard", "mlflow"):
        raise ValueError(f"track {kind!r} is unknown; use none, tensorboard or mlflow")
    if kind == "tensorboard" and folder is None:
        raise ValueError(
            "track tensorboard writes into a run folder and this run has none; give one, or use track none"
        )
    settings = _settings(config)

    def writer() -> _Writer | None:
        if kind == "mlflow":
            return _MLflow(name, settings)
        return None if kind == "none" or folder is None else _TensorBoard(folder, settings)

    tracker = Tracker(kind, writer, on_warning=on_warning)
    try:
        yield tracker
    except BaseException as error:
        failed = isinstance(error, Exception) and not isinstance(error, RunStoppedError)
        tracker.close(status="FAILED" if failed else "KILLED")
        raise
    tracker.close(status="FINISHED")


class _Writer(Protocol):
    """Where a tracker's figures go; anything may be raised."""

    def scalars(self, values: Mapping[str, int | float], *, step: int) -> None: ...

    def summary(self, values: Mapping[str, Value]) -> None: ...

    def close(self, *, status: str) -> None: ...


class _TensorBoard:
    """Events of one run, beside its folder until that holds a row; those of before are replaced."""

    def __init__(self, folder: Path, settings: Mapping[str, Value]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._settings = folder, settings
        self._live = unfinished_folder(folder) / EVENTS
        self._live.mkdir(parents=True, exist_ok=True)
        for old in self._live.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer: Any = SummaryWriter(str(self._live))
        self._writer.add_text("configuration", _markdown(settings))
        self._writer.flush()

    def scalars(self, values: Mapping[str, int | float], *, step: int) -> None:
        for tag, value in values.items():  # as doubles: bytes pass what a float32 counts exactly
            self._writer.add_scalar(tag, value, step, new_style=True, double_precision=True)
        self._writer.flush()

    def summary(self, values: Mapping[str, Value]) -> None:
        self._writer.add_text("row", _markdown(values))
        self._writer.add_hparams(dict(self._settings), _finite(values), run_name=".")  # beside the events, not below

    def close(self, *, status: str) -> None:
        self._writer.close()
        if (self._folder / ROW_FILE).is_file():
            shutil.move(self._live, self._folder / EVENTS)


class _MLflow:
    """A run on MLflow, through a client of its own: two runs of one process share nothing."""

    def __init__(self, name: str, settings: Mapping[str, Value]) -> None:
        self._client = _mlflow_client()
        wanted = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        self._run: str = self._client.create_run(_experiment(self._client, wanted), run_name=name).info.run_id
        from mlflow.entities import Param

        self._client.log_batch(self._run, params=[Param(key, str(value)) for key, value in settings.items()])

    def scalars(self, values: Mapping[str, int | float], *, step: int) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        self._client.log_batch(self._run, metrics=[Metric(key, float(v), now, step) for key, v in values.items()])

    def summary(self, values: Mapping[str, Value]) -> None:
        numbers = _finite(values)
        self.scalars(numbers, step=0)
        for key, value in values.items():
            if key not in numbers:  # words, and an infinite ε, which a metric would turn into a number
                self._client.set_tag(self._run, key, str(value))

    def close(self, *, status: str) -> None:
        self._client.set_terminated(self._run, status=status)


def _mlflow_client() -> Any:  # noqa: ANN401 - an extra, whose types are not at hand
    for setting, value in _MLFLOW_SETTINGS.items():
        os.environ.setdefault(setting, value)
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return MlflowClient()


def _experiment(client: Any, name: str) -> str:  # noqa: ANN401 - see above
    """The experiment of a name, made where there is none; runs that begin at once may both try."""
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name))
        except Exception:  # another run has made it meanwhile, or it cannot be made: then it is raised again
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def _settings(config: SweepConfig) -> dict[str, Value]:
    """The configuration by field, lists as text, fields without a value left out."""
    told: dict[str, Value] = {}
    for name, value in config.model_dump(mode="json").items():
        if name in NOT_TOLD or value is None or value == []:
            continue
        told[name] = ", ".join(map(str, value)) if isinstance(value, list) else value
    return told


def _finite(values: Mapping[str, Value | None]) -> dict[str, int | float]:
    return {key: v for key, v in values.items() if isinstance(v, int | float) and math.isfinite(v)}


def _tag(column: str) -> str:
    group, _, rest = column.partition("_")
    return f"{group}/{rest}" if group in ("bytes", "seconds") else column


def _markdown(values: Mapping[str, Value]) -> str:
    return "\n".join(["| | |", "|-|-|", *(f"| {name} | {value} |" for name, value in values.items())])


def _reason(error: Exception) -> str:
    """An error in one line, short, and without the password that an address may hold."""
    text = re.sub(r"//[^/@\s]*@", "//", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:300]}"
