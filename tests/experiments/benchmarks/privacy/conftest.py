"""The benchmark's scripts, which import each other by their bare names, some of which another benchmark uses too."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).resolve().parents[4] / "experiments" / "benchmarks" / "privacy"
NAMES = tuple(path.stem for path in sorted(FOLDER.glob("*.py")))


@pytest.fixture(scope="session")
def scripts():
    others = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    sys.path.insert(0, str(FOLDER))
    try:
        return SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    finally:
        sys.path.remove(str(FOLDER))
        for name in NAMES:
            sys.modules.pop(name, None)
        sys.modules.update(others)
