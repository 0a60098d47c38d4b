"""Runs of a recipe on worker processes that stay alive, each kept in a folder of its own."""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asfl_privacy.cli.one_cell import one_cell
from asfl_privacy.config import SweepConfig, load_config
from asfl_privacy.data import Dataset, load_dataset
from asfl_privacy.reporting import Row
from asfl_privacy.run import prepare_run
from asfl_privacy.run_files import config_toml
from asfl_privacy.worker import run_cell


@dataclass(frozen=True)
class Runs:
    """Where runs are kept, and who trains them.

    Attributes:
        folder: One folder a run below it; a run that is there is not trained again.
        pool: Worker processes, one thread each.
    """

    folder: Path
    pool: ProcessPoolExecutor

    def start(self, **fields: Any) -> Future[Row]:
        """Train one run, unless it is there.

        Args:
            fields: Of the sweep's configuration, one value each.

        Returns:
            Its row, in time; a failed run's says why.
        """
        return self.pool.submit(_train, fields, self.folder)


def open_pool(workers: int) -> ProcessPoolExecutor:
    """Worker processes of one thread each."""
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start)


def config_of(fields: Mapping[str, Any]) -> SweepConfig:
    """The configuration of one run.

    Raises:
        ValueError: A field that breaks its rule.
    """
    return load_config(None, overrides={"seeds": 1, "checkpoint_every": 0, **fields})


def folder_of(config: SweepConfig, *, below: Path) -> Path:
    """The folder of a run: its method, and a digest of all that is asked."""
    digest = hashlib.sha256(config_toml(config).encode()).hexdigest()[:16]
    return below / f"{config.methods[0]}-{digest}"


def rows_of(started: Sequence[Future[Row]]) -> list[Row]:
    """The rows of runs that were started, in their order."""
    return [one.result() for one in started]


def _start() -> None:
    torch.set_num_threads(1)


def _train(fields: Mapping[str, Any], below: Path) -> Row:
    config, cell = one_cell(config_of(fields), command="a recipe's run")
    data = _data(config.data, Path(config.data_root))
    run = prepare_run(config, cell, data=data)
    folder = folder_of(config, below=below)
    return run_cell(config, run, data=data, folder=folder, journal=None, should_stop=lambda: False)


@functools.lru_cache(maxsize=1)
def _data(name: str, root: Path) -> Dataset:
    return load_dataset(name, root=root)
