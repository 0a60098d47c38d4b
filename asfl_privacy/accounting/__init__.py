"""Accounting: closed forms, calibration, the ledger and the statement. Numbers only."""

from asfl_privacy.accounting.bracket import EpsilonBracket
from asfl_privacy.accounting.calibration import Calibration, calibrate
from asfl_privacy.accounting.event import EventClass
from asfl_privacy.accounting.gaussian import (
    classic_noise_multiplier,
    composed_gaussian_epsilon,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_noise_multiplier,
)
from asfl_privacy.accounting.laplace import (
    laplace_delta,
    laplace_epsilon,
    laplace_noise_multiplier,
    laplace_total_epsilon,
)
from asfl_privacy.accounting.ledger import Ledger, LedgerCounts
from asfl_privacy.accounting.statement import StatementFacts, statement, warnings_of

__all__ = [
    "Calibration",
    "EpsilonBracket",
    "EventClass",
    "Ledger",
    "LedgerCounts",
    "StatementFacts",
    "calibrate",
    "classic_noise_multiplier",
    "composed_gaussian_epsilon",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_noise_multiplier",
    "laplace_delta",
    "laplace_epsilon",
    "laplace_noise_multiplier",
    "laplace_total_epsilon",
    "statement",
    "warnings_of",
]
