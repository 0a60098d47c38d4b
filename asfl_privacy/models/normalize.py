"""Normalisation by public constants, the first block of a network."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Normalize(nn.Module):
    """(x − mean) / std a channel: the head's first layer, so that radii stay in raw pixel units.

    Args:
        mean: Constants to subtract, one a channel or one for all, in pixel units.
        std: Constants to divide by, above 0.
        ndim: Number of dimensions of one record; the constants sit on the first.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], *, ndim: int = 3) -> None:
        super().__init__()
        shape = (-1,) + (1,) * (ndim - 1)
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).reshape(shape))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).reshape(shape))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x of shape (batch, channels, …)."""
        return (x - self.mean) / self.std
