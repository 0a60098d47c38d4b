"""The true 2→2 norm of a single convolution, from its unrolled operator."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from scipy.linalg import eigh
from scipy.sparse.linalg import LinearOperator, svds
from torch import nn

DENSE_SIDE = 4096  # records up to this many entries get a dense Gram matrix, larger ones an iteration
CHUNK = 128


def spectral_norm(conv: nn.Conv2d, *, input_shape: tuple[int, ...]) -> tuple[float, str]:
    """Largest singular value of a zero-padded convolution.

    Args:
        conv: the convolution.
        input_shape: (C, H, W) of one record.

    Returns:
        The value and how it was found: the largest eigenvalue of the dense Gram matrix, or scipy's svds, which for
        large records approaches it from below.
    """
    linear = copy.deepcopy(conv).double().requires_grad_(False)
    linear.bias = None
    size = math.prod(input_shape)

    def forward(flat: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = linear(flat.reshape(-1, *input_shape))
        return outputs

    def adjoint(outputs: torch.Tensor) -> torch.Tensor:
        anywhere = torch.zeros(len(outputs), *input_shape, dtype=torch.float64, requires_grad=True)
        (images,) = torch.autograd.grad(linear(anywhere), anywhere, outputs)
        return images.flatten(1)

    if size <= DENSE_SIDE:
        rows = [adjoint(forward(part)) for part in torch.split(torch.eye(size, dtype=torch.float64), CHUNK)]
        gram = torch.cat(rows).numpy()
        top = eigh(gram, eigvals_only=True, subset_by_index=[size - 1, size - 1])[0]
        return math.sqrt(float(top)), "dense"
    outputs = forward(torch.zeros(1, size, dtype=torch.float64))
    operator = LinearOperator(
        dtype=np.float64,
        shape=(outputs.numel(), size),
        matvec=lambda v: forward(torch.from_numpy(np.ascontiguousarray(v).reshape(1, -1))).numpy().ravel(),
        rmatvec=lambda u: adjoint(torch.from_numpy(np.ascontiguousarray(u)).reshape(outputs.shape)).numpy().ravel(),
    )
    start = np.random.default_rng(0).standard_normal(min(operator.shape))
    values = svds(operator, k=1, ncv=60, tol=1e-13, v0=start, maxiter=5000, return_singular_vectors=False)
    return float(values[0]), "svds"
