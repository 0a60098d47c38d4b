"""Figure 3: class centroids of the clients in the latent space, and within-class over between-class scatter."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import seaborn as sns
from matplotlib.figure import Figure

from asfl_privacy.reporting.comparison import Difference, paired_difference
from asfl_privacy.reporting.display import Display
from asfl_privacy.reporting.drawing import MARKERS, Drawing, draw
from asfl_privacy.reporting.exhibits.exhibit import Exhibit, Material
from asfl_privacy.reporting.numerals import BLANK, nearest
from asfl_privacy.reporting.records import Record
from asfl_privacy.reporting.section import Section
from asfl_privacy.reporting.words import method_name

BASELINE: Final = "fedavg"
SHARING: Final = "asfl"
RECORDS: Final[Mapping[str, str]] = {"common": "common test records", "own": "own training records"}
SPACES: Final[Mapping[str, str]] = {"exchange": "exchange layer", "penultimate": "before the last layer"}
_MOST_CLASSES: Final = 20
_HEADINGS: Final = (
    "method",
    "records",
    "space",
    "after block",
    "within / between",
    "lowest to highest",
    "times FedAvg's",
    "95 % interval",
    "pairs",
    "classes",
)


@dataclass(frozen=True)
class _Measure:
    """One space on one kind of records: ratios by method and seed."""

    space: str
    records: str
    layer: str
    ratios: Mapping[str, Mapping[int, float]]
    classes: Mapping[str, tuple[int, ...]]

    def against(self, method: str) -> Difference | None:
        """The method's log ratio minus FedAvg's, paired by seed."""
        logs = {name: {seed: math.log(value) for seed, value in self.ratios[name].items()} for name in self.ratios}
        return None if method == BASELINE else paired_difference(logs[method], logs[BASELINE])


def latent_exhibit(material: Material) -> Exhibit:
    """Scatter ratios of each method in each space, paired with FedAvg's by seed, and maps of one seed's centroids.

    Args:
        material: `scatter`, and `centroids` with their places in the plane.

    Raises:
        ValueError: No scatter, FedAvg missing, a measure given twice, or methods measured after different blocks.

    Guarantee:
        Ratios are averaged and compared as logarithms, so "1.25 times" and "0.8 times" are equally far from none. A ratio
        without a logarithm (blank or zero scatter) enters no mean and is named.
    """
    records = material.table("scatter")
    measures = _measures(records)
    lines = tuple(_line(one, method) for one in measures for method in one.ratios)
    seeds = len({one["seed"] for one in records})
    table = Display(headings=_HEADINGS, lines=lines, shared=(("seeds", str(seeds)),))
    maps = _maps(material.tables.get("centroids", ()), records)
    return Exhibit(
        findings=_findings(measures),
        sections=(_ratio_section(table, left_out=_left_out(records)), *(section for _, section, _ in maps)),
        table=table,
        figures={
            file: content
            for name, _, drawing in maps
            for file, content in ((f"{name}.svg", drawing.svg), (f"{name}.png", drawing.png))
        },
    )


def _ratio(record: Record) -> float | None:
    """Within over between, where it has a logarithm."""
    within, between = record["within"], record["between"]
    if not isinstance(within, float) or not isinstance(between, float) or min(within, between) <= 0:
        return None
    return within / between


def _measures(records: Sequence[Record]) -> list[_Measure]:
    """By records and space, common records first."""
    methods = list(dict.fromkeys(str(one["method"]) for one in records))
    if BASELINE not in methods:
        raise ValueError(f"scatter.csv lacks {BASELINE}, which the others are compared with; measure it too")
    measures = []
    for kind in RECORDS:
        for space in SPACES:
            mine = [one for one in records if (one["records"], one["space"]) == (kind, space)]
            layers = list(dict.fromkeys(str(one["layer"]) for one in mine))
            if len(layers) > 1:
                raise ValueError(
                    f"space {space} is after {' and '.join(layers)}: ratios are compared in one space; measure all methods there"
                )
            if len({(one["method"], one["seed"]) for one in mine}) < len(mine):
                raise ValueError(
                    f"scatter.csv has a method and seed twice in space {space} on {kind} records; keep one"
                )
            if not mine:
                continue
            ratios: dict[str, dict[int, float]] = {method: {} for method in methods}
            classes: dict[str, set[int]] = {method: set() for method in methods}
            for one in mine:
                ratio, method = _ratio(one), str(one["method"])
                if ratio is not None:
                    ratios[method][_whole(one["seed"])] = ratio
                    classes[method].add(_whole(one["classes"]))
            measures.append(
                _Measure(
                    space=space,
                    records=kind,
                    layer=layers[0],
                    ratios=ratios,
                    classes={method: tuple(sorted(found)) for method, found in classes.items()},
                )
            )
    return measures


def _whole(value: object) -> int:
    assert isinstance(value, int)  # as `records.TABLES` has it
    return value


def _line(measure: _Measure, method: str) -> tuple[str, ...]:
    ratios, difference = list(measure.ratios[method].values()), measure.against(method)
    return (
        method_name(method),
        RECORDS[measure.records],
        SPACES[measure.space],
        measure.layer,
        nearest(statistics.geometric_mean(ratios)) if ratios else BLANK,
        f"{nearest(min(ratios))} to {nearest(max(ratios))}" if len(ratios) > 1 else BLANK,
        BLANK if difference is None else nearest(math.exp(difference.mean)),
        BLANK if difference is None or difference.pairs < 2 else _interval(difference),
        BLANK if difference is None else str(difference.pairs),
        _span(measure.classes[method]),
    )


def _interval(difference: Difference) -> str:
    return f"{_factor(difference.low)} to {_factor(difference.high)}"


def _factor(logarithm: float) -> str:
    """Its exponential; an interval of few seeds may reach beyond what a float holds."""
    return nearest(math.exp(logarithm) if logarithm < 700 else math.inf)


def _span(values: Sequence[int]) -> str:
    if not values:
        return BLANK
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _left_out(records: Sequence[Record]) -> list[str]:
    return [
        f"{method_name(one['method'])}, seed {one['seed']}, {RECORDS[str(one['records'])]}, {SPACES[str(one['space'])]}"
        for one in records
        if _ratio(one) is None
    ]


def _ratio_section(table: Display, *, left_out: Sequence[str]) -> Section:
    sentences = [
        "All clients do the local work of a run's last round from one global network. A centroid is the mean feature of a "
        "class under one client's network. Within: the mean squared distance of a class's centroids, one a client, from "
        "their mean; between: that of the classes' means from their mean; every class and every client of a class weighs "
        "the same. The ratio does not depend on the scale of the space; lower means that clients agree more.",
        "On common test records every client has every class, and only the networks differ. On their own training records "
        "clients have the classes that they hold, and their records differ too, which adds to within.",
        "Geometric means over seeds; quotients are paired by seed, with Student's interval of the logarithms.",
    ]
    sentences += [
        f"In no mean, as its scatter is zero or fewer than two classes have two clients: {one}." for one in left_out
    ]
    return Section(
        title="Scatter of class centroids",
        sentences=tuple(sentences),
        caption="One line a method, records and space.",
        headings=table.headings,
        lines=table.lines,
        svg=None,
        figure=None,
        alt="",
    )


def _findings(measures: Sequence[_Measure]) -> tuple[str, ...]:
    """What is claimed, ASFL below FedAvg, measure by measure."""
    found = [
        (one, difference)
        for one in measures
        if SHARING in one.ratios and (difference := one.against(SHARING)) is not None
    ]
    if not found:
        return ()
    lower = sum(difference.mean < 0 for _, difference in found)
    certain = sum(difference.high < 0 for _, difference in found)
    findings = [
        f"The scatter ratio is lower under ASFL than under FedAvg in {lower} of {len(found)} measures, with a 95 % interval "
        f"below 1 in {certain}."
    ]
    for one, difference in found:
        text = (
            f"On {RECORDS[one.records]}, {SPACES[one.space]} (after {one.layer}): ASFL's ratio is "
            f"{nearest(math.exp(difference.mean))} times FedAvg's over {difference.pairs} paired "
        )
        if difference.pairs < 2:
            findings.append(f"{text}seed; one pair has no interval.")
            continue
        verdict = (
            "lower"
            if difference.high < 0
            else "higher"
            if difference.low > 0
            else "not distinguishable at that confidence"
        )
        findings.append(f"{text}seeds, 95 % interval {_interval(difference)}: {verdict}.")
    return tuple(findings)


def _maps(centroids: Sequence[Record], scatter: Sequence[Record]) -> list[tuple[str, Section, Drawing]]:
    """A map for each kind of records of the first seed that all methods have: its name, its section, its picture."""
    maps = []
    for kind in RECORDS:
        mine = [one for one in centroids if one["records"] == kind and one["x"] is not None and one["y"] is not None]
        methods = list(dict.fromkeys(str(one["method"]) for one in mine))
        seeds = [{_whole(one["seed"]) for one in mine if one["method"] == method} for method in methods]
        shared = set.intersection(*seeds) if seeds else set()
        if not shared:
            continue
        seed, name = min(shared), f"latent-{kind}"
        points = {
            method: [one for one in mine if one["method"] == method and one["seed"] == seed] for method in methods
        }
        found = [
            one
            for method in methods
            for one in scatter
            if (one["method"], one["seed"], one["records"], one["space"]) == (method, seed, kind, "penultimate")
        ]
        ratios = {str(one["method"]): _ratio(one) for one in found}
        drawing = _draw_map(points, ratios, name=name)
        maps.append((name, _map_section(points, found, kind=kind, seed=seed, name=name, drawing=drawing), drawing))
    return maps


def _map_section(
    points: Mapping[str, Sequence[Record]],
    scatter: Sequence[Record],
    *,
    kind: str,
    seed: int,
    name: str,
    drawing: Drawing,
) -> Section:
    def number(value: object) -> float | None:
        return value if isinstance(value, float) else None

    return Section(
        title=f"Map of the centroids, {RECORDS[kind]}",
        sentences=(
            f"Centroids before the last layer, seed {seed}, one point a client and class, put in the plane by t-SNE, each "
            "method by itself. t-SNE keeps neighbours: distances between groups, and sizes of groups, mean nothing, and the "
            "numbers are of the space itself.",
        ),
        caption="What is drawn.",
        headings=("method", "points", "clients", "classes", "within", "between", "within / between"),
        lines=tuple(
            (
                method_name(str(one["method"])),
                str(len(points[str(one["method"])])),
                *(str(len({point[what] for point in points[str(one["method"])]})) for what in ("client", "label")),
                nearest(number(one["within"])),
                nearest(number(one["between"])),
                nearest(_ratio(one)),
            )
            for one in scatter
        ),
        svg=drawing.inline,
        figure=f"figures/{name}.svg",
        alt=f"{_listed(method_name(method) for method in points)}, side by side: class centroids of the clients in the plane, "
        "coloured by class.",
    )


def _draw_map(points: Mapping[str, Sequence[Record]], ratios: Mapping[str, float | None], *, name: str) -> Drawing:
    """One panel a method; colour and marker tell the class."""
    labels = sorted({_whole(one["label"]) for found in points.values() for one in found})
    palette = sns.color_palette("colorblind") if len(labels) <= 10 else sns.color_palette("husl", len(labels))

    def fill(figure: Figure) -> None:
        handles = []
        panels = figure.subplots(1, len(points), squeeze=False)[0]
        for axes, (method, found) in zip(panels, points.items(), strict=True):
            for index, label in enumerate(labels):
                places = [(one["x"], one["y"]) for one in found if one["label"] == label]
                drawn = axes.scatter(
                    [x for x, _ in places],
                    [y for _, y in places],
                    s=22,
                    color=[palette[index]],
                    marker=MARKERS[index % len(MARKERS)],
                    linewidths=0,
                    label=str(label),
                )
                if axes is panels[0]:
                    handles.append(drawn)
            ratio = ratios.get(method)
            number = "" if ratio is None else f"\nwithin / between {nearest(ratio)}"
            axes.set_title(f"{method_name(method)}{number}", fontsize=10)
            axes.set(xticks=[], yticks=[])
        if len(labels) <= _MOST_CLASSES:
            figure.legend(
                handles=handles, loc="outside lower center", ncols=min(10, len(labels)), title="class", frameon=False
            )

    return draw(fill, size=(max(4.0, 3.0 * len(points)), 4.0), name=name)


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
