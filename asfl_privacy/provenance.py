"""What made a report: command, commit, date, configuration, versions."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

PACKAGES = ("asfl-privacy", "torch", "torchvision", "numpy", "scipy", "pandas", "scikit-learn")


def provenance(*, title: str, command: str, config: Mapping[str, object]) -> dict[str, object]:
    """The record that lies beside a report's rows as run.json.

    Args:
        title: Of the report.
        command: That makes it anew.
        config: All that was asked, nothing left to decide.
    """
    return {
        "command": command,
        "commit": commit_of_package(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "config": dict(config),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        "title": title,
    }


def commit_of_package() -> str | None:
    """The commit that this package was built or runs from, `+` where files have changed since; None where it is unknown."""
    package = Path(__file__).resolve().parent
    built_from = package / "COMMIT"
    if built_from.is_file():
        return built_from.read_text(encoding="utf-8").strip() or None
    if not (package.parent / ".git").exists():
        return None
    git = ["git", "-C", str(package.parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed.strip() else "")
