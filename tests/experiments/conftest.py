"""The paper's recipes as modules, found as their own scripts find them."""

import importlib
import sys
from pathlib import Path

import pytest

PAPER = Path(__file__).resolve().parents[2] / "experiments" / "paper"


@pytest.fixture(scope="session")
def paper():
    """Imports a module of experiments/paper by its name."""
    sys.path.insert(0, str(PAPER))
    before = set(sys.modules)
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(PAPER))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file).parent == PAPER:
                del sys.modules[name]
