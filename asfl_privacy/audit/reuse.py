"""Part 4, reuse: no two rows or calls, however far apart, carry the same noise (Gram matrix of the residuals)."""

from __future__ import annotations

import math

import numpy as np

from asfl_privacy.audit.pairs import MEANING, worst_pair
from asfl_privacy.audit.residuals import SMALL_WIDTH, Residuals
from asfl_privacy.audit.significance import Evidence, too_aligned

MOST_VECTORS = 2560


def check_reuse(residuals: Residuals) -> list[Evidence]:
    """The largest |cosine| between any two rows of large batches, and between any two small calls.

    Rows of fewer than 64 coordinates are joined to blocks of neighbours, since short rows look alike by chance.

    Args:
        residuals: of all calls.

    Returns:
        The worst pair of each group.

    Guarantee:
        For an honest layer every p-value is valid. Noise repeated from a pool is found where it repeats within the
        vectors compared (up to 2,560 rows and all small calls): by chance from a pool of some 100,000 rows or fewer.
    """
    found = []
    blocks = [block for call in residuals.of_size("large") for block in _blocks(call.z)]
    step = max(1, math.ceil(len(blocks) / MOST_VECTORS))
    for name, vectors in (
        ("rows", blocks[::step]),
        ("small calls", [call.z.ravel() for call in residuals.of_size("small")]),
    ):
        width = min((len(vector) for vector in vectors), default=0)
        if len(vectors) < 2 or width < 2:
            continue
        first, second, cosine = worst_pair(np.stack([vector[:width] for vector in vectors]))
        num_tests = len(vectors) * (len(vectors) - 1) // 2
        p_value = min(1.0, float(too_aligned(np.array(cosine), count=width)) * num_tests)
        where = f"{name} {first * (step if name == 'rows' else 1)} and {second * (step if name == 'rows' else 1)}"
        found.append(
            Evidence(where=where, observed=cosine, expected=0.0, p_value=p_value, num_tests=num_tests, meaning=MEANING)
        )
    return found


def _blocks(z: np.ndarray) -> list[np.ndarray]:
    """Rows, or blocks of neighbouring rows with at least 64 residuals."""
    rows = math.ceil(SMALL_WIDTH / z.shape[1])
    usable = len(z) // rows * rows
    return list(z[:usable].reshape(-1, rows * z.shape[1]))
