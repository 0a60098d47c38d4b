"""Randomised response under audit: is each label kept and changed as rarely as claimed, whatever it is?"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy.stats import beta, binom, chi2

from asfl_privacy.accounting.checks import check_epsilon, check_integer, check_real
from asfl_privacy.audit.randomness import untouched_randomness
from asfl_privacy.audit.report import AuditReport, Breach, PartResult

PART = "response"


def run_response(
    randomize: Callable[[torch.Tensor], torch.Tensor],
    *,
    num_classes: int,
    epsilon: float,
    alpha: float = 1e-6,
    num_labels: int = 20_000,
) -> AuditReport:
    """Test k-ary randomised response against its claim.

    Args:
        randomize: int64 labels (n,) → randomised labels (n,), a fresh draw for each.
        num_classes: k ≥ 2.
        epsilon: ε > 0 claimed of one draw.
        alpha: probability of any breach reported of an honest randomiser, over all tests together.
        num_labels: draws for each true label, at least 100.

    Returns:
        The report. For each true label: kept no more often than e^ε/(e^ε + k − 1) allows (one-sided), the changed ones
        spread evenly over the other labels (two-sided), no label outside; and over two calls, that they differ.
        ``epsilon_low`` is a lower confidence bound on ε: the largest ratio of the probabilities of one answer from two
        labels, by Clopper–Pearson at level alpha over all pairs.

    Raises:
        ValueError: for values out of range, or answers of another shape or type.

    Source:
        Warner (1965), generalised to k answers: Kairouz, Bonawitz & Ramage (2016).

    Example:
        >>> run_response(lambda labels: labels, num_classes=2, epsilon=1.0).passed
        False
    """
    k = check_integer("num_classes", num_classes, minimum=2)
    check_integer("num_labels", num_labels, minimum=100)
    claimed = check_epsilon(epsilon)
    alpha = check_real("alpha", alpha, minimum=0.0, exclusive=True, fix="pass e.g. alpha=1e-6")
    keep = 1.0 / (1.0 + (k - 1) * math.exp(-claimed))
    counts, breaches = np.zeros((k, k), dtype=np.int64), []
    level = alpha / (2 * k + 2)
    with untouched_randomness():
        for label in range(k):
            answers = _answers(randomize, label, count=num_labels)
            if int(answers.min()) < 0 or int(answers.max()) >= k:
                worst = float(answers.min() if int(answers.min()) < 0 else answers.max())
                breaches.append(_breach(label, worst, float(k - 1), 0.0, "an answer outside the classes"))
                answers = answers[(answers >= 0) & (answers < k)]
            counts[label] = np.bincount(answers, minlength=k)
        same = _answers(randomize, 0, count=num_labels) == _answers(randomize, 0, count=num_labels)
    agree = keep**2 + (1.0 - keep) ** 2 / (k - 1)
    repeats = int(same.sum())
    p_value = float(binom.sf(repeats - 1, num_labels, agree))
    if p_value < level:
        breaches.append(_breach(0, repeats / num_labels, agree, p_value, "the share of equal answers in two calls"))
    for label in range(k):
        kept = int(counts[label, label])
        p_value = float(binom.sf(kept - 1, num_labels, keep))
        if p_value < level:
            breaches.append(_breach(label, kept / num_labels, keep, p_value, "the share of labels kept"))
        others = np.delete(counts[label], label)
        if k > 2 and others.sum() > 0:
            even = others.sum() / (k - 1)
            statistic = float(((others - even) ** 2 / even).sum())
            p_value = float(chi2.sf(statistic, k - 2)) if even >= 5 else 1.0
            if p_value < level:
                breaches.append(_breach(label, statistic, float(k - 2), p_value, "chi-square of the changed labels"))
    return AuditReport(
        passed=not breaches,
        breaches=tuple(breaches),
        epsilon_claimed=claimed,
        epsilon_low=_ratio_low(counts, trials=num_labels, level=alpha / (k * (k - 1) * k)),
        delta=0.0,
        alpha=alpha,
        num_residuals=num_labels * k,
        parts=(PartResult(name=PART, ran=True, num_tests=2 * k + 1),),
    )


def _answers(randomize: Callable[[torch.Tensor], torch.Tensor], label: int, *, count: int) -> np.ndarray:
    given = torch.full((count,), label, dtype=torch.int64)
    answers = randomize(given)
    if not isinstance(answers, torch.Tensor) or answers.shape != given.shape or answers.is_floating_point():
        raise ValueError(
            f"randomize gave {getattr(answers, 'dtype', type(answers).__name__)}: integer labels of shape {tuple(given.shape)} "
            "are due; return one label for each"
        )
    found: np.ndarray = answers.cpu().numpy().astype(np.int64)
    return found


def _ratio_low(counts: np.ndarray, *, trials: int, level: float) -> float:
    """The largest log ratio of two labels' chances of one answer that holds with confidence."""
    low = beta.ppf(level / 2.0, np.maximum(counts, 1), trials - np.maximum(counts, 1) + 1)
    low = np.where(counts == 0, 0.0, low)
    high = np.where(counts == trials, 1.0, beta.ppf(1.0 - level / 2.0, counts + 1, np.maximum(trials - counts, 1)))
    with np.errstate(divide="ignore"):
        ratios = np.log(low.max(axis=0)) - np.log(high.min(axis=0))
    return max(0.0, float(ratios.max()))


def _breach(label: int, observed: float, expected: float, p_value: float, meaning: str) -> Breach:
    return Breach(
        part=PART, where=f"true label {label}", observed=observed, expected=expected, p_value=p_value, meaning=meaning
    )
