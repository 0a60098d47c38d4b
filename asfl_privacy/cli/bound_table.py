"""What `bound` shows: the operators of a certificate with their shares, and nine norms for every exchange layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from rich.console import Console
from rich.table import Table

import sensitivity
from asfl_privacy.accounting.checks import norm_word
from asfl_privacy.cli.bound_head import Subject
from asfl_privacy.config import NORMS
from asfl_privacy.reporting.numerals import bound as rounded_up

Numbers = dict[str, object]
_ARROWS = {(p, q): f"{p}→{q}".replace("inf", "∞") for p in NORMS for q in NORMS}


def layer_rows(certificate: sensitivity.Certificate) -> list[Numbers]:
    """One record an operator on the route: name, kind, p, q, value, how, share, bottleneck.

    The share is what part of the growth an operator causes: its logarithm over the sum of all logarithms, of operators
    that stretch (norm above 1). The bottleneck is the operator of the largest norm. The route is that of the norms
    composed, whichever method gave the value.
    """
    growth = [math.log(layer.value) if layer.value > 1.0 else 0.0 for layer in certificate.layers]
    largest = max((layer.value for layer in certificate.layers), default=0.0)
    rows: list[Numbers] = []
    for layer, logarithm in zip(certificate.layers, growth, strict=True):
        rows.append(
            {
                "name": layer.name,
                "kind": layer.kind,
                "p": norm_word(layer.p),
                "q": norm_word(layer.q),
                "value": layer.value,
                "how": layer.how,
                "share": round(logarithm / sum(growth), 4) if sum(growth) > 0.0 else 0.0,
                "bottleneck": layer.value == largest,
            }
        )
    return rows


def norm_rows(subject: Subject, names: Sequence[str], *, method: str, budget_s: float) -> list[Numbers]:
    """Nine norms for the head that ends at each of the named blocks; what is refused says so in its row.

    Raises:
        ValueError: if every head is refused; with the first refusal.
    """
    rows: list[Numbers] = []
    for name in names:
        norms: dict[str, float | None] = {}
        row: Numbers = {"exchange_layer": name}
        try:
            _, head = subject.head(name or "auto")
            for p, q in _ARROWS:
                with torch.no_grad():
                    certificate = sensitivity.certify(
                        head, p=NORMS[p], q=NORMS[q], input_shape=subject.input_shape, method=method, budget_s=budget_s
                    )
                norms[f"{p},{q}"] = certificate.value
        except ValueError as error:
            rows.append({**row, "norms": None, "refused": " ".join(str(error).split())})
            continue
        rows.append({**row, "norms": norms, "refused": None})
    if all(row["refused"] is not None for row in rows):
        raise ValueError(f"no exchange layer has a bound: {rows[0]['refused']}")
    return rows


def print_layers(rows: Sequence[Mapping[str, object]]) -> None:
    """The operators as a table: every digit of their norms, since a rounded one could claim more than was proven."""
    table = _table("operator", "kind", "norm", "value", "share", "how")
    for row in rows:
        mark = " ← bottleneck" if row["bottleneck"] else ""
        arrow = f"{row['p']}→{row['q']}".replace("inf", "∞")
        share = f"{100.0 * float(str(row['share'])):.0f} %"
        cells = (row["name"] or "(head)", row["kind"], arrow, row["value"], f"{share}{mark}", row["how"])
        table.add_row(*[str(cell) for cell in cells])
    _print(table)


def print_norms(rows: Sequence[Mapping[str, object]]) -> None:
    """Nine columns, rounded up to 4 digits."""
    table = _table("exchange layer", *_ARROWS.values())
    refusals = []
    for row in rows:
        name = str(row["exchange_layer"]) or "(whole)"
        norms = row["norms"]
        if isinstance(norms, dict):
            table.add_row(name, *[rounded_up(norms[f"{p},{q}"]) for p, q in _ARROWS])
        else:
            table.add_row(name, "refused")
            refusals.append(f"{name}: {row['refused']}")
    _print(table)
    for line in refusals:
        print(line)  # noqa: T201


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _print(table: Table) -> None:
    console = Console(soft_wrap=True)
    if not console.is_terminal:  # a pipe has no width: nothing may be cut off
        console = Console(soft_wrap=True, width=10_000)
    console.print(table, highlight=False, markup=False)
