"""Part 6, tap: what is noised has norm at most C, row by row, whatever else is in the batch; NaN and inf are refused."""

from __future__ import annotations

import numpy as np
import torch

from asfl_privacy.audit.inputs import HUGE, edge_norm, far_direction, mixed_batch
from asfl_privacy.audit.probe import Probe, RefusedError, set_mode
from asfl_privacy.audit.significance import Evidence

ROWS = 16
_TOLERANCE = {torch.float64: 1e-9}  # relative to the row: other batch sizes take other sums
_COARSE = 1e-4


def check_tap(probe: Probe, *, mode: str, stream: np.random.Generator) -> tuple[list[Evidence], list[str]]:
    """Deterministic checks of the part before the noise.

    Args:
        probe: the layer and its tap.
        mode: "train", "eval" or "call".
        stream: draws the inputs.

    Returns:
        Evidence (p-value 0 where a check fails, else 1), and notes on what was refused.

    Edge cases:
        Without a tap only NaN and inf are tried, and only if a clip is claimed: a metric claim says nothing of them.
    """
    set_mode(mode, probe.layer, probe.tap)
    found: list[Evidence] = []
    notes: list[str] = []
    if probe.tap is not None:
        batch = probe.tensor(mixed_batch(rows=ROWS, claim=probe.claim, stream=stream))
        ends = HUGE * edge_norm(probe.claim) * np.stack([far_direction(probe.claim), -far_direction(probe.claim)])
        batch = torch.cat([batch, probe.tensor(ends.reshape(2, *probe.claim.input_shape)), torch.zeros_like(batch[:1])])
        try:
            values = probe.tapped(batch)
            found += [*_norms(probe, values, mode=mode), *_rows(probe, batch, values, mode=mode, notes=notes)]
        except RefusedError as error:
            notes.append(f"{mode} mode, tap refused a batch of mixed scale: {error}")
    if probe.tap is not None or probe.claim.clip is not None:
        found += [_refusal(probe, value, mode=mode) for value in (float("nan"), float("inf"))]
    return found, notes


def _norms(probe: Probe, values: torch.Tensor, *, mode: str) -> list[Evidence]:
    if probe.claim.clip is None:
        return []
    norms = torch.linalg.vector_norm(values.flatten(1), ord=probe.claim.norm, dim=1).numpy()
    rounding = 1e-9 if probe.dtype == torch.float64 else 1e-5
    largest = float(np.max(np.where(np.isfinite(norms), norms, np.inf)))
    holds = largest <= probe.claim.clip * (1.0 + rounding)
    where = f"{mode} mode, batch of mixed scale"
    return [_certain(where, largest, probe.claim.clip, holds, f"largest ℓ{probe.claim.norm} norm before the noise")]


def _rows(probe: Probe, batch: torch.Tensor, values: torch.Tensor, *, mode: str, notes: list[str]) -> list[Evidence]:
    """Each row is a function of its record alone: not of its place, of the other rows, or of the batch's size."""
    order = torch.arange(len(batch) - 1, -1, -1)
    others = batch.clone()
    others[::2] = -others[::2].flip(0) * 3.0
    attempts = [
        ("in another order", batch[order], values[order]),
        ("beside other records", others, torch.where(_odd(values), values, torch.nan)),
        ("in half a batch", batch[: len(batch) // 2], values[: len(batch) // 2]),
        *((f"row {row} alone", batch[row : row + 1], values[row : row + 1]) for row in range(len(batch))),
    ]
    found = []
    for name, inputs, expected in attempts:
        try:
            again = probe.tapped(inputs)
        except RefusedError as error:
            notes.append(f"{mode} mode, tap refused {name}: {error}")
            continue
        found.append(_difference(probe, again, expected, where=f"{mode} mode, {name}"))
    worst = max(found, key=lambda evidence: evidence.observed, default=None)
    return [] if worst is None else [worst]


def _odd(values: torch.Tensor) -> torch.Tensor:
    """Marks the rows at odd places."""
    odd = torch.arange(len(values)) % 2 == 1
    return odd.reshape(-1, *(1 for _ in values.shape[1:])).expand_as(values)


def _difference(probe: Probe, again: torch.Tensor, expected: torch.Tensor, *, where: str) -> Evidence:
    """The largest change of a row, relative to the row; rows marked by NaN are not compared."""
    marked = torch.isnan(expected).flatten(1).all(dim=1)
    change = (again - expected).abs().flatten(1).amax(dim=1)[~marked]
    size = expected.abs().flatten(1).amax(dim=1)[~marked]
    relative = torch.where(change == 0, change, change / torch.maximum(size, torch.tensor(1e-300, dtype=size.dtype)))
    largest = float(torch.nan_to_num(relative, nan=torch.inf).max()) if len(relative) else 0.0
    holds = largest <= _TOLERANCE.get(probe.dtype, _COARSE)
    return _certain(where, largest, 0.0, holds, "relative change of a row before the noise")


def _refusal(probe: Probe, value: float, *, mode: str) -> Evidence:
    """The layer raises on the value, or answers with finite numbers."""
    batch = np.zeros((3, *probe.claim.input_shape))
    batch[1].flat[0] = value
    where, meaning = f"{mode} mode, an input that holds {value}", "fraction of outputs that are NaN or inf"
    try:
        outputs = probe.outputs(probe.tensor(batch))
    except RefusedError:
        return _certain(where, 0.0, 0.0, True, meaning)
    fraction = float((~torch.isfinite(outputs)).double().mean())
    return _certain(where, fraction, 0.0, fraction == 0.0, meaning)


def _certain(where: str, observed: float, expected: float, holds: bool, meaning: str) -> Evidence:
    return Evidence(
        where=where, observed=observed, expected=expected, p_value=1.0 if holds else 0.0, num_tests=1, meaning=meaning
    )
