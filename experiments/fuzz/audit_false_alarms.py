"""Try the audit on honest layers and on mutants: `python experiments/fuzz/audit_false_alarms.py --runs 500`.

Honest layers must never be reported: Gaussian and Laplace noise, alone, behind a clip and rounded to a lattice, on records
of several shapes, in single and double precision, each at the audit's own alpha of 1e-6. Every mutant of
tests/audit/mutants.py must be reported in every run (--mutant-runs). Exit status 1 if one of both fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from asfl_privacy import audit
from asfl_privacy.mechanisms import Gaussian, Laplace, NoiseLayer, clip_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from audit.mutants import MUTANTS

CLIP = 1.0
SHAPES = ((1,), (10,), (64,), (3, 8, 8))


class Release(nn.Module):
    """Clip, truncation to the lattice, noise, rounding to the lattice."""

    def __init__(self, *, family: str, scale: float, spacing: float | None) -> None:
        super().__init__()
        self.family, self.scale, self.spacing = family, scale, spacing

    def tap(self, x: torch.Tensor) -> torch.Tensor:
        """What is noised."""
        clipped = clip_rows(x, max_norm=CLIP, norm=2 if self.family == "gaussian" else 1)
        return clipped if self.spacing is None else torch.trunc(clipped / self.spacing) * self.spacing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What is sent."""
        stream = np.random.default_rng()
        draw = stream.normal if self.family == "gaussian" else stream.laplace
        noised = self.tap(x).double() + torch.from_numpy(draw(0.0, self.scale, tuple(x.shape)))
        return (noised if self.spacing is None else torch.round(noised / self.spacing) * self.spacing).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class Case:
    """An honest layer and its claim."""

    name: str
    layer: nn.Module
    claim: audit.Claim
    tap: Callable[[torch.Tensor], torch.Tensor] | None
    dtype: torch.dtype


def honest_cases() -> list[Case]:
    """Every family, shape, precision, placement and spacing."""
    cases = []
    for mechanism in (
        Gaussian.calibrate(epsilon=1.0, delta=1e-5, sensitivity=2.0 * CLIP),
        Laplace.calibrate(epsilon=1.0, sensitivity=2.0 * CLIP),
    ):
        for shape in SHAPES:
            layer = NoiseLayer(mechanism)
            claim = audit.claim_of(layer, input_shape=shape)
            facts = {"family": mechanism.family, "scale": mechanism.scale, "clip": CLIP, "unit": "any"}
            for dtype in (torch.float32, torch.float64):
                words = f"{mechanism.family} {shape} {str(dtype).removeprefix('torch.')}"
                cases.append(Case(name=f"{words} layer", layer=layer, claim=claim, tap=None, dtype=dtype))
                for spacing in (None, 2.0**-10, 2.0):
                    release = Release(family=mechanism.family, scale=mechanism.scale, spacing=spacing)
                    clipped = audit.Claim(**facts, spacing=spacing, input_shape=shape)
                    for tap in (release.tap, None):
                        name = f"{words} release, spacing {spacing}, {'tap' if tap else 'no tap'}"
                        cases.append(Case(name=name, layer=release, claim=clipped, tap=tap, dtype=dtype))
    return cases


def main() -> int:
    """Run both and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500, help="honest runs")
    parser.add_argument("--mutant-runs", type=int, default=15, help="runs of each mutant")
    parser.add_argument("--seed", type=int, default=0, help="of the test inputs of the first run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = honest_cases()
    alarms, low, started = 0, 10.0, time.perf_counter()
    exceeded = 0
    for run in range(options.runs):
        case = cases[run % len(cases)]
        report = audit.run(case.layer, case.claim, tap=case.tap, dtype=case.dtype, seed=options.seed + run)
        exceeded += report.epsilon_low > 1.0
        if case.claim.spacing != 2.0:  # a spacing of 2C leaves no two records apart
            low = min(low, report.epsilon_low)
        if not report.passed:
            alarms += 1
            print(f"FALSE ALARM, {case.name}, seed {options.seed + run}\n{report.summary()}", flush=True)
    seconds = time.perf_counter() - started
    print(
        f"{alarms} false alarms in {options.runs} honest runs over {len(cases)} cases; smallest lower bound at ε = 1 is "
        f"{low:.3f}, {exceeded} above 1; {seconds / max(1, options.runs):.2f} s a run",
        flush=True,
    )
    missed = 0
    for mutant in MUTANTS if options.mutant_runs else ():
        flagged, seen_by, as_stated = 0, Counter[str](), 0
        for run in range(options.mutant_runs):
            layer = mutant.make()
            report = audit.run(layer, mutant.claim, tap=layer.tap if mutant.with_tap else None, seed=options.seed + run)
            parts = {breach.part for breach in report.breaches}
            flagged += not report.passed
            as_stated += parts == set(mutant.seen_by) if mutant.sole else parts >= set(mutant.seen_by)
            seen_by.update(parts)
        missed += flagged < options.mutant_runs or as_stated < options.mutant_runs
        words = ", ".join(f"{part} {count}" for part, count in seen_by.most_common())
        sole = ", sole catcher" if mutant.sole else ""
        print(f"{mutant.name}: {flagged} of {options.mutant_runs} ({words}){sole}; as stated {as_stated}", flush=True)
    return int(alarms > 0 or missed > 0)


if __name__ == "__main__":
    sys.exit(main())
