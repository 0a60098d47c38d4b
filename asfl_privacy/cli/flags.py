"""Flags made from the configuration's fields, so that both always have the same names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer

from asfl_privacy.config import SweepConfig, load_config
from asfl_privacy.run_profile import NUM_ROUNDS

Command = Callable[..., Any]

RUN_OPTIONS: dict[str, Any] = {
    "out": Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder to write; default by name.")],
    "workers": Annotated[
        int | None, typer.Option("--workers", metavar="N", help="Processes or threads; default: cores.")
    ],
    "resume": Annotated[bool, typer.Option("--resume", help="Go on with what was interrupted in --out.")],
    "ledger": Annotated[
        Path | None, typer.Option("--ledger", metavar="FILE", help="Data set's ledger over all runs; private.")
    ],
    "measure": Annotated[int, typer.Option("--measure", metavar="N", help="Rounds to measure, at least.")],
    "trace": Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="Chrome trace of one more round.")],
    "as_json": Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")],
}
_RUN_DEFAULTS: dict[str, object] = {
    "out": None,
    "workers": None,
    "resume": False,
    "ledger": None,
    "measure": NUM_ROUNDS,
    "trace": None,
    "as_json": False,
}


def is_grid(name: str) -> bool:
    """Whether a field holds several values."""
    return get_origin(SweepConfig.model_fields[name].annotation) is tuple


def config_flags(command: Command) -> Command:
    """Give a command one flag a configuration field, `--config`, and the run options it takes.

    Args:
        command: Takes `config` (a `SweepConfig`) and any of the `RUN_OPTIONS` by keyword.

    Returns:
        The command as typer reads it.
    """
    taken = [name for name in RUN_OPTIONS if name in inspect.signature(command).parameters]

    def from_flags(config_file: Path | None, **values: Any) -> Any:  # noqa: ANN401 - typer hands over anything
        options = {name: values.pop(name) for name in taken}
        overrides = {name: value for name, value in values.items() if value is not None}
        return command(config=load_config(config_file, overrides=overrides), **options)

    parameters = [
        _parameter(
            "config_file",
            Annotated[Path | None, typer.Option("--config", metavar="FILE", help="TOML file; flags win over it.")],
            None,
        )
    ]
    for name, field in SweepConfig.model_fields.items():
        extra = field.json_schema_extra
        metavar = extra["metavar"] if isinstance(extra, dict) else None
        default = field.default
        shown = " ".join(str(v) for v in default) if isinstance(default, tuple) else default
        help_text = f"{field.description}" + (f" [{shown}]" if shown not in (None, "") else "")
        option = typer.Option(f"--{name.replace('_', '-')}", metavar=str(metavar), help=help_text)
        kind: Any = list[str] | None if is_grid(name) else str | None
        parameters.append(_parameter(name, Annotated[kind, option], None))
    parameters += [_parameter(name, RUN_OPTIONS[name], _RUN_DEFAULTS[name]) for name in taken]
    from_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    from_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    from_flags.__doc__ = command.__doc__
    from_flags.__name__ = command.__name__
    return from_flags


def spread_lists(arguments: Sequence[str]) -> list[str]:
    """Let a grid flag take several values: `--epsilon 1 4 16` and `--epsilon 1,4,16` become one flag a value.

    Example:
        >>> spread_lists(["sweep", "--epsilon", "1", "4,16", "--noise", "once"])
        ['sweep', '--epsilon', '1', '--epsilon', '4', '--epsilon', '16', '--noise', 'once']
    """
    grids = {f"--{name.replace('_', '-')}" for name in SweepConfig.model_fields if is_grid(name)}
    if not arguments or arguments[0] not in ("sweep", "train", "profile", "layers"):
        return list(arguments)
    spread: list[str] = []
    waiting = list(arguments)
    while waiting:
        flag, equals, value = waiting[0].partition("=")
        del waiting[0]
        if flag not in grids:
            spread.append(flag + equals + value)
            continue
        values = value.split(",") if equals else []
        while not equals and waiting and not waiting[0].startswith("--"):
            values += waiting.pop(0).split(",")
        # Without a value the flag alone is kept, so that the parser says what is missing.
        spread += [part for one in values for part in (flag, one)] or [flag]
    return spread


def _parameter(name: str, annotation: Any, default: object) -> inspect.Parameter:  # noqa: ANN401 - any annotation
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
