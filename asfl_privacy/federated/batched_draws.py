"""Mini-batches of many clients, drawn up front and laid out for one gather a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asfl_privacy.federated.steps import Pool


@dataclass(frozen=True)
class Draws:
    """All mini-batches of some clients.

    Attributes:
        rows: Rows of each client's own pool, shape (clients, steps, records); padding repeats the batch's first record.
        sizes: True records of each client's batches, shape (clients,).
        num_remote: How many of the records drawn were remote, one count a client.
    """

    rows: NDArray[np.int64]
    sizes: NDArray[np.int64]
    num_remote: list[int]


def draw_batches(
    pools: Sequence[Pool], *, rngs: Sequence[np.random.Generator], num_steps: int, batch_size: int
) -> Draws:
    """Every client's mini-batches, those that `draw_rows` would draw from the same generators, bit for bit.

    Args:
        pools: What is drawn from, of one record at least each.
        rngs: One generator a client, advanced as by `num_steps` calls of `draw_rows`.
        num_steps: Number of batches a client.
        batch_size: Records a batch, the whole pool where it is smaller.
    """
    counts = [len(pool.labels) for pool in pools]
    sizes = np.minimum(counts, batch_size).astype(np.int64)
    rows = np.empty((len(pools), num_steps, int(sizes.max())), dtype=np.int64)
    num_remote = []
    for i, (pool, rng) in enumerate(zip(pools, rngs, strict=True)):
        size = int(sizes[i])
        for step in range(num_steps):
            drawn = rng.choice(counts[i], size=size, replace=False)
            rows[i, step, :size] = drawn if pool.received is None else np.sort(drawn)
        rows[i, :, size:] = rows[i, :, :1]
        num_remote.append(int((rows[i, :, :size] >= pool.num_own).sum()))
    return Draws(rows=rows, sizes=sizes, num_remote=num_remote)


def join_rows(parts: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """One tensor that holds the rows of all, and where each one's begin; a copy only where they lie apart.

    Args:
        parts: Tensors of shape (n, …), n their own; views of one contiguous tensor are found to be so.

    Example:
        >>> data = torch.arange(6).reshape(3, 2)
        >>> whole, starts = join_rows([data[2:], data[:1]])
        >>> starts, whole.data_ptr() == data.data_ptr()
        ([2, 0], True)
    """
    first = parts[0]
    row = math.prod(first.shape[1:])
    if row > 0 and all(
        part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and part.dtype == first.dtype
        and part.shape[1:] == first.shape[1:]
        and part.is_contiguous()
        and part.storage_offset() % row == 0
        for part in parts
    ):
        count = first.untyped_storage().nbytes() // first.element_size() // row
        whole = first.as_strided((count, *first.shape[1:]), (row, *first[0].contiguous().stride()), 0)
        return whole, [int(part.storage_offset()) // row for part in parts]
    return torch.cat(list(parts)), np.cumsum([0, *[len(part) for part in parts[:-1]]]).tolist()


def join_pools(pools: Sequence[Pool], *, rows: NDArray[np.int64]) -> tuple[Tensor, NDArray[np.int64]]:
    """One tensor that holds the inputs of all pools, as `join_rows`, and where each drawn row lies in it.

    Args:
        pools: Own rows and received ones.
        rows: Rows of each client's own pool, shape (clients, …).

    Returns:
        The tensor, and numbers of its rows in the shape of `rows`.

    Example:
        >>> pool = Pool(inputs=torch.zeros(2, 1), received=torch.ones(3, 1), labels=torch.zeros(5))
        >>> whole, where = join_pools([pool, pool], rows=np.array([[1, 2], [4, 0]]))
        >>> whole[torch.from_numpy(where)].flatten().tolist()
        [0.0, 1.0, 1.0, 0.0]
    """
    received = [pool.received for pool in pools if pool.received is not None]
    whole, starts = join_rows([*[pool.inputs for pool in pools], *received])
    later = iter(starts[len(pools) :])
    where = np.empty_like(rows)
    for i, pool in enumerate(pools):
        where[i] = rows[i] + starts[i]
        if pool.received is not None:
            where[i] = np.where(rows[i] < pool.num_own, where[i], rows[i] - pool.num_own + next(later))
    return whole, where


def to_device(values: NDArray[np.int64] | NDArray[np.float64], device: torch.device) -> Tensor:
    """A copy on the device; from page-locked memory where it goes to a GPU, so that the host need not wait."""
    copied = torch.from_numpy(np.ascontiguousarray(values))
    return copied.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else copied.to(device)
