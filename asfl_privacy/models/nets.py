"""Networks as sequences of named blocks, so that each block's end can be the exchange layer."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from torch import nn

from asfl_privacy.models.images import check_image
from asfl_privacy.models.normalize import Normalize
from asfl_privacy.models.norms import batch_norm
from asfl_privacy.models.residual import ResidualBlock, resnet20
from asfl_privacy.models.vgg import vgg11

__all__ = ["NETS", "OWN_LAYERS", "Normalize", "ResidualBlock", "lenet", "resnet20", "small_cnn", "vgg11"]


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
    channels, height, width = check_image(input_shape, least=4, network="small-cnn")
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
    channels, height, width = check_image(input_shape, least=4, network="lenet")
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


NETS: dict[str, Callable[..., nn.Sequential]] = {
    "small-cnn": small_cnn,
    "lenet": lenet,
    "resnet20": resnet20,
    "resnet20-bn": partial(resnet20, norm=batch_norm),
    "vgg11": vgg11,
    "vgg11-bn": partial(vgg11, norm=batch_norm),
}
"""Networks by name. Those that end in -bn have batch norm, so their records can be exchanged before conv1 alone."""

OWN_LAYERS = (Normalize, ResidualBlock)
"""Layers of these networks that are not torch's own; they keep nothing but parameters and buffers."""
