"""Weights: a network's parameters and buffers by name, and their average over clients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    entries = model.state_dict(keep_vars=True)
    own = {id(value) for value in (*model.parameters(), *model.buffers())}
    fits = entries.keys() == weights.keys() and all(
        id(entry) in own and entry.shape == weights[name].shape for name, entry in entries.items()
    )
    if not fits:  # loads what is no plain entry; its messages name what is missing, unexpected or of another shape
        model.load_state_dict(weights, strict=True)
        return
    for name, entry in entries.items():
        entry.copy_(weights[name])


def average_weights(
    results: Sequence[Weights], *, num_records: Sequence[int], before: Weights | None = None
) -> Weights:
    """FedAvg's mean, weighted by the number of records over the clients given, in the order given.

    Sums run in float64, so that one client's average is its own weights, bit for bit. Integer buffers (counters) stay
    integers: their rounded mean. An entry that no client has changed (a mask, say) stays as it is, finite or not.

    Args:
        results: Each client's weights after its local steps.
        num_records: Each client's number of records, above 0.
        before: What the clients started from, by which an entry that none has changed is known; None for the first result.

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
    for group in _by_type(results[0]):
        first = [results[0][name] for name in group]
        sizes = [value.numel() for value in first]
        flats = [torch.cat([result[name].reshape(-1) for name in group]) for result in results]
        wide = torch.zeros(sum(sizes), dtype=torch.float64, device=first[0].device)
        for flat, count in zip(flats, num_records, strict=True):
            wide += flat.to(torch.float64) * (count / total)
        is_finite = bool(torch.isfinite(wide).all())
        for name, value, part in zip(group, first, torch.split(wide, sizes), strict=True):
            is_count = not value.is_floating_point()
            start = value if before is None else before[name]
            if all(torch.equal(result[name], start) for result in results):
                averaged[name] = value.clone()
            elif not is_finite and not bool(torch.isfinite(part).all()):
                raise ValueError(f"weights {name} are not finite after averaging: training diverged; lower lr")
            else:
                mean = part.reshape(value.shape)
                averaged[name] = mean.round().to(value.dtype) if is_count else mean.to(value.dtype)
    return {name: averaged[name] for name in results[0]}


def _by_type(weights: Weights) -> Iterator[list[str]]:
    """Names of the entries of each type and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, value in weights.items():
        groups.setdefault((value.dtype, value.device), []).append(name)
    yield from groups.values()


def count_bytes(weights: Weights) -> int:
    """Bytes of the weights as they are sent: every parameter and buffer in its own type."""
    return sum(value.numel() * value.element_size() for value in weights.values())
