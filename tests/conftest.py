"""Fixtures that several rooms use."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch and NumPy load: test processes share the cores

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asfl_privacy.data import Dataset, load_dataset


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads under load are many times slower than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def digits() -> Dataset:
    """The embedded real data set."""
    return load_dataset("digits", root=Path("data"))
