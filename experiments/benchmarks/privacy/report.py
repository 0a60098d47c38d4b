"""The report and its figures, made from rows.csv and run.json alone: `python .../report.py reports/privacy`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import audit_power
import pandas as pd
from accountants import EPSILON, LEDGER, OUR_HIGH, OUR_LOW, SECONDS, TRUTH
from faults import AT_LEAST, AT_MOST
from figure import draw_accountants, draw_releases, references
from payload_size import CODES
from release_speed import TORCH, WORDS
from rows import ESTIMATE, REFUSES, Row, read_rows, wrong_side

from asfl_privacy.reporting import write_atomic

Facts = Mapping[str, Any]
ACCOUNTANTS = """## Accountants

ε at δ = 1e-5 unless said otherwise, sensitivity 1. Each figure is followed by its excess over the true ε (mpmath, 60 digits)
or, where there is no finite formula, over our own low end. **TOO LOW**: claimed as an upper bound, yet below the truth, so
what it promises does not hold. *too low*: an estimate below the truth. **TOO HIGH**: a lower bound above it. Where the
reference is our bracket, a flag says that two brackets exclude each other, and not which of them is wrong. The ledger records
every release in a round of its own, and its time holds all of that.
"""
FAULTS = """## Known faults

What other accountants say where they are known to be wrong or far off, asked in this run.
"""
RELEASE = """## Release

Millions of noise values a second on one core, and their ratio to torch's normal_ (float32) in the same run. The floor is
the system's random words alone, of which a value from a table takes one.
"""
PAYLOAD = """## Payload

Bytes of a released batch of 32×14×14 activations as a share of float32's. `entropy` is the floor of any lossless code (a
plug-in estimate), `raw` the smallest integer type, `coarse` the payload after rounding to a lattice four times coarser.
"""
LEDGER_WORDS = """## Ledger

Seconds of the process to record all rounds and to total them, and their ratios to the floor, numpy's own count of the same
ids. Memory is the most that the process has held up to the line, libraries included.
"""
AUDIT = """## Audit

Least number of residuals, of those tried, from which a part sees σ × factor in at least 90 % of the runs: Gaussian noise,
ε = 1 at δ = 1e-5, total alpha 1e-6. The row 1 is the honest layer. Pairs and reuse look at dependence and are blind to scale
by design.
"""


def report_of(rows: Sequence[Row], *, facts: Facts) -> str:
    """The page, in Markdown."""
    parts = {name: [row for row in rows if row.benchmark == name] for name in dict.fromkeys(r.benchmark for r in rows)}
    makers = {
        "accountants": _accountants,
        "faults": _faults,
        "release": _release,
        "payload": _payload,
        "ledger": _ledger,
        "audit": _audit,
    }
    lines = ["# Benchmarks of what makes a run private", ""]
    for name, make in makers.items():
        if name in parts:
            lines += [*make(parts[name]), ""]
    return "\n".join([*lines, *_made_by(facts)])


def _accountants(rows: Sequence[Row]) -> list[str]:
    true = references(rows)
    said = {(row.case, row.at, row.tool, row.quantity): row for row in rows}
    tools = [tool for tool in dict.fromkeys(row.tool for row in rows) if tool not in (TRUTH, OUR_HIGH, OUR_LOW, LEDGER)]
    figures, times, flags = [], [], []
    for (case, at), (low, high) in true.items():
        ours = [said[case, at, tool, EPSILON] for tool in (OUR_LOW, OUR_HIGH)]
        exact = said.get((case, at, TRUTH, EPSILON))
        width = 100.0 * ((ours[1].value or 0.0) / (ours[0].value or 1.0) - 1.0)
        cells = [_number(exact.value if exact else None, digits=6), _number(ours[0].value, digits=6)]
        cells += [_claim(ours[1], low=low, high=high), f"{width:.1g}"]
        for tool in (LEDGER, *tools):
            row = said.get((case, at, tool, EPSILON))
            cells.append("–" if row is None else _claim(row, low=low, high=high))
        figures.append((case, f"{at:g}", *cells))
        times.append((case, f"{at:g}", *_time_cells(said, case=case, at=at, tools=(OUR_HIGH, LEDGER, *tools))))
        flags += [
            f"- **{wrong_side(row, low=low, high=high)}** ({row.kind}): {row.tool} says {_number(row.value, digits=9)} where "
            f"{_number(low, digits=9)} to {_number(high, digits=9)} is true; {case}, {at:g} releases."
            for row in rows
            if (row.case, row.at, row.quantity) == (case, at, EPSILON) and wrong_side(row, low=low, high=high)
        ]
    heads = ("setting", "releases", "truth", "ours, low", "ours, high", "width %", LEDGER, *tools)
    refusals = dict.fromkeys(f"- {row.tool}, {row.kind}: {row.note}" for row in rows if row.value is None)
    return [
        ACCOUNTANTS,
        "![tightness and time](figures/accountants.svg)",
        "",
        *_table(heads, figures),
        "",
        "### Figures on the wrong side",
        "",
        *(flags or ["None."]),
        "",
        *refusals,
        "",
        "### Seconds, and how many times ours (compose)",
        "",
        *_table(("setting", "releases", "ours, compose", LEDGER, *tools), times),
    ]


def _claim(row: Row, *, low: float, high: float) -> str:
    if row.value is None:
        return "" if row.kind == REFUSES else row.kind
    text = _number(row.value, digits=6)
    if low > 0.0:
        text += f" ({100.0 * (row.value / low - 1.0):+.3g} %)"
    flag = wrong_side(row, low=low, high=high)
    if not flag:
        return text
    return f"*{flag.lower()}* {text}" if row.kind == ESTIMATE else f"**{flag}** {text}"


def _time_cells(
    said: Mapping[tuple[str, float | None, str, str], Row], *, case: str, at: float | None, tools: Sequence[str]
) -> list[str]:
    seconds = [said.get((case, at, tool, SECONDS)) for tool in tools]
    first = seconds[0].value if seconds[0] else None
    return [
        ""
        if row is None or row.value is None
        else f"{_number(row.value)}" + (f" ({row.value / first:.3g}×)" if first else "")
        for row in seconds
    ]


def _faults(rows: Sequence[Row]) -> list[str]:
    lines = []
    for case in dict.fromkeys(row.case for row in rows):
        mine = {row.tool: row for row in rows if row.case == case}
        claim = next(row for row in mine.values() if row.tool not in (AT_LEAST, AT_MOST))
        low, high = (mine[tool].value if tool in mine else None for tool in (AT_LEAST, AT_MOST))
        if claim.value is None or low is None or high is None:
            lines.append((case, claim.kind, "", "", "", claim.note))
            continue
        ratio = f"{claim.value / high:.3g}"
        flag = wrong_side(claim, low=low, high=high)
        verdict = f"**{flag}**, {ratio} of the truth" if flag else f"{ratio}× the truth"
        lines.append(
            (case, claim.kind, _number(claim.value), f"{_number(low)} to {_number(high)}", verdict, claim.note)
        )
    return [FAULTS, *_table(("who and where", "claimed as", "says", "truth", "verdict", "why"), lines)]


def _release(rows: Sequence[Row]) -> list[str]:
    speeds = [row for row in rows if row.quantity == "M values/s"]
    said = {row.tool: row.value for row in speeds}
    lines = [
        (row.tool, row.kind, "", "")
        if row.value is None
        else (row.tool, _number(row.value), _ratio(row.value, said.get(TORCH)), _ratio(row.value, said.get(WORDS)))
        for row in speeds
    ]
    tables = [(row.tool, _number(row.value)) for row in rows if row.quantity == "ms"]
    return [
        RELEASE,
        "![speed and size](figures/releases.svg)",
        "",
        *_table(("sampler", "M values/s", "÷ torch normal_", "÷ system words"), lines),
        "",
        *_table(("table", "ms to build"), tables),
    ]


def _payload(rows: Sequence[Row]) -> list[str]:
    lines = []
    for case, at in dict.fromkeys((row.case, row.at) for row in rows):
        found = {row.tool: row for row in rows if (row.case, row.at) == (case, at)}
        shares = [_number(found[code].value) if code in found else "" for code in CODES]
        above = _ratio(found["payload"].value, found["entropy"].value)
        lines.append((case, f"{at:g}", found["payload"].note, *shares, above))
    return [PAYLOAD, *_table(("family", "scale/Δ", "cells a scale", *CODES, "payload ÷ entropy"), lines)]


def _ledger(rows: Sequence[Row]) -> list[str]:
    lines = []
    for case in dict.fromkeys(row.case for row in rows):
        found = {row.tool: row.value for row in rows if row.case == case}
        floor = found["numpy count"]
        cells = [f"{_number(found[tool])} ({_ratio(found[tool], floor)}×)" for tool in ("record", "total")]
        lines.append((case, *cells, _number(floor), _number(found["peak memory"]), _number(found["file"])))
    heads = ("case", "record s (÷ floor)", "total s (÷ floor)", "floor s", "peak MiB", "bytes a release")
    return [LEDGER_WORDS, *_table(heads, lines)]


def audit_frame(rows: Sequence[Row]) -> pd.DataFrame:
    """The rows in the columns of audit_power.py."""
    return pd.DataFrame(
        [
            {
                "factor": float(row.case.split("×")[1]),
                "residuals": int(row.at or 0),
                "part": row.tool,
                "rate": row.value,
            }
            for row in rows
            if row.benchmark == "audit"
        ]
    )


def _audit(rows: Sequence[Row]) -> list[str]:
    return [AUDIT, "![power](figures/audit_power.svg)", "", audit_power.table(audit_frame(rows)), rows[0].note]


def _made_by(facts: Facts) -> list[str]:
    config = ", ".join(f"{name} {value}" for name, value in facts["config"].items())
    versions = ", ".join(f"{name} {value}" for name, value in facts["versions"].items())
    return [
        "## Made by",
        "",
        f"- command: `{facts['command']}`",
        f"- commit: {facts['commit'] or 'unknown'}",
        f"- started: {facts['started']}",
        f"- setting: {config}",
        f"- {versions}",
        "",
    ]


def _ratio(value: float | None, floor: float | None) -> str:
    return f"{value / floor:.3g}" if value is not None and floor else ""


def _number(value: float | None, *, digits: int = 4) -> str:
    if value is None:
        return "–"
    return f"{value:.{digits}g}" if value == 0.0 or 1e-3 <= abs(value) < 10**digits else f"{value:.{digits - 1}e}"


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
        write_atomic(figures / f"accountants.{kind}", draw_accountants(rows, image_format=kind))
        write_atomic(figures / f"releases.{kind}", draw_releases(rows, image_format=kind))
        if any(row.benchmark == "audit" for row in rows):
            write_atomic(figures / f"audit_power.{kind}", audit_power.draw(audit_frame(rows), image_format=kind))


if __name__ == "__main__":
    write_report(Path(sys.argv[1]))
