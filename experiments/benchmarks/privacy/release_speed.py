"""Millions of noise values a second on one core: the lattice samplers beside torch's, opendp's and SystemRandom.

    python experiments/benchmarks/privacy/release_speed.py [--values 200704] [--seconds 2]

Best of as many repeats as fit; tables are built before the clock starts, and their build time is printed apart. opendp is
measured where it is installed.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import numpy as np
import torch

from asfl_privacy.mechanisms.lattice import SystemSource, plan_lattice, rounded_gaussian, rounded_laplace, truncate
from asfl_privacy.mechanisms.lattice.source import CHUNK_BYTES

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
        import opendp.prelude as dp
    except ImportError:
        return None
    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T=int)), dp.l2_distance(T=int)
    measurement = dp.m.make_gaussian(*space, DIRECT)
    zeros = [0] * values
    return lambda: measurement(zeros)


def main() -> None:
    """Print one line a sampler."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--values", type=int, default=32 * 6272, help="values a call; the default is 32 records of 32×14×14"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each sampler")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    n, few = arguments.values, 4096
    source = SystemSource()
    for make, cells in (
        (rounded_gaussian, DIRECT),
        (rounded_gaussian, FINE),
        (rounded_laplace, DIRECT),
        (rounded_laplace, FINE),
    ):
        start = time.perf_counter()
        make(cells)
        print(f"table of {make.__name__} at {cells:g} cells: {1e3 * (time.perf_counter() - start):.0f} ms")
    floats = torch.empty(n)
    rows = torch.rand(n)
    exact, doubles = random.SystemRandom(), np.random.default_rng()
    noise = plan_lattice("gaussian", sensitivity=2.0, noise_multiplier=1.9, num_values=6272, clip_only=True)
    chunk = CHUNK_BYTES // 8
    rates: list[tuple[str, int, Callable[[], object]]] = [
        ("torch normal_, float32", n, lambda: floats.normal_()),
        ("system words alone, 64 bits a value", chunk, lambda: source.words(chunk)),
        (f"rounded Gaussian, {DIRECT:g} cells", n, lambda: rounded_gaussian(DIRECT).draw(n, source)),
        (f"rounded Laplace, {DIRECT:g} cells", n, lambda: rounded_laplace(DIRECT).draw(n, source)),
        (f"rounded Gaussian, {FINE:g} cells", n, lambda: rounded_gaussian(FINE).draw(n, source)),
        (f"rounded Laplace, {FINE:g} cells", n, lambda: rounded_laplace(FINE).draw(n, source)),
        (
            "Gaussian release: truncate, draw, add",
            n,
            lambda: noise.release(truncate(rows, spacing=noise.spacing), source),
        ),
        ("torch normal_, float32, again", n, lambda: floats.normal_()),
        ("numpy normal, float64", n, lambda: doubles.normal(size=n)),
        ("SystemRandom.gauss", few, lambda: [exact.gauss(0.0, 1.0) for _ in range(few)]),
    ]
    opendp = opendp_noise(few)
    if opendp:
        rates.append(("opendp discrete Gaussian", few, opendp))
    for name, values, act in rates:
        print(f"{name:42s} {best_rate(act, values=values, seconds=arguments.seconds):8.2f} M/s", flush=True)
    if opendp is None:
        print("opendp: not installed")


if __name__ == "__main__":
    main()
