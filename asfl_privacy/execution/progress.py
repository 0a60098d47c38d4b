"""What a run has come to: evaluations, totals, and the state after so many rounds; all that a checkpoint must hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from asfl_privacy.accounting import Ledger
from asfl_privacy.execution.charging import Account
from asfl_privacy.federated import State, Traffic
from asfl_privacy.federated.stopwatch import Seconds
from asfl_privacy.mechanisms import ReleasePlan


@dataclass(frozen=True)
class Evaluation:
    """One evaluation on the test records, after `round` rounds.

    Attributes:
        round: Rounds done.
        accuracy: Of the global network, 0–1; None for a method that has none.
        loss: Its mean cross-entropy, or None.
        sensitivity: Sensitivity that the round's noise was calibrated from; None without private releases.
        noise_scale: σ or b of the round; None without private releases.
        traffic: Bytes by channel so far.
        seconds: Time by phase since the evaluation before; clients' phases are summed over clients.
        peak_memory: Most bytes that this process has held in memory so far.
        measures: What the method itself measures, by column.
    """

    round: int
    accuracy: float | None
    loss: float | None
    sensitivity: float | None
    noise_scale: float | None
    traffic: Traffic = field(default_factory=Traffic)
    seconds: Seconds = field(default_factory=dict)
    peak_memory: int = 0
    measures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanFacts:
    """What a report needs of the plan of one round's releases.

    Attributes:
        sensitivity: Δ at the radius.
        scale: σ or b.
        noise_stddev: σ or √2·b.
        rounding: How the sensitivity accounts for rounding.
        certificate_method: How what runs before the noise was bounded; None where the sensitivity needs no certificate.
    """

    sensitivity: float
    scale: float
    noise_stddev: float
    rounding: str
    certificate_method: str | None


@dataclass(frozen=True)
class FailureNote:
    """A client that a tolerant run went on without.

    Attributes:
        round: Round number.
        client: Client number.
        phase: `collect` or `train`.
        reason: In one line.
    """

    round: int
    client: int
    phase: str
    reason: str


@dataclass(frozen=True)
class Progress:
    """A run after `rounds_done` rounds.

    Attributes:
        rounds_done: Rounds done.
        state: The state after them.
        account: What has been charged, or None without privacy.
        evaluations: In order of rounds.
        largest_plan: Of the round with the most noise, or None.
        traffic: Bytes by channel.
        drawn: Records drawn in all local steps.
        drawn_remote: How many of them came from another client.
        failures: Clients that a tolerant run went on without.
        seconds: Wall time of the rounds, evaluation included.
    """

    rounds_done: int
    state: State
    account: Account | None
    evaluations: tuple[Evaluation, ...] = ()
    largest_plan: PlanFacts | None = None
    traffic: Traffic = field(default_factory=Traffic)
    drawn: int = 0
    drawn_remote: int = 0
    failures: tuple[FailureNote, ...] = ()
    seconds: float = 0.0

    @property
    def remote_fraction(self) -> float:
        """α, the share of remote records in all records drawn."""
        return self.drawn_remote / self.drawn if self.drawn else 0.0

    @property
    def ledger(self) -> Ledger | None:
        """Every private release that was delivered; None without privacy, where no account would be true."""
        return None if self.account is None else self.account.ledger

    @property
    def held_back(self) -> int:
        """Records that were not used because their budget was spent."""
        return 0 if self.account is None else int(self.account.held_back.sum())


def plan_facts(plan: ReleasePlan) -> PlanFacts:
    """The facts of a plan."""
    certificate = None if plan.sensitivity.is_clip_only else plan.certificate
    return PlanFacts(
        sensitivity=plan.sensitivity.value,
        scale=plan.scale,
        noise_stddev=plan.noise_stddev,
        rounding=plan.sensitivity.rounding,
        certificate_method=None if certificate is None else certificate.method,
    )
