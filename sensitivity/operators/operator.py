"""What a rule about an operator says, and the checks that rules share.

A rule takes a recorded operator, the node whose value it reads and the work allowed, and answers with an `Operator` or
raises `NoBoundError`. Each family of operators has a file that exports its rules by operator name.
"""

# ruff: noqa: ANN401  (arguments of recorded operators have no narrower type)
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from sensitivity.capturing.recording import Node, Ref
from sensitivity.norms import NormTable
from sensitivity.operators.activations import cast_candidates
from sensitivity.rounding import FloatArray

_EXACT_DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much work the bounds of one operator may take.

    Attributes:
        dense_entries: build the matrix of one channel group if it has at most this many entries.
        symbol_flops: floating-point operations for the symbol bound of one convolution.
        flops: floating-point operations for tightening the table of one operator beyond that.
    """

    dense_entries: int
    symbol_flops: float
    flops: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Operator:
    """Bounds on one operator with one data input.

    Attributes:
        kind: what it is, in words.
        table: norm table over {1, 2, ∞}.
        jump: additive slack per output element; 0 for continuous operators.
        how: how its 2→2 norm was certified, in words; "" for a closed form.
    """

    kind: str
    table: NormTable
    jump: float = 0.0
    how: str = ""


Rule = Callable[[Node, Node, Effort], Operator]


class NoBoundError(ValueError):
    """Why an operator has no bound: a rule and a fix, to which the place is added."""


def refuse(rule: str, fix: str) -> NoReturn:
    """Raise `NoBoundError` with the rule and the fix.

    Raises:
        NoBoundError: always.
    """
    raise NoBoundError(f"{rule}; {fix}")


def require_batch_first(node: Node, *, source: Node) -> None:
    """Refuse a value whose first dimension is not the batch, or whose element type changed.

    Raises:
        NoBoundError: with the rule and the fix.
    """
    if not node.shape or node.shape[0] != source.shape[0]:
        refuse(
            f"it turns a batch of shape {source.shape} into {node.shape}, so records mix or the batch dimension moves",
            "keep the batch as the first dimension and treat records one by one",
        )
    if node.dtype != source.dtype:
        refuse(
            f"it changes {source.dtype} into {node.dtype}, which rounds the values",
            "keep one element type, float32 or float64",
        )


def require_elementwise(node: Node, *, source: Node) -> None:
    """Refuse an elementwise operator whose parameters depend on the input or change its shape.

    Raises:
        NoBoundError: with the rule and the fix.
    """
    if not isinstance(node.args[0], Ref) or len(node.parents) != 1 or node.shape != source.shape:
        refuse("its parameters depend on the input or change its shape", "use constant parameters")


def require_data_first(node: Node) -> None:
    """Refuse an operator whose first argument is not the only one that depends on the input.

    Raises:
        NoBoundError: with the rule and the fix.
    """
    if not isinstance(node.args[0], Ref) or any(isinstance(argument, Ref) for argument in node.args[1:]):
        refuse(
            "its weights depend on the input, or the input is on its right side", "apply constant weights to the input"
        )


def weights_as_float64(tensor: torch.Tensor) -> FloatArray:
    """Exact float64 copy of a constant tensor.

    Raises:
        NoBoundError: for element types that are not float32, float64 or integers, and for NaN or infinity.
    """
    if tensor.dtype not in _EXACT_DTYPES:
        refuse(f"its weights are {tensor.dtype}, not float32, float64 or an integer type", "convert them with .float()")
    array: FloatArray = tensor.detach().to("cpu", torch.float64).numpy()
    if not bool(np.isfinite(array).all()):
        refuse("its weights hold NaN or infinity", "train again or clip the weights")
    if not tensor.is_floating_point() and bool((np.abs(array) >= 2.0**53).any()):
        refuse("its integer weights exceed 2^53, which float64 cannot hold", "use floating-point weights")
    return array


def require_constant_operand(constant: Any, *, node: Node, source: Node) -> None:
    """Refuse a constant that carries a batch dimension or makes the value larger.

    Raises:
        NoBoundError: with the rule and the fix.
    """
    if node.shape != source.shape:
        refuse(
            f"it spreads values of shape {source.shape[1:]} over {node.shape[1:]}",
            "use constants of the record's own shape",
        )
    if isinstance(constant, torch.Tensor):
        if constant.ndim == len(node.shape) and constant.shape[0] != 1:
            refuse("its constant differs from record to record of a batch", "use a constant without a batch dimension")
        weights_as_float64(constant)
    else:
        cast_candidates(constant, source.dtype)


def pair(values: Any, default: tuple[int, int]) -> tuple[int, int]:
    """Two sizes from an argument that gives none, one for both axes, or two.

    Example:
        >>> pair([3], (1, 1)), pair([], (1, 2))
        ((3, 3), (1, 2))
    """
    listed = list(values) if isinstance(values, list | tuple) else [values]
    if not listed:
        return default
    return (listed[0], listed[0]) if len(listed) == 1 else (listed[0], listed[1])
