"""Norms of a network's channels: over a record's own groups, or over the batch."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

NUM_GROUPS = 2
"""Groups of channels, each normalised by itself, whatever the number of channels."""

Norm = Callable[[int], nn.Module]


def group_norm(channels: int) -> nn.GroupNorm:
    """Group norm of two groups: each record by its own mean and variance, so that no record depends on another.

    Args:
        channels: An even number.

    Source:
        Wu & He 2018, `Group normalization`; two groups as in the networks of Reddi et al. 2021, `Adaptive federated
        optimization`, §4, who put it in the place of batch norm.

    Example:
        >>> group_norm(16).num_groups
        2
    """
    return nn.GroupNorm(NUM_GROUPS, channels)


def batch_norm(channels: int) -> nn.BatchNorm2d:
    """Batch norm, which mixes the records of a batch: activations behind it cannot be exchanged, so it fits the tail alone.

    Source:
        Ioffe & Szegedy 2015, `Batch normalization`.
    """
    return nn.BatchNorm2d(channels)
