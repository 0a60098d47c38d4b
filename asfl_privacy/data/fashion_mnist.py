"""Fashion-MNIST: from Debian's package, a torchvision folder, or torchvision's download."""

from __future__ import annotations

import gzip
import shutil
import tempfile
from pathlib import Path

import numpy as np

from asfl_privacy.data.dataset import Dataset, make_dataset
from asfl_privacy.data.downloads import NothingReadError, read_or_download

DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
FASHION_MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def fashion_mnist(root: Path) -> Dataset:
    """70,000 28×28 grey images of clothing: from Debian's package, a torchvision folder, or torchvision's download.

    Raises:
        ValueError: None of them has it; the line says where it was looked for.
    """
    from torchvision.datasets import FashionMNIST

    raw = root / "FashionMNIST" / "raw"
    here = all((raw / file).is_file() for file in FASHION_MNIST_FILES)
    packaged = not here and DEBIAN_FASHION_MNIST.is_dir()
    with tempfile.TemporaryDirectory() as scratch:
        folder = root
        if packaged:
            # Debian recompresses the files, so torchvision's checksum refuses them; it reads the unpacked ones.
            folder = Path(scratch)
            _unpack(folder / "FashionMNIST" / "raw")
        try:
            parts = read_or_download(
                lambda: [
                    FashionMNIST(str(folder), train=train, download=not (here or packaged)) for train in (True, False)
                ],
                folder=raw,
            )
        except NothingReadError as error:
            raise ValueError(
                f"data fashion-mnist: nothing readable in {DEBIAN_FASHION_MNIST} or {folder if packaged else raw} and no "
                f"download ({error}); run apt-get install dataset-fashion-mnist, or put torchvision's files there"
            ) from None
        train, test = ((part.data.numpy()[:, None] / np.float32(255.0), part.targets.numpy()) for part in parts)
    return make_dataset("fashion-mnist", train=train, test=test, num_classes=10, mean=(0.286,), std=(0.353,))


def _unpack(raw: Path) -> None:
    """Debian's files, unpacked where torchvision looks for them."""
    raw.mkdir(parents=True)
    for file in FASHION_MNIST_FILES:
        packed = DEBIAN_FASHION_MNIST / f"{file}.gz"
        try:
            with gzip.open(packed, "rb") as source, (raw / file).open("wb") as target:
                shutil.copyfileobj(source, target)
        except (OSError, EOFError) as error:
            raise ValueError(
                f"data fashion-mnist: {packed} cannot be read ({error}); reinstall with apt-get install "
                "dataset-fashion-mnist"
            ) from None
