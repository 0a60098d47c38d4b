"""The slow, obvious twin: the matrix of a linear module, one basis record at a time, in float64."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from torch import nn

EXACT_PAIRS = [(1, 1), (1, 2), (1, math.inf), (2, math.inf), (math.inf, math.inf)]


def dense_matrix(module: nn.Module, input_shape: tuple[int, ...]) -> np.ndarray:
    net = copy.deepcopy(module).double()
    size = math.prod(input_shape)
    with torch.no_grad():
        zero = net(torch.zeros(1, *input_shape, dtype=torch.float64)).reshape(1, -1)
        columns = net(torch.eye(size, dtype=torch.float64).reshape(size, *input_shape)).reshape(size, -1) - zero
    return columns.T.numpy()


def dense_norm(W: np.ndarray, p: float, q: float) -> float:
    if p == 1:
        return float(np.linalg.norm(W, ord=q, axis=0).max())
    if q == math.inf:
        return float(np.linalg.norm(W, ord={2: 2, math.inf: 1}[p], axis=1).max())
    assert (p, q) == (2, 2)
    return float(np.linalg.norm(W, 2))
