"""The report in words and as data."""

import json
import math

from audit.mutants import GAUSSIAN, honest, normal

from asfl_privacy import audit
from asfl_privacy.audit import AuditReport, Breach, PartResult


def test_a_breach_is_one_line_with_value_claim_and_place():
    breach = Breach(part="scale", where="eval mode, row 3", observed=0.5, expected=1.0, p_value=1e-20, meaning="scale")
    assert breach.message == "scale: scale is 0.5, claimed 1 (eval mode, row 3; p = 1.0e-20)"


def test_the_lower_bound_is_printed_rounded_down():
    """Catches: a bound of .9996 printed as 1.000."""
    report = AuditReport(
        passed=True,
        breaches=(),
        epsilon_claimed=1.0,
        epsilon_low=0.9996,
        delta=1e-5,
        alpha=1e-6,
        num_residuals=10,
        parts=(PartResult(name="scale", ran=False, num_tests=0),),
    )
    assert "at least 0.999 at delta 1e-05, claimed 1" in report.summary()
    assert "scale not run" in report.summary()


def test_a_report_is_json():
    def respond(x):
        return (x + normal(x.shape, 1.0)).to(x.dtype) * math.nan

    for report in (audit.run(honest(GAUSSIAN), GAUSSIAN, parts=("scale",)), audit.run(respond, GAUSSIAN)):
        data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        assert data["passed"] == report.passed
        assert [breach["message"] for breach in data["breaches"]] == [breach.message for breach in report.breaches]
        assert [part["name"] for part in data["parts"]] == [part.name for part in report.parts]
        assert "seconds" not in data
