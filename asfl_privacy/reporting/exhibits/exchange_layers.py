"""Figure 4: accuracy and bytes of every exchange layer, and what the automatic choice costs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asfl_privacy.reporting.cells import Cell, gather_cells
from asfl_privacy.reporting.comparison import Difference, paired_difference, shared_task
from asfl_privacy.reporting.display import Display, varying_settings
from asfl_privacy.reporting.drawing import INK, draw
from asfl_privacy.reporting.exhibits.exhibit import Exhibit, Material
from asfl_privacy.reporting.exhibits.methods import interval
from asfl_privacy.reporting.numerals import BLANK, bound, exact, nearest, spread
from asfl_privacy.reporting.records import Record
from asfl_privacy.reporting.section import Section
from asfl_privacy.reporting.words import SETTING_NAMES

POINTS_LOST: Final = 1.0
BYTES_SHARE: Final = 0.5
SEEDS: Final = 5
"""The claim: at most so many points below the best layer, over that many paired seeds, at that share of the largest bytes."""

_FIGURE: Final = "exchange-layers"
_RED: Final = "#c1272d"
_SENDING: Final = {
    "bytes of activations and labels": ("bytes_activations", "bytes_labels"),
    "all bytes": ("bytes_model", "bytes_activations", "bytes_labels"),
    "bytes of activations alone": ("bytes_activations",),  # a label costs the same at every layer
}
_IN_TABLE: Final = ("bytes of activations and labels", "all bytes")
_HEADINGS: Final = (
    *("exchange layer", "data", "automatic", "accuracy %", "points above the best layer", "95 % interval", "pairs"),
    *("MB of activations and labels", "share of the largest", "MB with the model's", "share of the largest of these"),
    *("points above FedAvg", "95 % interval of that"),
)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One exchange layer of one network on one data set.

    Attributes:
        name: Of the layer.
        is_automatic: Whether the rule takes it.
        cell: Its runs.
        to_best: Accuracy minus that of the layer with the highest mean, paired; None without a seed in common.
        megabytes: 10⁶ bytes of a run, mean over runs, by what is counted; None where a run does not say.
        share: The same over the largest of all layers.
    """

    name: str
    is_automatic: bool
    cell: Cell
    to_best: Difference | None
    megabytes: Mapping[str, float | None]
    share: Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """All layers of one network on one data set, from input to output, and FedAvg if it was run."""

    title: str
    layers: tuple[Layer, ...]
    best: Layer
    automatic_name: str
    fedavg: Cell | None
    shared: tuple[tuple[str, str], ...]

    @property
    def automatic(self) -> Layer | None:
        """The layer that the rule takes, if it was run."""
        return next((layer for layer in self.layers if layer.is_automatic), None)


def exchange_layers_exhibit(material: Material) -> Exhibit:
    """Accuracy, bytes and shares by exchange layer, and whether the automatic one keeps the claim.

    Args:
        material: Rows of ASFL without noise for each layer, of FedAvg too if wanted (others are left out); `layers`
            gives the order of the layers and names the automatic one.

    Raises:
        ValueError: No run of ASFL without noise, a layer or data set that `layers` lacks, no or several automatic layers,
            two cells of one layer, or runs of different tasks on one data set.

    Guarantee:
        Bytes are those that the runs counted. The best layer is the one with the highest mean accuracy, which favours it
        over the automatic one; no failed run enters a mean.
    """
    gathered = [cell for cell in gather_cells(material.rows) if not cell.is_noised]
    panels = _panels([cell for cell in gathered if cell.accuracy_by_seed], material.table("layers"))
    varying = [
        column
        for column in varying_settings([layer.cell for panel in panels for layer in panel.layers])
        if column in ("lr", "options")
    ]
    table = Display(
        headings=(*_HEADINGS, *(SETTING_NAMES[column] for column in varying)),
        lines=tuple(_line(layer, panel, varying) for panel in panels for layer in panel.layers),
        shared=panels[0].shared if len(panels) == 1 else (),
    )
    drawing = draw(lambda figure: _fill(figure, panels), size=(4.6 * len(panels) + 0.4, 3.8), name=_FIGURE)
    failed = [
        f"{panel_title(cell)}, {exact(cell.settings['exchange_layer'])}, seed {run['seed']}: {run['status']}"
        for cell in gathered
        for run in cell.failed
    ]
    sentences = (
        "ASFL without noise with each block as exchange layer. Accuracy of the global network on the test records, each "
        "run's the mean of its last evaluations; mean ± standard deviation over seeds. Differences are paired by seed, with "
        "Student's interval. The best layer is the one with the highest mean, so that chance favours it.",
        "MB (10⁶ bytes) are of a whole run, all clients together, mean over seeds. The paper adds up model and activations; "
        "the claim is checked for activations and labels, for all bytes, and for activations alone.",
        *(f"{panel.title}: " + "; ".join(f"{name} {value}" for name, value in panel.shared) + "." for panel in panels),
        *(f"Failed, and in no mean: {one}." for one in failed),
    )
    section = Section(
        title="Exchange layers",
        sentences=sentences,
        caption="One line a layer, from input to output.",
        headings=table.headings,
        lines=table.lines,
        svg=drawing.inline,
        figure=f"figures/{_FIGURE}.svg",
        alt="By exchange layer: accuracy (line; small dots: one run each; red dot: the automatic layer; dashed: FedAvg) and "
        "megabytes of activations and labels (dark bars) and of the model (light bars on top).",
    )
    return Exhibit(
        findings=tuple(sentence for panel in panels for sentence in _findings(panel)),
        sections=(section,),
        table=table,
        figures={f"{_FIGURE}.svg": drawing.svg, f"{_FIGURE}.png": drawing.png},
    )


def panel_title(cell: Cell) -> str:
    """Data and network."""
    return f"{exact(cell.settings['data'])}, {exact(cell.settings['model'])}"


def _panels(cells: Sequence[Cell], layers: Sequence[Record]) -> list[Panel]:
    places = dict.fromkeys((c.settings["data"], c.settings["model"]) for c in cells if c.settings["method"] == "asfl")
    if not places:
        raise ValueError("no finished run of asfl without noise: exchange layers are compared by these; run them first")
    panels = []
    for data, model in places:
        here = [cell for cell in cells if (cell.settings["data"], cell.settings["model"]) == (data, model)]
        known = [record for record in layers if (record["data"], record["model"]) == (data, model)]
        here = [cell for cell in here if cell.settings["method"] in ("asfl", "fedavg")]
        panels.append(_panel(here, known, title=f"{exact(data)}, {exact(model)}"))
    return panels


def _panel(cells: Sequence[Cell], known: Sequence[Record], *, title: str) -> Panel:
    shared = shared_task(cells)
    order = [str(record["exchange_layer"]) for record in known]
    automatic = [str(record["exchange_layer"]) for record in known if record["automatic"] == "yes"]
    if len(automatic) != 1:
        raise ValueError(
            f"layers names {len(automatic)} automatic layers for {title}: there is one; make the report again"
        )
    by_name: dict[str, Cell] = {}
    for cell in cells:
        name = str(cell.settings["exchange_layer"])
        if cell.settings["method"] != "asfl":
            continue
        if name not in order:
            raise ValueError(f"layers lacks {name!r} of {title}: it gives the order of all; make the report again")
        if name in by_name:
            raise ValueError(
                f"exchange layer {name!r} of {title} has two cells: one is compared; give runs that differ in seed"
            )
        by_name[name] = cell
    fedavg = [cell for cell in cells if cell.settings["method"] == "fedavg"]
    if len(fedavg) > 1:
        raise ValueError(f"fedavg has {len(fedavg)} cells for {title}: differences are to one; give one learning rate")
    best = max(by_name, key=lambda name: statistics.fmean(by_name[name].accuracy_by_seed.values()))
    megabytes = {name: {what: _megabytes(cell, what) for what in _SENDING} for name, cell in by_name.items()}
    largest = {what: max((found[what] or 0.0 for found in megabytes.values()), default=0.0) for what in _SENDING}
    ordered = tuple(
        Layer(
            name=name,
            is_automatic=name == automatic[0],
            cell=by_name[name],
            to_best=paired_difference(by_name[name].accuracy_by_seed, by_name[best].accuracy_by_seed),
            megabytes=megabytes[name],
            share={what: _over(megabytes[name][what], largest[what]) for what in _SENDING},
        )
        for name in order
        if name in by_name
    )
    return Panel(
        title=title,
        layers=ordered,
        best=next(layer for layer in ordered if layer.name == best),
        automatic_name=automatic[0],
        fedavg=fedavg[0] if fedavg else None,
        shared=shared,
    )


def _megabytes(cell: Cell, what: str) -> float | None:
    parts = [cell.by_seed(column) for column in _SENDING[what]]
    if any(len(part) < len(cell.runs) for part in parts):
        return None
    return sum(statistics.fmean(part.values()) for part in parts) / 1e6


def _over(value: float | None, largest: float) -> float | None:
    return None if value is None or largest == 0 else value / largest


def _line(layer: Layer, panel: Panel, varying: Sequence[str]) -> tuple[str, ...]:
    values = _per_cent(layer.cell)
    to_fedavg = (
        None if panel.fedavg is None else paired_difference(layer.cell.accuracy_by_seed, panel.fedavg.accuracy_by_seed)
    )
    to_best = None if layer is panel.best else layer.to_best
    figures = [text for what in _IN_TABLE for text in (nearest(layer.megabytes[what]), _share(layer.share[what]))]
    return (
        layer.name,
        panel.title,
        "yes" if layer.is_automatic else "no",
        spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None),
        "best" if layer is panel.best else BLANK if to_best is None else f"{100 * to_best.mean:+.1f}",
        BLANK if to_best is None or to_best.pairs < 2 else interval(to_best),
        BLANK if layer.to_best is None else str(layer.to_best.pairs),
        *figures,
        BLANK if to_fedavg is None else f"{100 * to_fedavg.mean:+.1f}",
        BLANK if to_fedavg is None or to_fedavg.pairs < 2 else interval(to_fedavg),
        *(exact(layer.cell.settings[column]) for column in varying),
    )


def _share(value: float | None) -> str:
    """Rounded up, so that what is above a half does not read as a half."""
    return BLANK if value is None else bound(value)


def _per_cent(cell: Cell) -> list[float]:
    return [100.0 * value for value in cell.accuracy_by_seed.values()]


def _findings(panel: Panel) -> list[str]:
    chosen = panel.automatic
    if chosen is None:
        return [f"{panel.title}: the automatic layer, {panel.automatic_name}, has no finished run."]
    if chosen is panel.best:
        text = f"{panel.title}: the automatic layer, {chosen.name}, is the best of {len(panel.layers)} by mean accuracy"
    elif chosen.to_best is None:
        return [f"{panel.title}: the automatic layer, {chosen.name}, and the best, {panel.best.name}, share no seed."]
    else:
        text = (
            f"{panel.title}: the automatic layer, {chosen.name}, is {100 * chosen.to_best.mean:+.2f} points from the best, "
            f"{panel.best.name}"
        )
        if chosen.to_best.pairs > 1:
            low, high = 100 * chosen.to_best.low, 100 * chosen.to_best.high
            text += f", 95 % interval {low:+.2f} to {high:+.2f}"
    pairs = 0 if chosen.to_best is None else chosen.to_best.pairs
    text += f" ({pairs} paired seed{'' if pairs == 1 else 's'}"
    text += f"; the claim asks for {SEEDS})." if pairs < SEEDS else ")."
    return [text, *(_verdict(panel, chosen, what=what, pairs=pairs) for what in _SENDING)]


def _verdict(panel: Panel, chosen: Layer, *, what: str, pairs: int) -> str:
    """Whether the claim holds, counting some bytes."""
    share = chosen.share[what]
    costliest = max(panel.layers, key=lambda layer: layer.megabytes[what] or 0.0)
    if share is None or any(layer.megabytes[what] is None for layer in panel.layers):
        return f"{panel.title}, counting {what}: not known, as a run does not say its bytes."
    # a difference of exactly one point may come out a rounding error below
    near = chosen.to_best is not None and 100 * chosen.to_best.mean >= -POINTS_LOST - 1e-9
    cheap = share <= BYTES_SHARE
    whether = "holds" if near and cheap and pairs >= SEEDS else "does not hold"
    if near and cheap and pairs < SEEDS:
        whether = f"would hold, but over fewer than {SEEDS} seeds"
    return (
        f"{panel.title}, counting {what}: the claim (at most {POINTS_LOST:g} point below the best layer at no more than "
        f"{BYTES_SHARE:g} of the largest bytes) {whether}: {'within' if near else 'more than'} {POINTS_LOST:g} point, "
        f"{_share(share)} of the bytes of {costliest.name}."
    )


def _fill(figure: Figure, panels: Sequence[Panel]) -> None:
    grid = figure.subplots(1, len(panels), squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=True):
        _draw_panel(axes, panel)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    colours = sns.color_palette("colorblind")
    places = list(range(len(panel.layers)))
    sent = [layer.megabytes["bytes of activations and labels"] or 0.0 for layer in panel.layers]
    total = [
        layer.megabytes["all bytes"] or layer.megabytes["bytes of activations and labels"] or 0.0
        for layer in panel.layers
    ]
    model = [whole - part for whole, part in zip(total, sent, strict=True)]
    axes.bar(places, sent, color=colours[0], alpha=0.75, width=0.6, label="activations and labels")
    axes.bar(places, model, bottom=sent, color=colours[0], alpha=0.25, width=0.6, label="model")
    axes.set_xticks(places, [layer.name for layer in panel.layers], rotation=30 if len(places) > 4 else 0)
    axes.set_xlabel("exchange layer")
    axes.set_ylabel("MB of a run (bars)")
    axes.set_title(panel.title, fontsize=10)
    axes.xaxis.grid(visible=False)
    right = axes.twinx()
    right.grid(visible=False)
    right.set_ylabel("accuracy (%), line")
    values = [_per_cent(layer.cell) for layer in panel.layers]
    means = [statistics.fmean(one) for one in values]
    right.plot(places, means, color=INK, marker="o", markersize=5, linewidth=1.5, label="accuracy")
    for place, one in zip(places, values, strict=True):
        if len(one) > 1:
            right.scatter([place] * len(one), one, s=7, color=INK, alpha=0.6, linewidth=0)
    for place, layer, mean in zip(places, panel.layers, means, strict=True):
        if layer.is_automatic:
            right.scatter([place], [mean], s=70, color=_RED, zorder=5, label="automatic")
    if panel.fedavg is not None:
        right.axhline(
            statistics.fmean(_per_cent(panel.fedavg)), color=INK, linewidth=1.2, linestyle=(0, (6, 3)), label="FedAvg"
        )
    handles = [*axes.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    labels = [*axes.get_legend_handles_labels()[1], *right.get_legend_handles_labels()[1]]
    axes.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, frameon=False)
