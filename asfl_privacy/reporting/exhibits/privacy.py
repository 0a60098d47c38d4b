"""Table 3: accuracy with noise, against the methods without it."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from typing import Final

from asfl_privacy.reporting.break_even import TARGETS, BreakEven, break_even, series_of, threshold
from asfl_privacy.reporting.cells import SETTINGS, Cell, gather_cells
from asfl_privacy.reporting.comparison import Difference, check_task, paired_difference, reference_of
from asfl_privacy.reporting.curve import Curve, curve_of, describe
from asfl_privacy.reporting.display import Display, varying_settings
from asfl_privacy.reporting.exhibits.exhibit import Exhibit, Material
from asfl_privacy.reporting.exhibits.methods import BASELINE, interval
from asfl_privacy.reporting.exhibits.noise_notes import FROM_A_SEED, marks, promise_section, tex_note
from asfl_privacy.reporting.figures import curve_inline_svg, curve_png, curve_svg
from asfl_privacy.reporting.numerals import BLANK, bound, exact, nearest, spread
from asfl_privacy.reporting.rows import Value
from asfl_privacy.reporting.section import Section
from asfl_privacy.reporting.words import SETTING_NAMES, cell_name, mechanism_name, method_name

_FIGURE: Final = "privacy"
_SHOWN: Final = frozenset({"noise", "placement", "delta", "q", *TARGETS})
_OWN_LAYER: Final = ("asfl",)


def privacy_exhibit(material: Material) -> Exhibit:
    """Accuracy by ε, paired differences to FedAvg and ASFL without noise, break-even, and which methods are still beaten.

    Args:
        material: Rows of one task: runs with noise, FedAvg without noise, and other methods without noise.

    Raises:
        ValueError: Runs of different tasks, FedAvg without noise in no or more than one cell, or no run with noise.

    Guarantee:
        No failed run enters a mean, and none is passed over in silence. Every ε and δ shown is at least the largest over
        the cell's seeds, to 1 part in 10⁹; a break-even is a measured ε.
    """
    gathered = gather_cells(material.rows)
    cells = [cell for cell in gathered if cell.accuracy_by_seed]
    shared = check_task(cells, baseline=BASELINE)
    baseline = next(cell for cell in cells if cell.settings["method"] == BASELINE and not cell.is_noised)
    clean = [cell for cell in cells if not cell.is_noised]
    noised = [cell for cell in cells if cell.is_noised]
    if not noised:
        raise ValueError("no finished run with noise: the table is of these; give runs with --mech gaussian or laplace")
    others = [cell for cell in clean if cell.settings["method"] not in _OWN_LAYER]
    varying = [column for column in varying_settings(noised) if column not in _SHOWN]
    table = Display(
        headings=_headings(varying),
        lines=tuple(_line(cell, cells, baseline=baseline, others=others, varying=varying) for cell in cells),
        shared=shared,
    )
    curve = curve_of([*_drawn_references(clean, baseline), *noised])
    failed = [f"{_series_name(cell, varying, target=True)}, seed {run['seed']}: {run['status']}" for cell in gathered
              for run in cell.failed]  # fmt: skip
    unfinished = [cell for cell in gathered if cell.is_noised]
    return Exhibit(
        findings=_findings(noised, cells, baseline=baseline, others=others, varying=varying),
        sections=(_main_section(table, curve, cells=gathered, failed=failed), promise_section(unfinished)),
        table=table,
        figures={f"{_FIGURE}.svg": curve_svg(curve), f"{_FIGURE}.png": curve_png(curve)},
        note=tex_note(gathered),
    )


def _headings(varying: Sequence[str]) -> tuple[str, ...]:
    return (
        *("run", "noise drawn", "ε per release", "ε total", "δ", "placement", "noise sd"),
        *(SETTING_NAMES[column] for column in varying),
        *("accuracy %", "runs", "points above FedAvg", "95 % interval of that"),
        *("points above ASFL without noise", "95 % interval of the latter"),
        *("methods without noise beaten", "not beaten"),
    )


def _line(
    cell: Cell, cells: Sequence[Cell], *, baseline: Cell, others: Sequence[Cell], varying: Sequence[str]
) -> tuple[str, ...]:
    settings = cell.settings
    values = [100.0 * value for value in cell.accuracy_by_seed.values()]
    asfl = reference_of(cell, cells, method="asfl")
    to_fedavg = None if cell is baseline else _above(cell, baseline)
    to_asfl = None if asfl is None or asfl is cell else _above(cell, asfl)
    beaten = [one for one in others if _beats(cell, one)]
    return (
        cell_name(settings),
        exact(settings["noise"]),
        *(bound(cell.largest(column)) for column in ("epsilon_release", "epsilon_total", "delta_total")),
        exact(settings["placement"]),
        nearest(cell.largest("noise_stddev")),
        *(exact(settings[column]) for column in varying),
        spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None),
        f"{len(cell.runs)}, {len(cell.failed)} failed" if cell.failed else str(len(cell.runs)),
        *_difference_texts(to_fedavg),
        *_difference_texts(to_asfl),
        f"{len(beaten)} of {len(others)}" if cell.is_noised else BLANK,
        (_names([one for one in others if one not in beaten]) or "none") if cell.is_noised else BLANK,
    )


def _above(cell: Cell, reference: Cell) -> Difference | None:
    return paired_difference(cell.accuracy_by_seed, reference.accuracy_by_seed)


def _beats(cell: Cell, other: Cell) -> bool:
    """Whether the mean over the seeds of both is higher; never so without a seed in common."""
    difference = _above(cell, other)
    return difference is not None and difference.mean > 0


def _difference_texts(difference: Difference | None) -> tuple[str, str]:
    if difference is None:
        return BLANK, BLANK
    return f"{100 * difference.mean:+.1f}", BLANK if difference.pairs < 2 else interval(difference)


def _names(cells: Sequence[Cell]) -> str:
    return ", ".join(method_name(cell.settings["method"]) for cell in cells)


def _drawn_references(clean: Sequence[Cell], baseline: Cell) -> list[Cell]:
    """ASFL, FedAvg and the most accurate of the others."""
    others = [cell for cell in clean if cell is not baseline and cell.settings["method"] not in _OWN_LAYER]
    best = max(others, key=lambda cell: statistics.fmean(cell.accuracy_by_seed.values()), default=None)
    return [cell for cell in clean if cell.settings["method"] in _OWN_LAYER or cell is baseline or cell is best]


def _main_section(table: Display, curve: Curve, *, cells: Sequence[Cell], failed: Sequence[str]) -> Section:
    sentences = [
        *marks(cells),
        "Accuracy of the global network on the test records, each run's the mean of its last evaluations; mean ± standard "
        "deviation over seeds. Differences are paired by seed, with Student's interval, each on its own. A method is beaten "
        "where the mean over the seeds that both have is higher.",
        "; ".join(f"{name}: {value}" for name, value in table.shared) + ".",
        *(f"Failed, and in no mean: {one}." for one in failed),
    ]
    return Section(
        title="Accuracy with noise",
        sentences=tuple(sentences),
        caption="One line a cell: without noise first, then from weak to strong privacy.",
        headings=table.headings,
        lines=table.lines,
        svg=curve_inline_svg(curve, stacked=False),
        figure=f"figures/{_FIGURE}.svg",
        alt=describe(curve),
    )


def _findings(
    noised: Sequence[Cell], cells: Sequence[Cell], *, baseline: Cell, others: Sequence[Cell], varying: Sequence[str]
) -> tuple[str, ...]:
    found = []
    for cell in cells:
        if not cell.is_noised and cell.settings["method"] in _OWN_LAYER:
            difference = _above(cell, baseline)
            if difference is not None:
                name = cell_name(cell.settings)
                layers = [one for one in cells if not one.is_noised and one.settings["method"] in _OWN_LAYER]
                name += f", {_layer(cell)}" if len(layers) > 1 else ""
                found.append(f"{name}, against FedAvg without noise: {_gain(difference)}.")
    series = series_of(noised)
    ladders = _ladders(noised)
    on_ladder = [cell for ladder in ladders for cell in ladder]
    for one in series:
        if len(one) == 1 and any(one[0] is cell for cell in on_ladder):
            continue
        name, asfl = _series_name(one[0], varying), reference_of(one[0], cells, method="asfl")
        place = break_even(one, baseline, without_noise=asfl)
        found.append(f"Break-even with FedAvg without noise, {name}: {_break_even_text(place)}")
        if others:
            found.append(f"Methods without noise, {name}: {_beaten_text(one, others)}")
    found += [_ladder_text(ladder, baseline, varying) for ladder in ladders]
    left_out = len(noised) - sum(len(one) for one in series)
    if left_out:
        found.append(
            f"{left_out} of {len(noised)} cells with noise have no ε in their rows: read no promise into them."
        )
    if any(cell.settings["reproducible"] == "yes" for cell in noised):
        found.append(f"{FROM_A_SEED}.")
    return tuple(found)


def _gain(difference: Difference) -> str:
    text = (
        f"{100 * difference.mean:+.1f} points over {difference.pairs} paired seed{'s' if difference.pairs > 1 else ''}"
    )
    return text + (f", 95 % interval {interval(difference)}" if difference.pairs > 1 else "")


def _layer(cell: Cell) -> str:
    return f"exchange layer {exact(cell.settings['exchange_layer'])}"


def _series_name(cell: Cell, varying: Sequence[str], *, target: bool = False, without: Collection[str] = ()) -> str:
    """What cells that differ in ε alone have in common, in words."""
    settings = cell.settings
    parts = [cell_name(settings)]
    if cell.is_noised:
        parts = [f"{method_name(settings['method'])} with {mechanism_name(settings['mech'])} noise"]
        parts += [f"drawn {exact(settings['noise'])}"] if settings["noise"] is not None else []
        parts += [f"at {exact(settings['placement'])}"] if settings["placement"] is not None else []
        norm = f", ℓ{exact(settings['p'])}" if settings["p"] is not None else ""
        parts += [f"R = {exact(settings['radius'])}{norm}"] if settings["radius"] is not None else []
        parts += [f"δ = {exact(settings['delta'])}"] if settings["delta"] is not None and "delta" not in without else []
    names = [column for column in varying if column not in ("radius", "p")]
    names += list(TARGETS) if target else []
    parts += [f"{SETTING_NAMES[column]} {exact(settings[column])}" for column in names if settings[column] is not None]
    return ", ".join(parts)


def _break_even_text(place: BreakEven) -> str:
    smallest, largest = bound(place.measured[0]), bound(place.measured[-1])
    if place.epsilon is None or place.difference is None:
        text = f"none among the ε per release measured ({smallest} to {largest}): {place.reason}."
        if place.first is not None:
            text += f" Not monotone: it is above FedAvg with that confidence at ε per release {bound(place.first)}."
        return text
    text = (
        f"ε per release {bound(place.epsilon)}, ε total {bound(place.epsilon_total)}: from there to {largest}, the largest "
        f"measured, it is above FedAvg with 95 % confidence (at break-even: {_gain(place.difference)})."
    )
    if place.fails_last is not None and place.failed_runs:
        runs = f"{place.failed_runs} run{'' if place.failed_runs == 1 else 's'}"
        text += f" At ε per release {bound(place.fails_last)} {runs} failed, which counts as not above."
    if place.is_censored:
        text += " It is the smallest ε measured: the true break-even may lie lower."
    if not place.is_monotone and place.first is not None:
        text += f" Not monotone: it is above already at ε per release {bound(place.first)}, but not at {bound(place.fails_last)}."
    return text


def _ladders(noised: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that differ in δ alone, where there are several."""
    groups: dict[tuple[Value, ...], list[Cell]] = {}
    for cell in noised:
        if isinstance(cell.settings["delta"], float):
            groups.setdefault(tuple(cell.settings[c] for c in SETTINGS if c != "delta"), []).append(cell)
    return [group for group in groups.values() if len(group) > 1]


def _ladder_text(ladder: Sequence[Cell], baseline: Cell, varying: Sequence[str]) -> str:
    held: list[tuple[float, bool]] = []
    for cell in ladder:
        difference, delta = _above(cell, baseline), cell.settings["delta"]
        if isinstance(delta, float) and delta > 0:
            held.append((delta, difference is not None and difference.low > 0 and not cell.failed))
    place = threshold(held)
    deltas = sorted(delta for delta, _ in held)
    name = _series_name(ladder[0], varying, target=True, without=("delta",))
    text = f"δ from {exact(deltas[0])} to {exact(deltas[-1])}, {name}: above FedAvg with 95 % confidence "
    if place.holds_from is None:
        return text + "not at the largest δ" + ("." if place.holds_first is None else ", though at a smaller one.")
    text += f"from δ {exact(place.holds_from)} on"
    return text + ("." if place.fails_last is None else f", not at {exact(place.fails_last)}.")


def _beaten_text(series: Sequence[Cell], others: Sequence[Cell]) -> str:
    measured = [(cell.largest("epsilon_release") or 0.0, all(_beats(cell, one) for one in others)) for cell in series]
    place = threshold(measured)
    count = f"all {len(others)}" if len(others) > 1 else f"the only one, {_names(others)},"
    if place.holds_from is None:
        text = f"at the largest ε it does not beat {count} by mean accuracy"
    else:
        text = f"it beats {count} by mean accuracy from ε per release {bound(place.holds_from)} on"
        at = [cell for cell in series if cell.largest("epsilon_release") == place.holds_from]
        text += f" (ε total {', '.join(bound(cell.largest('epsilon_total')) for cell in at)})"
    if place.fails_last is not None:
        failing = [cell for cell in series if cell.largest("epsilon_release") == place.fails_last]
        ahead = [one for one in others if not all(_beats(cell, one) for cell in failing)]
        text += f"; at ε per release {bound(place.fails_last)} not {_names(ahead)}"
    else:
        text += ", the smallest measured"
    if not place.is_monotone and place.holds_first is not None:
        text += f"; not monotone: also at ε per release {bound(place.holds_first)}"
    return text + "."
