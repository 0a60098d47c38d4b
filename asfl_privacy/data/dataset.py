"""A data set as the federation sees it: images in pixel units, labels, and the public constants about them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Dataset:
    """Training and test records with the constants that may be known without looking at them.

    Attributes:
        name: What the rows and reports call it.
        train_inputs: float32, shape (n, *input_shape), every value inside `input_box`.
        train_labels: int64, shape (n,), values 0 … num_classes − 1.
        test_inputs: float32, shape (m, *input_shape), inside `input_box`.
        test_labels: int64, shape (m,).
        num_classes: Number of classes.
        input_box: (low, high) of every input value: the raw pixel units in which a radius is measured.
        mean: Public per-channel constants that the model's first layer subtracts, in pixel units.
        std: Public per-channel constants that it divides by.
        train_groups: int64, shape (n,): whose each training record is, such as the writer's number, any whole numbers
            from 0; None where the data do not tell. The partition `natural` makes a client of each group.
    """

    name: str
    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    num_classes: int
    input_box: tuple[float, float] = (0.0, 1.0)
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    train_groups: Tensor | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one record, without the batch dimension."""
        return tuple(self.train_inputs.shape[1:])

    @property
    def num_records(self) -> int:
        """Number of training records: the n that a δ of 1/n is compared with."""
        return int(self.train_inputs.shape[0])


def make_dataset(
    name: str,
    *,
    train: tuple[object, object],
    test: tuple[object, object],
    num_classes: int | None = None,
    input_box: tuple[float, float] = (0.0, 1.0),
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    train_groups: object | None = None,
) -> Dataset:
    """Check arrays and make a `Dataset` of them.

    Args:
        name: What rows and reports call the data set.
        train: (inputs, labels); inputs (n, …) inside `input_box`, labels (n,) whole numbers from 0.
        test: (inputs, labels) of the held-out records, same shapes.
        num_classes: Number of classes; by default one more than the largest training label.
        input_box: (low, high) that every input value lies in.
        mean: Public per-channel constants to subtract; default the middle of the box.
        std: Public per-channel constants to divide by; default half the width of the box.
        train_groups: Whose each training record is, whole numbers from 0, shape (n,); None where that is not known.

    Returns:
        The data set, inputs as float32, labels and groups as int64.

    Raises:
        ValueError: Empty data, values that are not finite or outside the box, labels that are not whole numbers in
            0 … num_classes − 1, groups that are not whole numbers from 0, or shapes that do not agree.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> x, y = rng.random((20, 1, 4, 4)), np.arange(20) % 2
        >>> make_dataset("mine", train=(x, y), test=(x, y)).input_shape
        (1, 4, 4)
    """
    low, high = (float(v) for v in input_box)
    if not (np.isfinite(low) and np.isfinite(high) and low < high):
        raise ValueError(f"data {name}: input box {input_box} must be two finite numbers, low < high; give (0.0, 1.0)")
    train_inputs, train_labels = _records(name, "training", train, low=low, high=high)
    test_inputs, test_labels = _records(name, "test", test, low=low, high=high)
    if train_inputs.shape[1:] != test_inputs.shape[1:]:
        raise ValueError(
            f"data {name}: training records have shape {tuple(train_inputs.shape[1:])} and test records "
            f"{tuple(test_inputs.shape[1:])}; give both the same shape"
        )
    classes = int(train_labels.max()) + 1 if num_classes is None else int(num_classes)
    for part, labels in (("training", train_labels), ("test", test_labels)):
        if int(labels.min()) < 0 or int(labels.max()) >= classes:
            raise ValueError(
                f"data {name}: {part} labels run from {int(labels.min())} to {int(labels.max())}, but must lie in 0 to "
                f"{classes - 1} ({classes} classes); renumber them or give num_classes"
            )
    channels = int(train_inputs.shape[1])
    means = tuple(float(v) for v in mean) if mean is not None else ((low + high) / 2,) * channels
    stds = tuple(float(v) for v in std) if std is not None else ((high - low) / 2,) * channels
    if len(means) not in (1, channels) or len(stds) not in (1, channels) or not all(s > 0 for s in stds):
        raise ValueError(
            f"data {name}: mean {means} and std {stds} must hold 1 or {channels} numbers, std above 0; "
            "give one a channel"
        )
    return Dataset(
        name=name,
        train_inputs=train_inputs,
        train_labels=train_labels,
        test_inputs=test_inputs,
        test_labels=test_labels,
        num_classes=classes,
        input_box=(low, high),
        mean=means,
        std=stds,
        train_groups=None if train_groups is None else _groups(name, train_groups, count=len(train_labels)),
    )


def _records(name: str, part: str, pair: tuple[object, object], *, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Inputs and labels of one part as checked tensors."""
    try:
        inputs, labels = np.asarray(pair[0]), np.asarray(pair[1])
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"data {name}: {part} records are not numeric arrays ({reason}); give arrays") from None
    if inputs.dtype.kind not in "fiub" or labels.dtype.kind not in "fiub":
        raise ValueError(
            f"data {name}: {part} inputs of type {inputs.dtype} and labels of type {labels.dtype} are not numeric arrays; "
            "give real numbers and whole numbers"
        )
    if inputs.ndim < 2 or labels.ndim != 1 or inputs.shape[0] != labels.shape[0] or inputs.size == 0:
        raise ValueError(
            f"data {name}: {part} inputs of shape {inputs.shape} and labels of shape {labels.shape}; "
            "give inputs (n, …) and labels (n,) with n ≥ 1"
        )
    if not np.isfinite(inputs).all() or float(inputs.min()) < low or float(inputs.max()) > high:
        raise ValueError(
            f"data {name}: {part} inputs run from {float(inputs.min()):g} to {float(inputs.max()):g}, but must be finite "
            f"and inside the input box [{low:g}, {high:g}]; scale them to it"
        )
    whole = labels.astype(np.int64)
    if not (whole == labels).all():
        raise ValueError(f"data {name}: {part} labels must be whole numbers from 0; encode the classes as integers")
    # float32 may round a value at the edge out of the box: move it to the nearest float32 inside.
    inside = np.clip(inputs.astype(np.float32, copy=False), _float32_above(low), -_float32_above(-high))
    return torch.from_numpy(np.ascontiguousarray(inside)), torch.from_numpy(whole)


def _groups(name: str, given: object, *, count: int) -> Tensor:
    """Group of each training record as a checked tensor."""
    groups = np.asarray(given)
    if groups.shape != (count,) or groups.dtype.kind not in "iu" or int(groups.min()) < 0:
        raise ValueError(
            f"data {name}: train groups of shape {groups.shape} and type {groups.dtype} must be whole numbers from 0, one for "
            f"each of {count} training records; number the groups"
        )
    return torch.from_numpy(groups.astype(np.int64))


def _float32_above(value: float) -> np.float32:
    """The least float32 at or above a float."""
    near = np.float32(value)
    return near if float(near) >= value else np.nextafter(near, np.float32(np.inf))


def data_digest(data: Dataset) -> str:
    """SHA-256 of the training records and labels, hexadecimal: tells one data set's ledger from another's.

    Groups are left out: they say whose a record is and do not change what it costs to release it.
    """
    digest = hashlib.sha256(repr((tuple(data.train_inputs.shape), data.num_classes)).encode())
    digest.update(data.train_inputs.contiguous().numpy().tobytes())
    digest.update(data.train_labels.contiguous().numpy().tobytes())
    return digest.hexdigest()
