"""A bracket around ε: the value proven safe and a value proven unavoidable."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EpsilonBracket:
    """What a ledger says about ε.

    Args:
        low: no accountant can prove less for these noise multipliers when the declared sensitivity is attained.
        high: the proven ε; this is the one to report.
        delta: the δ at which ``high`` holds: 0 where no Gaussian is involved.

    Guarantee:
        low ≤ true ε ≤ high, rounding included.
    """

    low: float
    high: float
    delta: float
