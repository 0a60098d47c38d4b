"""Made-up data sets of the real ones' shapes, small enough to see in seconds that a recipe runs."""

from __future__ import annotations

import numpy as np

from asfl_privacy.data import Dataset
from asfl_privacy.data.dataset import make_dataset


def _made_up(*, shape: tuple[int, ...], num_classes: int, num_writers: int | None = None) -> Dataset:
    """Records of a class around its own bright spot, 12 a class to train on and 4 to test, at least 120 and 40."""
    rng = np.random.default_rng(0)
    per_class = max(12, 120 // num_classes)

    def part(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.arange(count * num_classes) % num_classes
        centres = np.random.default_rng(1).uniform(0.2, 0.8, (num_classes, *shape))
        inputs = np.clip(centres[labels] + rng.normal(0.0, 0.1, (len(labels), *shape)), 0.0, 1.0)
        return inputs.astype(np.float32), labels

    train, test = part(per_class), part(max(4, 40 // num_classes))
    groups = None if num_writers is None else np.arange(len(train[1])) // num_classes % num_writers
    extra = {} if groups is None else {"train_groups": groups}
    return make_dataset("made-up", train=train, test=test, num_classes=num_classes, **extra)


def digits_like() -> Dataset:
    """8×8, 10 classes."""
    return _made_up(shape=(1, 8, 8), num_classes=10)


def mnist_like() -> Dataset:
    """28×28, 10 classes."""
    return _made_up(shape=(1, 28, 28), num_classes=10)


def cifar10_like() -> Dataset:
    """3×32×32, 10 classes."""
    return _made_up(shape=(3, 32, 32), num_classes=10)


def cifar100_like() -> Dataset:
    """3×32×32, 100 classes."""
    return _made_up(shape=(3, 32, 32), num_classes=100)


def femnist_like() -> Dataset:
    """28×28, 62 classes, written by 6 people."""
    return _made_up(shape=(1, 28, 28), num_classes=62, num_writers=6)
