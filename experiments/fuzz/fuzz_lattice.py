"""Chi-square of the lattice noise on many fresh draws: `python experiments/fuzz/fuzz_lattice.py --draws 100000000`.

Draws from the operating system's source at random scales, one after another, and compares every cell (or, above 64 cells a
scale, every block, and every sixteenth within the blocks) with its probability in double precision. Prints a p-value for
each, and fails where one is below 1e-7. `--seed` repeats scales and draws.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from asfl_privacy.mechanisms.lattice import SeededSource, SystemSource, WordSource, rounded_gaussian, rounded_laplace
from asfl_privacy.mechanisms.lattice.blocks import BlockSampler

BATCH = 1 << 20
LEAST = 20.0  # expected count of a pooled cell
SMALLEST_P = 1e-7
REACH = {"gaussian": 12, "laplace": 40}  # scales counted; past them lies less than 1e-17
SAMPLERS: dict[str, Callable[[float], BlockSampler]] = {"gaussian": rounded_gaussian, "laplace": rounded_laplace}
Floats = npt.NDArray[np.float64]


def upper_tail(family: str, x: Floats) -> Floats:
    """P(noise > x) for x in scales ≥ 0."""
    tail: Floats = special.ndtr(-x) if family == "gaussian" else np.exp(-x) / 2.0
    return tail


def interval(family: str, low: Floats, high: Floats) -> Floats:
    """P(low < noise < high) for 0 ≤ low < high in scales, without cancellation for Laplace."""
    if family == "laplace":
        width: Floats = np.exp(-low) * -np.expm1(low - high) / 2.0
        return width
    return upper_tail(family, low) - upper_tail(family, high)


def chi_square(counts: npt.NDArray[np.int64], probabilities: Floats) -> float:
    """The p-value, neighbouring cells pooled; what lies outside the cells joins the last."""
    total = int(counts.sum())
    groups = np.floor(np.cumsum(probabilities * total) / LEAST).astype(np.int64)
    _, groups = np.unique(groups, return_inverse=True)
    observed = np.bincount(groups, weights=counts)
    expected = np.bincount(groups, weights=probabilities * total)
    expected[-1] += total - expected.sum()
    if len(expected) > 1 and expected[-1] < LEAST:
        observed[-2], expected[-2] = observed[-2] + observed[-1], expected[-2] + expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return float(stats.chi2.sf(statistic, len(expected) - 1))


def check(family: str, scale: float, *, draws: int, source: WordSource) -> dict[str, float]:
    """p-values of one scale, by what was counted."""
    sampler = SAMPLERS[family](scale)
    bits, M = sampler.position_bits, sampler.cells_per_block
    num_blocks = math.ceil(REACH[family] * scale / M)
    low = (1.0 + np.arange(num_blocks) * M - 0.5) / scale
    counts = np.zeros((2, num_blocks), dtype=np.int64)
    parts = np.zeros((num_blocks, 16), dtype=np.int64)
    zeros = 0
    for start in range(0, draws, BATCH):
        noise = sampler.draw(min(BATCH, draws - start), source)
        zeros += int(np.count_nonzero(noise == 0))
        for side in (0, 1):
            cells = (noise[noise > 0] if side else -noise[noise < 0]) - 1
            counts[side] += np.bincount(cells >> bits, minlength=num_blocks)[:num_blocks]
            if bits >= 4:
                keys = (cells >> bits << 4) | ((cells & (M - 1)) >> (bits - 4))
                parts += np.bincount(keys, minlength=16 * num_blocks)[: 16 * num_blocks].reshape(num_blocks, 16)
    blocks = interval(family, low, low + M / scale)
    zero = 2.0 * float(interval(family, np.array([0.0]), np.array([0.5 / scale]))[0])
    found = {
        "cells" if bits == 0 else "blocks": chi_square(
            np.concatenate([counts[0][::-1], [zeros], counts[1]]), np.concatenate([blocks[::-1], [zero], blocks])
        )
    }
    if bits >= 4:
        edges = low[:, None] + np.arange(17) * (M / 16 / scale)
        within = interval(family, edges[:, :-1], edges[:, 1:])
        within /= within.sum(axis=1, keepdims=True)
        block_counts = parts.sum(axis=1)
        kept = block_counts * within.min(axis=1) >= LEAST
        expected = block_counts[kept, None] * within[kept]
        statistic = float(((parts[kept] - expected) ** 2 / expected).sum())
        found["within blocks"] = float(stats.chi2.sf(statistic, 15 * int(kept.sum())))
    return found


def main() -> int:
    """Run, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10**8, help="draws for each scale")
    parser.add_argument(
        "--scales", type=float, nargs="*", default=[], help="scales in cells; default: four random ones"
    )
    parser.add_argument("--families", nargs="*", default=sorted(SAMPLERS), choices=sorted(SAMPLERS))
    parser.add_argument("--seed", type=int, default=None, help="repeat; default: the operating system's randomness")
    arguments = parser.parse_args()
    random = np.random.default_rng(arguments.seed)
    scales = arguments.scales or [
        *random.uniform(32.0, 64.0, 2).tolist(),
        *(2.0 ** random.uniform(10.0, 40.0, 2)).tolist(),
    ]
    worst = 1.0
    for family in arguments.families:
        for scale in scales:
            key = f"fuzz {arguments.seed} {family} {scale!r}".encode()
            source = SystemSource() if arguments.seed is None else SeededSource(key)
            start = time.perf_counter()
            found = check(family, scale, draws=arguments.draws, source=source)
            worst = min(worst, *found.values())
            words = ", ".join(f"{name} p={p:.3g}" for name, p in found.items())
            print(
                f"{family} scale {scale!r}: {words} ({arguments.draws:,} draws, {time.perf_counter() - start:.0f} s)",
                flush=True,
            )
    print(f"smallest p-value {worst:.3g}: {'passed' if worst >= SMALLEST_P else 'FAILED'}")
    return 0 if worst >= SMALLEST_P else 1


if __name__ == "__main__":
    sys.exit(main())
