"""One copy of a data set for many processes: a mapped file, or read-only arrays of an object store."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor

from asfl_privacy.data import Dataset


def data_arrays(data: Dataset) -> tuple[str, dict[str, NDArray[Any]]]:
    """A data set taken apart: everything small as JSON, and its tensors as arrays.

    Args:
        data: The data set, on the CPU.

    Returns:
        JSON of the fields that hold no tensor, and the arrays by field, contiguous; they share the tensors' memory.

    Guarantee:
        `data_of` makes the same data set of them, to the bit.
    """
    values = {field.name: getattr(data, field.name) for field in fields(Dataset)}
    arrays = {name: np.ascontiguousarray(value.numpy()) for name, value in values.items() if isinstance(value, Tensor)}
    return json.dumps({name: value for name, value in values.items() if name not in arrays}), arrays


def data_of(facts: str, arrays: Mapping[str, NDArray[Any]]) -> Dataset:
    """A data set over arrays that may be read-only, without a copy.

    Args:
        facts: From `data_arrays`.
        arrays: Likewise, or what an object store gives back for them.

    Returns:
        The data set; its tensors are views of the arrays.

    Edge cases:
        torch has no read-only tensors, and warns of arrays that are. Nothing writes to a data set; should a program do so
        after all, read-only pages end its process instead of changing what others see.

    Example:
        >>> import torch
        >>> x, y = torch.rand(4, 1, 2, 2), torch.tensor([0, 1, 0, 1])
        >>> data = Dataset("mine", train_inputs=x, train_labels=y, test_inputs=x, test_labels=y, num_classes=2)
        >>> data_of(*data_arrays(data)).train_inputs.data_ptr() == x.data_ptr()
        True
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return _joined(facts, tensors)


def write_data(data: Dataset, file: Path) -> None:
    """Write a data set to a file (safetensors) that processes can map.

    Args:
        data: The data set, on the CPU.
        file: What to write.

    Raises:
        OSError: It cannot be written.
    """
    facts, arrays = data_arrays(data)
    save_file(arrays, file, metadata={"facts": facts})


def map_data(file: Path) -> Dataset:
    """The data set of a file, mapped into memory rather than read.

    Args:
        file: From `write_data`; it must not change while it is mapped.

    Returns:
        The data set, to the bit the one that was written.

    Guarantee:
        However many processes map the file, its pages are in memory once. They are mapped copy-on-write: a program that
        wrote to a tensor would change its own copy of that page, never the file or what another process sees.
    """
    with safe_open(file, framework="pt", device="cpu") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        return _joined(opened.metadata()["facts"], tensors)


def _joined(facts: str, tensors: Mapping[str, Tensor]) -> Dataset:
    values: dict[str, Any] = dict(tensors)
    for name, value in json.loads(facts).items():
        values[name] = tuple(value) if isinstance(value, list) else value
    return Dataset(**values)
