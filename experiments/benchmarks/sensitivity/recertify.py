"""Recertifying the 28² head after each training step: `fast` with a previous certificate against `auto` and a floor.

    python experiments/benchmarks/sensitivity/recertify.py [--steps 8] [--momentum 0.0]

The floor is taking the head's fingerprint once, which any certificate must do twice. Prints, per pair of norms and
step, the value divided by that of `auto` on the same weights, and medians of the times with their ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from heads import HEADS
from torch import nn

from sensitivity import certify
from sensitivity.fingerprint import take_fingerprint

T = TypeVar("T")
PAIRS = ((1, 1), (1, 2), (2, 2))
SHAPE = (1, 28, 28)


def timed(act: Callable[[], T]) -> tuple[T, float]:
    """What it returns, and its milliseconds."""
    start = time.perf_counter()
    result = act()
    return result, 1e3 * (time.perf_counter() - start)


def train_step(head: nn.Module, optimizer: torch.optim.Optimizer, random: torch.Generator) -> None:
    """One step on random images, towards smaller outputs."""
    optimizer.zero_grad()
    head(torch.rand(32, *SHAPE, generator=random)).square().mean().backward()
    optimizer.step()


def measure(p: int, q: int, *, steps: int, momentum: float) -> None:
    """Print one pair of norms."""
    spec = next(spec for spec in HEADS if spec.name == "init28")
    torch.manual_seed(spec.seed)
    head = spec.build().eval()
    random = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.05, momentum=momentum)
    previous, auto_ms = timed(lambda: certify(head, p=p, q=q, input_shape=SHAPE))
    certify(head, p=p, q=q, input_shape=SHAPE, method="fast", previous=previous)  # imports and caches
    ratios, times, autos, floors = [], [], [auto_ms], []
    for _ in range(steps):
        train_step(head, optimizer, random)
        kept = previous
        previous, fast_ms = timed(lambda: certify(head, p=p, q=q, input_shape=SHAPE, method="fast", previous=kept))  # noqa: B023
        fresh, auto_ms = timed(lambda: certify(head, p=p, q=q, input_shape=SHAPE))
        ratios.append(previous.value / fresh.value)
        times.append(fast_ms)
        autos.append(auto_ms)
        floors.append(timed(lambda: take_fingerprint(head, input_shape=SHAPE))[1])
    fast, auto, floor = (statistics.median(values) for values in (times, autos, floors))
    print(f"{p}→{q}: fast {fast:.0f} ms, {auto / fast:.0f}× less than auto, {fast / floor:.0f}× the floor")
    print("     value / auto after each step: " + " ".join(f"{ratio:.3f}" for ratio in ratios))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--momentum", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for p, q in PAIRS:
        measure(p, q, steps=options.steps, momentum=options.momentum)
