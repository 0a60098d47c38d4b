"""ResNet-20 for small images, with group norm or batch norm."""

from __future__ import annotations

from collections import OrderedDict

import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from asfl_privacy.models.images import check_image
from asfl_privacy.models.normalize import Normalize
from asfl_privacy.models.norms import Norm, group_norm

LEAST_SIDE = 5
"""Smallest image on which no convolution works on a single pixel: two halvings, rounded up, leave 2×2."""


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions, each followed by a norm, beside a shortcut without parameters.

    Where the shape changes the shortcut takes every other pixel and fills the new channels with zeros, half of them before
    and half behind: option A of the paper.

    Args:
        inputs: Channels that it reads.
        outputs: Channels that it gives, `inputs` or twice as many.
        norm: Makes the norm of so many channels.

    Guarantee:
        Keeps nothing but its parameters and its norms' buffers; works out of place.

    Source:
        He, Zhang, Ren & Sun 2016, `Deep residual learning for image recognition`, §3.3 and §4.2.

    Example:
        >>> import torch
        >>> ResidualBlock(16, 32, norm=group_norm)(torch.zeros(2, 16, 8, 8)).shape
        torch.Size([2, 32, 4, 4])
    """

    def __init__(self, inputs: int, outputs: int, *, norm: Norm) -> None:
        super().__init__()
        self.added_channels = outputs - inputs
        stride = 1 if outputs == inputs else 2
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.first_norm = norm(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output: shape (batch, outputs, height, width), halved and rounded up where the shape changes."""
        shortcut = x
        if self.added_channels:
            before = self.added_channels // 2
            shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, before, self.added_channels - before))
        hidden = F.relu(self.first_norm(self.first(x)))
        result: Tensor = F.relu(self.second_norm(self.second(hidden)) + shortcut)
        return result


def resnet20(
    *,
    input_shape: tuple[int, ...],
    num_classes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    norm: Norm = group_norm,
) -> nn.Sequential:
    """ResNet-20: blocks conv1, block1 to block9 (three each of 16, 32 and 64 channels), pool, classifier.

    Convolutions start from He's normal initialisation, as in the paper; they have no bias, as norms follow.

    Args:
        input_shape: (channels, height, width).
        num_classes: Number of classes.
        mean: Public per-channel constants of the data.
        std: Public per-channel constants of the data.
        norm: Makes the norm of so many channels; `asfl_privacy.models.norms.batch_norm` for the published network.

    Returns:
        The network, a `Sequential` of named blocks.

    Raises:
        ValueError: Records that are not images of at least 5×5.

    Source:
        He, Zhang, Ren & Sun 2016, §4.2, n = 3, option A.
    """
    channels, _, _ = check_image(input_shape, least=LEAST_SIDE, network="resnet20")
    blocks: OrderedDict[str, nn.Module] = OrderedDict(normalize=Normalize(mean, std))
    blocks["conv1"] = nn.Sequential(nn.Conv2d(channels, 16, 3, padding=1, bias=False), norm(16), nn.ReLU())
    widths = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)
    for number in range(1, 10):
        blocks[f"block{number}"] = ResidualBlock(widths[number - 1], widths[number], norm=norm)
    blocks["pool"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    blocks["classifier"] = nn.Linear(64, num_classes)
    network = nn.Sequential(blocks)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return network
