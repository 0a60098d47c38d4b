"""From one recorded operator to its norm table, or to a refusal that names it.

Every rule checks that the operator keeps the batch as the first dimension and treats records one by one; what no rule
claims is refused.
"""

from __future__ import annotations

import math

import torch

from sensitivity.capturing.recording import Node, leaves_of, place_of
from sensitivity.errors import UnsupportedModuleError
from sensitivity.norms import lipschitz_table
from sensitivity.operators import conv_rules, linear_rules, normalisation, pooling_rules, softmax, structure
from sensitivity.operators.activations import DISCONTINUOUS, activation_slope
from sensitivity.operators.operator import (
    Effort,
    Operator,
    Rule,
    refuse,
    require_batch_first,
    require_elementwise,
    weights_as_float64,
)
from sensitivity.operators.registry import registered_rule

SUPPORTED = (
    "Linear, convolutions, ReLU-like activations, pooling, BatchNorm in eval mode and norms over one record, Dropout "
    "in eval mode, sums, concatenations, views, slices, padding, and arithmetic with constants"
)

_FAMILIES = (linear_rules, conv_rules, normalisation, pooling_rules, softmax, structure)
RULES: dict[str, Rule] = {name: rule for family in _FAMILIES for name, rule in family.RULES.items()}


def operator_of(node: Node, *, source: Node, effort: Effort) -> Operator:
    """Bound one operator that reads one value.

    Args:
        node: the operator.
        source: the node whose value it reads.
        effort: work allowed.

    Returns:
        Its kind, table and jump.

    Raises:
        UnsupportedModuleError: if it has no proven bound, mixes records, or moves the batch dimension.

    Guarantee: for two batches that differ in one record, that record's outputs differ by at most table[r][s]·(distance
        in norm r) + jump·(number of outputs)^{1/s}, in norm s, and no other record's outputs differ.
    """
    try:
        require_batch_first(node, source=source)
        if len(node.parents) != 1 and node.op not in ("mul", "div"):
            refuse("it combines several values that depend on the input", f"use one of: {SUPPORTED}")
        for constant in leaves_of((node.args, node.kwargs)):
            if isinstance(constant, torch.Tensor):
                weights_as_float64(constant)
        slope = activation_slope(node.op, args=node.args[1:], kwargs=node.kwargs, dtype=source.dtype)
        if slope is not None:
            require_elementwise(node, source=source)
            size = math.prod(node.shape[1:])
            return Operator(kind=node.op.strip("_"), table=lipschitz_table(slope.value, size=size), jump=slope.jump)
        rule = RULES.get(node.op) or registered_rule(node.op)
        if rule is None:
            fix = DISCONTINUOUS.get(node.op)
            if fix is not None:
                refuse("it is discontinuous, so no bound exists", fix)
            refuse("no bound is known for it", f"use one of: {SUPPORTED}")
        return rule(node, source, effort)
    except UnsupportedModuleError:
        raise
    except ValueError as error:
        raise UnsupportedModuleError(f"{place_of(node.path, node.module)} uses {node.op}: {error}") from error
