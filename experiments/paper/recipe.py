"""A recipe: what one table or figure of the paper asks for, on one data set."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROFILES = HERE / "data"
EXHIBIT_KEYS = frozenset({"exhibit", "measure", "title", "rates", "fields", "options"})
PROFILE_KEYS = frozenset({"name", "fields", "lr", "layers", "toy", "options"})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is asked, nothing left to decide.

    Attributes:
        exhibit: Of `asfl_privacy.reporting.exhibits.EXHIBITS`.
        measure: The module of this folder that trains and measures.
        title: Of the report.
        fields: Of every run's configuration.
        options: What the measuring module reads.
    """

    exhibit: str
    measure: str
    title: str
    fields: Mapping[str, Any]
    options: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """For run.json."""
        return {
            "exhibit": self.exhibit,
            "measure": self.measure,
            "fields": dict(self.fields),
            "options": dict(self.options),
        }


def read_recipe(
    exhibit: str, profile: str, *, changes: Mapping[str, Any], rates: Path | None = None, toy: bool = False
) -> Recipe:
    """Put an exhibit's file and a data set's together.

    Args:
        exhibit: Name of a TOML file of this folder.
        profile: Name of a TOML file of the folder data.
        changes: Fields of the configuration that win over both.
        rates: Report of Table 1 whose tuned rates the methods take; the exhibit's own word where None.
        toy: Made-up data of the same shape, and the least of everything, to see that a recipe runs.

    Returns:
        The recipe: texts `{layers}`, `{lr}` and `{rounds}` are the profile's, its options for this exhibit win, and
        `rates` are looked up.

    Raises:
        ValueError: Unknown names or keys, or rates that are not there.
    """
    asked = _read(HERE / f"{exhibit}.toml", known=EXHIBIT_KEYS, what="exhibit")
    data = _read(PROFILES / f"{profile}.toml", known=PROFILE_KEYS, what="profile")
    fields = {**data["fields"], **asked.get("fields", {}), **changes}
    options = {**asked.get("options", {}), **data.get("options", {}).get(exhibit, {})}
    if toy:
        fields, options = _toy(fields, options, data=data)
    options = _filled(options, {"layers": data["layers"], "lr": data["lr"], "rounds": fields["rounds"]})
    source = (
        rates if rates is not None else Path(str(asked["rates"]).format(profile=profile)) if "rates" in asked else None
    )
    if source is not None:
        options["rates"] = {} if toy else read_rates(source)
    options.setdefault("lr", data["lr"][0])
    title = str(asked["title"]).format(name=data["name"], **fields)
    return Recipe(exhibit=asked["exhibit"], measure=asked["measure"], title=title, fields=fields, options=options)


def read_rates(report: Path) -> dict[str, dict[str, Any]]:
    """What each method was given in a report of Table 1: its learning rate and options.

    Raises:
        ValueError: No such report.
    """
    try:
        chosen = json.loads((report / "run.json").read_text(encoding="utf-8"))["config"]["chosen"]
        return {method: {"lr": one["lr"], **one["options"]} for method, one in chosen.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"rates {report}: no report of tuned methods lies there ({type(error).__name__}); make it with table1 first, or give "
            "--rates DIR"
        ) from None


def rate_of(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Learning rate and options of a method, of the tuned ones where there are any."""
    rates: Mapping[str, Mapping[str, Any]] = options.get("rates", {})
    return dict(rates.get(method, {"lr": options["lr"]}))


def _read(path: Path, *, known: frozenset[str], what: str) -> dict[str, Any]:
    if not path.is_file():
        names = ", ".join(sorted(one.stem for one in path.parent.glob("*.toml")))
        raise ValueError(f"{what} {path.stem!r} is unknown; use one of {names}")
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    strangers = sorted(set(values) - known)
    if strangers:
        raise ValueError(f"{path}: key {strangers[0]!r} is unknown; the valid keys are {', '.join(sorted(known))}")
    return values


def _filled(value: Any, names: Mapping[str, Any]) -> Any:  # noqa: ANN401 - whatever TOML holds
    """The value with every text `{name}` replaced."""
    if isinstance(value, dict):
        return {key: _filled(one, names) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, names) for one in value]
    return names.get(value[1:-1], value) if isinstance(value, str) and value.startswith("{") else value


TOY_FIELDS: Mapping[str, Any] = {
    "clients": 4,
    "cohort": 2,
    "rounds": 2,
    "tail_steps": 2,
    "full_steps": 1,
    "batch_size": 4,
    "evaluate_every": 2,
    "last_evaluations": 1,
}


def _toy(
    fields: dict[str, Any], options: dict[str, Any], *, data: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same recipe at the least size: a seed, a learning rate, at most two values of a cell's list."""
    small = {**fields, **TOY_FIELDS, "data": f"toy_data:{data['toy']}"}
    if not str(fields["partition"]).startswith("natural"):
        small["partition"] = "dirichlet:1"
    less = dict(options)
    for name in ("seeds", "repeats"):
        if name in less:
            less[name] = 1
    if "more_seeds" in less:
        less["more_seeds"] = 0
    if "exchange_layers" in less:
        less["exchange_layers"] = data["layers"][:1]
    if "problem" in less:
        less["problem"] = {**less["problem"], "horizons": [2, 4], "seeds": 1}
    if "grid" in less:
        grid = less["grid"]
        less["grid"] = {"lr": [0.05], "seeds": 1} | {
            method: {name: values[:1] for name, values in one.items()}
            for method, one in grid.items()
            if isinstance(one, dict)
        }
        less["widenings"] = 0
    if "cells" in less:
        less["cells"] = [
            {
                name: [1, 2] if name == "cohort" else values[:2] if isinstance(values, list) else values
                for name, values in one.items()
                if name != "seeds"
            }
            for one in less["cells"]
        ]
    return small, less
