"""Build hook: a wheel remembers the commit that it was built from, so that reports can name it."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface):  # type: ignore[type-arg]  # hatchling's own examples leave it open
    """Adds asfl_privacy/COMMIT to a wheel; a tree without git gives an empty one."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Ask git for the commit, `+` where files have changed."""
        if version == "editable":
            return
        git = ["git", "-C", self.root]
        try:
            commit = subprocess.run(
                [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
            ).stdout.strip()
            changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
            text = commit + ("+" if changed.strip() else "")
        except (OSError, subprocess.CalledProcessError):
            text = ""
        self._folder = tempfile.TemporaryDirectory()
        file = Path(self._folder.name) / "COMMIT"
        file.write_text(text + "\n", encoding="utf-8")
        build_data["force_include"][str(file)] = "asfl_privacy/COMMIT"
