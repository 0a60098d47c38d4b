"""Weights: a network's parameters and buffers by name, and their average over clients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Weights = dict[str, Tensor]
"""Parameters and buffers by their state-dict name; never shared with a live network."""


def read_weights(model: nn.Module) -> Weights:
    """A copy of a network's parameters and buffers."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@torch.no_grad()
def load_weights(model: nn.Module, weights: Weights) -> None:
    """Copy weights into a network in place; every entry must be there and fit."""
    model.load_state_dict(weights, strict=True)


def average_weights(results: Sequence[Weights], *, num_records: Sequence[int]) -> Weights:
    """FedAvg's mean, weighted by the number of records over the clients given, in the order given.

    Sums run in float64, so that one client's average is its own weights, bit for bit. Integer buffers (counters) stay
    integers: their rounded mean.

    Args:
        results: Each client's weights after its local steps.
        num_records: Each client's number of records, above 0.

    Returns:
        The average.

    Raises:
        ValueError: No results, or weights that are not finite, which a too large learning rate causes.

    Source:
        McMahan et al. 2017, Algorithm 1, with the sum over the sampled clients only.
    """
    if not results or len(results) != len(num_records) or min(num_records) < 1:
        raise ValueError(f"{len(results)} results with record counts {list(num_records)}; give one count ≥ 1 a result")
    total = float(sum(num_records))
    averaged: Weights = {}
    for name, first in results[0].items():
        wide = torch.zeros_like(first, dtype=torch.float64)
        for result, count in zip(results, num_records, strict=True):
            wide += result[name].to(torch.float64) * (count / total)
        averaged[name] = wide.to(first.dtype) if first.is_floating_point() else wide.round().to(first.dtype)
        if not bool(torch.isfinite(wide).all()):
            raise ValueError(f"weights {name} are not finite after averaging: training diverged; lower lr")
    return averaged


def count_bytes(weights: Weights) -> int:
    """Bytes of the weights as they are sent: every parameter and buffer in its own type."""
    return sum(value.numel() * value.element_size() for value in weights.values())
