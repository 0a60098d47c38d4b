"""Virtual environments of the peers, each with its pinned versions, made where they are missing.

    python experiments/benchmarks/engines/environments.py --root DIR

An environment for the Python that runs this script sees this one's torch and numpy through a .pth file; one for another
Python (BlazeFL asks for 3.12 or later, `python3.12` on the path) installs torch of the same version, about 5 GB.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Environment:
    """One peer's environment: requirements, and the Pythons it runs on, best first ("" for the one that runs this)."""

    name: str
    requirements: tuple[str, ...]
    pythons: tuple[str, ...] = ("",)


ENVIRONMENTS = {
    one.name: one
    for one in (
        Environment("flower", ("flwr[simulation]==1.42.0",)),
        Environment("pfl", ("pfl[pytorch]==0.6.0",)),
        Environment("blazefl", ("blazefl==2.0.3",), pythons=("python3.12", "python3.13")),
    )
}


def python_of(root: Path, name: str) -> Path:
    """The interpreter of an environment."""
    return root / name / "bin" / "python"


def make(root: Path, environment: Environment) -> str:
    """Make an environment where it is missing; says why it cannot, or nothing."""
    if (root / environment.name / "ready").exists():
        return ""
    base = next(filter(None, map(_interpreter, environment.pythons)), None)
    if base is None:
        return f"needs one of {', '.join(environment.pythons)} on the path"
    folder, mine = root / environment.name, base == sys.executable
    shutil.rmtree(folder, ignore_errors=True)
    extra = () if mine else (f"torch=={importlib.metadata.version('torch').partition('+')[0]}", "numpy")
    try:
        _run(base, "-m", "venv", str(folder))
        python = str(python_of(root, environment.name))
        if mine:  # the environment sees this one's packages behind its own
            (Path(_run(python, "-c", _PURELIB)) / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        _run(python, "-m", "pip", "install", "--quiet", *environment.requirements, *extra)
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout or str(error)).strip().splitlines()
        return f"cannot be installed: {lines[-1] if lines else error}"
    (folder / "ready").touch()
    return ""


_PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"


def _interpreter(name: str) -> str | None:
    """The path of a Python that starts, or None."""
    if not name:
        return sys.executable
    found = shutil.which(name)
    try:
        return found and _run(found, "-c", "import sys; print(sys.executable)")
    except (OSError, subprocess.CalledProcessError):  # a launcher without that version behind it
        return None


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main(arguments: list[str]) -> None:
    """Make all environments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of the environments")
    root = parser.parse_args(arguments).root
    for name, environment in ENVIRONMENTS.items():
        print(f"{name}: {make(root, environment) or 'ready'}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
