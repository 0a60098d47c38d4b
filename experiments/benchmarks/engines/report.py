"""The report and its figures, made from rows.csv and run.json alone: `python .../report.py reports/engines`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from figure import draw_engines, draw_scaling
from races import CLIENTS, ENGINES, FIXED, LOCAL, RELEASE, SIZE
from rows import OK, Row, Summary, read_rows, summaries

from asfl_privacy.reporting import write_atomic

Facts = Mapping[str, Any]
HEAD = """# Engines on one workload

Each run is a process of its own. `wall` and `processors` are seconds of a round (the median over its timed rounds, then over
repeats; processors: all processes of the engine together). Ratios are to the first line's run of the same repeat, and
their median is shown, for wall with least and most. `once` is what a run pays once (imports, data, workers, whatever the
first round takes longer) and is in no ratio. `drift` is the largest distance of the last weights from the first line's, ÷
the way that those travelled: all engines draw the same mini-batches, so it is rounding, which some rounds of training grow.
A run that took another number of steps, or ended elsewhere, is marked and in no figure.
"""
WORDS = {
    ENGINES: """## Engines

![ratios](figures/engines.svg)
""",
    FIXED: """## Fixed cost of a round

The same clients and messages with no local step: what a round costs that trains nothing.
""",
    LOCAL: """## ASFL's round against FedAvg's at equal total steps

Half of the steps train the tail alone, on activations that are computed once. What is left of a round's arithmetic (products
and convolutions, forward and backward, as torch counts them) is a property of the network and of where it is cut, not of an
engine:
""",
    RELEASE: """## Cost of a private release

Certificate, noise from the system's source, ledger and payload: a round with them against one whose activations leave as
they are. ε = 1 at δ = 1e-5 and radius .1 a release.
""",
    SIZE: """## Growing networks

![scaling](figures/scaling.svg)
""",
    CLIENTS: """## Growing federations

At most 50 clients a round. `last ÷ first` compares the medians of the last and the first ten timed rounds.
""",
}
COLUMNS = ("engine", "wall s", "÷ first", "least–most", "processors s", "÷ first", "once s", "peak MiB", "drift")


def report_of(rows: Sequence[Row], *, facts: Facts) -> str:
    """The page, in Markdown."""
    lines = [HEAD]
    for race, words in WORDS.items():
        mine = [row for row in rows if row.race == race]
        if mine:
            lines += [words, *(_operations(facts) if race == LOCAL else ()), *_cases(mine)]
    return "\n".join([*lines, *_troubles(rows), *_made_by(facts)])


def _operations(facts: Facts) -> list[str]:
    shares = facts["config"].get("operations", {})
    return [*(f"- {name}: {share:.2f} of the arithmetic" for name, share in shares.items()), ""]


def _cases(rows: Sequence[Row]) -> list[str]:
    lines = []
    for case in dict.fromkeys(row.case for row in rows):
        mine = [row for row in rows if row.case == case]
        found = summaries(mine, floor=mine[0].tool)
        heads: Sequence[str] = COLUMNS
        cells = [_cells(one) for one in found]
        if mine[0].race == CLIENTS:
            heads = (*COLUMNS, "last ÷ first")
            cells = [(*line, _growth(mine, one.tool)) for line, one in zip(cells, found, strict=True)]
        lines += [f"### {case}", "", *_table(heads, cells), ""]
    return lines


def _cells(one: Summary) -> tuple[str, ...]:
    if not math.isfinite(one.round_s):
        return (one.tool, one.status, *[""] * (len(COLUMNS) - 2))
    ends = f"{one.low:.3g}–{one.high:.3g}" if math.isfinite(one.low) else ""
    return (
        one.tool if one.status == OK else f"{one.tool} (**{one.status}** in some runs)",
        _number(one.round_s),
        _ratio(one.wall_ratio),
        ends,
        _number(one.cpu_s),
        _ratio(one.cpu_ratio),
        f"{one.once_s:.1f}",
        f"{one.peak_mib:.0f}",
        "" if math.isnan(one.drift) else f"{one.drift:.1e}",
    )


def _growth(rows: Sequence[Row], tool: str) -> str:
    """Last ten rounds against the first ten, the median over repeats."""
    ratios = [
        median(row.seconds[-10:]) / median(row.seconds[:10])
        for row in rows
        if row.tool == tool and row.status == OK and len(row.seconds) >= 20
    ]
    return _ratio(median(ratios)) if ratios else ""


def _troubles(rows: Sequence[Row]) -> list[str]:
    """Everything that did not end as it should, and what else runs have to say."""
    found = dict.fromkeys(f"- {row.case}; {row.tool}: **{row.status}**: {row.note}" for row in rows if row.status != OK)
    notes = dict.fromkeys(f"- {row.tool}: {row.note}" for row in rows if row.status == OK and row.note)
    return ["## Not measured", "", *(found or ["None."]), "", "## Versions of the peers", "", *(notes or ["None."]), ""]


def _made_by(facts: Facts) -> list[str]:
    config = [f"- {name}: {value}" for name, value in facts["config"].items() if not isinstance(value, dict)]
    tasks = [
        f"- {case}: " + ", ".join(f"{name} {value}" for name, value in task.items() if value != "")
        for case, task in facts["config"].get("tasks", {}).items()
    ]
    versions = ", ".join(f"{name} {value}" for name, value in facts["versions"].items())
    return [
        "## Made by",
        "",
        f"- command: `{facts['command']}`",
        f"- commit: {facts['commit'] or 'unknown'}",
        f"- started: {facts['started']}",
        *config,
        f"- {versions}",
        "",
        "### Tasks (of the first line)",
        "",
        *tasks,
        "",
    ]


def _ratio(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4g}"


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    head = "| " + " | ".join(headings) + " |"
    body = ["| " + " | ".join(cell.replace("|", "∣") for cell in line) + " |" for line in lines]
    return [head, "|" + "|".join([":--"] * len(headings)) + "|", *body]


def write_report(folder: Path) -> None:
    """Make report.md and the figures in a folder from its rows.csv and run.json."""
    rows = read_rows(folder / "rows.csv")
    facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    write_atomic(folder / "report.md", report_of(rows, facts=facts))
    figures = folder / "figures"
    figures.mkdir(exist_ok=True)
    for kind in ("svg", "png"):
        write_atomic(figures / f"engines.{kind}", draw_engines(rows, image_format=kind))
        write_atomic(figures / f"scaling.{kind}", draw_scaling(rows, image_format=kind))


if __name__ == "__main__":
    write_report(Path(sys.argv[1]))
