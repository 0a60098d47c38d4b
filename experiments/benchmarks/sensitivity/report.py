"""The benchmark's report and figure, made from rows.csv alone: `python .../report.py reports/sensitivity`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from figure import draw
from rows import ESTIMATE, LOWER, MEMORY, UPPER, Row, read_rows

from asfl_privacy.reporting import write_atomic

OURS = ("certificate", "fast", "product", "lower bound", "true norm", "peak memory")
ROUNDING = 1e-9  # relative: what a pair's ratio, computed in float64, may exceed a bound by
PROSE = """# How tight the certificates are

Every head, pair of norms p→q and tool has one row in rows.csv; this page and tightness.svg come from it alone. *Found* is
the largest ratio ‖y(x) − y(x')‖_q / ‖x − x'‖_p of a pair of records that search found, so the true sensitivity lies
between it and the certificate. *Product* is the product of the layers' bounds in one norm, which 1→2 does not have. Times
are wall clock on one thread; no figure but them depends on them.

A gradient step of the search improves one pair of records, by at most two forward and backward passes of both (one through
the softened head, one through the head itself at every fourth step) and one forward pass. Rounds of 100 steps begin and end
with some more.
"""


@dataclass(frozen=True)
class Case:
    """The rows of one head and one pair of norms, by tool."""

    head: str
    p: str
    q: str
    rows: dict[str, Row]

    def value(self, tool: str) -> float | None:
        """What a tool says, or None."""
        row = self.rows.get(tool)
        return row.value if row else None

    def ratio(self, tool: str, to: str) -> float | None:
        """One tool's figure divided by another's."""
        above, below = self.value(tool), self.value(to)
        return above / below if above is not None and below else None

    @property
    def norms(self) -> str:
        """For example 1→∞."""
        return f"{self.p}→{self.q}".replace("inf", "∞")


def cases_of(rows: Iterable[Row]) -> list[Case]:
    """Rows grouped by head and norms, in the order of the file."""
    cases: dict[tuple[str, str, str], Case] = {}
    for row in rows:
        case = cases.setdefault((row.head, row.p, row.q), Case(row.head, row.p, row.q, {}))
        case.rows[row.tool] = row
    return list(cases.values())


def is_beaten(row: Row, *, found: float | None) -> bool:
    """Whether a found pair exceeds what a tool puts forward as an upper bound or an estimate."""
    if row.kind not in (UPPER, ESTIMATE) or row.value is None or found is None:
        return False
    return row.value < found * (1.0 - ROUNDING)


def report_of(rows: Sequence[Row]) -> str:
    """The page, in Markdown."""
    cases = [case for case in cases_of(rows) if any(row.kind != MEMORY for row in case.rows.values())]
    return "\n".join(
        [
            PROSE,
            *_alarms(cases),
            "## Certificates",
            "",
            *_certificates(cases),
            "",
            *_single_convolutions(cases),
            *_peers(cases),
            *_memory(rows),
            *_facts(rows),
        ]
    )


def _alarms(cases: Sequence[Case]) -> list[str]:
    above = [
        f"- **ABOVE THE PRODUCT** on {case.head}, {case.norms}: {_number(case.value('certificate'))} against "
        f"{_number(case.value('product'))}."
        for case in cases
        if (ratio := case.ratio("certificate", "product")) is not None and ratio > 1.0 + ROUNDING
    ]
    lines = []
    for case in cases:
        for tool, row in case.rows.items():
            if row.kind != UPPER or not is_beaten(row, found=case.value("lower bound")):
                continue
            who = f"our {tool} is" if tool in OURS else f"{tool} is"
            lines.append(
                f"- **UNSOUND** on {case.head}, {case.norms}: {who} {_number(row.value)}, a found pair reaches "
                f"{_number(case.value('lower bound'))} ({_number(case.ratio(tool, 'lower bound'))} of it claimed)."
            )
    return [
        *("## Upper bounds that a found pair exceeds", "", *(lines or ["None."]), ""),
        *("## Certificates above the plain product", "", *(above or ["None."]), ""),
    ]


def _certificates(cases: Sequence[Case]) -> list[str]:
    lines = []
    for case in cases:
        certificate, found = case.rows.get("certificate"), case.rows.get("lower bound")
        if certificate is None:
            continue
        lines.append(
            (
                case.head,
                case.norms,
                _number(certificate.value, digits=6),
                certificate.note if certificate.value is not None else f"{certificate.kind}: {certificate.note}",
                _number(found.value if found else None, digits=6),
                _number(case.ratio("certificate", "lower bound"), bold=True),
                _number(case.value("product")),
                _number(case.ratio("product", "certificate")),
                _number(case.value("fast")),
                _number(case.ratio("fast", "certificate")),
                _seconds(certificate),
                _seconds(case.rows.get("fast")),
                "–" if found is None else found.note,
            )
        )
    heads = ("head", "norm", "certificate", "method", "found", "certificate ÷ found", "product")
    return _table((*heads, "product ÷ certificate", "fast", "fast ÷ certificate", "s", "fast s", "search"), lines)


def _single_convolutions(cases: Sequence[Case]) -> list[str]:
    tools = ("certificate", "fast", "lower bound", *_peer_names(cases))
    lines = []
    for case in cases:
        truth = case.rows.get("true norm")
        if truth is None or truth.value is None:
            continue
        excesses = [case.ratio(tool, "true norm") for tool in tools]
        shown = ["–" if excess is None else f"{100 * (excess - 1):+.3g} %" for excess in excesses]
        lines.append((case.head, f"{truth.value:.10g}", truth.note, *shown))
    if not lines:
        return []
    words = "Excess over the true norm. svds approaches it from below; below zero a claim is too small."
    return ["## Single convolutions, 2→2", "", words, "", *_table(("head", "true norm", "from", *tools), lines), ""]


def _peers(cases: Sequence[Case]) -> list[str]:
    tools = _peer_names(cases)
    lines = []
    notes: dict[str, list[str]] = {}
    for case in cases:
        if not any(tool in case.rows for tool in tools):
            continue
        cells = [_number(case.value("certificate"))]
        for tool in tools:
            row = case.rows.get(tool)
            cells.append("" if row is None else _verdict(case, row))
            if row is not None:
                heads = notes.setdefault(f"{tool}, {row.kind}: {row.note}", [])
                heads.extend([case.head] if case.head not in heads else [])
        lines.append((case.head, case.norms, *cells))
    if not lines:
        return []
    words = (
        "Value, then its ratio to the certificate, then seconds. UNSOUND: claimed as an upper bound, but a found pair "
        "exceeds it. *Too small*: an estimate that a found pair exceeds. *Lower*: never meant to be more."
    )
    explained = [f"- {note} ({', '.join(heads)})" for note, heads in notes.items()]
    return ["## Peers", "", words, "", *_table(("head", "norm", "certificate", *tools), lines), "", *explained, ""]


def _verdict(case: Case, row: Row) -> str:
    if row.value is None:
        return row.kind
    text = f"{_number(row.value)} ({_number(case.ratio(row.tool, 'certificate'))}×, {_seconds(row)} s)"
    if is_beaten(row, found=case.value("lower bound")):
        found = f"{_number(case.ratio(row.tool, 'lower bound'))} of found"
        return f"**UNSOUND** {text}, {found}" if row.kind == UPPER else f"*too small* {text}, {found}"
    return f"*lower* {text}" if row.kind == LOWER else text


def _memory(rows: Sequence[Row]) -> list[str]:
    chosen = [row for row in rows if row.tool == "peak memory"]
    if not chosen:
        return []
    lines = [(f"{row.p}→{row.q}", _number(row.value), row.kind, row.note) for row in chosen]
    about = f"{chosen[0].about}."
    return ["## Memory", "", about, "", *_table(("norm", "peak memory", "unit", "note"), lines), ""]


def _facts(rows: Sequence[Row]) -> list[str]:
    heads = {row.head: row for row in rows if row.kind != MEMORY}
    lines = [
        (row.head, row.about, f"`{row.digest}`", "–" if row.accuracy is None else f"{100 * row.accuracy:.1f} %")
        for row in heads.values()
    ]
    made = [
        *(f"- command: `{command}`" for command in dict.fromkeys(row.command for row in rows)),
        *(f"- commit: {commit}" for commit in dict.fromkeys(row.commit for row in rows)),
        *(f"- digest of the package's code: `{code}`" for code in dict.fromkeys(row.code for row in rows)),
        *(f"- {versions}" for versions in dict.fromkeys(row.versions for row in rows)),
    ]
    table = _table(("head", "what it is", "digest of its weights", "accuracy"), lines)
    return ["## Heads", "", *table, "", "## Made by", "", *made, ""]


def _peer_names(cases: Sequence[Case]) -> list[str]:
    return list(dict.fromkeys(tool for case in cases for tool in case.rows if tool not in OURS))


def _number(value: float | None, *, digits: int = 4, bold: bool = False) -> str:
    if value is None:
        return "–"
    text = f"{value:.{digits}g}" if 1e-3 <= abs(value) < 10**digits else f"{value:.{digits - 1}e}"
    return f"**{text}**" if bold else text


def _seconds(row: Row | None) -> str:
    return "–" if row is None or row.seconds is None else f"{row.seconds:.2f}"


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    head = "| " + " | ".join(headings) + " |"
    body = ["| " + " | ".join(cell.replace("|", "∣") for cell in line) + " |" for line in lines]
    return [head, "|" + "|".join([":--"] * len(headings)) + "|", *body]


def write_report(folder: Path) -> None:
    """Make report.md, tightness.svg and tightness.png in a folder from its rows.csv."""
    rows = read_rows(folder / "rows.csv")
    write_atomic(folder / "report.md", report_of(rows))
    for kind in ("svg", "png"):
        write_atomic(folder / f"tightness.{kind}", draw(rows, image_format=kind))


if __name__ == "__main__":
    write_report(Path(sys.argv[1]))
