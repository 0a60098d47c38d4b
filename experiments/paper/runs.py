"""Runs of a recipe on worker processes that stay alive, each kept in a folder of its own."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import multiprocessing
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from asfl_privacy.cli.one_cell import one_cell
from asfl_privacy.config import SweepConfig, load_config
from asfl_privacy.configured_data import load_data
from asfl_privacy.data import Dataset
from asfl_privacy.reporting import Row
from asfl_privacy.run import prepare_run
from asfl_privacy.run_rows import run_name
from asfl_privacy.worker import run_cell


@dataclass(frozen=True)
class Runs:
    """Where runs are kept, and who trains them.

    Attributes:
        folder: One folder a run below it; a run that is there is not trained again.
        pool: Worker processes, one thread each; None trains in this process.
    """

    folder: Path
    pool: Executor | None
    _folders: dict[str, Path] = field(default_factory=dict)

    def start(self, **fields: Any) -> Future[Row]:
        """Train one run, unless it is there.

        Args:
            fields: Of the sweep's configuration, one value each.

        Returns:
            Its row, in time; a failed run's says why.

        Raises:
            ValueError: A field that breaks its rule.
        """
        config = config_of(fields)
        folder = folder_of(config, below=self.folder)
        if self.pool is None:
            done: Future[Row] = Future()
            done.set_result(_train(config, folder))
        else:
            done = self.pool.submit(_train, config, folder)
        done.add_done_callback(lambda ended: self._note(ended, folder))
        return done

    def folders_of(self, rows: Sequence[Row]) -> list[Path]:
        """The folders of runs that were started here and ended well."""
        names = dict.fromkeys(run_name(row) for row in rows if row["status"] == "ok")
        return [self._folders[name] for name in names if name in self._folders]

    def _note(self, ended: Future[Row], folder: Path) -> None:
        if not ended.cancelled() and ended.exception() is None:
            self._folders[run_name(ended.result())] = folder


@contextlib.contextmanager
def open_runs(folder: Path, *, workers: int) -> Iterator[Runs]:
    """Worker processes of one thread each, or none with 0; waiting runs are dropped where the block fails."""
    if workers == 0:
        yield Runs(folder, None)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start, initargs=(list(sys.path),)) as pool:
        try:
            yield Runs(folder, pool)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def config_of(fields: Mapping[str, Any]) -> SweepConfig:
    """The configuration of one run.

    Raises:
        ValueError: A field that breaks its rule.
    """
    return load_config(None, overrides={"seeds": 1, "checkpoint_every": 0, **fields})


def folder_of(config: SweepConfig, *, below: Path) -> Path:
    """The folder of a run: its method, and a digest of all that is asked beside the defaults."""
    asked = config.model_dump(mode="json", exclude_defaults=True)
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    return below / f"{config.methods[0]}-{digest}"


def rows_of(started: Sequence[Future[Row]]) -> list[Row]:
    """The rows of runs that were started, in their order."""
    return [one.result() for one in started]


def _start(path: list[str]) -> None:
    sys.path[:] = path  # a recipe's own data and networks are found as the parent finds them
    torch.set_num_threads(1)


def _train(config: SweepConfig, folder: Path) -> Row:
    wanted, cell = one_cell(config, command="a recipe's run")
    data = _data(wanted.data, wanted.data_root, wanted.evaluate_on)
    run = prepare_run(wanted, cell, data=data)
    return run_cell(wanted, run, data=data, folder=folder, journal=None, should_stop=lambda: False)


@functools.lru_cache(maxsize=2)  # tuning and comparison take turns
def _data(name: str, root: str, evaluate_on: str) -> Dataset:
    return load_data(load_config(None, overrides={"data": name, "data_root": root, "evaluate_on": evaluate_on}))
