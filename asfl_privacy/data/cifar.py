"""CIFAR-10 and CIFAR-100: from a torchvision folder, or torchvision's download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asfl_privacy.data.dataset import Dataset, make_dataset
from asfl_privacy.data.downloads import NothingReadError, read_or_download


def cifar10(root: Path) -> Dataset:
    """60,000 32×32 colour images of ten things, of which 10,000 test.

    The means and standard deviations are the rounded figures of the public training set, fixed here as constants.

    Raises:
        ValueError: No readable files in `root` and no download.

    Source:
        Krizhevsky 2009, `Learning multiple layers of features from tiny images`.
    """
    from torchvision.datasets import CIFAR10

    return _cifar("cifar10", CIFAR10, root=root, num_classes=10, mean=(0.491, 0.482, 0.447), std=(0.247, 0.243, 0.262))


def cifar100(root: Path) -> Dataset:
    """60,000 32×32 colour images of a hundred things (the fine labels), of which 10,000 test.

    The means and standard deviations are the rounded figures of the public training set, fixed here as constants.

    Raises:
        ValueError: No readable files in `root` and no download.

    Source:
        Krizhevsky 2009, `Learning multiple layers of features from tiny images`.
    """
    from torchvision.datasets import CIFAR100

    return _cifar(
        "cifar100", CIFAR100, root=root, num_classes=100, mean=(0.507, 0.487, 0.441), std=(0.267, 0.256, 0.276)
    )


def _cifar(
    name: str,
    source: Any,  # noqa: ANN401 - torchvision has no types
    *,
    root: Path,
    num_classes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Dataset:
    """Both parts of one of the sets, channels first."""
    folder = root / source.base_folder
    try:
        parts = read_or_download(
            lambda: [source(str(root), train=train, download=True) for train in (True, False)],
            folder=root,
            archive=root / source.filename,
        )
    except NothingReadError as error:
        raise ValueError(
            f"data {name}: nothing readable in {folder} and no download ({error}); put the files of {source.url} there, or "
            "give the folder above as --data-root"
        ) from None
    train, test = ((_pixels(part.data), part.targets) for part in parts)
    return make_dataset(name, train=train, test=test, num_classes=num_classes, mean=mean, std=std)


def _pixels(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Images (n, height, width, channels) of bytes as (n, channels, height, width) from 0 to 1."""
    return images.transpose(0, 3, 1, 2).astype(np.float32, order="C") / np.float32(255.0)
