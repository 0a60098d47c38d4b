"""VGG-11 for small images, with group norm or batch norm."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from asfl_privacy.models.images import check_image
from asfl_privacy.models.normalize import Normalize
from asfl_privacy.models.norms import Norm, group_norm

LEAST_SIDE = 17
"""Smallest image on which no convolution works on a single pixel: four halvings, rounded up, leave 2×2."""
WIDTHS = (64, 128, 256, 256, 512, 512, 512, 512)
POOLED = (1, 2, 4, 6, 8)
"""Convolutions, numbered from 1, that a max pool follows."""


def vgg11(
    *,
    input_shape: tuple[int, ...],
    num_classes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    norm: Norm = group_norm,
) -> nn.Sequential:
    """VGG-11's eight 3×3 convolutions with norms; blocks conv1 to conv8, each up to its pool, then pool and classifier.

    The usual form for 32×32 images: one linear layer behind the average of what the last pool leaves, in place of three
    wide ones. Pools round up, so that images of 17 to 32 pixels a side all end at one pixel.

    Args:
        input_shape: (channels, height, width).
        num_classes: Number of classes.
        mean: Public per-channel constants of the data.
        std: Public per-channel constants of the data.
        norm: Makes the norm of so many channels; `asfl_privacy.models.norms.batch_norm` for the published network.

    Returns:
        The network, a `Sequential` of named blocks.

    Raises:
        ValueError: Records that are not images of at least 17×17.

    Source:
        Simonyan & Zisserman 2015, `Very deep convolutional networks for large-scale image recognition`, table 1, column A.
    """
    channels, _, _ = check_image(input_shape, least=LEAST_SIDE, network="vgg11")
    blocks: OrderedDict[str, nn.Module] = OrderedDict(normalize=Normalize(mean, std))
    for number, width in enumerate(WIDTHS, start=1):
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1), norm(width), nn.ReLU()]
        if number in POOLED:
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        blocks[f"conv{number}"] = nn.Sequential(*layers)
        channels = width
    blocks["pool"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    blocks["classifier"] = nn.Linear(channels, num_classes)
    return nn.Sequential(blocks)
