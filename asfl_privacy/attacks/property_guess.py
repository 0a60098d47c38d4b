"""The property guess: a classifier that reads a property of the record, its label say, from released activations."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from asfl_privacy.attacks.guards import check_batch, check_confidence, check_labels
from asfl_privacy.attacks.intervals import rate_interval

STRENGTHS = (1e-4, 1e-2, 1.0)
"""Inverse penalties tried on a quarter of the auxiliary records."""


@dataclass(frozen=True, kw_only=True)
class PropertyGuess:
    """How often the property is read off.

    Attributes:
        accuracy: Share of records whose property is guessed.
        low: Lower end of its confidence interval.
        high: Upper end.
        confidence: Coverage of the interval.
        majority_rate: Share that the auxiliary records' most frequent value would get: the guess of one who sees nothing.
        num_records: Records guessed at.
    """

    accuracy: float
    low: float
    high: float
    confidence: float
    majority_rate: float
    num_records: int


def guess_property(
    auxiliary_released: Tensor,
    auxiliary_property: Tensor,
    released: Tensor,
    record_property: Tensor,
    *,
    confidence: float = 0.95,
) -> PropertyGuess:
    """Fit a logistic regression to releases of auxiliary records, and guess the property of those attacked.

    Args:
        auxiliary_released: released activations of the attacker's own records, shape (n, ...).
        auxiliary_property: their property, integers or truth values, shape (n,), of at least two values.
        released: activations attacked, shape (m, ...).
        record_property: the truth, shape (m,); used for counting alone.
        confidence: coverage of the interval.

    Returns:
        Accuracy with its Clopper–Pearson interval, against the majority rate.

    Raises:
        ValueError: shapes that differ, NaN, inf, a property of one value.

    Guarantee:
        The interval covers the fitted classifier's accuracy on records of this kind with at least the asked confidence;
        a better classifier may exist.

    Example:
        >>> import torch
        >>> values = torch.arange(40) % 2
        >>> rows = values.reshape(-1, 1).float()
        >>> guess_property(rows, values, rows[:10], values[:10]).accuracy
        1.0
    """
    auxiliary_released = check_batch(auxiliary_released, what="auxiliary_released")
    released = check_batch(released, what="released", shape=tuple(auxiliary_released.shape[1:]))
    confidence = check_confidence(confidence)
    known = check_labels(auxiliary_property, what="auxiliary_property", count=len(auxiliary_released)).cpu().numpy()
    truth = check_labels(record_property, what="record_property", count=len(released)).cpu().numpy()
    values, counts = np.unique(known, return_counts=True)
    if len(values) < 2:
        raise ValueError(f"auxiliary_property is {values[0]} throughout: two values are due; there is nothing to guess")
    guessed = _fit_and_guess(_rows(auxiliary_released), known, _rows(released))
    hits = int(np.sum(guessed == truth))
    low, high = rate_interval(hits, trials=len(truth), confidence=confidence)
    return PropertyGuess(
        accuracy=hits / len(truth),
        low=low,
        high=high,
        confidence=confidence,
        majority_rate=float(np.mean(truth == values[np.argmax(counts)])),
        num_records=len(truth),
    )


def _fit_and_guess(
    rows: NDArray[np.float64], known: NDArray[np.generic], attacked: NDArray[np.float64]
) -> NDArray[np.generic]:
    from sklearn.exceptions import ConvergenceWarning  # a second to import, which other attacks need not pay
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    cut = max(1, len(rows) * 3 // 4)
    if len(np.unique(known[:cut])) < 2 or cut == len(rows):
        strengths: tuple[float, ...] = (1e-2,)  # too few records to choose with
    else:
        strengths = STRENGTHS
    models = [make_pipeline(StandardScaler(), LogisticRegression(C=C, max_iter=100)) for C in strengths]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a classifier that stopped early is still a classifier
        if len(models) > 1:
            scores = [float(model.fit(rows[:cut], known[:cut]).score(rows[cut:], known[cut:])) for model in models]
            models = [models[int(np.argmax(scores))]]
        guessed: NDArray[np.generic] = models[0].fit(rows, known).predict(attacked)
    return guessed


def _rows(released: Tensor) -> NDArray[np.float64]:
    return released.flatten(1).double().cpu().numpy()
