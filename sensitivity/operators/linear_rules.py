"""Rules for products with constants: linear layers, scaling, running sums."""

from __future__ import annotations

import math

from sensitivity.capturing.recording import Node, Ref
from sensitivity.norms import repeated_table
from sensitivity.operators.elementwise import constant_multipliers
from sensitivity.operators.linear import cumulative_table, diagonal_table, matrix_table
from sensitivity.operators.operator import (
    Effort,
    Operator,
    Rule,
    refuse,
    require_constant_operand,
    require_data_first,
    weights_as_float64,
)


def _linear(node: Node, source: Node, effort: Effort) -> Operator:
    """addmm(bias, x, Wᵀ), mm(x, Wᵀ) on a batch of vectors, or linear(x, W, bias) over the last dimension."""
    is_layer = node.op == "linear"
    if node.op == "addmm":
        bias, data, weight = node.args[:3]
        if isinstance(bias, Ref) or any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
            refuse("its bias depends on the input or is scaled", "use torch.nn.Linear")
    else:
        data, weight = node.args[:2]
    if is_layer and any(isinstance(argument, Ref) for argument in node.args[2:]):
        refuse("its bias depends on the input", "use torch.nn.Linear")
    if not isinstance(data, Ref) or isinstance(weight, Ref) or (len(source.shape) != 2 and not is_layer):
        refuse(
            "it multiplies something other than a batch of vectors by constant weights",
            "multiply each record by constant weights from the right, as Linear does",
        )
    W = weights_as_float64(weight)
    if len(source.shape) < 2 or W.ndim != 2:
        refuse(
            f"its weights have {W.ndim} dimensions and records have shape {source.shape[1:]}",
            "use weights of 2 dimensions, and records of at least 1",
        )
    table = matrix_table(W if is_layer else W.T)
    return Operator(kind="linear", table=repeated_table(table, copies=math.prod(source.shape[1:-1])))


def _scaling(node: Node, source: Node, effort: Effort) -> Operator:
    """x·c, c·x or x/c with a constant c."""
    left, right = node.args[:2]
    if len(node.parents) != 1 or (isinstance(left, Ref) and isinstance(right, Ref)):
        refuse(
            "products and quotients of two values that depend on the input are unbounded", "multiply by constants only"
        )
    if node.op == "div" and (not isinstance(left, Ref) or node.kwargs.get("rounding_mode") is not None):
        refuse("dividing by the input, or rounding the quotient, has no bound", "divide the input by constants only")
    constant = right if isinstance(left, Ref) else left
    require_constant_operand(constant, node=node, source=source)
    d = constant_multipliers(constant, dtype=source.dtype, divide=node.op == "div")
    return Operator(kind="scaling", table=diagonal_table(d, repeats=math.prod(node.shape[1:]) // d.size))


def _running_sum(node: Node, source: Node, effort: Effort) -> Operator:
    require_data_first(node)
    dim = node.args[1] % len(source.shape)
    if dim == 0:
        refuse("it sums over the batch, so records mix", "sum along another dimension")
    length = source.shape[dim]
    table = repeated_table(cumulative_table(length), copies=math.prod(source.shape[1:]) // length)
    return Operator(kind="cumsum", table=table)


def _batched_product(node: Node, source: Node, effort: Effort) -> Operator:
    refuse(
        "it multiplies by one matrix per record, or folds the batch into another dimension",
        "multiply by constant weights of 2 dimensions with Linear or @",
    )


RULES: dict[str, Rule] = {
    **dict.fromkeys(("addmm", "mm", "linear"), _linear),
    **dict.fromkeys(("mul", "div"), _scaling),
    "cumsum": _running_sum,
    **dict.fromkeys(("bmm", "baddbmm", "mv", "dot", "_trilinear"), _batched_product),
}
