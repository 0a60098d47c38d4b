"""Table 2: local computation of a client's round, relative to FedAvg's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from matplotlib.figure import Figure

from asfl_privacy.reporting.comparison import paired_difference
from asfl_privacy.reporting.display import Display
from asfl_privacy.reporting.drawing import INK, Drawing, draw
from asfl_privacy.reporting.exhibits.exhibit import Exhibit, Material
from asfl_privacy.reporting.numerals import BLANK, nearest
from asfl_privacy.reporting.records import Record
from asfl_privacy.reporting.section import Section
from asfl_privacy.reporting.words import mechanism_name, method_name

BASELINE: Final = "fedavg"
OURS: Final = "asfl"
_HEADINGS: Final = ("method", "sharing ms", "training ms", "total ms", "relative to FedAvg", "95 % interval")


@dataclass(frozen=True)
class Ratio:
    """A ratio of times, with the ends of its 95 % interval; 0 and infinity for one repeat."""

    value: float
    low: float
    high: float

    @property
    def is_open(self) -> bool:
        """Whether one repeat says nothing of how far another may lie."""
        return math.isinf(self.high)


@dataclass(frozen=True)
class Contender:
    """What was measured of one method on one task.

    Attributes:
        method: As rows call it.
        mech: As rows call it.
        exchange_layer: Where activations leave; empty where none do.
        sharing: Seconds, by repeat and client.
        training: Likewise.
        certificate: Seconds of the round's certificate, by repeat; empty without noise.
    """

    method: str
    mech: str
    exchange_layer: str
    sharing: Mapping[tuple[int, int], float]
    training: Mapping[tuple[int, int], float]
    certificate: Mapping[int, float]

    @cached_property
    def total(self) -> dict[tuple[int, int], float]:
        """Seconds of local work, by repeat and client."""
        return {pair: self.sharing[pair] + self.training[pair] for pair in self.sharing}

    @property
    def is_noised(self) -> bool:
        """Whether what leaves is noised."""
        return self.mech != "none"

    @property
    def name(self) -> str:
        """In text."""
        parts = [method_name(self.method), self.exchange_layer, mechanism_name(self.mech) if self.is_noised else ""]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class Task:
    """The contenders on one data set, network and device; FedAvg is one of them."""

    name: str
    device: str
    contenders: tuple[Contender, ...]

    @property
    def baseline(self) -> Contender:
        """FedAvg."""
        return next(one for one in self.contenders if one.method == BASELINE and not one.is_noised)

    def ranked(self, *, noised: bool) -> list[Contender]:
        """With or without noise, the least local time relative to FedAvg first."""
        chosen = [one for one in self.contenders if one.is_noised == noised]
        return sorted(chosen, key=lambda one: ratio_of(one, self.baseline).value)


def ratio_of(own: Contender, other: Contender) -> Ratio:
    """Local time of one relative to another's, paired: the same client in the same repeat, with the same records.

    Returns:
        The geometric mean over repeats of each repeat's median over clients, with Student's interval of the logarithms.

    Raises:
        ValueError: No client's round in common.

    Guarantee:
        The interval covers the true ratio with 95 % where the repeats' logarithms are independent and normal. Repeats are
        what is independent: clients of one repeat share the machine's state, and to count each of them would make the
        interval too narrow. The median keeps one interrupted client from moving a repeat.

    Source:
        Student (1908); a ratio of times is symmetric in its logarithm.
    """
    logs: dict[int, list[float]] = {}
    for (repeat, client), seconds in own.total.items():
        if (repeat, client) in other.total:
            logs.setdefault(repeat, []).append(math.log(seconds / other.total[repeat, client]))
    medians = {repeat: statistics.median(values) for repeat, values in logs.items()}
    found = paired_difference(medians, dict.fromkeys(medians, 0.0))
    if found is None:
        raise ValueError(f"{own.name} and {other.name} have no client's round in common; time them in the same rounds")
    return Ratio(math.exp(found.mean), math.exp(found.low), math.exp(found.high))


def local_time_exhibit(material: Material) -> Exhibit:
    """Sharing, training and their sum, a line a method, relative to FedAvg; with noise apart.

    Args:
        material: `timings`, of one task or several.

    Raises:
        ValueError: A task without FedAvg, times that are blank or not above 0, or a client's round that is there twice.

    Guarantee:
        The ratio is of paired times, so that neither a slow spell of the machine nor a client of few records moves it.
    """
    tasks = tasks_of(material.table("timings"))
    sections, figures = [], dict[str, str | bytes]()
    for number, task in enumerate(tasks, start=1):
        name = "local_time" if len(tasks) == 1 else f"local_time_{number}"
        drawing = _draw(task, name=name)
        figures |= {f"{name}.svg": drawing.svg, f"{name}.png": drawing.png}
        sections.append(_clean_section(task, drawing=drawing, name=name))
        if any(one.is_noised for one in task.contenders):
            sections.append(_noised_section(task))
    several = len(tasks) > 1
    table = Display(
        headings=(*(("data",) if several else ()), *_HEADINGS),
        lines=tuple(
            (*((task.name,) if several else ()), *_line(one, task.baseline))
            for task in tasks
            for one in task.ranked(noised=False)
        ),
        shared=() if several else (("data and network", tasks[0].name), ("device", tasks[0].device)),
    )
    return Exhibit(findings=_findings(tasks), sections=tuple(sections), table=table, figures=figures)


def tasks_of(records: Sequence[Record]) -> list[Task]:
    """Records by task and contender, in their order.

    Raises:
        ValueError: As `local_time_exhibit`.
    """
    grouped: dict[tuple[str, ...], dict[tuple[str, ...], list[Record]]] = {}
    for record in records:
        task = tuple(str(record[column]) for column in ("data", "model", "device"))
        who = tuple(str(record[column]) for column in ("method", "mech", "exchange_layer"))
        grouped.setdefault(task, {}).setdefault(who, []).append(record)
    tasks = []
    for (data, model, device), contenders in grouped.items():
        name = f"{data}, {model}" + ("" if device == "cpu" else f", {device}")
        if not any(method == BASELINE and mech == "none" for method, mech, _ in contenders):
            raise ValueError(f"{name}: no times of {BASELINE}, which the others' are relative to; time it beside them")
        made = tuple(_contender(who, found) for who, found in contenders.items())
        tasks.append(Task(name=name, device=device, contenders=made))
    return tasks


def _contender(who: Sequence[str], records: Sequence[Record]) -> Contender:
    sharing: dict[tuple[int, int], float] = {}
    training: dict[tuple[int, int], float] = {}
    certificate: dict[int, float] = {}
    for record in records:
        repeat, client = int(record["repeat"] or 0), int(record["client"] or 0)
        shared, trained = record["seconds_sharing"], record["seconds_training"]
        where = f"{who[0]}, repeat {repeat}, client {client}"
        if not isinstance(shared, float) or not isinstance(trained, float) or shared < 0.0 or trained <= 0.0:
            raise ValueError(f"{where}: sharing {shared} s and training {trained} s are no times; measure it again")
        if (repeat, client) in sharing:
            raise ValueError(f"{where} is there twice: a client's round is timed once; keep one of its lines")
        sharing[repeat, client], training[repeat, client] = shared, trained
        if isinstance(record["seconds_certificate"], float):
            certificate[repeat] = record["seconds_certificate"]
    return Contender(
        method=who[0],
        mech=who[1],
        exchange_layer=who[2],
        sharing=sharing,
        training=training,
        certificate=certificate,
    )


def _line(one: Contender, baseline: Contender) -> tuple[str, ...]:
    ratio = ratio_of(one, baseline)
    return (
        one.name,
        *(_milliseconds(list(part.values())) for part in (one.sharing, one.training, one.total)),
        f"{ratio.value:.3f}" if one is not baseline else "1",
        _interval(ratio) if one is not baseline else BLANK,
    )


def _milliseconds(seconds: Sequence[float]) -> str:
    return nearest(1e3 * statistics.median(seconds)) if seconds else BLANK


def _interval(ratio: Ratio) -> str:
    return BLANK if ratio.is_open else f"{ratio.low:.3f} to {ratio.high:.3f}"


def _with_interval(ratio: Ratio) -> str:
    return f"{ratio.value:.3f}" + ("" if ratio.is_open else f" (95 % interval {_interval(ratio)})")


def _clean_section(task: Task, *, drawing: Drawing, name: str) -> Section:
    ranked = task.ranked(noised=False)
    return Section(
        title=f"Local time: {task.name}",
        sentences=(
            "What a client computes in a round, all methods with the same number of local steps. Sharing: the activations "
            "that it sends. Training: tail and full steps with all that the method adds to them (MOON's further passes, "
            "control variates, FedProto's class means, both halves of SplitFed). Evaluation, aggregation and transport are "
            "not in it.",
            "Clients were timed one at a time on one thread, the methods' rounds in turns, in an order drawn anew each time, "
            "after rounds that do not count. On a GPU a time ends when the device is done.",
            "Times are medians over clients and repeats, so that parts need not add up. The ratio pairs the same client in "
            "the same repeat: the median over clients, then the geometric mean over repeats, with Student's interval of the "
            "logarithms over repeats.",
        ),
        caption=f"One line a method, the least local time first; {_counts(task)}.",
        headings=_HEADINGS,
        lines=tuple(_line(one, task.baseline) for one in ranked),
        svg=drawing.inline,
        figure=f"figures/{name}.svg",
        alt=f"Local time relative to FedAvg, {task.name}: "
        + "; ".join(f"{one.name} {ratio_of(one, task.baseline).value:.3f}" for one in ranked)
        + ".",
    )


def _noised_section(task: Task) -> Section:
    return Section(
        title=f"Local time with noise: {task.name}",
        sentences=(
            "The same with noise on what is shared; sharing includes drawing it. FedAvg's time is that without noise. The "
            "certificate, and the noise calibrated from it, are the server's and made once a round for all clients: they are "
            "not in the total.",
        ),
        caption="One line a method, the least local time first.",
        headings=(*_HEADINGS, "certificate, ms a round"),
        lines=tuple(
            (*_line(one, task.baseline), _milliseconds(list(one.certificate.values())))
            for one in task.ranked(noised=True)
        ),
        svg=None,
        figure=None,
        alt="",
    )


def _counts(task: Task) -> str:
    pairs = task.baseline.total
    repeats = len({repeat for repeat, _ in pairs})
    return f"{repeats} repeat{'s' if repeats > 1 else ''}, {len(pairs)} rounds of single clients in all"


def _findings(tasks: Sequence[Task]) -> tuple[str, ...]:
    """Which line is lowest on each task, how ASFL stands to the best of the others, and on how many it is lowest."""
    findings, timed, won = [], 0, 0
    for task in tasks:
        ranked = task.ranked(noised=False)
        lowest, ours = ranked[0], [one for one in ranked if one.method == OURS]
        findings.append(
            f"{task.name}: {lowest.name} takes the least local time of {len(ranked)} lines, "
            f"{_with_interval(ratio_of(lowest, task.baseline))} of FedAvg's."
            if lowest is not task.baseline
            else f"{task.name}: FedAvg takes the least local time of {len(ranked)} lines."
        )
        timed, won = timed + bool(ours), won + (lowest.method == OURS)
        rival = next(one for one in ranked if one.method != OURS)
        for one in ours:
            ratio = ratio_of(one, rival)
            findings.append(
                f"{task.name}: {one.name} takes {_with_interval(ratio)} of the local time of {rival.name}, the lowest of the "
                f"other methods: {_verdict(ratio)}."
            )
        for one in task.ranked(noised=True):
            findings.append(
                f"{task.name}: {one.name} takes {_with_interval(ratio_of(one, task.baseline))} of FedAvg's local time, its "
                "noise included."
            )
    if timed:
        findings.append(
            f"ASFL takes the least local time of all methods on {won} of {timed} data set{'s' if timed > 1 else ''}."
        )
    return tuple(findings)


def _verdict(ratio: Ratio) -> str:
    if ratio.is_open:
        return "one repeat, so nothing is known of the spread"
    return "below" if ratio.high < 1.0 else "above" if ratio.low > 1.0 else "not distinguishable at that confidence"


def _draw(task: Task, *, name: str) -> Drawing:
    """One dot a method with its interval, FedAvg at 1."""
    ranked = task.ranked(noised=False)
    ratios = [ratio_of(one, task.baseline) for one in ranked]

    def fill(figure: Figure) -> None:
        axes = figure.add_subplot()
        for row, ratio in enumerate(ratios):
            axes.plot([ratio.value], [row], "o", color=INK)
            if not ratio.is_open:
                axes.plot([ratio.low, ratio.high], [row, row], "-", color=INK, linewidth=1.5)
        axes.axvline(1.0, color=INK, linewidth=0.8, linestyle="--")
        axes.set_yticks(range(len(ranked)), [one.name for one in ranked])
        axes.invert_yaxis()
        axes.set_xlim(0.0, 1.3 * max(ratio.value for ratio in ratios))  # longer intervals are cut; the table has them
        axes.set_xlabel("local time relative to FedAvg")

    return draw(fill, size=(6.4, 0.8 + 0.32 * len(ranked)), name=name)
