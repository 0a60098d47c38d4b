"""The command line: the only room that prints or decides paths."""

from asfl_privacy.cli.main import main

__all__ = ["main"]
