"""Test inputs: zero, at the edge of what is claimed, and huge."""

from __future__ import annotations

import numpy as np

from asfl_privacy.audit.claim import Claim

KINDS = ("zero", "edge", "huge")
HUGE = 1000.0
_INSIDE = 1.0 - 1e-6  # at the clip, yet inside it after rounding to float32


def make_inputs(kind: str, *, rows: int, claim: Claim, stream: np.random.Generator) -> np.ndarray:
    """A batch of test inputs.

    Args:
        kind: "zero"; "edge" (norm C, or Δ where nothing is clipped); "huge" (a thousand times that, or a thousand times
            the noise).
        rows: size of the batch.
        claim: gives C, Δ, the scale, the norm and the lattice.
        stream: where the directions are drawn from.

    Returns:
        float64, shape (rows, *claim.input_shape); on the lattice where one is claimed.
    """
    shape = (rows, *claim.input_shape)
    if kind == "zero":
        return np.zeros(shape)
    directions = unit_rows(stream.standard_normal((rows, claim.size)), norm=claim.norm)
    size = edge_norm(claim)
    if kind == "huge":
        # without a clip the noise must survive the rounding of input + noise to float32
        size = HUGE * (claim.clip or claim.scale * claim.size ** (1.0 / claim.norm))
    return on_lattice(size * directions, claim=claim).reshape(shape)


def edge_norm(claim: Claim) -> float:
    """The norm of inputs at the edge: C, else Δ, else that of the noise."""
    if claim.clip is not None:
        return claim.clip * _INSIDE
    return claim.sensitivity or claim.scale * claim.size ** (1.0 / claim.norm)


def even_direction(claim: Claim) -> np.ndarray:
    """The direction of norm 1 that is the same in every coordinate, shape (size,)."""
    return np.full(claim.size, claim.size ** (-1.0 / claim.norm))


def far_direction(claim: Claim) -> np.ndarray:
    """The even direction; one coordinate where the lattice would swallow an even one at the edge."""
    even = even_direction(claim)
    kept = on_lattice(edge_norm(claim) * even, claim=claim)
    if np.linalg.norm(kept, ord=claim.norm) >= 0.99 * edge_norm(claim):
        return even
    return np.asarray(np.eye(1, claim.size)[0])


def mixed_batch(*, rows: int, claim: Claim, stream: np.random.Generator) -> np.ndarray:
    """Rows of norms from 1e-3 to 1e3 times the edge, so that one row's scale cannot hide in another's."""
    directions = unit_rows(stream.standard_normal((rows, claim.size)), norm=claim.norm)
    sizes = edge_norm(claim) * np.geomspace(1e-3, HUGE, rows)
    return (directions * sizes[:, None]).reshape(rows, *claim.input_shape)


def unit_rows(rows: np.ndarray, *, norm: int) -> np.ndarray:
    """Rows scaled to norm 1."""
    lengths = np.asarray(np.linalg.norm(rows, ord=norm, axis=1, keepdims=True))
    return np.asarray(rows / lengths)


def on_lattice(values: np.ndarray, *, claim: Claim) -> np.ndarray:
    """Truncated toward zero to multiples of the spacing, so that no norm grows; unchanged where none is claimed."""
    return values if claim.spacing is None else np.trunc(values / claim.spacing) * claim.spacing
