"""Convergence: gradients, disagreement and drift round by round, and how fast ‖∇F‖² falls with the number of rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Final

import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

from asfl_privacy.reporting.comparison import Difference, paired_difference
from asfl_privacy.reporting.display import Display
from asfl_privacy.reporting.drawing import MARKERS, Drawing, draw
from asfl_privacy.reporting.exhibits.exhibit import Exhibit, Material
from asfl_privacy.reporting.numerals import BLANK, exact, nearest
from asfl_privacy.reporting.records import Record
from asfl_privacy.reporting.section import Section
from asfl_privacy.reporting.words import method_name

BASELINE: Final = "fedavg"
EXPECTED_SLOPE: Final = -0.5
"""Of log mean ‖∇F‖² against log T where steps are proportional to 1/√T: Karimireddy et al. 2020, Theorem I."""
QUANTITIES: Final[Mapping[str, str]] = {
    "squared_gradient_norm": "‖∇F‖²",
    "dissimilarity": "gradient dissimilarity",
    "drift": "client drift",
}
"""Columns of the diagnostics that are drawn, and what they are called."""
_HEADINGS: Final = ("method", "slope", "95 % interval", "difference to FedAvg", "95 % interval", "seeds")

Curves = Mapping[str, Mapping[int, Mapping[int, float]]]
"""Values of one quantity by method, seed and round (or number of rounds)."""


def convergence_exhibit(material: Material) -> Exhibit:
    """What convergence proofs speak of, on real data and on a problem whose constants are known.

    Args:
        material: `diagnostics` and `decay`, FedAvg among the methods of `decay`.

    Raises:
        ValueError: A table is missing or empty, FedAvg or a second number of rounds is missing from `decay`, a run is there
            twice, or a mean of ‖∇F‖² is not above 0.

    Guarantee:
        Slopes are least squares through (log T, log mean ‖∇F‖²), one a method and seed. Differences are paired by seed, with
        Student's interval, and the verdict is of that interval's ends alone.
    """
    decay = material.table("decay")
    curves = {column: _curves(material.table("diagnostics"), column, along="round") for column in QUANTITIES}
    means = _curves(decay, "squared_gradient_norm", along="rounds")
    slopes = {method: {seed: _slope(one) for seed, one in seeds.items()} for method, seeds in means.items()}
    if BASELINE not in slopes:
        raise ValueError("decay has no runs of fedavg, whose slope the others are compared with; measure them too")
    table = Display(headings=_HEADINGS, lines=tuple(_decay_line(one, slopes) for one in slopes), shared=())
    rounds = draw(lambda figure: _fill_rounds(figure, curves), size=(10.5, 3.6), name="rounds")
    falling = draw(lambda figure: _fill_decay(figure, means), size=(5.2, 3.9), name="decay")
    return Exhibit(
        findings=(*_round_findings(material.table("diagnostics"), curves), *_decay_findings(slopes, means)),
        sections=(
            _rounds_section(material.table("diagnostics"), curves, rounds),
            _decay_section(decay, table, falling),
        ),
        table=table,
        figures={
            "rounds.svg": rounds.svg,
            "rounds.png": rounds.png,
            "decay.svg": falling.svg,
            "decay.png": falling.png,
        },
    )


def verdict(difference: Difference) -> str:
    """What a paired difference of slopes says, from its interval alone.

    Example:
        >>> verdict(Difference(mean=0.01, low=-0.02, high=0.04, pairs=5))
        'no slower than FedAvg at that confidence: the interval includes 0'
    """
    if difference.pairs < 2:
        return "one seed, from which nothing follows"
    if difference.high < 0:
        return "faster than FedAvg: the interval lies below 0"
    if difference.low > 0:
        return "slower than FedAvg: the interval lies above 0"
    return "no slower than FedAvg at that confidence: the interval includes 0"


def _curves(records: Sequence[Record], column: str, *, along: str) -> dict[str, dict[int, dict[int, float]]]:
    """Values by method (FedAvg first), seed and round; blank ones are left out."""
    found: dict[str, dict[int, dict[int, float]]] = {}
    for one in records:
        seed, number, value = one["seed"], one[along], one[column]
        assert isinstance(seed, int)
        assert isinstance(number, int)
        curve = found.setdefault(str(one["method"]), {}).setdefault(seed, {})
        if number in curve:
            raise ValueError(
                f"{one['method']}, seed {seed} has two records of {along} {number}, counted twice in means; give one run a seed"
            )
        if isinstance(value, float):
            curve[number] = value
    return dict(sorted(found.items(), key=lambda one: one[0] != BASELINE))


def _slope(means: Mapping[int, float]) -> float:
    """Least squares slope of log mean ‖∇F‖² against log T."""
    if len(means) < 2 or min(means.values()) <= 0:
        raise ValueError(
            f"decay has ‖∇F‖² {', '.join(map(str, means.values())) or 'of no run'} for {len(means)} number(s) of rounds: a slope "
            "needs two, and means above 0; measure two"
        )
    logs = [(math.log(rounds), math.log(mean)) for rounds, mean in means.items()]
    return statistics.linear_regression(*zip(*logs, strict=True)).slope


def _of_zero(slopes: Mapping[int, float]) -> Difference | None:
    """Mean of the slopes with its interval."""
    return paired_difference(slopes, dict.fromkeys(slopes, 0.0))


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def _interval(difference: Difference) -> str:
    return BLANK if difference.pairs < 2 else f"{_signed(difference.low)} to {_signed(difference.high)}"


def _decay_line(method: str, slopes: Mapping[str, Mapping[int, float]]) -> tuple[str, ...]:
    own = _of_zero(slopes[method])
    assert own is not None
    other = None if method == BASELINE else paired_difference(slopes[method], slopes[BASELINE])
    return (
        method_name(method),
        _signed(own.mean),
        _interval(own),
        BLANK if other is None else _signed(other.mean),
        BLANK if other is None else _interval(other),
        str(own.pairs),
    )


def _decay_findings(slopes: Mapping[str, Mapping[int, float]], means: Curves) -> list[str]:
    own = _of_zero(slopes[BASELINE])
    assert own is not None
    interval = "" if own.pairs < 2 else f" (95 % interval {_interval(own)})"
    findings = [
        f"On the problem with known smoothness FedAvg's mean ‖∇F‖² falls as T to the {_signed(own.mean)}{interval}; the "
        f"theorem's bound falls as T to the {_signed(EXPECTED_SLOPE)}."
    ]
    for method in slopes:
        difference = paired_difference(slopes[method], slopes[BASELINE])
        if method == BASELINE or difference is None:
            continue
        text = f"{method_name(method)}'s slope is {_signed(difference.mean)} from FedAvg's over {difference.pairs} paired seed(s)"
        text += "" if difference.pairs < 2 else f", 95 % interval {_interval(difference)}"
        findings.append(f"{text}. That is {verdict(difference)}.")
        longest = max(next(iter(means[BASELINE].values())))
        ratio = _ratio(
            {seed: one[longest] for seed, one in means[method].items() if longest in one},
            {seed: one[longest] for seed, one in means[BASELINE].items() if longest in one},
        )
        findings += [f"There its mean ‖∇F‖² over {longest} rounds is {ratio} FedAvg's."] if ratio else []
    return findings


def _ratio(own: Mapping[int, float], other: Mapping[int, float]) -> str:
    """The geometric mean of paired ratios with its interval, as `2 times`; empty where it has no meaning."""
    values = [*own.values(), *other.values()]
    if not values or min(values) <= 0:
        return ""
    found = paired_difference(
        {seed: math.log(value) for seed, value in own.items()}, {seed: math.log(value) for seed, value in other.items()}
    )
    if found is None:
        return ""
    text = f"{nearest(math.exp(found.mean))} times"
    if found.pairs < 2:
        return text
    return f"{text} (95 % interval {nearest(math.exp(found.low))} to {nearest(math.exp(found.high))})"


def _round_findings(records: Sequence[Record], curves: Mapping[str, Curves]) -> list[str]:
    findings = []
    for method in curves["squared_gradient_norm"]:
        share = _remote(records, method)
        if share is not None and share[1] > 0:
            findings.append(
                f"With {method_name(method)} a share α = {share[0]:.3f} of records drawn in a run is remote, mean over seeds, "
                f"and (τ′/2)/(τ′ + τ) is {share[1]:.3f}."
            )
        if method == BASELINE:
            continue
        for column, name in QUANTITIES.items():
            by_method = curves[column]
            if BASELINE in by_method:
                ratio = _ratio(_over_rounds(by_method[method]), _over_rounds(by_method[BASELINE]))
                findings += [f"{method_name(method)}'s {name}, mean over rounds, is {ratio} FedAvg's."] if ratio else []
    return findings


def _over_rounds(seeds: Mapping[int, Mapping[int, float]]) -> dict[int, float]:
    """Each seed's mean over the rounds that were diagnosed, the start left out: all methods share it."""
    found = {seed: [value for number, value in one.items() if number > 0] for seed, one in seeds.items()}
    return {seed: statistics.fmean(values) for seed, values in found.items() if values}


def _remote(records: Sequence[Record], method: str) -> tuple[float, float] | None:
    """α of whole runs, mean over seeds, and the share that was planned."""
    last: dict[int, tuple[int, float, float]] = {}
    for one in records:
        seed, number, share, planned = one["seed"], one["round"], one["remote_fraction"], one["planned_remote_fraction"]
        if (
            one["method"] == method
            and isinstance(seed, int)
            and isinstance(number, int)
            and isinstance(share, float)
            and isinstance(planned, float)
            and (seed not in last or number > last[seed][0])
        ):
            last[seed] = (number, share, planned)
    if not last:
        return None
    return statistics.fmean(one[1] for one in last.values()), statistics.fmean(one[2] for one in last.values())


def _rounds_section(records: Sequence[Record], curves: Mapping[str, Curves], drawing: Drawing) -> Section:
    def ends(column: str, method: str) -> tuple[str, str]:
        """Mean over seeds at the first and at the last round that has a value."""
        by_round: dict[int, list[float]] = {}
        for one in curves[column][method].values():
            for number, value in one.items():
                by_round.setdefault(number, []).append(value)
        if not by_round:
            return BLANK, BLANK
        return nearest(statistics.fmean(by_round[min(by_round)])), nearest(statistics.fmean(by_round[max(by_round)]))

    def line(method: str) -> tuple[str, ...]:
        share = _remote(records, method)
        cells = [text for column in QUANTITIES for text in ends(column, method)]
        alpha = BLANK if share is None else f"{share[0]:.3f}"
        return (method_name(method), *cells, alpha, str(len(curves["drift"][method])))

    names = [f"{name}, {end}" for name in QUANTITIES.values() for end in ("first", "last")]
    return Section(
        title="Round by round",
        sentences=(
            "F is the mean loss of all training records, F_i of client i's, p_i its share of the records. ‖∇F‖² and the "
            "dissimilarity Σ p_i‖∇F_i − ∇F‖² are of the global weights after a round; drift is the mean over the round's clients "
            "of ‖y_i − ȳ‖², y_i where client i's local steps end and ȳ their mean.",
            "Methods have learning rates of their own, and drift grows with the square of the rate.",
            "Lines are means over seeds, bands reach from the least to the largest. α is the share of records drawn in a run's "
            "local steps that came from another client.",
        ),
        caption="Before the first round (drift: in the first round) and after the last, mean over seeds.",
        headings=("method", *names, "α", "seeds"),
        lines=tuple(line(method) for method in curves["squared_gradient_norm"]),
        svg=drawing.inline,
        figure="figures/rounds.svg",
        alt="Squared gradient norm, gradient dissimilarity and client drift against the round, one line a method",
    )


def _decay_section(decay: Sequence[Record], table: Display, drawing: Drawing) -> Section:
    horizons = sorted({int(one["rounds"] or 0) for one in decay})
    lrs = [float(one["lr"]) for one in decay if one["lr"] is not None]
    smoothness = [float(one["smoothness"]) for one in decay if one["smoothness"] is not None]
    constants = [f"T is {', '.join(map(str, horizons))} rounds."]
    if lrs and smoothness:
        constants.append(
            f"The smoothness constant L is {exact(max(smoothness))}; steps fall with 1/√T from {nearest(max(lrs))} to "
            f"{nearest(min(lrs))}."
        )
    return Section(
        title="Decay on a problem with known smoothness",
        sentences=(
            "Each record's loss is a sum of log(1 + r²) over turned coordinates r of record minus parameters: smooth, not "
            "convex, each client with a minimiser of its own, head and tail each holding half of the parameters.",
            " ".join(constants),
            "The slope is that of log of the mean of ‖∇F‖² over a run's rounds against log T, one a seed, by least squares. "
            "Differences are paired by seed, with Student's interval; an interval that includes 0 does not show that both are "
            "the same, only how far apart they may be.",
        ),
        caption="Slopes, mean over seeds.",
        headings=table.headings,
        lines=table.lines,
        svg=drawing.inline,
        figure="figures/decay.svg",
        alt="Mean squared gradient norm against the number of rounds on logarithmic axes, one line a method",
    )


def _fill_rounds(figure: Figure, curves: Mapping[str, Curves]) -> None:
    panels = figure.subplots(1, len(QUANTITIES), squeeze=False)[0]
    for axes, (column, name) in zip(panels, QUANTITIES.items(), strict=True):
        _draw_lines(axes, curves[column], markers=False)
        values = [value for seeds in curves[column].values() for one in seeds.values() for value in one.values()]
        if values and min(values) > 0:
            _make_logarithmic(axes)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_xlabel("round")
        axes.set_ylabel(name)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, len(labels)), frameon=False)


def _fill_decay(figure: Figure, means: Curves) -> None:
    axes = figure.subplots()
    _draw_lines(axes, means, markers=True)
    horizons = sorted({rounds for one in means[BASELINE].values() for rounds in one})
    start = statistics.fmean(one[horizons[0]] for one in means[BASELINE].values() if horizons[0] in one)
    guide = [start * (rounds / horizons[0]) ** EXPECTED_SLOPE for rounds in horizons]
    axes.plot(horizons, guide, color="#808080", linestyle=(0, (6, 3)), linewidth=1.2, label="slope −1/2")
    axes.set_xscale("log")
    _make_logarithmic(axes)
    axes.xaxis.set_major_locator(FixedLocator(horizons))
    axes.xaxis.set_major_formatter(lambda rounds, _position: f"{rounds:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("rounds T")
    axes.set_ylabel("mean ‖∇F‖²")
    axes.legend(frameon=False)


def _make_logarithmic(axes: Axes) -> None:
    """A logarithmic axis of values, its ticks written as numbers: the style draws no formulas."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0), numticks=8))
    axes.yaxis.set_major_formatter(lambda value, _position: nearest(value))
    axes.yaxis.set_minor_locator(NullLocator())


def _draw_lines(axes: Axes, curves: Curves, *, markers: bool) -> None:
    """Mean and range over seeds, one line a method."""
    palette = sns.color_palette("colorblind")
    for index, (method, seeds) in enumerate(curves.items()):
        by_round: dict[int, list[float]] = {}
        for one in seeds.values():
            for number, value in one.items():
                by_round.setdefault(number, []).append(value)
        xs, colour = sorted(by_round), palette[index % 10]
        axes.fill_between(
            xs, [min(by_round[x]) for x in xs], [max(by_round[x]) for x in xs], color=colour, alpha=0.2, linewidth=0
        )
        axes.plot(
            xs,
            [statistics.fmean(by_round[x]) for x in xs],
            color=colour,
            linewidth=1.6,
            marker=MARKERS[index % len(MARKERS)] if markers else None,
            label=method_name(method),
        )
    axes.spines[["top", "right"]].set_visible(False)
