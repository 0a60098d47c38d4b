"""What an audit found."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Breach:
    """A claim that the layer does not keep.

    Args:
        part: the part of the audit that saw it.
        where: mode, inputs, call, coordinate or row.
        observed: the statistic as measured.
        expected: what the claim says of it.
        p_value: probability of as bad a value in an honest layer, corrected for the tests of its group; 0 where the check
            is certain.
        meaning: what the statistic is.
    """

    part: str
    where: str
    observed: float
    expected: float
    p_value: float
    meaning: str

    @property
    def message(self) -> str:
        """One line."""
        certainty = "certain" if self.p_value == 0.0 else f"p = {self.p_value:.1e}"
        return f"{self.part}: {self.meaning} is {self.observed:.4g}, claimed {self.expected:.4g} ({self.where}; {certainty})"


@dataclass(frozen=True, kw_only=True)
class PartResult:
    """One part of the audit.

    Args:
        name: of the part.
        ran: whether it tested anything.
        num_tests: tests made, all of them within the part's share of alpha.
        notes: what was refused or not possible, and why a part did not run.
    """

    name: str
    ran: bool
    num_tests: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """What an audit says of a layer and its claim.

    Args:
        passed: whether no part saw a breach. Passing is no proof: it says how small a fault could have hidden.
        breaches: each with the part that saw it.
        epsilon_claimed: ε of one release as claimed; None if the claim names none.
        epsilon_low: a lower confidence bound on ε at ``delta``; 0 where nothing was measured, or where residuals turned
            out dependent. It exceeds the ε of an honest layer with probability at most alpha. A bound far below the
            claim does not show more privacy.
        delta: δ of one release as claimed.
        alpha: probability of any breach reported of an honest layer, over all parts together.
        num_residuals: residual scalars tested.
        parts: what each part did.
    """

    passed: bool
    breaches: tuple[Breach, ...]
    epsilon_claimed: float | None
    epsilon_low: float
    delta: float
    alpha: float
    num_residuals: int
    parts: tuple[PartResult, ...]

    def summary(self) -> str:
        """Lines of text: the verdict, ε, every breach, and what was not run."""
        claimed = "not claimed" if self.epsilon_claimed is None else f"claimed {self.epsilon_claimed:.4g}"
        lines = [
            f"audit {'passed' if self.passed else 'FAILED'}: {sum(part.num_tests for part in self.parts)} tests on "
            f"{self.num_residuals} residuals, total alpha {self.alpha:g}",
            f"epsilon: at least {_down(self.epsilon_low)} at delta {self.delta:g}, {claimed}",
            *(f"breach of {breach.message}" for breach in self.breaches),
            *(f"{part.name} not run" for part in self.parts if not part.ran),
            *(f"{part.name}: {note}" for part in self.parts for note in part.notes),
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: no NaN, inf as text."""
        plain = asdict(self)
        plain["breaches"] = [{**asdict(breach), "message": breach.message} for breach in self.breaches]
        finite: dict[str, Any] = _plain(plain)
        return finite


def _plain(value: Any) -> Any:  # noqa: ANN401  (any JSON value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _down(number: float) -> str:
    """Three decimals, rounded down."""
    return f"{math.floor(number * 1000.0) / 1000.0:.3f}" if math.isfinite(number) else str(number)
