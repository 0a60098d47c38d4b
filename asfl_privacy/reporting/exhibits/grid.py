"""Any grid of settings: number of activations exchanged, ε by exchange layer or radius, clean or released activations."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from asfl_privacy.reporting.cells import SETTINGS, Cell, gather_cells
from asfl_privacy.reporting.comparison import Difference, paired_difference, reference_of
from asfl_privacy.reporting.display import Display, varying_settings
from asfl_privacy.reporting.exhibits.exhibit import Exhibit, Material
from asfl_privacy.reporting.exhibits.grid_picture import GridLine, GridPicture, draw_grid, picture_of
from asfl_privacy.reporting.exhibits.methods import BASELINE, interval
from asfl_privacy.reporting.exhibits.noise_notes import marks, promise_section, tex_note
from asfl_privacy.reporting.numerals import BLANK, bound, exact, nearest, spread
from asfl_privacy.reporting.rows import Value
from asfl_privacy.reporting.section import Section
from asfl_privacy.reporting.words import SETTING_NAMES, cell_name

_FIGURE: Final = "grid"
_SPENT: Final = {"target_epsilon": "epsilon_release", "target_total_epsilon": "epsilon_total", "delta": "delta_total"}
_STEPS: Final = frozenset({"tail_steps", "full_steps"})
_CHANNELS: Final = ("bytes_activations", "bytes_labels", "bytes_model")


def grid_exhibit(material: Material) -> Exhibit:
    """One line a cell and a figure along the first varying numeric setting.

    Args:
        material: Rows over any settings. The configuration, or its `options`, may name `x`, the column of the figure's
            x-axis, and `series`, the columns that tell its lines apart.

    Raises:
        ValueError: No finished run, an unknown `x` or `series`, or two cells that they put in one place.

    Guarantee:
        A setting is either the same wherever it has a meaning, or has a column. Differences are to FedAvg without noise of
        the same task and as many local steps, and blank where there is not exactly one. Every ε and δ shown is at least
        the largest over the cell's seeds, to 1 part in 10⁹.
    """
    gathered = gather_cells(material.rows)
    cells = [cell for cell in gathered if cell.accuracy_by_seed]
    if not cells:
        raise ValueError("no run has finished with an accuracy: a grid is of these; finish one run first")
    table = _table(cells)
    x, series = _asked(material)
    picture = picture_of(cells, x=x, series=series)
    sections = [_main_section(table, picture, cells=gathered)]
    contrast = _contrast_section(cells)
    if contrast is not None:
        sections.append(contrast)
    figures: dict[str, str | bytes] = {}
    if picture is not None:
        drawing = draw_grid(picture, name=_FIGURE)
        sections[0] = _with_picture(sections[0], drawing.inline, picture)
        figures = {f"{_FIGURE}.svg": drawing.svg, f"{_FIGURE}.png": drawing.png}
    if any(cell.is_noised for cell in gathered):
        sections.append(promise_section(gathered))
    return Exhibit(
        findings=_findings(cells, picture),
        sections=tuple(sections),
        table=table,
        figures=figures,
        note=tex_note(gathered),
    )


def _asked(material: Material) -> tuple[str | None, tuple[str, ...] | None]:
    """The columns that the configuration names."""
    config = material.info.get("config")
    found: dict[str, object] = {}
    for level in (config, config.get("options") if isinstance(config, dict) else None):
        if isinstance(level, dict):
            found |= {name: level[name] for name in ("x", "series") if name in level}
    x, series = found.get("x"), found.get("series")
    names = [series] if isinstance(series, str) else series
    if names is not None and not isinstance(names, list):
        raise ValueError(f'series {names!r} is no list of columns; give for example ["radius"]')
    return None if x is None else str(x), None if names is None else tuple(str(name) for name in names)


def _table(cells: Sequence[Cell]) -> Display:
    noised = [cell for cell in cells if cell.is_noised]
    varying = [column for column in varying_settings(cells) if column not in _SPENT or _says_more(noised, column)]
    spent = ("ε per release", "ε total", "δ", "noise sd") if noised else ()
    return Display(
        headings=(
            *("run", *(SETTING_NAMES[column] for column in varying)),
            *("accuracy %", "runs", "points above FedAvg", "95 % interval", "pairs"),
            *("MB of activations", "MB of labels", "MB of the model"),
            *spent,
        ),
        lines=tuple(_line(cell, cells, varying=varying, with_noise=bool(noised)) for cell in cells),
        shared=tuple(
            (SETTING_NAMES[column], exact(values[0]))
            for column in SETTINGS
            if column not in ("method", "mech", *_SPENT) and column not in varying
            if len(values := _values(cells, column)) == 1
        ),
    )


def _line(cell: Cell, cells: Sequence[Cell], *, varying: Sequence[str], with_noise: bool) -> tuple[str, ...]:
    values = [100.0 * value for value in cell.accuracy_by_seed.values()]
    difference = _to_fedavg(cell, cells)
    spent: tuple[str, ...] = ()
    if with_noise:
        spent = tuple(bound(cell.largest(column)) for column in ("epsilon_release", "epsilon_total", "delta_total"))
        spent += (nearest(cell.largest("noise_stddev")),)
    return (
        _name(cell),
        *(exact(cell.settings[column]) for column in varying),
        spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None),
        f"{len(cell.runs)}, {len(cell.failed)} failed" if cell.failed else str(len(cell.runs)),
        BLANK if difference is None else f"{100 * difference.mean:+.1f}",
        BLANK if difference is None or difference.pairs < 2 else interval(difference),
        BLANK if difference is None else str(difference.pairs),
        *(nearest(_megabytes(cell, channel)) for channel in _CHANNELS),
        *spent,
    )


def _values(cells: Sequence[Cell], column: str) -> list[Value]:
    """Different values where a column has a meaning; steps are compared among the cells that share activations."""
    shown = [cell for cell in cells if column not in _STEPS or cell.settings["tail_steps"] != 0] or cells
    return list(dict.fromkeys(cell.settings[column] for cell in shown if cell.settings[column] is not None))


def _name(cell: Cell) -> str:
    steps = cell.settings["full_steps"]
    alone = cell.settings["tail_steps"] == 0 and steps is not None
    return cell_name(cell.settings) + (f", {exact(steps)} full steps" if alone else "")


def _says_more(noised: Sequence[Cell], column: str) -> bool:
    """Whether what was asked differs from what was spent, in any cell."""
    pairs = [(cell.settings[column], cell.largest(_SPENT[column])) for cell in noised]
    return any(isinstance(asked, int | float) and bound(float(asked)) != bound(spent) for asked, spent in pairs)


def _megabytes(cell: Cell, channel: str) -> float | None:
    """10⁶ bytes of a run, mean over the runs; None where one does not say."""
    found = cell.by_seed(channel)
    return statistics.fmean(found.values()) / 1e6 if len(found) == len(cell.runs) else None


def _to_fedavg(cell: Cell, cells: Sequence[Cell]) -> Difference | None:
    baseline = reference_of(cell, cells, method=BASELINE)
    if baseline is None or baseline is cell:
        return None
    return paired_difference(cell.accuracy_by_seed, baseline.accuracy_by_seed)


def _main_section(table: Display, picture: GridPicture | None, *, cells: Sequence[Cell]) -> Section:
    failed = [
        f"{cell_name(cell.settings)}, seed {run['seed']}: {run['status']}" for cell in cells for run in cell.failed
    ]
    sentences = [
        *marks(cells),
        "Accuracy of the global network, each run's the mean of its last evaluations; mean ± standard deviation over seeds. "
        "Differences are to FedAvg without noise of the same task and number of local steps, paired by seed, with Student's "
        "interval; — where there is not exactly one such FedAvg. MB (10⁶ bytes) are of a whole run, mean over seeds.",
        *(("; ".join(f"{name}: {value}" for name, value in table.shared) + ".",) if table.shared else ()),
        *(("No figure: no numeric setting varies between the runs.",) if picture is None else ()),
        *(f"Failed, and in no mean: {one}." for one in failed),
    ]
    return Section(
        title="Grid",
        sentences=tuple(sentences),
        caption="One line a cell.",
        headings=table.headings,
        lines=table.lines,
        svg=None,
        figure=None,
        alt="",
    )


def _with_picture(section: Section, svg: str, picture: GridPicture) -> Section:
    alt = f"Accuracy against {picture.x_label}. Small dots: one run each; lines: mean over seeds."
    if picture.references:
        alt += " Horizontal lines: runs that have no place on this axis."
    if picture.omitted:
        alt += f" Not drawn: {picture.omitted} cells with a blank or infinite {picture.x_label}."
    return Section(
        title=section.title,
        sentences=section.sentences,
        caption=section.caption,
        headings=section.headings,
        lines=section.lines,
        svg=svg,
        figure=f"figures/{_FIGURE}.svg",
        alt=alt,
    )


def _contrast_section(cells: Sequence[Cell]) -> Section | None:
    """Own activations released against clean, where cells differ in nothing else."""
    pairs = _contrasts(cells)
    if not pairs:
        return None
    others = _apart(pairs)
    lines = []
    for clean, released in pairs:
        difference = paired_difference(released.accuracy_by_seed, clean.accuracy_by_seed)
        lines.append(
            (
                cell_name(clean.settings),
                bound(clean.largest("epsilon_release")),
                bound(released.largest("epsilon_release")),
                *(exact(clean.settings[column]) for column in others),
                *(spread(100 * statistics.fmean(one.accuracy_by_seed.values()), None) for one in (clean, released)),
                BLANK if difference is None else f"{100 * difference.mean:+.1f}",
                BLANK if difference is None or difference.pairs < 2 else interval(difference),
                BLANK if difference is None else str(difference.pairs),
            )
        )
    return Section(
        title="Own activations: clean or released",
        sentences=(
            "A client's own activations in the tail round, as they are (clean) or as they were released; all else is equal.",
        ),
        caption="One line a pair of cells.",
        headings=(
            *("run", "ε per release, clean", "ε per release, released", *(SETTING_NAMES[column] for column in others)),
            *("accuracy %, clean", "accuracy %, released", "points released above clean", "95 % interval", "pairs"),
        ),
        lines=tuple(lines),
        svg=None,
        figure=None,
        alt="",
    )


def _apart(pairs: Sequence[tuple[Cell, Cell]]) -> list[str]:
    """Settings that tell one pair from another, what was asked of ε and δ aside."""
    cells = [cell for pair in pairs for cell in pair]
    return [column for column in varying_settings(cells) if column != "own" and column not in _SPENT]


def _contrasts(cells: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    groups: dict[tuple[Value, ...], dict[Value, Cell]] = {}
    for cell in cells:
        if cell.is_noised:
            key = tuple(cell.settings[column] for column in SETTINGS if column != "own")
            groups.setdefault(key, {})[cell.settings["own"]] = cell
    return [(group["clean"], group["released"]) for group in groups.values() if {"clean", "released"} <= set(group)]


def _findings(cells: Sequence[Cell], picture: GridPicture | None) -> tuple[str, ...]:
    found = [] if picture is None else [_along(line, picture) for line in picture.lines if len(line.points) > 1]
    compared = [(cell, difference) for cell in cells if (difference := _to_fedavg(cell, cells)) is not None]
    for noised, what in ((False, "without noise"), (True, "with noise")):
        here = [difference for cell, difference in compared if cell.is_noised is noised]
        if here:
            above = sum(one.pairs > 1 and one.low > 0 for one in here)
            below = sum(one.pairs > 1 and one.high < 0 for one in here)
            found.append(
                f"Of {len(here)} cells {what} that have a FedAvg to compare with, {above} are above it with 95 % confidence and "
                f"{below} below, each interval on its own."
            )
    pairs = _contrasts(cells)
    for clean, released in pairs:
        difference = paired_difference(released.accuracy_by_seed, clean.accuracy_by_seed)
        if difference is not None and difference.pairs > 1:
            where = "".join(f", {SETTING_NAMES[c]} {exact(clean.settings[c])}" for c in _apart(pairs))
            found.append(
                f"Own activations released instead of clean, {cell_name(clean.settings)}{where}, ε per release "
                f"{bound(clean.largest('epsilon_release'))}: {100 * difference.mean:+.1f} points over {difference.pairs} paired "
                f"seeds, 95 % interval {interval(difference)}."
            )
    return tuple(found)


def _along(line: GridLine, picture: GridPicture) -> str:
    """From the first place on the axis to the last, and the best between."""
    first, last, best = line.points[0], line.points[-1], max(line.points, key=lambda point: point.mean)
    text = f"{line.label}: {first.mean:.1f} % at {picture.x_label} {first.text}, {last.mean:.1f} % at {last.text}"
    return text + ("." if best in (first, last) else f", highest {best.mean:.1f} % at {best.text}.")
