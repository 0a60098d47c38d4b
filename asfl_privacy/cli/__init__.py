"""The command line: the only room that prints or decides paths."""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """The console script; worker processes import this module too, and need none of what the commands load.

    Args:
        argv: Arguments without the program's name; default `sys.argv[1:]`.

    Raises:
        SystemExit: Always, with the exit code.
    """
    try:
        from asfl_privacy.cli.commands import run_command
    except KeyboardInterrupt:  # while the libraries load
        print("asfl-privacy: interrupted", file=sys.stderr)  # noqa: T201
        sys.exit(130)
    run_command(argv)
