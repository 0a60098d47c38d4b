"""The sparse matrix of a recorded linear operator, for one record."""

# ruff: noqa: ANN401  (constants of recorded operators have no narrower type)
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy import sparse

from sensitivity.capturing.recording import Node, Ref
from sensitivity.composing.linear_map import LinearMap, TooLargeError, frobenius
from sensitivity.operators.conv_rules import conv_matrix_of
from sensitivity.operators.normalisation import BATCH_NORMS
from sensitivity.operators.operator import weights_as_float64
from sensitivity.operators.pooling_rules import AVERAGES, average_matrix
from sensitivity.operators.structure import INDEXING, index_map
from sensitivity.rounding import UNIT_ROUNDOFF, FloatArray, add_up, mul_up, sqrt_up


def matrix_of(node: Node, *, source: Node, max_entries: int) -> LinearMap | None:
    """The matrix by which an operator moves differences of one record.

    Args:
        node: an operator that reads one value; `operators.rules` has accepted it.
        source: the node whose value it reads.
        max_entries: largest number of entries to build.

    Returns:
        The map, constants left out, or None if the operator is not linear.

    Raises:
        TooLargeError: if it would have more entries.
    """
    build = _BUILDERS.get(node.op)
    if build is None and node.op in INDEXING:
        build = _indexing
    if build is None:
        return None
    size_in, size_out = math.prod(source.shape[1:]), math.prod(node.shape[1:])
    if _entries(node, size_in, size_out) > max_entries:
        raise TooLargeError(f"the matrix of {node.op} would have more than {max_entries} entries")
    return build(node, source)


def _entries(node: Node, size_in: int, size_out: int) -> int:
    """Entries of the matrix, estimated before it is built."""
    weights = [leaf for leaf in node.args if isinstance(leaf, torch.Tensor)]
    if node.op == "convolution":
        weight, transposed = node.args[1], node.args[6]
        per_entry = int(weight.numel()) // int(weight.shape[0])
        return (size_in if transposed else size_out) * per_entry
    if node.op in ("addmm", "mm", "linear"):
        largest = max(weights, key=lambda tensor: tensor.ndim * 2**40 + tensor.numel())
        inner = int(largest.shape[1 if node.op == "linear" else 0])
        return size_in // inner * largest.numel()
    return max(size_in, size_out)


def diagonal_map(factors: FloatArray, *, deviation: float) -> LinearMap:
    """diag(factors), where each true factor is within `deviation` of the one given."""
    n = factors.size
    error = mul_up(sqrt_up(float(n)), deviation)
    return LinearMap(matrix=sparse.csr_array(sparse.diags_array(factors, format="csr")), error=error)


def _linear(node: Node, source: Node) -> LinearMap:
    if node.op == "linear":
        W = weights_as_float64(node.args[1])
    elif node.op == "addmm":
        W = weights_as_float64(node.args[2]).T
    else:
        W = weights_as_float64(node.args[1]).T
    copies = math.prod(source.shape[1:-1])
    block = sparse.csr_array(W)
    matrix = block if copies == 1 else sparse.csr_array(sparse.kron(sparse.eye_array(copies), block, format="csr"))
    return LinearMap(matrix=matrix, error=0.0)


def _convolution(node: Node, source: Node) -> LinearMap:
    return LinearMap(matrix=conv_matrix_of(node, source), error=0.0)


def _average(node: Node, source: Node) -> LinearMap:
    """Weights 1/divisor, each rounded once."""
    A = average_matrix(node, source)
    return LinearMap(matrix=A, error=mul_up(2.0 * UNIT_ROUNDOFF, frobenius(A)))


def _batch_norm(node: Node, source: Node) -> LinearMap:
    factors, deviation = batch_norm_factors(node, source)
    repeats = math.prod(source.shape[2:])
    return diagonal_map(np.repeat(factors, repeats), deviation=deviation)


def _scaling(node: Node, source: Node) -> LinearMap:
    left, right = node.args[:2]
    constant = right if isinstance(left, Ref) else left
    shape = tuple(constant.shape) if isinstance(constant, torch.Tensor) else ()
    factors, deviation = _constant_factors(constant, dtype=source.dtype, divide=node.op == "div")
    record = shape[1:] if len(shape) == len(source.shape) else shape
    full = np.broadcast_to(factors.reshape(record), source.shape[1:]).reshape(-1)
    return diagonal_map(full, deviation=deviation)


def batch_norm_factors(node: Node, source: Node) -> tuple[FloatArray, float]:
    """γ/√(var + ε) of batch norm in eval mode.

    Args:
        node: the operator.
        source: the node whose value it reads.

    Returns:
        One signed factor per channel, and how far each may be from the truth: eps may act as its float32 cast.
    """
    gain, variance = node.args[1], weights_as_float64(node.args[4])
    legit = node.op == "_native_batch_norm_legit_no_training"
    epsilon = float(node.args[6 if legit else 7])
    gamma = np.ones_like(variance) if gain is None else weights_as_float64(gain)
    exact, cast = (gamma / np.sqrt(variance + e) for e in (epsilon, float(np.float32(epsilon))))
    deviation = float((np.abs(exact - cast) + np.abs(exact) * 16.0 * UNIT_ROUNDOFF).max(initial=0.0))
    return exact, add_up(deviation, math.ulp(0.0))


def _constant_factors(constant: Any, *, dtype: torch.dtype, divide: bool) -> tuple[FloatArray, float]:
    """Factors c or 1/c per entry, and how far each may be from the truth: constants may act as their casts."""
    if isinstance(constant, torch.Tensor):
        exact = constant.detach().to("cpu", torch.float64).numpy().reshape(-1)
        cast = constant.detach().to("cpu", dtype).to(torch.float64).numpy().reshape(-1)
    else:
        exact = np.array([float(constant)])
        cast = np.array([float(torch.tensor(float(constant), dtype=dtype))])
    if divide:
        exact, cast = 1.0 / exact, 1.0 / cast
    rounding = np.abs(exact) * (4.0 * UNIT_ROUNDOFF) if divide else 0.0
    deviation = float((np.abs(exact - cast) * (1.0 + 2.0**-40) + rounding).max(initial=0.0))
    return exact, deviation


def _negation(node: Node, source: Node) -> LinearMap:
    return diagonal_map(np.full(math.prod(source.shape[1:]), -1.0), deviation=0.0)


def _indexing(node: Node, source: Node) -> LinearMap:
    reads = index_map(node, source)
    real = np.flatnonzero(reads >= 0)
    matrix = sparse.csr_array(
        (np.ones(real.size), (real, reads[real])), shape=(reads.size, math.prod(source.shape[1:]))
    )
    return LinearMap(matrix=matrix, error=0.0)


_BUILDERS: dict[str, Callable[[Node, Node], LinearMap]] = {
    **dict.fromkeys(("addmm", "mm", "linear"), _linear),
    "convolution": _convolution,
    **dict.fromkeys(("mul", "div"), _scaling),
    **dict.fromkeys(AVERAGES, _average),
    **dict.fromkeys(BATCH_NORMS, _batch_norm),
    "neg": _negation,
}
