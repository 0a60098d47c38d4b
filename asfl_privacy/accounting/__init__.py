"""Accounting: closed forms, calibration, the ledger and the statement. Numbers only."""

from asfl_privacy.accounting.bracket import EpsilonBracket
from asfl_privacy.accounting.budget import RecordBudget
from asfl_privacy.accounting.calibration import Calibration, calibrate, least_factor
from asfl_privacy.accounting.event import EventClass
from asfl_privacy.accounting.filter import RecordFilter
from asfl_privacy.accounting.gaussian import (
    classic_noise_multiplier,
    composed_gaussian_epsilon,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_noise_multiplier,
)
from asfl_privacy.accounting.journal import Journal
from asfl_privacy.accounting.laplace import (
    laplace_delta,
    laplace_epsilon,
    laplace_noise_multiplier,
    laplace_total_epsilon,
)
from asfl_privacy.accounting.ledger import Ledger
from asfl_privacy.accounting.pld import LossEvent, compose
from asfl_privacy.accounting.run_calibration import PlannedReleases, RunCalibration, calibrate_run
from asfl_privacy.accounting.sampled import sampled_epsilon
from asfl_privacy.accounting.statement import statement, statement_record
from asfl_privacy.accounting.statement_facts import StatementFacts
from asfl_privacy.accounting.statement_sentences import warnings_of
from asfl_privacy.accounting.totals import LedgerCounts

__all__ = [
    "Calibration",
    "EpsilonBracket",
    "EventClass",
    "Journal",
    "Ledger",
    "LedgerCounts",
    "LossEvent",
    "PlannedReleases",
    "RecordBudget",
    "RecordFilter",
    "RunCalibration",
    "StatementFacts",
    "calibrate",
    "calibrate_run",
    "classic_noise_multiplier",
    "compose",
    "composed_gaussian_epsilon",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_noise_multiplier",
    "laplace_delta",
    "laplace_epsilon",
    "laplace_noise_multiplier",
    "laplace_total_epsilon",
    "least_factor",
    "sampled_epsilon",
    "statement",
    "statement_record",
    "warnings_of",
]
