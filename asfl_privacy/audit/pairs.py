"""Part 2, pairs: sums and differences of rows, columns and calls have the noise of independent draws.

For a pair (a, b) the cosine (|a+b|² − |a−b|²) / (4|a||b|) weighs its sum against its difference: shared noise empties
the difference (cosine 1), antithetic noise the sum (cosine −1), and correlated noise lies between. Noise that is merely
too small moves both alike and is left to part 1.
"""

from __future__ import annotations

import math

import numpy as np

from asfl_privacy.audit.claim import Claim
from asfl_privacy.audit.residuals import Call, Residuals
from asfl_privacy.audit.significance import Evidence, cosines, too_aligned

MOST_COLUMNS = 512  # up to here all pairs of columns are compared, not only those at chosen lags
MEANING = "cosine between residuals"


def check_pairs(residuals: Residuals, *, claim: Claim) -> list[Evidence]:
    """Cosines of pairs of rows, columns and calls: pooled over each lag, pair by pair, and mirrored.

    Args:
        residuals: of all calls.
        claim: gives the shape of a record, whose neighbours along each axis are compared.

    Returns:
        The worst test of each group.

    Guarantee:
        For an honest layer every p-value is valid, since pairs of a pooled test share no residual.
    """
    large = residuals.of_size("large")
    found: list[Evidence] = []
    groups = _equal_shapes(large)
    for stack in groups:
        rows, width = stack.shape[1:]
        found += _pooled(stack, axis=1, lags=_lags(rows, ()), name="rows")
        found += _pair_by_pair(stack, axis=1, lags=_lags(rows, ()), name="rows")
        strides = tuple(math.prod(claim.input_shape[axis:]) for axis in range(1, len(claim.input_shape)))
        lags = _lags(width, strides if math.prod(claim.input_shape) == width else ())
        found += _pooled(stack, axis=2, lags=lags, name="coordinates")
        if width <= MOST_COLUMNS:
            found += _all_pairs(stack.transpose(2, 0, 1).reshape(width, -1), name="coordinates")
        else:
            found += _pair_by_pair(stack, axis=2, lags=lags, name="coordinates")
        if len(stack) > 1:
            found += _all_pairs(stack.reshape(len(stack), -1), name="calls")
    for stack in _equal_shapes(residuals.of_size("small", "single")):
        found += _pooled(stack, axis=0, lags=_lags(len(stack), ()), name="small calls")
    return found


def _equal_shapes(calls: list[Call]) -> list[np.ndarray]:
    """Normal scores stacked as (calls, rows, width), one stack for each shape."""
    shapes: dict[tuple[int, ...], list[np.ndarray]] = {}
    for call in calls:
        shapes.setdefault(call.z.shape, []).append(call.z)
    return [np.stack(scores) for scores in shapes.values()]


def _lags(length: int, strides: tuple[int, ...]) -> list[int]:
    """Distances at which noise tends to be copied: neighbours, axes of the record, halves; 0 stands for mirrored."""
    lags = {1, 2, length // 2, *strides}
    return [0, *sorted(lag for lag in lags if 0 < lag < length)] if length > 1 else []


def _places(length: int, lag: int) -> tuple[np.ndarray, np.ndarray]:
    """Disjoint pairs of places at the lag."""
    if lag == 0:
        first = np.arange(length // 2)
        return first, length - 1 - first
    first = np.arange(length - lag)
    first = first[first // lag % 2 == 0]
    return first, first + lag


def _pooled(stack: np.ndarray, *, axis: int, lags: list[int], name: str) -> list[Evidence]:
    """One test for each lag, over all pairs at it."""
    if not lags:
        return []
    values, counts = [], []
    for lag in lags:
        first, second = (np.take(stack, places, axis=axis).ravel() for places in _places(stack.shape[axis], lag))
        values.append(float(cosines(first, second)))
        counts.append(first.size)
    p_values = np.array([float(too_aligned(np.array(v), count=n)) for v, n in zip(values, counts, strict=True)])
    worst = int(np.argmin(p_values))
    return [_evidence(f"{name} {_apart(lags[worst])}", values[worst], p_values[worst], len(lags))]


def _pair_by_pair(stack: np.ndarray, *, axis: int, lags: list[int], name: str) -> list[Evidence]:
    """One test for each pair at each lag, over all calls."""
    if not lags:
        return []
    lines = np.moveaxis(stack, axis, 0).reshape(stack.shape[axis], -1)
    places = [_places(len(lines), lag) for lag in lags]
    first, second = (np.concatenate(side) for side in zip(*places, strict=True))
    values = cosines(lines[first], lines[second])
    p_values = too_aligned(values, count=lines.shape[1])
    worst = int(np.argmin(p_values))
    where = f"{name} {first[worst]} and {second[worst]}"
    return [_evidence(where, float(values[worst]), float(p_values[worst]), len(values))]


def _all_pairs(vectors: np.ndarray, *, name: str) -> list[Evidence]:
    """One test for each pair of vectors."""
    if len(vectors) < 2:
        return []
    first, second, cosine = worst_pair(vectors)
    num_tests = len(vectors) * (len(vectors) - 1) // 2
    p_value = float(too_aligned(np.array(cosine), count=vectors.shape[1]))
    return [_evidence(f"{name} {first} and {second}", cosine, p_value, num_tests)]


def worst_pair(vectors: np.ndarray) -> tuple[int, int, float]:
    """The two vectors with the largest |cosine|, and that cosine."""
    norms = np.linalg.norm(vectors, axis=1)
    units = vectors / np.where(norms > 0, norms, 1.0)[:, None]
    gram = units @ units.T
    np.fill_diagonal(gram, 0.0)
    first, second = divmod(int(np.argmax(np.abs(gram))), len(vectors))
    return min(first, second), max(first, second), float(gram[first, second])


def _apart(lag: int) -> str:
    return "mirrored about the middle" if lag == 0 else f"{lag} apart"


def _evidence(where: str, cosine: float, p_value: float, num_tests: int) -> Evidence:
    p_value = min(1.0, p_value * num_tests)
    return Evidence(where=where, observed=cosine, expected=0.0, p_value=p_value, num_tests=num_tests, meaning=MEANING)
