"""Validation records: a part of the training records held out, so that choices need not look at the test records."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from asfl_privacy.data.dataset import Dataset

VALIDATION_SHARE = 6
"""One record in so many is held out, of each class."""


def hold_out(data: Dataset) -> Dataset:
    """The data set with a sixth of its training records in the place of the test records, which are left out.

    Args:
        data: The data set.

    Returns:
        Training records without those held out, in their order and with their groups, and those held out as what is
        evaluated.

    Raises:
        ValueError: Fewer than six training records of every class: nothing could be held out.

    Guarantee:
        The same records are held out in every run, whatever its seed; no test record is in the result. Of each class a
        sixth is held out, rounded down.

    Example:
        >>> from asfl_privacy.data import make_dataset
        >>> x, y = np.zeros((24, 1, 2, 2)), np.arange(24) % 2
        >>> held = hold_out(make_dataset("mine", train=(x, y), test=(x[:3], y[:3])))
        >>> held.num_records, len(held.test_labels)
        (20, 4)
    """
    labels = data.train_labels.numpy()
    rng = np.random.Generator(np.random.Philox(key=0))
    is_held = np.zeros(len(labels), dtype=bool)
    for label in range(data.num_classes):
        of_class = np.flatnonzero(labels == label)
        is_held[rng.permutation(of_class)[: len(of_class) // VALIDATION_SHARE]] = True
    if not is_held.any():
        raise ValueError(
            f"data {data.name}: no class has {VALIDATION_SHARE} training records, so none can be held out; evaluate on test"
        )
    return replace(
        data,
        train_inputs=data.train_inputs[~is_held],
        train_labels=data.train_labels[~is_held],
        train_groups=None if data.train_groups is None else data.train_groups[~is_held],
        test_inputs=data.train_inputs[is_held],
        test_labels=data.train_labels[is_held],
    )
