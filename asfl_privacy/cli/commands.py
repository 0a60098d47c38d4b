"""Entry point: every refusal becomes one line on standard error and exit code 2."""

from __future__ import annotations

import importlib.metadata
import io
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from asfl_privacy.cli.attack import attack
from asfl_privacy.cli.audit import audit
from asfl_privacy.cli.bound import bound
from asfl_privacy.cli.budget import account, calibrate
from asfl_privacy.cli.flags import config_flags, spread_lists
from asfl_privacy.cli.layers import layers
from asfl_privacy.cli.profile import profile
from asfl_privacy.cli.report import report
from asfl_privacy.cli.training import RunInterruptedError, sweep, train
from asfl_privacy.sweep import SweepStoppedError

COMMAND_LINE_ERROR: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
"""What the parser raises; some versions of typer carry a copy of click, so the class is found from theirs."""

GOOD, CHECK_FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

app = typer.Typer(
    name="asfl-privacy",
    help="Private activation sharing for federated learning: bounds, noise, accounts, and privacy–utility tables.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    invoke_without_command=True,
)


@app.callback()
def options(
    *, version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False
) -> None:
    """Private activation sharing for federated learning: bounds, noise, accounts, and privacy–utility tables."""
    if version:
        print(importlib.metadata.version("asfl-privacy"))  # noqa: T201
        raise typer.Exit


app.command("sweep")(config_flags(sweep))
app.command("train")(config_flags(train))
app.command("profile")(config_flags(profile))
app.command("layers")(config_flags(layers))
app.command("calibrate")(calibrate)
app.command("account")(account)
app.command("bound")(bound)
app.command("attack")(attack)
app.command("audit")(audit)
app.command("report")(report)


def run_command(argv: Sequence[str] | None = None) -> None:
    """Run a command and leave with its exit code: 0 good, 1 a check or a run failed, 2 bad input, 130 interrupted.

    Args:
        argv: Arguments without the program's name; default `sys.argv[1:]`.

    Raises:
        SystemExit: Always.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show ε must not cost the run
            stream.reconfigure(errors="replace")
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = spread_lists(given or ["--help"])
    try:
        result = typer.main.get_command(app).main(args=arguments, prog_name=app.info.name, standalone_mode=False)
    except COMMAND_LINE_ERROR as error:
        _leave(f"{error.format_message()} See asfl-privacy --help.", BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        _leave("interrupted", INTERRUPTED)
    except SweepStoppedError as error:
        _leave(f"interrupted: {error}; go on with the same command and --resume", INTERRUPTED)
    except RunInterruptedError as error:
        _leave(f"interrupted: {error}", INTERRUPTED)
    except OSError as error:
        if error.filename is not None and error.strerror is not None:
            _leave(f"{error.filename}: {error.strerror}; give a file or folder that can be used", BAD_INPUT)
        _leave(str(error), BAD_INPUT)
    except ValueError as error:
        _leave(str(error), BAD_INPUT)
    if not given:
        sys.exit(BAD_INPUT)
    if result == INTERRUPTED:  # what typer makes of Ctrl-C
        _leave("interrupted", INTERRUPTED)
    sys.exit(result if isinstance(result, int) else GOOD)


def _leave(message: str, code: int) -> None:
    print(f"asfl-privacy: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201
    sys.exit(code)
