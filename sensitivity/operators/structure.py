"""Rules for operators that only move entries: every output is one input of the same record, or a constant.

Which input each output reads is found by running the operator itself on numbered entries. With m_j the number of
outputs that read input j, the matrix A has one 1 in each row that reads, and AᵀA = diag(m). So all nine norms are
exact: 1→1 max m, 1→2 and 2→2 √(max m), p→∞ 1, 2→1 ‖m‖₂, ∞→1 Σm, ∞→2 √(Σm).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sensitivity.capturing.recording import PIECES, SIZED, VIEWS, Node, Ref, map_leaves
from sensitivity.norms import NormTable, lipschitz_table
from sensitivity.operators.activations import cast_candidates
from sensitivity.operators.operator import Effort, Operator, Rule, refuse, require_data_first
from sensitivity.rounding import sqrt_up

IntArray = NDArray[np.int64]
RECORDS = 2  # the batch on which an operator is run; roll, which could hide behind its size, is looked at first

_SAME_ORDER = (
    *VIEWS,
    *("squeeze", "unsqueeze", "clone", "alias", "detach", "contiguous", "_to_copy"),
)
_MOVING = (
    *("permute", "transpose", "t", "slice", "select", "diagonal", "flip", "roll", "rot90", "tril", "triu"),
    *("index", "index_select", "repeat", "expand", "unfold", "im2col"),
    *("constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d"),
    *("replication_pad1d", "replication_pad2d", "replication_pad3d", "pad"),
    *("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle"),
    *PIECES,
)
INDEXING = frozenset((*_SAME_ORDER, *_MOVING))


def index_map(node: Node, source: Node) -> IntArray:
    """Which input each output of one record reads.

    Args:
        node: an operator of `INDEXING` that reads one value.
        source: the node whose value it reads, batch first.

    Returns:
        For each entry of one output record, in flat order, the flat index of the entry of the same input record, or −1
        for a constant; shape (outputs,).

    Raises:
        NoBoundError: if the operator moves the batch dimension or mixes records, or its constant is not finite.

    Guarantee: exact; it is what the operator does to a batch of two records whose entries are numbered, for both
        records alike.

    Edge cases: tril, triu and padding give constants.

    Example:
        >>> from sensitivity.capturing.capture import record
        >>> from torch import nn
        >>> nodes = record(nn.ReflectionPad1d((1, 0)), input_shape=(1, 3), dtype=torch.float32).nodes
        >>> index_map(nodes[1], nodes[0])
        array([1, 0, 1, 2])
    """
    require_data_first(node)
    num_in, num_out = math.prod(source.shape[1:]), math.prod(node.shape[1:])
    if node.op in _SAME_ORDER:
        if node.shape[:1] != source.shape[:1] or num_in != num_out:
            refuse("it moves the batch dimension", "keep the batch as the first dimension")
        return np.arange(num_in)
    _require_batch_not_rolled(node, ndim=len(source.shape))
    if node.op in ("tril", "triu") and len(source.shape) == 2:  # two records may be too few to show it
        refuse("it cuts a triangle out of the batch, so records differ", "give each record two dimensions or more")
    if node.op == "constant_pad_nd":
        cast_candidates(node.args[2] if len(node.args) > 2 else 0, source.dtype)
    numbered = 1.0 + torch.arange(RECORDS * num_in, dtype=torch.float64).reshape(RECORDS, *source.shape[1:])
    try:
        moved = _run(node, numbered)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        refuse(
            f"it does not run on {RECORDS} records ({' '.join(str(error).split())[:100]})",
            "keep the batch as the first dimension and treat records one by one",
        )
    if tuple(moved.shape) != (RECORDS, *node.shape[1:]):
        refuse("it moves the batch dimension", "keep the batch as the first dimension")
    reads: IntArray = moved.reshape(RECORDS, num_out).numpy().astype(np.int64) - 1
    if not np.array_equal(np.where(reads[0] < 0, -1, reads[0] + num_in), reads[1]) or bool((reads[0] >= num_in).any()):
        refuse("it moves the batch dimension or mixes records", "keep the batch as the first dimension")
    first: IntArray = reads[0]
    return first


def index_table(reads: IntArray, *, num_in: int) -> NormTable:
    """Norm table of an operator whose output i is input reads[i], or a constant where that is −1.

    Args:
        reads: shape (outputs,).
        num_in: entries of the input.

    Returns:
        The table; every entry is exact up to rounding.

    Example:
        >>> index_table(np.array([0, 1, 1, -1, 1]), num_in=3)[0]
        (3.0, 1.7320508075688774, 1.0)
    """
    counts = np.bincount(reads[reads >= 0], minlength=num_in)
    most, total = int(counts.max(initial=0)), int(counts.sum())
    if most == 0:
        return (0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)
    often, all_reads, squares = _float_up(most), _float_up(total), _float_up(int((counts * counts).sum()))
    return (
        (often, sqrt_up(often), 1.0),
        (sqrt_up(squares), sqrt_up(often), 1.0),
        (all_reads, sqrt_up(all_reads), 1.0),
    )


def _float_up(count: int) -> float:
    """A count as a float that is not below it."""
    return float(count) if float(count) >= count else math.nextafter(float(count), math.inf)


def _require_batch_not_rolled(node: Node, *, ndim: int) -> None:
    """A shift by a multiple of the batch size looks like none."""
    if node.op != "roll":
        return
    dims = node.args[2] if len(node.args) > 2 else node.kwargs.get("dims", [])
    if not dims or any(dim % ndim == 0 for dim in dims):
        refuse("it rolls the batch dimension, so records mix", "name the dimensions to roll, without the first")


def _run(node: Node, data: torch.Tensor) -> torch.Tensor:
    """The recorded operator on other data; constants that it writes become 0."""
    args, kwargs = map_leaves(lambda leaf: data if isinstance(leaf, Ref) else _on_cpu(leaf), (node.args, node.kwargs))
    piece = kwargs.pop("piece", None)
    if node.op in SIZED:
        args = (data, [-1, *args[1][1:]], *args[2:])
    if node.op == "constant_pad_nd":
        args = (*args[:2], 0.0)
    if node.op == "pad":
        result: Any = torch.nn.functional.pad(*args, **kwargs)
    else:
        packet = getattr(torch.ops.aten, node.op)
        result = getattr(packet, node.overload or "default")(*args, **kwargs)
    made: torch.Tensor = result if piece is None else result[piece]
    return made


def _on_cpu(leaf: Any) -> Any:  # noqa: ANN401
    return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf


def _moved(node: Node, source: Node, effort: Effort) -> Operator:
    num_in = math.prod(source.shape[1:])
    reads = index_map(node, source)
    table = index_table(reads, num_in=num_in)
    repeats = table[0][0] > 1.0
    return Operator(kind=node.op if repeats else "rearranged", table=table)


def _same_order(node: Node, source: Node, effort: Effort) -> Operator:
    size = len(index_map(node, source))
    return Operator(kind="rearranged", table=lipschitz_table(1.0, size=size))


RULES: dict[str, Rule] = {**dict.fromkeys(_SAME_ORDER, _same_order), **dict.fromkeys(_MOVING, _moved)}
