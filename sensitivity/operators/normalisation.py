"""Rules for normalisation layers: from a recorded normalisation to its norm table."""

from __future__ import annotations

import math

import numpy as np
import torch

from sensitivity.capturing.recording import Node
from sensitivity.operators.elementwise import batch_norm_multipliers
from sensitivity.operators.linear import diagonal_table
from sensitivity.operators.operator import Effort, Operator, Rule, refuse, require_data_first, weights_as_float64


def _batch_norm(node: Node, source: Node, effort: Effort) -> Operator:
    require_data_first(node)
    weight, _, mean, variance = node.args[1:5]
    legit_eval = node.op == "_native_batch_norm_legit_no_training"
    if mean is None or variance is None or (not legit_eval and node.args[5]):
        refuse(
            "batch statistics mix records, so no per-record bound exists", "call .eval(), with track_running_stats=True"
        )
    epsilon = float(node.args[6 if legit_eval else 7])
    if source.dtype == torch.float32:
        epsilon = min(epsilon, float(np.float32(epsilon)))  # the kernel casts eps to float32
    gain = None if weight is None else weights_as_float64(weight)
    d = batch_norm_multipliers(gain, variance=weights_as_float64(variance), epsilon=epsilon)
    return Operator(kind="batch_norm", table=diagonal_table(d, repeats=math.prod(source.shape[2:])))


RULES: dict[str, Rule] = dict.fromkeys(
    ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit_no_training"), _batch_norm
)
