"""Part 3, family: the residuals follow the claimed law, its middle and its tails."""

from __future__ import annotations

import numpy as np

from asfl_privacy.audit.claim import Claim
from asfl_privacy.audit.residuals import Residuals
from asfl_privacy.audit.significance import Evidence, kolmogorov_smirnov, tail_count

TAILS = (1e-1, 1e-2, 1e-3, 1e-4)


def check_family(residuals: Residuals, *, claim: Claim) -> list[Evidence]:
    """Kolmogorov–Smirnov against the claimed law, pooled and in each setting; and exact counts in its tails.

    Args:
        residuals: of all calls.
        claim: gives the family.

    Returns:
        The worst test of each group.

    Guarantee:
        For an honest layer every p-value is an upper bound for every sample size. More noise than claimed is another
        law, so it is a breach here: write the true scale into the claim.
    """
    settings = {
        name: np.concatenate([call.u.ravel() for call in calls]) for name, calls in residuals.settings().items()
    }
    everything = np.concatenate(list(settings.values()))
    return [
        _worst_gap({"all residuals": everything}, claim=claim),
        _worst_gap(settings, claim=claim),
        _worst_tail(everything, claim=claim),
    ]


def _worst_gap(samples: dict[str, np.ndarray], *, claim: Claim) -> Evidence:
    tests = {name: kolmogorov_smirnov(sample, family=claim.family) for name, sample in samples.items()}
    name = min(tests, key=lambda name: tests[name][1])
    gap, p_value = tests[name]
    return Evidence(
        where=name,
        observed=gap,
        expected=0.0,
        p_value=min(1.0, p_value * len(tests)),
        num_tests=len(tests),
        meaning=f"Kolmogorov–Smirnov distance from the claimed {claim.family} law",
    )


def _worst_tail(u: np.ndarray, *, claim: Claim) -> Evidence:
    counts = {probability: tail_count(u, probability=probability, family=claim.family) for probability in TAILS}
    probability = min(counts, key=lambda probability: counts[probability][1])
    beyond, p_value = counts[probability]
    return Evidence(
        where=f"all residuals, tails of probability {probability:g}",
        observed=beyond / u.size,
        expected=probability,
        p_value=min(1.0, p_value * len(counts)),
        num_tests=len(counts),
        meaning="fraction of residuals in the tails",
    )
