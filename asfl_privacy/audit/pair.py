"""The worst pair: two inputs whose noised values lie as far apart as the claim allows, and the noise about each."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from asfl_privacy.audit.inputs import HUGE, edge_norm, far_direction, mixed_batch, on_lattice
from asfl_privacy.audit.probe import Probe, set_mode
from asfl_privacy.audit.residuals import unround


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Noise about the two inputs of the worst pair.

    Args:
        first: residual/scale about x₀, shape (rows, width).
        second: residual/scale about x₁.
        difference: D/scale, shape (width,).
        where: the pair in words.
    """

    first: np.ndarray
    second: np.ndarray
    difference: np.ndarray
    where: str


def draw_pair(probe: Probe, *, mode: str, num_pairs: int, num_scalars: int, stream: np.random.Generator) -> Pair | None:
    """Send the worst pair through the layer.

    Args:
        probe: the layer.
        mode: "train", "eval" or "call".
        num_pairs: records of both inputs together, fewer where they are large.
        num_scalars: least number of residual scalars about each input, met by more records where they are small.
        stream: draws the probing inputs.

    Returns:
        The residuals about both; None if the claim names no distance.

    Raises:
        RefusedError: if the layer refuses the inputs.
    """
    claim = probe.claim
    if claim.worst_distance is None:
        return None
    set_mode(mode, probe.layer, probe.tap)
    rows = max(num_pairs // 2, math.ceil(num_scalars / claim.size))
    rows = max(min(rows, 2**21 // claim.size), min(rows, 256))
    direction = far_direction(claim)
    if probe.clips_unseen:  # only the claim says what the clip does: inputs far outside must come out at its edge
        edges = [on_lattice(sign * claim.clip * direction, claim=claim) for sign in (-1.0, 1.0)] if claim.clip else []
        noises = [
            _about(probe, sign * HUGE * edge_norm(claim) * direction, centre=edge, rows=rows, stream=stream)
            for sign, edge in zip((-1.0, 1.0), edges, strict=True)
        ]
        return Pair(
            first=noises[0],
            second=noises[1],
            difference=(edges[1] - edges[0]) / claim.scale,
            where=f"{mode} mode, inputs far outside the clip on opposite sides",
        )
    if probe.tap is None:
        ends = [on_lattice(sign * claim.worst_distance / 2.0 * direction, claim=claim) for sign in (-1.0, 1.0)]
        where = f"{mode} mode, inputs Δ apart"
    else:
        ends, where = _farthest(probe, stream=stream), f"{mode} mode, inputs whose clipped values lie far apart"
    noises = [_about(probe, end, centre=None, rows=rows, stream=stream) for end in ends]
    if probe.tap is not None and claim.clip is not None:
        taps = [probe.tapped(_batch(probe, end, rows=2)).flatten(1).numpy()[0] for end in ends]
        difference = (taps[1] - taps[0]) / claim.scale
    elif probe.tap is None and probe.noise_of is None:
        difference = (ends[1] - ends[0]) / claim.scale
    else:  # inputs that reach Δ are not known: the claim says that some do
        width = noises[0].shape[1]
        difference = np.full(width, claim.worst_distance / claim.scale * width ** (-1.0 / claim.norm))
        where = f"{mode} mode, noise of inputs said to be Δ apart"
    return Pair(first=noises[0], second=noises[1], difference=difference, where=where)


def _batch(probe: Probe, record: np.ndarray, *, rows: int) -> torch.Tensor:
    return probe.tensor(np.broadcast_to(record.reshape(probe.claim.input_shape), (rows, *probe.claim.input_shape)))


def _about(
    probe: Probe, record: np.ndarray, *, centre: np.ndarray | None, rows: int, stream: np.random.Generator
) -> np.ndarray:
    """Residuals of a batch that repeats one record, about ``centre`` where it is known from the claim alone."""
    inputs = _batch(probe, record, rows=rows)
    outputs = probe.outputs(inputs)
    if centre is None:
        return unround(probe.residuals(inputs, outputs), claim=probe.claim, stream=stream)
    return unround((outputs.flatten(1).numpy() - centre) / probe.claim.scale, claim=probe.claim, stream=stream)


def _farthest(probe: Probe, *, stream: np.random.Generator) -> list[np.ndarray]:
    """Of 64 inputs of mixed size and their opposites, the pair that the tap moves furthest apart."""
    claim = probe.claim
    ends = mixed_batch(rows=64, claim=claim, stream=stream).reshape(64, -1)
    ends[0] = HUGE * edge_norm(claim) * far_direction(claim)
    batch = np.concatenate([ends, -ends]).reshape(128, *claim.input_shape)
    values = probe.tapped(probe.tensor(batch)).flatten(1).numpy()
    distances = np.linalg.norm(values[:64] - values[64:], ord=claim.norm, axis=1)
    distances = np.where(np.isfinite(distances), distances, -1.0)
    chosen = int(np.argmax(distances * np.where(np.arange(64) == 0, 1.0 + 1e-3, 1.0)))
    return [-ends[chosen], ends[chosen]]
