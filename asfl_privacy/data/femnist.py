"""FEMNIST: handwritten characters by writer, in the JSON files of the LEAF benchmark."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from asfl_privacy.data.dataset import Dataset, make_dataset

NUM_CLASSES = 62
"""Digits 0 to 9, then capital letters, then small ones."""
SIDE = 28
HOW = "make them with preprocess.sh of LEAF's data/femnist, e.g. -s niid --sf 0.1 -k 0 -t sample, and copy train and test there"


@dataclass(frozen=True)
class _Part:
    """Records of all files of one folder, in the files' order.

    Attributes:
        inputs: Shape (n, 1, 28, 28).
        labels: Shape (n,).
        writers: Name of the writer of each record.
    """

    inputs: NDArray[np.float32]
    labels: NDArray[np.int64]
    writers: tuple[str, ...]


def femnist(root: Path) -> Dataset:
    """28×28 grey characters of 62 classes with the writer of each training record, from `root`/femnist/{train,test}/*.json.

    Pixels are as LEAF writes them: from 0 to 1, the background white, so 1. Nothing is downloaded. The mean and standard
    deviation are the figures that are in common use for the whole set, rounded, fixed here as constants.

    Args:
        root: Folder that holds `femnist`.

    Returns:
        The data set; `train_groups` numbers the writers in the order of their names. A writer of several files is one.

    Raises:
        ValueError: A folder without files, or a file that is not LEAF's; the line names it.

    Source:
        Caldas et al. 2018, `LEAF: a benchmark for federated settings`; Cohen et al. 2017 (EMNIST, by class).
    """
    train, test = (_read_part(root / "femnist" / part) for part in ("train", "test"))
    numbers = {writer: number for number, writer in enumerate(sorted(set(train.writers)))}
    return make_dataset(
        "femnist",
        train=(train.inputs, train.labels),
        test=(test.inputs, test.labels),
        num_classes=NUM_CLASSES,
        mean=(0.964,),
        std=(0.159,),
        train_groups=np.array([numbers[writer] for writer in train.writers], dtype=np.int64),
    )


def _read_part(folder: Path) -> _Part:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ValueError(f"data femnist: no .json file in {folder}; {HOW}")
    inputs, labels, writers = [], [], []
    for file in files:
        for writer, x, y in _read_file(file):
            inputs.append(x)
            labels.append(y)
            writers += [writer] * len(y)
    if not writers:
        raise ValueError(f"data femnist: the files in {folder} hold no record; {HOW}")
    return _Part(inputs=np.concatenate(inputs), labels=np.concatenate(labels), writers=tuple(writers))


def _read_file(file: Path) -> list[tuple[str, NDArray[np.float32], NDArray[np.int64]]]:
    """Name, inputs and labels of each writer of a file, writers without records left out."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        users, counts, records = content["users"], content["num_samples"], content["user_data"]
        if len(users) != len(counts):
            raise ValueError(f"{len(users)} users and {len(counts)} in num_samples")
        return [
            (str(user), *_of_writer(str(user), records[user], count=count))
            for user, count in zip(users, counts, strict=True)
            if count != 0
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:  # json's and Unicode's errors are ValueErrors
        reason = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise ValueError(
            f"data femnist: {file} is not LEAF's: users, num_samples, user_data of x and y ({reason}); {HOW}"
        ) from None


def _of_writer(
    writer: str, records: dict[str, object], *, count: object
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    inputs, labels = np.array(records["x"], dtype=np.float32), np.array(records["y"])
    if inputs.shape != (count, SIDE * SIDE) or labels.shape != (count,) or labels.dtype.kind not in "iu":
        raise ValueError(
            f"writer {writer}: x of shape {inputs.shape}, y of shape {labels.shape} and type {labels.dtype}, where "
            f"num_samples is {count}"
        )
    return inputs.reshape(-1, 1, SIDE, SIDE), labels.astype(np.int64)
