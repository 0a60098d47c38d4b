"""Rules for normalisation layers: from a recorded normalisation to its norm table and to the range of its output."""

from __future__ import annotations

import math

import numpy as np
import torch

from sensitivity.capturing.recording import Node
from sensitivity.operators.elementwise import batch_norm_multipliers
from sensitivity.operators.linear import diagonal_table
from sensitivity.operators.operator import Effort, Operator, Rule, refuse, require_data_first, weights_as_float64
from sensitivity.operators.record_norms import Normalised, largest_entry, normalisation_table
from sensitivity.rounding import FloatArray

BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit_no_training")


def output_range(node: Node, source: Node) -> tuple[FloatArray, FloatArray] | None:
    """Least and largest output of a normalisation by a record's own statistics, per entry of one record.

    Args:
        node: any recorded operator.
        source: the node whose value it reads, batch first.

    Returns:
        (low, high), each of the record's shape; None if the operator is no such normalisation.

    Raises:
        NoBoundError: where the operator's rule would raise it.

    Guarantee: outputs lie in β ± |γ|·√(n − 1), or |γ|·√n for RMS norm, whatever the input; rounded outward.

    Example:
        >>> source = Node(op="input", shape=(13, 2))
        >>> low, high = output_range(Node(op="rms_norm", args=(None, [2], None, 1e-5), shape=(13, 2)), source)
        >>> bool((low < -1.414).all()), bool((high > 1.414).all())
        (True, True)
    """
    shift = _SHIFTS.get(node.op)
    if shift is None or (node.op == "instance_norm" and not node.args[5]):
        return None
    facts = _FACTS[node.op](node, source)
    shape = (facts.num_groups, facts.group_size)
    gains = np.ones(shape) if facts.gains is None else np.broadcast_to(np.abs(facts.gains), shape)
    centre = np.zeros(shape)
    bias = node.args[shift] if shift else None
    if bias is not None:
        values = weights_as_float64(bias)
        is_layer = node.op == "native_layer_norm"
        centre = np.broadcast_to(values.reshape(1, -1), shape) if is_layer else _per_channel(values, shape=shape)
    radius = gains * largest_entry(facts)
    wide = (np.abs(centre) + radius) * 2.0**-50
    record = source.shape[1:]
    return (centre - radius - wide).reshape(record), (centre + radius + wide).reshape(record)


def _batch_norm(node: Node, source: Node, effort: Effort) -> Operator:
    require_data_first(node)
    weight, _, mean, variance = node.args[1:5]
    legit_eval = node.op == "_native_batch_norm_legit_no_training"
    if mean is None or variance is None or (not legit_eval and node.args[5]):
        refuse(
            "batch statistics mix records, so no per-record bound exists", "call .eval(), with track_running_stats=True"
        )
    return _fixed_statistics(weight, variance, node.args[6 if legit_eval else 7], source)


def _fixed_statistics(weight: torch.Tensor | None, variance: torch.Tensor, epsilon: float, source: Node) -> Operator:
    """A multiplier per channel."""
    gain = None if weight is None else weights_as_float64(weight)
    d = batch_norm_multipliers(gain, variance=weights_as_float64(variance), epsilon=_smaller_epsilon(epsilon, source))
    return Operator(kind="batch_norm", table=diagonal_table(d, repeats=math.prod(source.shape[2:])))


def _instance_norm(node: Node, source: Node, effort: Effort) -> Operator:
    """instance_norm(x, γ, β, mean, variance, use_input_stats, momentum, ε)."""
    require_data_first(node)
    if not node.args[5]:
        if node.args[4] is None:
            refuse("it has neither running statistics nor those of the record", "use InstanceNorm as torch.nn makes it")
        return _fixed_statistics(node.args[1], node.args[4], node.args[7], source)
    return _own_statistics(node, source, effort)


def _own_statistics(node: Node, source: Node, effort: Effort) -> Operator:
    require_data_first(node)
    return Operator(kind=node.op.removeprefix("native_"), table=normalisation_table(_FACTS[node.op](node, source)))


def _layer_facts(node: Node, source: Node) -> Normalised:
    """native_layer_norm(x, shape, γ, β, ε) and rms_norm(x, shape, γ, ε)."""
    shape, weight = tuple(node.args[1]), node.args[2]
    is_rms = node.op == "rms_norm"
    ndim = len(shape)
    if not 0 < ndim < len(source.shape) or tuple(source.shape[-ndim:]) != shape:
        refuse(
            f"it normalises the last dimensions {shape} of a batch of shape {source.shape}, so records mix",
            "leave the batch out of normalized_shape",
        )
    size = math.prod(shape)
    return Normalised(
        num_groups=math.prod(source.shape[1:]) // size,
        group_size=size,
        epsilon=_smaller_epsilon(node.args[3 if is_rms else 4], source),
        centred=not is_rms,
        gains=None if weight is None else weights_as_float64(weight).reshape(1, size),
    )


def _channel_facts(node: Node, source: Node) -> Normalised:
    """native_group_norm(x, γ, β, batch, channels, pixels, groups, ε), and instance_norm as one group per channel."""
    weight = node.args[1]
    if len(source.shape) < 2:
        refuse(f"records of shape {source.shape[1:]} have no channels", "give each record channels")
    channels, pixels = source.shape[1], math.prod(source.shape[2:])
    if node.op == "instance_norm":
        groups, epsilon = channels, node.args[7]
    else:
        batch, declared, area, groups, epsilon = node.args[3:8]
        if batch not in ("batch", source.shape[0]) or (declared, area) != (channels, pixels):
            refuse("its sizes are not those of the batch, so records mix", "use torch.nn.functional.group_norm")
    size = channels // groups * pixels
    return Normalised(
        num_groups=groups,
        group_size=size,
        epsilon=_smaller_epsilon(epsilon, source),
        centred=True,
        gains=None if weight is None else _per_channel(weights_as_float64(weight), shape=(groups, size)),
    )


def _per_channel(values: FloatArray, *, shape: tuple[int, int]) -> FloatArray:
    """Values per channel, repeated over its pixels and split into groups."""
    return np.repeat(values.reshape(-1), math.prod(shape) // values.size).reshape(shape)


def _smaller_epsilon(epsilon: float, source: Node) -> float:
    """The kernel casts eps to float32 for such data; the smaller of the two counts."""
    value = float(epsilon)
    return min(value, float(np.float32(value))) if source.dtype == torch.float32 else value


_FACTS = {
    "native_layer_norm": _layer_facts,
    "rms_norm": _layer_facts,
    "native_group_norm": _channel_facts,
    "instance_norm": _channel_facts,
}
_SHIFTS = {"native_layer_norm": 3, "rms_norm": 0, "native_group_norm": 2, "instance_norm": 2}  # where β stands
RULES: dict[str, Rule] = {
    **dict.fromkeys(BATCH_NORMS, _batch_norm),
    **dict.fromkeys(("native_layer_norm", "native_group_norm", "rms_norm"), _own_statistics),
    "instance_norm": _instance_norm,
}
