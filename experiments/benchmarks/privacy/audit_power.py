"""Power of the audit's parts: how often σ × factor is seen, against the number of residuals.

    python experiments/benchmarks/privacy/audit_power.py [--quick] [--out reports/privacy]

A Gaussian layer with ε = 1 at δ = 1e-5 adds factor·σ to records of 8 coordinates, in two calls. Each part tests the same
residuals at its share of the audit's alpha, 1e-6/7; the likelihood part gets as many residuals about each of its two
inputs as the others get together from both calls. Faults of other kinds are in tests/audit/mutants.py.

Writes OUT/audit_power.csv, the table OUT/audit_power.md, OUT/figures/audit_power.svg and .png, and OUT/audit_power.json
(command, commit, versions).
"""

from __future__ import annotations

import argparse
import io
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from asfl_privacy.audit import PARTS, Claim
from asfl_privacy.audit.family import check_family
from asfl_privacy.audit.likelihood import bound_epsilon
from asfl_privacy.audit.pair import Pair
from asfl_privacy.audit.pairs import check_pairs
from asfl_privacy.audit.residuals import Call, Residuals
from asfl_privacy.audit.reuse import check_reuse
from asfl_privacy.audit.scale import check_scale
from asfl_privacy.audit.significance import Evidence

ALPHA = 1e-6
WIDTH = 8
CLAIM = Claim(family="gaussian", scale=3.7306316, sensitivity=1.0, epsilon=1.0, input_shape=(WIDTH,))
FACTORS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 1.0)
QUICK_FACTORS = (0.5, 0.7, 0.9, 0.97, 1.0)
COUNTS = tuple(2**power for power in range(6, 18))
QUICK_COUNTS = (*COUNTS[::2], COUNTS[-1])
POWER = 0.9


def residuals_of(noise: np.ndarray) -> Residuals:
    """Two calls of the noise, shape (2, rows, WIDTH), in units of the claimed σ."""
    calls = [
        Call(mode="eval", inputs="edge", size="large", number=number, u=u, z=u, rounding=0.0, off_lattice=0)
        for number, u in enumerate(noise)
    ]
    return Residuals(calls=calls)


def is_seen(evidence: Sequence[Evidence]) -> bool:
    """Whether a part with its share of alpha reports a breach."""
    return any(not item.p_value > ALPHA / len(PARTS) / len(evidence) for item in evidence)


def likelihood_sees(first: np.ndarray, second: np.ndarray, stream: np.random.Generator) -> bool:
    """Whether a lower bound on ε exceeds the claim."""
    difference = np.full(WIDTH, WIDTH**-0.5 / CLAIM.scale)
    pair = Pair(first=first, second=second, difference=difference, where="")
    bounds = bound_epsilon(pair, claim=CLAIM, alpha=ALPHA / len(PARTS), stream=stream)
    return max(bound.epsilon for bound in bounds) > 1.0


def measure(factor: float, count: int, *, runs: int, seed: int) -> list[dict[str, Any]]:
    """One row for each part: in how many of the runs it saw the fault."""
    stream = np.random.default_rng([seed, count, round(1000 * factor)])
    seen = dict.fromkeys(("scale", "family", "pairs", "reuse", "likelihood"), 0)
    parts: dict[str, Callable[[Residuals], list[Evidence]]] = {
        "scale": lambda found: check_scale(found, claim=CLAIM),
        "family": lambda found: check_family(found, claim=CLAIM),
        "pairs": lambda found: check_pairs(found, claim=CLAIM),
        "reuse": check_reuse,
    }
    for _ in range(runs):
        noise = factor * stream.standard_normal((2, count // (2 * WIDTH), WIDTH))
        found = residuals_of(noise)
        for part, check in parts.items():
            seen[part] += is_seen(check(found))
        both = factor * stream.standard_normal((2, count // WIDTH, WIDTH))
        seen["likelihood"] += likelihood_sees(both[0], both[1], stream)
    return [
        {"factor": factor, "residuals": count, "part": part, "runs": runs, "seen": number, "rate": number / runs}
        for part, number in seen.items()
    ]


def table(rows: pd.DataFrame) -> str:
    """Markdown: the least number of residuals, of those tried, from which a part sees the fault in 90 % of runs."""
    lines = ["| σ × | " + " | ".join(PARTS_SHOWN) + " |", "|---|" + "---|" * len(PARTS_SHOWN)]
    for factor, group in rows.groupby("factor"):
        cells = []
        for part in PARTS_SHOWN:
            curve = group[group["part"] == part].sort_values("residuals")
            enough = curve["rate"].to_numpy() >= POWER
            first = len(enough) - int(np.argmin(enough[::-1])) if not enough.all() else 0
            cells.append(f"{curve['residuals'].iloc[first]:,}" if first < len(enough) else "never")
        lines.append(f"| {factor:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


PARTS_SHOWN = ("scale", "family", "likelihood", "pairs", "reuse")


def draw(rows: pd.DataFrame, *, image_format: str) -> bytes:
    """Power against the number of residuals, a panel for each part that looks at scale; "svg" or "png"."""
    style: dict[Any, Any] = {
        **sns.axes_style("whitegrid"),
        "font.family": ["DejaVu Sans"],
        "font.size": 9.0,
        "svg.fonttype": "none",
        "svg.hashsalt": "audit-power",
        "savefig.dpi": 160,
    }
    shown = PARTS_SHOWN[:3]
    factors = sorted(rows["factor"].unique())
    colours = sns.color_palette("viridis", len(factors))
    buffer = io.BytesIO()
    with mpl.rc_context(style):
        figure = Figure(figsize=(10.0, 3.4), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(shown), sharey=True)
        for axes, part in zip(panels, shown, strict=True):
            for factor, colour in zip(factors, colours, strict=True):
                curve = rows[(rows["part"] == part) & (rows["factor"] == factor)].sort_values("residuals")
                label = "honest" if factor == 1.0 else f"σ × {factor:g}"
                axes.plot(curve["residuals"], curve["rate"], marker="o", markersize=3, color=colour, label=label)
            axes.set_xscale("log", base=2)
            axes.set_title(part)
            axes.set_xlabel("residuals")
        panels[0].set_ylabel("fraction of runs in which it is seen")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", frameon=False)
        metadata = {"Date": None} if image_format == "svg" else {"Software": None}
        figure.savefig(buffer, format=image_format, metadata=metadata)
    return buffer.getvalue()


def facts(seed: int, runs: int) -> dict[str, Any]:
    """What made the report."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    packages = {name: version(name) for name in ("asfl-privacy", "numpy", "scipy", "matplotlib", "seaborn")}
    command = f"python {shlex.join(sys.argv)}"
    versions = {"python": platform.python_version(), **packages}
    return {"command": command, "commit": commit, "seed": seed, "runs": runs, "alpha": ALPHA, "versions": versions}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer runs, factors and counts: below a minute")
    parser.add_argument("--runs", type=int, default=None, help="runs of each cell (default 100, quick 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("reports/privacy"))
    options = parser.parse_args()
    runs = options.runs or (10 if options.quick else 100)
    factors, counts = (QUICK_FACTORS, QUICK_COUNTS) if options.quick else (FACTORS, COUNTS)
    found = []
    for factor in factors:
        for count in counts:
            found += measure(factor, count, runs=runs, seed=options.seed)
        print(f"σ × {factor:g} done", flush=True)
    rows = pd.DataFrame(found)
    figures: Path = options.out / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    rows.to_csv(options.out / "audit_power.csv", index=False)
    text = (
        "# Power of the audit\n\nLeast number of residuals, of those tried, from which a part sees the fault in at least "
        f"{POWER:.0%} of {runs} runs; Gaussian noise, ε = 1 at δ = 1e-5, total alpha {ALPHA:g}. The row 1 is the honest "
        "layer. Pairs and reuse look at dependence and are blind to scale by design.\n\n"
    )
    (options.out / "audit_power.md").write_text(text + table(rows) + "\n![power](figures/audit_power.svg)\n")
    for image_format in ("svg", "png"):
        (figures / f"audit_power.{image_format}").write_bytes(draw(rows, image_format=image_format))
    (options.out / "audit_power.json").write_text(json.dumps(facts(options.seed, runs), indent=2) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
