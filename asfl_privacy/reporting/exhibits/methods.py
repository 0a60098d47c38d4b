"""Table 1: methods without noise on one task, each as it was tuned."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from asfl_privacy.reporting.cells import Cell, gather_cells, run_name
from asfl_privacy.reporting.comparison import Difference, check_task, megabytes_a_round, paired_difference
from asfl_privacy.reporting.display import Display
from asfl_privacy.reporting.exhibits.exhibit import Exhibit, Material
from asfl_privacy.reporting.numerals import BLANK, exact, nearest, spread
from asfl_privacy.reporting.records import Record
from asfl_privacy.reporting.rows import PERSONAL
from asfl_privacy.reporting.section import Section
from asfl_privacy.reporting.words import PERSONAL_NAMES, cell_name, method_name

BASELINE: Final = "fedavg"
_HEADINGS: Final = (
    "method",
    "accuracy %",
    "points above FedAvg",
    "95 % interval",
    "pairs",
    "rounds to target",
    "MB a round",
    "learning rate",
    "options",
)


def methods_exhibit(material: Material) -> Exhibit:
    """Accuracy, paired differences to FedAvg, rounds to FedAvg's own accuracy, bytes; personal accuracy apart.

    Args:
        material: Rows of runs without noise (others are left out); `evaluations` for rounds to target and `trials` for
            what tuning tried, where there are any.

    Raises:
        ValueError: Runs of different tasks, or FedAvg with no or more than one cell.

    Guarantee:
        A failed run enters no mean. The target is FedAvg's mean accuracy, the same for all; a method counts as having
        reached it in the first round whose evaluation, averaged over its seeds, is at least that.
    """
    cells = [cell for cell in gather_cells(material.rows) if not cell.is_noised]
    finished = [cell for cell in cells if cell.runs]
    shared = check_task(finished, baseline=BASELINE)
    baseline = next(cell for cell in finished if cell.settings["method"] == BASELINE)
    ordered = sorted(
        (cell for cell in finished if cell.accuracy_by_seed), key=lambda cell: -statistics.fmean(_accuracies(cell))
    )
    target = statistics.fmean(_accuracies(baseline))
    evaluations = material.tables.get("evaluations", ())
    lines = tuple(_line(cell, baseline, evaluations=evaluations, target=target) for cell in ordered)
    table = Display(headings=_HEADINGS, lines=lines, shared=shared)
    sections = [_main_section(table, target=target, failed=_failures(cells))]
    personal = [cell for cell in finished if cell.by_seed(PERSONAL[0])]
    if personal:
        sections.append(_personal_section(personal))
    trials = material.tables.get("trials", ())
    if trials:
        sections.append(_tuning_section(trials))
    return Exhibit(findings=_findings(ordered, baseline), sections=tuple(sections), table=table)


def _accuracies(cell: Cell) -> list[float]:
    return [100.0 * value for value in cell.accuracy_by_seed.values()]


def _line(cell: Cell, baseline: Cell, *, evaluations: Sequence[Record], target: float) -> tuple[str, ...]:
    values = _accuracies(cell)
    difference = None if cell is baseline else _difference(cell, baseline)
    settings = cell.settings
    return (
        _name(cell),
        spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None),
        BLANK if difference is None else f"{100 * difference.mean:+.1f}",
        BLANK if difference is None or difference.pairs < 2 else interval(difference),
        BLANK if difference is None else str(difference.pairs),
        _rounds_to(target, _curve(cell, evaluations)),
        nearest(megabytes_a_round(cell)),
        exact(settings["lr"]),
        exact(settings["options"]),
    )


def _name(cell: Cell) -> str:
    layer = cell.settings["exchange_layer"]
    return method_name(cell.settings["method"]) + (f", {layer}" if layer else "")


def interval(difference: Difference) -> str:
    """The ends of a difference's interval, in points."""
    return f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}"


def _difference(cell: Cell, baseline: Cell) -> Difference | None:
    return paired_difference(cell.accuracy_by_seed, baseline.accuracy_by_seed)


def _curve(cell: Cell, evaluations: Sequence[Record]) -> dict[int, float]:
    """Accuracy in per cent, mean over the cell's runs, after each round in which all of them were evaluated."""
    names = {run_name(run) for run in cell.runs}
    values: dict[int, list[float]] = {}
    for one in evaluations:
        accuracy, number = one["accuracy"], one["round"]
        if one["run"] in names and isinstance(accuracy, float) and isinstance(number, int):
            values.setdefault(number, []).append(100.0 * accuracy)
    return {number: statistics.fmean(found) for number, found in sorted(values.items()) if len(found) == len(names)}


def _rounds_to(target: float, curve: Mapping[int, float]) -> str:
    if not curve:
        return BLANK
    reached = [number for number, value in curve.items() if value >= target]
    return str(min(reached)) if reached else f"over {max(curve)}"


def _failures(cells: Sequence[Cell]) -> tuple[str, ...]:
    return tuple(
        f"{cell_name(cell.settings)}, seed {run['seed']}: {run['status']}" for cell in cells for run in cell.failed
    )


def _main_section(table: Display, *, target: float, failed: Sequence[str]) -> Section:
    sentences = [
        "Accuracy of the global network on the test records, each run's the mean of its last evaluations; mean ± standard "
        "deviation over seeds. Differences are paired by seed, with Student's interval.",
        f"Rounds to target: the first evaluated round in which a method's mean accuracy over seeds is at least {target:.1f} %, "
        "FedAvg's in this table.",
        "Megabytes (10⁶ bytes) a round are of all clients and channels together.",
        "; ".join(f"{name}: {value}" for name, value in table.shared) + ".",
    ]
    sentences += [f"Failed, and in no mean: {one}." for one in failed]
    return Section(
        title="Methods",
        sentences=tuple(sentences),
        caption="One line a method, the most accurate first.",
        headings=table.headings,
        lines=table.lines,
        svg=None,
        figure=None,
        alt="",
    )


def _personal_section(cells: Sequence[Cell]) -> Section:
    def text(cell: Cell, column: str) -> str:
        values = [100.0 * value for value in cell.by_seed(column).values()]
        if not values:
            return BLANK
        return spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)

    return Section(
        title="Methods without a global network",
        sentences=(
            "Each client's own network on the test records of the classes that the client has, mean over clients: not to be "
            "compared with the accuracy of a global network on all classes.",
        ),
        caption="One line a method.",
        headings=(
            "method",
            *(f"{PERSONAL_NAMES[column]} %" for column in PERSONAL),
            "seeds",
            "MB a round",
            "learning rate",
            "options",
        ),
        lines=tuple(
            (
                _name(cell),
                *(text(cell, column) for column in PERSONAL),
                str(len(cell.runs)),
                nearest(megabytes_a_round(cell)),
                exact(cell.settings["lr"]),
                exact(cell.settings["options"]),
            )
            for cell in cells
        ),
        svg=None,
        figure=None,
        alt="",
    )


def _tuning_section(trials: Sequence[Record]) -> Section:
    best: dict[str, float] = {}
    for one in trials:
        if isinstance(one["accuracy"], float):
            method = str(one["method"])
            best[method] = max(best.get(method, -math.inf), one["accuracy"])
    lines = tuple(
        (
            method_name(str(one["method"])),
            exact(one["lr"]),
            str(one["options"]) or BLANK,
            "failed" if not isinstance(one["accuracy"], float) else f"{100 * one['accuracy']:.1f}",
            "best" if one["accuracy"] is not None and one["accuracy"] == best.get(str(one["method"])) else "",
        )
        for one in trials
    )
    return Section(
        title="Tuning",
        sentences=(
            "Accuracy on a sixth of the training records, which took no part in these runs' training. Every method got the "
            "same learning rates; where the best was an end of the grid, the grid went on there. Further options were tried "
            "at the rate found. FedProto was judged by its clients' own accuracy.",
        ),
        caption="Every point that was tried.",
        headings=("method", "learning rate", "options", "validation accuracy %", ""),
        lines=lines,
        svg=None,
        figure=None,
        alt="",
    )


def _findings(ordered: Sequence[Cell], baseline: Cell) -> tuple[str, ...]:
    """ASFL's place, its difference to FedAvg, and every method that is ahead of it, or the next one."""
    asfl = next((cell for cell in ordered if cell.settings["method"] == "asfl"), None)
    if asfl is None:
        return ()
    place = ordered.index(asfl) + 1
    findings = [f"ASFL is number {place} of {len(ordered)} by accuracy of the global network."]
    difference = _difference(asfl, baseline)
    if difference is not None:
        text = f"ASFL is {100 * difference.mean:+.1f} points from FedAvg over {difference.pairs} paired seeds"
        text += f", 95 % interval {interval(difference)}" if difference.pairs > 1 else ""
        verdict = (
            "above"
            if difference.low > 0
            else "below"
            if difference.high < 0
            else "not distinguishable from FedAvg at that confidence"
        )
        findings.append(f"{text}: {verdict}.")
    others = [cell for cell in ordered if cell is not asfl and cell is not baseline]
    for cell in others:
        found = paired_difference(cell.accuracy_by_seed, asfl.accuracy_by_seed)
        is_next = place == 1 and cell is others[0]
        if found is not None and (found.mean > 0 or is_next):
            findings.append(
                f"{_name(cell)} is {100 * found.mean:+.1f} points from ASFL over {found.pairs} paired seeds"
                + (f", 95 % interval {interval(found)}." if found.pairs > 1 else ".")
            )
    return tuple(findings)
