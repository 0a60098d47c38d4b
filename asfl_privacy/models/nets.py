"""Networks as sequences of named blocks, so that each block's end can be the exchange layer."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

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


def small_cnn(
    *, input_shape: tuple[int, ...], num_classes: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> nn.Sequential:
    """Two 3×3 convolutions (16 and 32 channels), one hidden layer of 64; blocks conv1, conv2, fc1, classifier.

    Images of 16 pixels or more a side are halved by both convolutions, smaller ones by the second alone.

    Args:
        input_shape: (channels, height, width).
        num_classes: Number of classes.
        mean: Public per-channel constants of the data.
        std: Public per-channel constants of the data.

    Returns:
        The network, a `Sequential` of named blocks.

    Raises:
        ValueError: Records that are not images of at least 4×4.
    """
    channels, height, width = _image_shape(input_shape, least=4)
    stride = 2 if min(height, width) >= 16 else 1
    size = [math.ceil(math.ceil(side / stride) / 2) for side in (height, width)]
    return nn.Sequential(
        OrderedDict(
            normalize=Normalize(mean, std),
            conv1=nn.Sequential(nn.Conv2d(channels, 16, 3, stride=stride, padding=1), nn.ReLU()),
            conv2=nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
            fc1=nn.Sequential(nn.Flatten(), nn.Linear(32 * size[0] * size[1], 64), nn.ReLU()),
            classifier=nn.Linear(64, num_classes),
        )
    )


def lenet(
    *, input_shape: tuple[int, ...], num_classes: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> nn.Sequential:
    """LeNet-5's sizes with ReLU and max pooling; blocks conv1, conv2, fc1, fc2, classifier.

    Both convolutions are padded, so that images from 4×4 pixels on fit.

    Args:
        input_shape: (channels, height, width).
        num_classes: Number of classes.
        mean: Public per-channel constants of the data.
        std: Public per-channel constants of the data.

    Returns:
        The network, a `Sequential` of named blocks.

    Raises:
        ValueError: Records that are not images of at least 4×4.

    Source:
        LeCun, Bottou, Bengio, Haffner 1998, figure 2.
    """
    channels, height, width = _image_shape(input_shape, least=4)
    return nn.Sequential(
        OrderedDict(
            normalize=Normalize(mean, std),
            conv1=nn.Sequential(nn.Conv2d(channels, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            conv2=nn.Sequential(nn.Conv2d(6, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            fc1=nn.Sequential(nn.Flatten(), nn.Linear(16 * (height // 4) * (width // 4), 120), nn.ReLU()),
            fc2=nn.Sequential(nn.Linear(120, 84), nn.ReLU()),
            classifier=nn.Linear(84, num_classes),
        )
    )


def _image_shape(input_shape: tuple[int, ...], *, least: int) -> tuple[int, int, int]:
    if len(input_shape) != 3 or min(input_shape[1:]) < least:
        raise ValueError(
            f"records of shape {input_shape} do not fit the built-in networks, which take (channels, height, width) from "
            f"{least}×{least} on; give your own model as module:factory"
        )
    return input_shape[0], input_shape[1], input_shape[2]


NETS: dict[str, Callable[..., nn.Sequential]] = {"small-cnn": small_cnn, "lenet": lenet}
