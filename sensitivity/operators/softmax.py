"""Norm tables of softmax, log-softmax and log-sum-exp along one dimension of each record.

Legend: n classes, s the softmax of a group x, e_i unit vectors. A Lipschitz constant is the largest norm of the Jacobian.
- softmax: J = diag(s) − ssᵀ, symmetric. Column j has ℓ1 norm 2s_j(1 − s_j) ≤ ½, squared length at most
  2s_j²(1 − s_j)² ≤ ⅛, entries at most s_j(1 − s_j) ≤ ¼; so 2→2 ≤ √(½·½). For a vector of signs σ with mass m of s on
  +1, Jσ has entries 2s_i(1 − m) and −2s_i·m: ∞→1 = 4m(1 − m) ≤ 1, ∞→2 ≤ √(8m²(1 − m)²) ≤ √½ = 2→1. Two equal classes
  that hold all mass attain every one.
- log-softmax: J = I − 1sᵀ is linear in s and norms are convex, so each is largest at a vertex s = e_1, where J maps v to
  v_i − v_1 (M = [−1 | I] without the row of zeros, MMᵀ = I + 11ᵀ): 1→1 n − 1, 1→2 √(n − 1), 1→∞ 1, 2→2 √n, 2→∞ √2,
  ∞→∞ 2, ∞→2 2√(n − 1), ∞→1 2(n − 1), and 2→1 = max over signs ‖Mᵀσ‖₂ = √(n(n − 1)). These are limits, so exact.
- log-sum-exp has gradient s: it moves by no more than the largest move, and all the mass may sit on it, as for a maximum.
"""

from __future__ import annotations

import math

import numpy as np

from sensitivity.capturing.recording import Node
from sensitivity.norms import NormTable, repeated_table
from sensitivity.operators.operator import Effort, Operator, Rule, refuse, require_data_first
from sensitivity.operators.pooling import max_table
from sensitivity.rounding import FloatArray, mul_up, sqrt_up

_ZERO: NormTable = ((0.0, 0.0, 0.0),) * 3


def softmax_table(num_classes: int) -> NormTable:
    """Norm table of softmax over one group of classes.

    Args:
        num_classes: classes, at least 1.

    Returns:
        The table; every entry is the Lipschitz constant, roots rounded up.

    Edge cases: one class has softmax 1: its table is 0.

    Example:
        >>> softmax_table(10)[0][0], softmax_table(10)[0][2]
        (0.5, 0.25)
    """
    if num_classes == 1:
        return _ZERO
    eighth, half = sqrt_up(0.125), sqrt_up(0.5)
    return (0.5, eighth, 0.25), (half, 0.5, eighth), (1.0, half, 0.5)


def log_softmax_table(num_classes: int) -> NormTable:
    """Norm table of log-softmax over one group of classes.

    Args:
        num_classes: classes, at least 1.

    Returns:
        The table; every entry is the Lipschitz constant, roots rounded up.

    Edge cases: one class has log-softmax 0: its table is 0.

    Example:
        >>> log_softmax_table(10)[0]
        (9.0, 3.0, 1.0)
    """
    if num_classes == 1:
        return _ZERO
    n = float(num_classes)
    rest = n - 1.0
    return (
        (rest, sqrt_up(rest), 1.0),
        (sqrt_up(n * rest), sqrt_up(n), sqrt_up(2.0)),
        (2.0 * rest, mul_up(2.0, sqrt_up(rest)), 2.0),
    )


def output_range(node: Node, source: Node) -> tuple[FloatArray, FloatArray] | None:
    """Least and largest output of softmax or log-softmax, per entry of one record.

    Args:
        node: any recorded operator.
        source: the node whose value it reads, batch first.

    Returns:
        (low, high), each of the record's shape: [0, 1], or (−∞, 0] for log-softmax; None for other operators.

    Example:
        >>> low, high = output_range(Node(op="_softmax", shape=(13, 2)), Node(op="input", shape=(13, 2)))
        >>> low.tolist(), high.tolist()
        ([0.0, 0.0], [1.0, 1.0])
    """
    ends = _RANGES.get(node.op)
    return None if ends is None else (np.full(source.shape[1:], ends[0]), np.full(source.shape[1:], ends[1]))


def _softmax(node: Node, source: Node, effort: Effort) -> Operator:
    require_data_first(node)
    num_classes = _classes(node, source)
    table = softmax_table(num_classes) if node.op == "_softmax" else log_softmax_table(num_classes)
    groups = math.prod(source.shape[1:]) // num_classes
    return Operator(kind=node.op.strip("_"), table=repeated_table(table, copies=groups))


def _classes(node: Node, source: Node) -> int:
    dim = int(node.args[1]) % len(source.shape)
    if dim == 0:
        refuse("it normalises over the batch, so records mix", "name another dimension")
    return source.shape[dim]


def _log_sum_exp(node: Node, source: Node, effort: Effort) -> Operator:
    require_data_first(node)
    if not node.args[1] or any(dim % len(source.shape) == 0 for dim in node.args[1]):
        refuse("it sums over the batch, so records mix", "name the dimensions to reduce, without the first")
    return Operator(
        kind="logsumexp", table=max_table(1, num_in=math.prod(source.shape[1:]), num_out=math.prod(node.shape[1:]))
    )


_RANGES = {"_softmax": (0.0, 1.0), "_log_softmax": (-math.inf, 0.0)}
RULES: dict[str, Rule] = {
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax),
    "logsumexp": _log_sum_exp,
}
