"""Part 1, scale: no call, coordinate or row has less noise than claimed."""

from __future__ import annotations

import numpy as np

from asfl_privacy.audit.claim import Claim
from asfl_privacy.audit.residuals import Call, Residuals
from asfl_privacy.audit.significance import Evidence, magnitude, relative_scale, too_small

FEWEST = 8  # a sum of fewer residuals shows little, and noise rounded to a lattice that no one declared makes it 0


def check_scale(residuals: Residuals, *, claim: Claim) -> list[Evidence]:
    """One-sided scale tests: of everything, and of each setting, call, coordinate, row and place in the batch.

    Args:
        residuals: of all calls.
        claim: gives the family.

    Returns:
        The worst test of each group; sums of fewer than 8 residuals are not tested.

    Guarantee:
        For an honest layer every p-value is valid for every sample size; more noise than claimed is never an alarm.
    """
    totals = [(call, magnitude(call.u, rounding=call.rounding, family=claim.family)) for call in residuals.calls]
    everything = np.array([sum(float(total.sum()) for _, total in totals)])
    found = [_worst(everything, count=residuals.count, names=["all residuals"], claim=claim)]
    settings = residuals.settings()
    by_setting = {name: np.concatenate([total for call, total in totals if call.setting == name]) for name in settings}
    found += _grouped([(name, total.reshape(1, -1)) for name, total in by_setting.items()], "", claim=claim)
    found += _grouped([(call.where, total.reshape(1, -1)) for call, total in totals], "", claim=claim)
    found += _grouped([(name, total.T) for name, total in by_setting.items()], "coordinate", claim=claim)
    large = [(call, total) for call, total in totals if call.size == "large"]
    found += _grouped([(call.where, total) for call, total in large], "row", claim=claim)
    places = [total for _, total in large if total.shape == large[0][1].shape]
    if len(places) > 1:
        found += _grouped([("all large batches", np.concatenate(places, axis=1))], "row", claim=claim)
    return found


def _grouped(tables: list[tuple[str, np.ndarray]], axis: str, *, claim: Claim) -> list[Evidence]:
    """One group: a test for each line of each table."""
    tables = [(name, table) for name, table in tables if table.shape[1] >= FEWEST]
    if not tables:
        return []
    num_tests = sum(len(table) for _, table in tables)
    worst = [
        _worst(
            table.sum(axis=1),
            count=table.shape[1],
            names=[f"{name}, {axis} {index}" if axis else name for index in range(len(table))],
            claim=claim,
            num_tests=num_tests,
        )
        for name, table in tables
    ]
    return [min(worst, key=lambda evidence: evidence.p_value)]


def _worst(totals: np.ndarray, *, count: int, names: list[str], claim: Claim, num_tests: int | None = None) -> Evidence:
    p_values = too_small(totals, count=count, family=claim.family)
    worst = int(np.argmin(p_values))
    number = num_tests or len(names)
    return Evidence(
        where=names[worst],
        observed=float(relative_scale(totals[worst], count=count, family=claim.family)),
        expected=1.0,
        p_value=min(1.0, float(p_values[worst]) * number),
        num_tests=number,
        meaning="noise scale in units of the claimed one",
    )


def non_finite(calls: list[Call]) -> list[Evidence]:
    """Evidence that finite inputs gave NaN or inf, if any did."""
    bad = [call for call in calls if not np.isfinite(call.u).all()]
    if not bad:
        return []
    fraction = float(np.mean(~np.isfinite(bad[0].u)))
    meaning = "fraction of outputs that are NaN or inf"
    return [Evidence(where=bad[0].where, observed=fraction, expected=0.0, p_value=0.0, num_tests=1, meaning=meaning)]
