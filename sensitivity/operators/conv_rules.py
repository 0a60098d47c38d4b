"""Rules for convolutions and transposed convolutions: from a recorded one to its norm table and to its matrix."""

from __future__ import annotations

from dataclasses import dataclass

from scipy import sparse

from sensitivity.capturing.recording import Node
from sensitivity.operators.conv import ConvGeometry, conv_matrix, conv_table, transposed_table
from sensitivity.operators.operator import Effort, Operator, Rule, refuse, require_data_first, weights_as_float64
from sensitivity.rounding import FloatArray


@dataclass(frozen=True, kw_only=True)
class _Recorded:
    """A recorded convolution: the kernel and geometry of a plain one, and whether its transpose was meant."""

    W: FloatArray
    geometry: ConvGeometry
    transposed: bool


def conv_matrix_of(node: Node, source: Node) -> sparse.csr_array:
    """Matrix of a recorded convolution or transposed convolution for one record, bias left out.

    Args:
        node: the convolution.
        source: the node whose value it reads.

    Returns:
        Shape (outputs, inputs) in flat (channel, pixels…) order, exact, columns sorted.

    Raises:
        NoBoundError: if its weights depend on the input or are not finite, or it has no or more than three axes.
    """
    found = _read(node, source)
    matrix = conv_matrix(found.W, geometry=found.geometry)
    return sparse.csr_array(matrix.T.tocsr()) if found.transposed else matrix


def _convolution(node: Node, source: Node, effort: Effort) -> Operator:
    found = _read(node, source)
    table, how = conv_table(
        found.W,
        geometry=found.geometry,
        dense_entries=effort.dense_entries,
        symbol_flops=effort.symbol_flops,
        flops=effort.flops,
    )
    num_axes = len(found.geometry.size_in)
    if found.transposed:
        return Operator(kind=f"conv_transpose{num_axes}d", table=transposed_table(table), how=how)
    return Operator(kind=f"conv{num_axes}d", table=table, how=how)


def _read(node: Node, source: Node) -> _Recorded:
    require_data_first(node)
    weight, _, stride, padding, dilation, transposed, _, groups = node.args[1:9]
    W = weights_as_float64(weight)
    num_axes = W.ndim - 2
    if num_axes not in (1, 2, 3) or len(source.shape) != W.ndim or W.size == 0:
        refuse(
            f"a convolution with weights of shape {W.shape} of an input of shape {source.shape[1:]} has no bound here",
            "use Conv1d, Conv2d or Conv3d on records of channels and pixels",
        )

    def per_axis(values: list[int]) -> tuple[int, ...]:
        return tuple(values) * (num_axes if len(values) == 1 else 1)

    inputs, outputs = tuple(source.shape[2:]), tuple(node.shape[2:])
    geometry = ConvGeometry(
        size_in=outputs if transposed else inputs,
        size_out=inputs if transposed else outputs,
        stride=per_axis(list(stride)),
        padding=per_axis(list(padding)),
        dilation=per_axis(list(dilation)),
        groups=groups,
    )
    return _Recorded(W=W, geometry=geometry, transposed=bool(transposed))


RULES: dict[str, Rule] = {"convolution": _convolution}
