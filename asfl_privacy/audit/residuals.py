"""Residuals: the layer's noise over calls, rows and coordinates, in both modes and for inputs of every size.

Where a lattice is claimed, the layer adds rounded noise. A rounded value is replaced by a draw of the claimed law within
its cell; honest rounded noise then has exactly the claimed continuous law, so every test stays exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy import special

from asfl_privacy.audit.claim import Claim
from asfl_privacy.audit.inputs import KINDS, make_inputs
from asfl_privacy.audit.probe import Probe, RefusedError, set_mode
from asfl_privacy.audit.significance import normal_scores

NUM_SMALL_CALLS = 192
NUM_SINGLE_CALLS = 8
SMALL_WIDTH = 64  # residuals in a small call: enough for the Gram matrix to tell reuse from chance
SMALLEST_BATCH = 32
CALLS = 2


@dataclass(frozen=True, kw_only=True)
class Call:
    """The residuals of one call.

    Args:
        mode: "train", "eval", or "call" for a plain function.
        inputs: "zero", "edge" or "huge".
        size: "large", "small" or "single" (a batch of one).
        number: counts calls of the same mode, inputs and size.
        u: residual/scale, shape (rows, width), un-rounded where a lattice is claimed.
        z: normal scores of u.
        rounding: how far u may lie from the true residual because outputs are floating numbers.
        off_lattice: outputs that are no multiple of the claimed spacing.
    """

    mode: str
    inputs: str
    size: str
    number: int
    u: np.ndarray
    z: np.ndarray
    rounding: float
    off_lattice: int

    @property
    def setting(self) -> str:
        """Mode, inputs and size in words."""
        batch = {"large": "", "small": ", small batches", "single": ", batches of one"}[self.size]
        return f"{self.mode} mode, {self.inputs} inputs{batch}"

    @property
    def where(self) -> str:
        """The setting and the number of the call."""
        return f"{self.setting}, call {self.number}"


@dataclass(kw_only=True)
class Residuals:
    """All calls, and what could not be called."""

    calls: list[Call] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def of_size(self, *sizes: str) -> list[Call]:
        """Calls of the sizes named, in the order they were made."""
        return [call for call in self.calls if call.size in sizes]

    def settings(self) -> dict[str, list[Call]]:
        """Calls by mode, inputs and size."""
        groups: dict[str, list[Call]] = {}
        for call in self.calls:
            groups.setdefault(call.setting, []).append(call)
        return groups

    @property
    def count(self) -> int:
        """Residual scalars of all calls."""
        return sum(call.u.size for call in self.calls)


def gather(probe: Probe, *, modes: tuple[str, ...], num_residuals: int, stream: np.random.Generator) -> Residuals:
    """Call the layer and collect its residuals.

    Args:
        probe: the layer.
        modes: "train" and "eval", or "call".
        num_residuals: least number of residual scalars of large batches; batches never fall below 32 rows.
        stream: draws the inputs and the positions within lattice cells.

    Returns:
        The residuals; a call that the layer refused is a note.

    Raises:
        ValueError: if the layer refuses every call.
    """
    found = Residuals()
    kinds = [kind for kind in KINDS if not (kind == "huge" and probe.clips_unseen)]
    rows = max(SMALLEST_BATCH, math.ceil(num_residuals / (len(modes) * len(kinds) * CALLS * probe.claim.size)))
    small = math.ceil(SMALL_WIDTH / probe.claim.size)
    for mode in modes:
        set_mode(mode, probe.layer, probe.tap)
        for kind in kinds:
            _call(probe, found, mode, kind, size="large", rows=rows, repeats=CALLS, stream=stream)
        _call(probe, found, mode, "edge", size="single", rows=1, repeats=NUM_SINGLE_CALLS, stream=stream)
        repeats = NUM_SMALL_CALLS // len(modes)
        if not _call(probe, found, mode, "edge", size="small", rows=small, repeats=repeats, stream=stream):
            _call(probe, found, mode, "edge", size="small", rows=2 * small, repeats=repeats, stream=stream)
    if not found.calls:
        raise ValueError(
            f"layer refuses every batch ({found.notes[0]}): an audit needs its noise; pass the input_shape and dtype= "
            "that it takes, or wrap it"
        )
    return found


def _call(
    probe: Probe,
    found: Residuals,
    mode: str,
    kind: str,
    *,
    size: str,
    rows: int,
    repeats: int,
    stream: np.random.Generator,
) -> bool:
    """Append ``repeats`` calls; False and a note if the layer refuses one."""
    for number in range(repeats):
        inputs = probe.tensor(make_inputs(kind, rows=rows, claim=probe.claim, stream=stream))
        try:
            outputs = probe.outputs(inputs)
            raw = probe.residuals(inputs, outputs)
        except RefusedError as error:
            found.notes.append(f"{mode} mode, {kind} inputs, batch of {rows} refused: {error}")
            return False
        u = unround(raw, claim=probe.claim, stream=stream)
        found.calls.append(
            Call(
                mode=mode,
                inputs=kind,
                size=size,
                number=number,
                u=u,
                z=normal_scores(u, family=probe.claim.family),
                rounding=float(outputs.abs().max()) * torch.finfo(probe.dtype).eps / probe.claim.scale,
                off_lattice=count_off_lattice(outputs.numpy(), claim=probe.claim),
            )
        )
    return True


def unround(u: np.ndarray, *, claim: Claim, stream: np.random.Generator) -> np.ndarray:
    """Replace each value by a draw of the claimed law within its lattice cell; unchanged where no lattice is claimed.

    Args:
        u: residual/scale.
        claim: spacing, scale and family.
        stream: draws the positions.

    Guarantee:
        If u is the claimed noise rounded to the nearest multiple of the spacing, the result has exactly the claimed
        continuous law (to rounding). Magnitudes stay within half a spacing of u.
    """
    if claim.spacing is None:
        return u
    width = claim.spacing / claim.scale
    known = np.where(np.isfinite(u), u, 0.0)
    near = np.abs(np.rint(known / width)) * width
    # the cell [near − w/2, near + w/2] of |u|, by log upper tails so that no far cell collapses; the middle one is
    # symmetric, so half of it is drawn and then signed
    lower = np.maximum(near - width / 2.0, 0.0)
    tail_low, tail_high = _log_tail(lower, claim.family), _log_tail(near + width / 2.0, claim.family)
    position = stream.random(u.shape)
    drawn = _tail_quantile(tail_low + np.log1p(position * np.expm1(tail_high - tail_low)), claim.family)
    sign = np.where(near == 0.0, np.where(stream.random(u.shape) < 0.5, -1.0, 1.0), np.sign(known))
    return np.where(np.isfinite(u), sign * drawn, u)


def count_off_lattice(outputs: np.ndarray, *, claim: Claim) -> int:
    """Outputs that are no multiple of the claimed spacing."""
    if claim.spacing is None:
        return 0
    cells = outputs / claim.spacing
    return int(np.count_nonzero(cells != np.rint(cells)))


def _log_tail(x: np.ndarray, family: str) -> np.ndarray:
    """Logarithm of P(U > x), x ≥ 0."""
    return np.asarray(special.log_ndtr(-x)) if family == "gaussian" else -x - math.log(2.0)


def _tail_quantile(log_tail: np.ndarray, family: str) -> np.ndarray:
    """The x ≥ 0 with log P(U > x) = log_tail."""
    return np.asarray(-special.ndtri_exp(log_tail)) if family == "gaussian" else -log_tail - math.log(2.0)
