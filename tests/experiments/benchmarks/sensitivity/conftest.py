"""The benchmark's scripts, which import each other by their bare names."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).resolve().parents[4] / "experiments" / "benchmarks" / "sensitivity"
NAMES = ("heads", "rows", "peers", "truth", "training", "figure", "report", "memory", "run")


@pytest.fixture(scope="session")
def scripts():
    sys.path.insert(0, str(FOLDER))
    try:
        return SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    finally:
        sys.path.remove(str(FOLDER))
