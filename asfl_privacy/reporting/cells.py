"""A cell of the grid: the runs that differ in nothing but the seed."""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from asfl_privacy.reporting.rows import COLUMNS, PERSONAL, Row, Value, complete_row

# Largest over the runs, never the mean: a guarantee that holds for every seed.
BOUNDS: Final[tuple[str, ...]] = (
    "sensitivity",
    "noise_scale",
    "noise_stddev",
    "epsilon_release",
    "epsilon_total",
    "delta_total",
    "epsilon_whole_record",
    "epsilon_client",
    "epsilon_activations",
    "epsilon_labels",
    "epsilon_updates",
)
_OUTCOMES: Final = frozenset(
    {*BOUNDS, "status", "accuracy", "seed", "seconds", "update_multiplier", "epsilon_claimed", "held_back", *PERSONAL}
    | {"remote_fraction", "bytes_model", "bytes_activations", "bytes_labels"}
)
SETTINGS: Final[tuple[str, ...]] = tuple(column for column in COLUMNS if column not in _OUTCOMES)
_BASE: Final = ("data", "partition", "clients", "cohort", "model", "rounds", "lr")
_ASFL_BASE: Final = (*_BASE, "tail_steps", "full_steps")


@dataclass(frozen=True)
class Cell:
    """Settings, the runs that ended well and those that failed, each in order of their seeds."""

    settings: Mapping[str, Value]
    runs: tuple[Row, ...]
    failed: tuple[Row, ...]

    @property
    def is_noised(self) -> bool:
        """Whether this cell claims privacy; a cell without noise is a reference."""
        return self.settings["mech"] != "none"

    @property
    def accuracy_by_seed(self) -> dict[int, float]:
        """Accuracy (0 to 1) of the global network of every run that ended well and has one."""
        return self.by_seed("accuracy")

    def by_seed(self, column: str) -> dict[int, float]:
        """A column's number in every run that ended well and has one there."""
        values = [(_number_of(run, "seed"), run[column]) for run in self.runs]
        return {seed: float(value) for seed, value in values if isinstance(value, int | float)}

    def largest(self, column: str) -> float | None:
        """The largest value over the runs; blank (None) where any run left it blank, or none ended well."""
        values = [run[column] for run in self.runs]
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        return max(numbers) if numbers and len(numbers) == len(values) else None


def gather_cells(rows: Sequence[Mapping[str, object]]) -> list[Cell]:
    """Group runs into cells: references first, then from weak to strong privacy.

    Args:
        rows: Runs, in any order.

    Returns:
        Unnoised ASFL, FedAvg, other unnoised methods; then, for each method, mechanism and further settings, cells
        by falling target ε, then falling δ. A smaller radius (weaker) comes before a larger one, "any" last.

    Raises:
        ValueError: No rows, a row that `complete_row` refuses, two runs of one cell and seed.

    Edge cases:
        A failed run that left settings blank joins the one cell that agrees with the rest of them, if there is one.

    Example:
        >>> run = {"status": "ok", "mech": "none", "seed": 0, "accuracy": 0.5}
        >>> [cell.settings["method"] for cell in gather_cells([{**run, "method": m} for m in ("fedavg", "asfl")])]
        ['asfl', 'fedavg']
    """
    if not rows:
        raise ValueError("rows is empty: a table needs at least one run; finish a run first")
    completed = [complete_row(row) for row in rows]
    groups: dict[tuple[Value, ...], list[Row]] = {}
    for row in sorted(completed, key=lambda row: row["status"] != "ok"):
        key = tuple(row[column] for column in SETTINGS)
        if row["status"] != "ok" and key not in groups:
            key = _only_match(row, groups) or key
        groups.setdefault(key, []).append(row)
    cells = [_cell(dict(zip(SETTINGS, key, strict=True)), runs) for key, runs in groups.items()]
    return sorted(cells, key=_order)


def run_name(row: Mapping[str, object]) -> str:
    """A short name of a run, the same wherever its row is read: a digest of what was asked and its seed.

    Example:
        >>> row = complete_row({"status": "ok", "method": "asfl", "mech": "none", "seed": 0, "accuracy": 0.5})
        >>> run_name(row) == run_name({**row, "accuracy": 0.7}), run_name(row) == run_name({**row, "seed": 1})
        (True, False)
    """
    asked = {column: row[column] for column in (*SETTINGS, "seed") if row[column] is not None}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]


def reference_cell(cell: Cell, cells: Sequence[Cell], *, method: str) -> Cell | None:
    """The unnoised cell of a method that a cell is compared with, or None where there is not exactly one.

    Args:
        cell: The cell to compare.
        cells: All cells.
        method: "asfl" or "fedavg".

    Guarantee:
        Data, partition, clients, cohort, model, rounds and learning rate agree. ASFL against ASFL agrees in tail and
        full steps and in the exchange layer (or the reference left it blank); any other pair agrees in the sum of
        tail and full steps, because FedAvg spends τ'+τ full steps.
    """
    both_asfl = method == "asfl" and cell.settings["method"] == "asfl"
    found = [
        other
        for other in cells
        if not other.is_noised
        and other.settings["method"] == method
        and all(other.settings[column] == cell.settings[column] for column in (_ASFL_BASE if both_asfl else _BASE))
        and (both_asfl or _steps(other) == _steps(cell))
        and (not both_asfl or other.settings["exchange_layer"] in (None, cell.settings["exchange_layer"]))
    ]
    if both_asfl and len(found) > 1:
        found = [other for other in found if other.settings["exchange_layer"] is not None]
    return found[0] if len(found) == 1 else None


def _only_match(row: Row, groups: Mapping[tuple[Value, ...], Sequence[Row]]) -> tuple[Value, ...] | None:
    matches = [
        key
        for key, runs in groups.items()
        if all(row[column] in (None, value) for column, value in zip(SETTINGS, key, strict=True))
        and row["seed"] not in [run["seed"] for run in runs]
    ]
    return matches[0] if len(matches) == 1 else None


def _cell(settings: Mapping[str, Value], rows: Sequence[Row]) -> Cell:
    ordered = sorted(rows, key=lambda row: _number_of(row, "seed"))
    for left, right in itertools.pairwise(ordered):
        if left["seed"] == right["seed"]:
            raise ValueError(
                f"seed {left['seed']} of {settings['method']} with mech {settings['mech']} appears twice with the "
                "same settings: a run counts once; keep one of the two rows"
            )
    return Cell(
        settings=settings,
        runs=tuple(row for row in ordered if row["status"] == "ok"),
        failed=tuple(row for row in ordered if row["status"] != "ok"),
    )


def _order(cell: Cell) -> tuple[object, ...]:
    settings = cell.settings
    method = str(settings["method"])
    rank = 3 if cell.is_noised else {"asfl": 0, "fedavg": 1}.get(method, 2)
    asked = [settings["target_epsilon"], settings["target_total_epsilon"], cell.largest("epsilon_release")]
    kind, target = next(((k, float(v)) for k, v in enumerate(asked) if isinstance(v, int | float)), (3, 0.0))
    delta = settings["delta"]
    others = [c for c in SETTINGS if c not in ("method", "mech", "target_epsilon", "target_total_epsilon", "delta")]
    return (
        rank,
        method,
        str(settings["mech"]),
        *(_sortable(settings[column]) for column in others),
        kind,
        -target,
        -float(delta) if isinstance(delta, int | float) else 0.0,
    )


def _sortable(value: Value) -> tuple[int, float, str]:
    if value is None:
        return (2, 0.0, "")
    return (1, 0.0, value) if isinstance(value, str) else (0, float(value), "")


def _steps(cell: Cell) -> int:
    steps = (cell.settings["tail_steps"], cell.settings["full_steps"])
    return sum(value for value in steps if isinstance(value, int))


def _number_of(row: Row, column: str) -> int:
    value = row[column]
    if not isinstance(value, int):
        raise ValueError(f"{column} is {value!r}: every run has a whole number there; fill it in")
    return value
