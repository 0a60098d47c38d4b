"""The import rules bite: a planted violation of each contract is found."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

VIOLATIONS = [
    ("sensitivity/errors.py", "import asfl_privacy.accounting", "sensitivity stands alone"),
    ("sensitivity/errors.py", "import pandas", "sensitivity stands alone"),
    ("asfl_privacy/accounting/checks.py", "import torch", "accounting is numbers only"),
    ("asfl_privacy/accounting/checks.py", "import sensitivity", "accounting is numbers only"),
    ("asfl_privacy/mechanisms/clipping.py", "import asfl_privacy.federated", "rooms import one way"),
    ("asfl_privacy/models/nets.py", "import asfl_privacy.mechanisms", "rooms import one way"),
    ("asfl_privacy/federated/weights.py", "import asfl_privacy.execution", "rooms import one way"),
    ("asfl_privacy/execution/serial.py", "import asfl_privacy.reporting", "rooms import one way"),
    ("asfl_privacy/sweep.py", "import asfl_privacy.cli", "rooms import one way"),
    ("asfl_privacy/reporting/rows.py", "import torch", "reporting sees rows only"),
    ("asfl_privacy/reporting/rows.py", "import asfl_privacy.federated", "reporting sees rows only"),
    ("asfl_privacy/federated/weights.py", "import asfl_privacy.reporting", "federated does not see reporting"),
]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    program = "import sys; from importlinter.cli import lint_imports_command as run; run(['--no-cache'])"
    return subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The packages and their contracts, to be spoilt."""
    folder = tmp_path_factory.mktemp("copy")
    for package in ("sensitivity", "asfl_privacy"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_the_contracts_are_kept(copy):
    result = lint(copy)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "5 kept, 0 broken" in result.stdout


@pytest.mark.parametrize(("file", "line", "contract"), VIOLATIONS)
def test_a_planted_violation_is_found(copy, file, line, contract):
    target = copy / file
    before = target.read_text()
    try:
        target.write_text(before + f"\n{line}  # planted\n")
        result = lint(copy)
    finally:
        target.write_text(before)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"{contract} BROKEN" in result.stdout
