"""Means and rates with the error that goes with them."""

import math
from dataclasses import dataclass

from scipy.stats import beta

from asfl_privacy.accounting.checks import check_integer
from asfl_privacy.attacks.guards import check_confidence


@dataclass(frozen=True, kw_only=True)
class MeanError:
    """A mean over records and its standard error (0 for a single record, where it is not known)."""

    mean: float
    standard_error: float
    num_records: int


def mean_error(values: list[float]) -> MeanError:
    """Mean and standard error, the latter s/√n with s² over n − 1.

    Args:
        values: one a record, finite.

    Raises:
        ValueError: no values, NaN or inf.

    Example:
        >>> mean_error([1.0, 3.0])
        MeanError(mean=2.0, standard_error=1.0, num_records=2)
    """
    count = len(values)
    if not count or not all(map(math.isfinite, values)):
        raise ValueError(
            f"{count} values to average, NaN or inf among them or none at all: pass one finite value a record"
        )
    mean = math.fsum(values) / count
    if count == 1:
        return MeanError(mean=mean, standard_error=0.0, num_records=1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return MeanError(mean=mean, standard_error=math.sqrt(variance / count), num_records=count)


def rate_interval(successes: int, *, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Two-sided Clopper–Pearson interval of a success probability.

    Args:
        successes: 0 … trials.
        trials: at least 1.
        confidence: coverage, in (0, 1).

    Returns:
        (low, high).

    Raises:
        ValueError: counts or a confidence out of range.

    Guarantee:
        For independent trials of one probability, the interval covers it with at least the asked confidence. Where the
        probability differs between trials it is the mean that is covered; its count spreads less than a binomial one.

    Source:
        Clopper & Pearson 1934; differing probabilities: Hoeffding 1956, theorem 4.

    Example:
        >>> [round(end, 4) for end in rate_interval(0, trials=10)]  # high = 1 − 0.025^(1/10)
        [0.0, 0.3085]
    """
    trials = check_integer("trials", trials, minimum=1)
    successes = check_integer("successes", successes, minimum=0)
    if successes > trials:
        raise ValueError(f"successes is {successes}: there were only {trials} trials; count again")
    tail = (1.0 - check_confidence(confidence)) / 2.0
    low = 0.0 if successes == 0 else float(beta.ppf(tail, successes, trials - successes + 1))
    high = 1.0 if successes == trials else float(beta.ppf(1.0 - tail, successes + 1, trials - successes))
    return low, high
