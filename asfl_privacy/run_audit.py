"""Audit of a run: does its code add the noise that its statement claims, and does its statement follow from its ledger?"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import sensitivity
from asfl_privacy import audit
from asfl_privacy.accounting import gaussian_epsilon, laplace_epsilon
from asfl_privacy.accounting.statement import statement, statement_record
from asfl_privacy.accounting.statement_facts import StatementFacts
from asfl_privacy.federated import Privacy
from asfl_privacy.federated.local_training import noise_adder, update_noise
from asfl_privacy.federated.private_updates import AddNoise, noised_sum
from asfl_privacy.mechanisms import noise_rows, rows_before_noise, split_head
from asfl_privacy.mechanisms.label_randomiser import randomize_labels
from asfl_privacy.mechanisms.lattice import SystemSource
from asfl_privacy.run import epsilon_columns
from asfl_privacy.run_files import ROW_FILE, STATEMENT_FILE, STATEMENT_JSON_FILE, file_digest
from asfl_privacy.run_folder import FinishedRun

UPDATE_VALUES = 512
"""Coordinates of the made-up gradient on which the noise of updates is audited; it is the same on every coordinate."""


@dataclass(frozen=True, kw_only=True)
class RunAudit:
    """What an audit says of a run.

    Attributes:
        reports: By channel, the audit of its noise as the code draws it now.
        findings: What else does not hold, one line each; empty where all does.
        checked: What else was checked and holds, one line each.
    """

    reports: dict[str, audit.AuditReport]
    findings: tuple[str, ...]
    checked: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.findings and all(report.passed for report in self.reports.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "passed": self.passed,
            "findings": list(self.findings),
            "checked": list(self.checked),
            "channels": {channel: report.to_dict() for channel, report in self.reports.items()},
        }


def audit_run(run: FinishedRun, *, alpha: float = 1e-6, seed: int = 0) -> RunAudit:
    """Audit a finished run.

    Args:
        run: From `read_run`.
        alpha: Probability of any breach reported of an honest run's noise, over all channels together.
        seed: Of the test inputs; the noise is fresh from the system's source, also for a run that drew it from a seed.

    Returns:
        The audit: the noise of each protected channel by `audit.run`, statement and row recomputed from the ledger alone,
        and the last head's certificate against a search for pairs that beat it.

    Raises:
        ValueError: A run without noise, which claims nothing.
    """
    privacy = run.run.privacy
    if privacy is None or run.ledger is None:
        raise ValueError(f"{run.folder} is a run without noise, which claims nothing; audit a run with --mech gaussian")
    findings, checked = _check_documents(run)
    more_findings, more_checked = _check_certificate(run)
    wanted: dict[str, Callable[[float], audit.AuditReport]] = {}
    if run.plan is not None:
        wanted["activations"] = lambda share: _audit_activations(run, alpha=share, seed=seed)
    if privacy.label_epsilon is not None:
        wanted["labels"] = lambda share: _audit_labels(run, privacy, alpha=share)
    if privacy.updates != "none":
        wanted["updates"] = lambda share: _audit_updates(run, privacy, alpha=share, seed=seed)
    reports = {channel: make(alpha / len(wanted)) for channel, make in wanted.items()}
    return RunAudit(reports=reports, findings=(*findings, *more_findings), checked=(*checked, *more_checked))


def _check_documents(run: FinishedRun) -> tuple[list[str], list[str]]:
    """Statement and row against what the ledger alone gives."""
    assert run.ledger is not None
    if run.ledger.facts is None:
        return ["ledger.json holds no facts of the run, so its statement cannot be made anew"], []
    facts = StatementFacts.from_dict(run.ledger.facts)
    findings: list[str] = []
    checked: list[str] = []
    record = statement_record(run.ledger, facts=facts)
    stored = json.loads((run.folder / STATEMENT_JSON_FILE).read_text(encoding="utf-8"))
    text = (run.folder / STATEMENT_FILE).read_text(encoding="utf-8")
    for name, holds in (
        (STATEMENT_JSON_FILE, stored == json.loads(json.dumps(record))),
        (STATEMENT_FILE, text == statement(run.ledger, facts=facts)),
    ):
        line = "follows from ledger.json alone" if holds else "is not what ledger.json gives"
        (checked if holds else findings).append(f"{name} {line}")
    row = json.loads((run.folder / ROW_FILE).read_text(encoding="utf-8"))
    changed = [name for name, digest in row["sha256"].items() if file_digest(run.folder / name) != digest]
    spent = epsilon_columns(run.ledger, delta=facts.delta)
    same_row = all(row["row"].get(column) == value for column, value in spent.items())
    for holds, good, bad in (
        (not changed, "no file has changed since it was written", f"changed since written: {', '.join(changed)}"),
        (same_row, "the row's ε are those of the ledger", "the row's ε are not those of the ledger"),
    ):
        (checked if holds else findings).append(good if holds else bad)
    total = run.ledger.epsilon(delta=facts.delta).high
    if facts.total_epsilon is not None:
        holds = total <= facts.total_epsilon
        (checked if holds else findings).append(
            f"total ε {total:.6g} is {'within' if holds else 'ABOVE'} the budget {facts.total_epsilon:g}"
        )
    return findings, checked


def _check_certificate(run: FinishedRun) -> tuple[list[str], list[str]]:
    """The last head's certificate against a search for pairs of records."""
    if run.plan is None or run.plan.certificate is None:
        return [], []
    certificate = run.plan.certificate
    prefix, _ = split_head(run.federation.split.head, run.plan.placement)
    try:
        found = sensitivity.lower_bound(
            prefix, p=certificate.p, q=certificate.q, input_shape=run.plan.input_shape, input_box=run.plan.input_box
        ).value
    except (ValueError, sensitivity.UnsupportedModuleError) as error:
        return [], [f"no pair search on the last head: {error}"]
    words = f"pair search on the last head reaches {found:.6g}, certified {certificate.value:.6g}"
    return ([words], []) if found > certificate.value else ([], [words])


def _audit_activations(run: FinishedRun, *, alpha: float, seed: int) -> audit.AuditReport:
    plan, privacy = run.plan, run.run.privacy
    assert plan is not None and privacy is not None and run.run.cell.target is not None  # noqa: PT018  (for the types)
    delta = run.run.cell.target.delta
    prefix, _ = split_head(run.federation.split.head, plan.placement)
    with torch.no_grad():
        shape = tuple(prefix(torch.zeros(1, *plan.input_shape)).shape[1:])
    z = plan.noise_multiplier
    gaussian = plan.mechanism.family == "gaussian"
    claim = audit.Claim(
        family=plan.mechanism.family,
        scale=plan.scale,
        input_shape=shape,
        unit="any" if plan.radius == "any" else "metric",
        sensitivity=plan.lattice.sensitivity,
        clip=plan.clip,
        spacing=plan.payload_spacing if plan.placement == "exchange" else plan.lattice.spacing,
        epsilon=gaussian_epsilon(delta, noise_multiplier=z) if gaussian else laplace_epsilon(0.0, noise_multiplier=z),
        delta=delta if gaussian else 0.0,
        noise_multiplier=z,
    )

    def layer(rows: Tensor) -> Tensor:
        return noise_rows(plan, rows, source=SystemSource())

    def tap(rows: Tensor) -> Tensor:
        return rows_before_noise(plan, rows)

    return audit.run(layer, claim, alpha=alpha, tap=tap, seed=seed)


def _audit_labels(run: FinishedRun, privacy: Privacy, *, alpha: float) -> audit.AuditReport:
    assert privacy.label_epsilon is not None
    classes, epsilon = run.data.num_classes, privacy.label_epsilon

    def randomize(labels: Tensor) -> Tensor:
        return randomize_labels(labels, num_classes=classes, epsilon=epsilon, source=SystemSource())

    return audit.run_response(randomize, num_classes=classes, epsilon=epsilon, alpha=alpha)


def _audit_updates(run: FinishedRun, privacy: Privacy, *, alpha: float, seed: int) -> audit.AuditReport:
    assert privacy.update_multiplier is not None and run.run.cell.target is not None  # noqa: PT018  (for the types)
    noise, clip = update_noise(privacy), privacy.update_clip
    claim = audit.Claim(
        family="gaussian",
        scale=noise.scale,
        input_shape=(UPDATE_VALUES,),
        unit="any",
        clip=clip,
        spacing=noise.spacing,
        delta=run.run.cell.target.delta,
        noise_multiplier=privacy.update_multiplier,
    )

    def sums(rows: Tensor, add_noise: AddNoise) -> Tensor:
        each = (row.unsqueeze(0) for row in rows.double())
        return torch.stack([noised_sum(row, clip=clip, add_noise=add_noise, spacing=noise.spacing) for row in each])

    def layer(rows: Tensor) -> Tensor:
        return sums(rows, noise_adder(noise, SystemSource()))

    def tap(rows: Tensor) -> Tensor:
        return sums(rows, lambda total: total)

    return audit.run(layer, claim, alpha=alpha, tap=tap, seed=seed, dtype=torch.float64)
