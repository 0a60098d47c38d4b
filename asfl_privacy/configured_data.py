"""The data set that a configuration asks for."""

from __future__ import annotations

from pathlib import Path

from asfl_privacy.config import SweepConfig
from asfl_privacy.data import Dataset, hold_out, load_dataset


def load_data(config: SweepConfig) -> Dataset:
    """Read the data set, with validation records in the place of the test records where that is asked.

    Raises:
        ValueError: As `load_dataset` and `hold_out`.
    """
    data = load_dataset(config.data, root=Path(config.data_root))
    return hold_out(data) if config.evaluate_on == "validation" else data
