"""All nine operator norms of a small matrix, by brute force over the corners of the cube."""

from __future__ import annotations

import itertools
import math

import numpy as np

NINE = [(p, q) for p in (1, 2, math.inf) for q in (1, 2, math.inf)]


def largest_over_signs(A: np.ndarray, q: float) -> float:
    """‖A‖_{∞→q}: a convex function is largest at a corner of the cube, and −x gives what x gives."""
    signs = np.array(list(itertools.product([-1.0, 1.0], repeat=A.shape[1] - 1)))
    return float(np.linalg.norm(A[:, 1:] @ signs.T + A[:, :1], ord=q, axis=0).max())


def nine_norms(W: np.ndarray) -> np.ndarray:
    """Table of norms, [input norm][output norm] over (1, 2, ∞); exact for up to about 12 columns and rows."""

    table = np.zeros((3, 3))
    for j, q in enumerate((1, 2, math.inf)):
        table[0][j] = np.linalg.norm(W, ord=q, axis=0).max()
        table[2][j] = largest_over_signs(W, q)
    table[1] = [largest_over_signs(W.T, 2), np.linalg.norm(W, 2), np.linalg.norm(W, axis=1).max()]
    return table
