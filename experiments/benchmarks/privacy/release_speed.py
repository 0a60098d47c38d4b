"""Millions of noise values a second on one core: the lattice samplers beside torch's, opendp's and SystemRandom.

    python experiments/benchmarks/privacy/release_speed.py [--values 200704] [--seconds 2]

Best of as many repeats as fit; tables are built before the clock starts, and their build time is printed apart. opendp is
measured where it is installed.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from asfl_privacy.mechanisms.lattice import SystemSource, plan_lattice, rounded_gaussian, rounded_laplace, truncate
from asfl_privacy.mechanisms.lattice.source import CHUNK_BYTES

TORCH, WORDS, OPENDP = "torch normal_, float32", "system words alone, 64 bits a value", "opendp discrete Gaussian"
DIRECT, FINE = 60.0, 2.0**20 + 0.5  # cells per scale: one table, and table with position


def best_rate(act: Callable[[], object], *, values: int, seconds: float) -> float:
    """Most millions of values a second over the repeats."""
    act()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        act()
        best = min(best, time.perf_counter() - start)
    return values / best / 1e6


def opendp_noise(values: int) -> Callable[[], object] | None:
    """The discrete Gaussian of opendp on a vector, where it is installed."""
    try:
        import opendp.prelude as dp  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T=int)), dp.l2_distance(T=int)
    measurement = dp.m.make_gaussian(*space, DIRECT)
    zeros = [0] * values
    return lambda: measurement(zeros)


def table_times() -> Iterator[tuple[str, float]]:
    """Name of a sampler and the milliseconds that its table takes to build; nothing may have built it before."""
    for make, cells in (
        (rounded_gaussian, DIRECT),
        (rounded_gaussian, FINE),
        (rounded_laplace, DIRECT),
        (rounded_laplace, FINE),
    ):
        start = time.perf_counter()
        make(cells)
        yield f"{make.__name__} at {cells:g} cells", 1e3 * (time.perf_counter() - start)


def rates(*, values: int, seconds: float) -> Iterator[tuple[str, float | None]]:
    """Name of a sampler and its millions of values a second; None where it is not installed."""
    torch.set_num_threads(1)
    n, few, chunk = values, 4096, CHUNK_BYTES // 8
    source = SystemSource()
    floats = torch.empty(n)
    rows = torch.rand(n)
    exact, doubles = random.SystemRandom(), np.random.default_rng()
    noise = plan_lattice("gaussian", sensitivity=2.0, noise_multiplier=1.9, num_values=6272, clip_only=True)
    acts: list[tuple[str, int, Callable[[], object] | None]] = [
        (TORCH, n, lambda: floats.normal_()),
        (WORDS, chunk, lambda: source.words(chunk)),
        (f"rounded Gaussian, {DIRECT:g} cells", n, lambda: rounded_gaussian(DIRECT).draw(n, source)),
        (f"rounded Laplace, {DIRECT:g} cells", n, lambda: rounded_laplace(DIRECT).draw(n, source)),
        (f"rounded Gaussian, {FINE:g} cells", n, lambda: rounded_gaussian(FINE).draw(n, source)),
        (f"rounded Laplace, {FINE:g} cells", n, lambda: rounded_laplace(FINE).draw(n, source)),
        (
            "Gaussian release: truncate, draw, add",
            n,
            lambda: noise.release(truncate(rows, spacing=noise.spacing), source),
        ),
        (f"{TORCH}, again", n, lambda: floats.normal_()),
        ("numpy normal, float64", n, lambda: doubles.normal(size=n)),
        ("SystemRandom.gauss", few, lambda: [exact.gauss(0.0, 1.0) for _ in range(few)]),
        (OPENDP, few, opendp_noise(few)),
    ]
    for name, count, act in acts:
        yield name, None if act is None else best_rate(act, values=count, seconds=seconds)


def main() -> None:
    """Print one line a sampler."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--values", type=int, default=32 * 6272, help="values a call; the default is 32 records of 32×14×14"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each sampler")
    arguments = parser.parse_args()
    for name, milliseconds in table_times():
        print(f"table of {name}: {milliseconds:.0f} ms")
    for name, rate in rates(values=arguments.values, seconds=arguments.seconds):
        print(f"{name:42s} " + ("not installed" if rate is None else f"{rate:8.2f} M/s"), flush=True)


if __name__ == "__main__":
    main()
