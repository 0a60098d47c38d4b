"""The command line: the only room that prints or decides paths."""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """The console script; worker processes import this module too, and need none of what the commands load.

    Args:
        argv: Arguments without the program's name; default `sys.argv[1:]`.

    Raises:
        SystemExit: Always, with the exit code.
    """
    from asfl_privacy.cli.main import run_command

    run_command(argv)
