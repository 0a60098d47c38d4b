"""Audit: empirical evidence that a noise layer adds what it claims, and a lower bound on its ε."""

from asfl_privacy.audit.claim import Claim, claim_of
from asfl_privacy.audit.procedure import MODES, PARTS, run
from asfl_privacy.audit.report import AuditReport, Breach, PartResult
from asfl_privacy.audit.response import run_response

__all__ = ["MODES", "PARTS", "AuditReport", "Breach", "Claim", "PartResult", "claim_of", "run", "run_response"]
