"""The table as it is shown: few columns, every figure as text."""

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from asfl_privacy.reporting.cells import SETTINGS, Cell
from asfl_privacy.reporting.numerals import bound, exact, nearest, spread
from asfl_privacy.reporting.rows import PERSONAL, Value
from asfl_privacy.reporting.table import frame_of
from asfl_privacy.reporting.words import PERSONAL_NAMES, SETTING_NAMES, cell_name

ORDER: Final = (
    "References first, then from weak to strong privacy: ε falling, at equal ε δ falling. ε, δ and sensitivity are the "
    "largest over seeds, rounded up to 4 digits; — is blank."
)
_STEPS: Final = frozenset({"tail_steps", "full_steps"})
# What was asked is shown beside what was spent only where the two differ.
_SPENT: Final = {"target_epsilon": "epsilon_release", "target_total_epsilon": "epsilon_total", "delta": "delta_total"}


@dataclass(frozen=True)
class Display:
    """Column headings, one tuple of texts a cell, and the settings that all cells share."""

    headings: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    shared: tuple[tuple[str, str], ...]


def display_table(cells: Sequence[Cell]) -> Display:
    """Choose the columns worth showing and write every figure as text.

    Args:
        cells: From `gather_cells`, in the order to show.

    Guarantee:
        A setting is either the same wherever it has a meaning, and then in `shared`, or has a column. Each ε, δ and
        sensitivity shown is at least the value in the rows (to 1 part in 10⁹).

    Example:
        >>> from asfl_privacy.reporting.cells import gather_cells
        >>> run = {"status": "ok", "method": "asfl", "mech": "none", "data": "digits", "seed": 0, "accuracy": 0.9}
        >>> table = display_table(gather_cells([run]))
        >>> table.shared, table.lines[0][:2]
        ((('data', 'digits'),), ('ASFL, no noise', '90.0'))
    """
    varying = varying_settings(cells)
    asked = [column for column in _SPENT if _differs_from_spent(cells, column)]
    columns = [column for column in varying if column not in _SPENT] + asked
    personal = [column for column in PERSONAL if any(cell.by_seed(column) for cell in cells)]
    frame = frame_of(cells)
    headings = (
        "run",
        *(SETTING_NAMES[column] for column in columns),
        "accuracy %",
        *(f"{PERSONAL_NAMES[column]} %" for column in personal),
        *("ε per release", "ε total", "δ", "ε whole record"),
        *("points below ASFL", "points below FedAvg"),
        *("MB sent", "runs", "sensitivity", "noise sd"),
    )
    lines = tuple(
        _line(cell, line, columns=columns, personal=personal)
        for cell, line in zip(cells, frame.to_dict("records"), strict=True)
    )
    shared = tuple(
        (SETTING_NAMES[column], exact(_values(cells, column)[0]))
        for column in SETTINGS
        if column not in ("method", "mech", *_SPENT) and column not in varying and _values(cells, column)
    )
    return Display(headings=headings, lines=lines, shared=shared)


def varying_settings(cells: Sequence[Cell]) -> list[str]:
    """Settings with more than one value among the cells where they have a meaning, method and mechanism apart.

    Steps are compared among the cells that share activations: the others run τ'+τ full steps by design. No options is a
    choice of its own beside cells of the same method and mechanism that have some.
    """
    found = {column for column in SETTINGS if len(set(_values(cells, column))) > 1}
    asked: dict[tuple[Value, Value], set[Value]] = {}
    for cell in cells:
        asked.setdefault((cell.settings["method"], cell.settings["mech"]), set()).add(cell.settings["options"])
    found |= {"options"} if any(len(values) > 1 for values in asked.values()) else set()
    return [column for column in SETTINGS if column not in ("method", "mech") and column in found]


def _values(cells: Sequence[Cell], column: str) -> list[Value]:
    return [
        cell.settings[column]
        for cell in cells
        if cell.settings[column] is not None and not (column in _STEPS and cell.settings["tail_steps"] == 0)
    ]


def _differs_from_spent(cells: Sequence[Cell], column: str) -> bool:
    """Whether what was asked says more than what was spent, in any cell."""
    pairs = [(_number(cell.settings[column]), cell.largest(_SPENT[column])) for cell in cells]
    return any(asked is not None and bound(asked) != bound(spent) for asked, spent in pairs)


def _line(
    cell: Cell, line: Mapping[Hashable, Value], *, columns: Sequence[str], personal: Sequence[str]
) -> tuple[str, ...]:
    def figure(column: str) -> float | None:
        return _number(line[column])

    def percent(column: str) -> float | None:
        value = figure(column)
        return None if value is None else 100.0 * value

    name = cell_name(cell.settings)
    if cell.settings["tail_steps"] == 0 and cell.settings["full_steps"] is not None:
        name += f", {exact(cell.settings['full_steps'])} full steps"
    good, failed = len(cell.runs), len(cell.failed)
    return (
        name,
        *(exact(cell.settings[column]) for column in columns),
        *(spread(percent(f"{column}_mean"), percent(f"{column}_sd")) for column in ("accuracy", *personal)),
        *(bound(figure(c)) for c in ("epsilon_release", "epsilon_total", "delta_total", "epsilon_whole_record")),
        *(spread(figure(f"loss_{m}_mean"), figure(f"loss_{m}_sd")) for m in ("asfl", "fedavg")),
        nearest(_megabytes(cell)),
        f"{good} of {good + failed}, {failed} failed" if failed else str(good),
        bound(figure("sensitivity")),
        nearest(figure("noise_stddev")),
    )


def _megabytes(cell: Cell) -> float | None:
    """Bytes of all channels, 10⁶, mean over the runs; None where a run does not say."""
    channels = ("bytes_model", "bytes_activations", "bytes_labels")
    sums = [[_number(run[channel]) for channel in channels] for run in cell.runs]
    known = [sum(value for value in run if value is not None) for run in sums if any(v is not None for v in run)]
    return statistics.fmean(known) / 1e6 if known and len(known) == len(sums) else None


def _number(value: Value) -> float | None:
    return float(value) if isinstance(value, int | float) else None
