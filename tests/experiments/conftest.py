"""The paper's recipes as modules, found as their own scripts find them."""

import importlib
import sys
from pathlib import Path

import pytest

PAPER = Path(__file__).resolve().parents[2] / "experiments" / "paper"


@pytest.fixture(scope="module")
def paper():
    """Imports a module of experiments/paper by its name, which a benchmark's module may bear too."""
    names = {path.stem for path in PAPER.glob("*.py")}
    strangers = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(PAPER))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(PAPER))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(strangers)
