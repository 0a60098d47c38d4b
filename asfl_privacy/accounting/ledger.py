"""The ledger: what was released of every record, and the ε it adds up to."""

import math
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from asfl_privacy.accounting.bracket import EpsilonBracket
from asfl_privacy.accounting.checks import (
    check_choice,
    check_delta,
    check_norm,
    check_radius,
    check_real,
    norm_word,
    number_words,
)
from asfl_privacy.accounting.event import EventClass, check_vector, make_event, multiplier_at
from asfl_privacy.accounting.gaussian import composed_gaussian_epsilon
from asfl_privacy.accounting.rationals import fraction_down, fraction_up
from asfl_privacy.accounting.storage import read_document, write_document
from asfl_privacy.accounting.totals import Group, Ints, largest_mixed_epsilon, largest_sum, merge_counts

FORMAT, VERSION = "asfl-privacy ledger", 1
PRIVACY_UNIT = "one record (example-level, local)"
ARITHMETIC = "ideal arithmetic"
HEADS_NOTE = (
    "conditional on the sequence of heads: heads are learned from private data through model updates, so the total is "
    "unconditional only if the updates are protected too"
)


@dataclass(frozen=True, kw_only=True)
class LedgerCounts:
    """How much a ledger holds: distinct records, releases in all, and the most releases of one record."""

    records: int
    releases: int
    max_releases_per_record: int


@dataclass(kw_only=True, eq=False)
class Ledger:
    """Columnar account of releases: event classes, and an integer count per record in each.

    Args:
        p: norm of the neighbouring relation (1, 2 or inf) in raw input units.
        radius: R > 0, the largest p-distance of two neighbouring records; "any" for any two records of the input box.
        privacy_unit: what one neighbour differs in; only the unit named here is supported.
        arithmetic: what the noise arithmetic is assumed to be.
        heads_note: what the total is conditional on.

    Guarantee:
        ``epsilon`` is the maximum over records of the composed ε of ALL releases of that record: recipients are assumed
        to collude, and no amplification by sampling is claimed, because a recipient sees what it received.

    Source:
        Composition of Gaussians: μ² = Σ 1/z² (Dong, Roth & Su 2022, Corollary 3.3); Laplace: basic composition.

    Example:
        >>> ledger = Ledger(p=2, radius=0.1)
        >>> fixed = {"channel": "activations", "mechanism": "gaussian", "noise_multiplier": 10.0}
        >>> for round_number in range(100):
        ...     ledger.record(**fixed, round=round_number, records=[3, 7])
        >>> round(ledger.epsilon(delta=1e-5).high, 3)
        4.377
    """

    p: float
    radius: float | str
    privacy_unit: str = PRIVACY_UNIT
    arithmetic: str = ARITHMETIC
    heads_note: str = HEADS_NOTE
    _columns: dict[EventClass, tuple[Ints, Ints]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.p = check_norm(self.p)
        self.radius = check_radius(self.radius)
        check_choice("privacy_unit", self.privacy_unit, (PRIVACY_UNIT,))
        check_choice("arithmetic", self.arithmetic, (ARITHMETIC,))
        check_choice("heads_note", self.heads_note, (HEADS_NOTE,))

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same facts, classes and counts, to the last bit."""
        if not isinstance(other, Ledger):
            return NotImplemented
        return (
            all(getattr(self, name) == getattr(other, name) for name in _FACTS)
            and self._columns.keys() == other._columns.keys()
            and all(
                np.array_equal(mine, theirs)
                for event, column in self._columns.items()
                for mine, theirs in zip(column, other._columns[event], strict=True)
            )
        )

    @property
    def relation(self) -> str:
        """The neighbouring relation in words."""
        if self.radius == "any":
            return "replace one record by any other record of the input box"
        radius = number_words(float(self.radius))
        return f"replace one record by another at ℓ{norm_word(self.p)} distance at most {radius} (raw input units)"

    @property
    def event_classes(self) -> tuple[EventClass, ...]:
        """The event classes, in the order in which they were first recorded."""
        return tuple(self._columns)

    @property
    def channels(self) -> tuple[str, ...]:
        """The channels with at least one release, sorted."""
        return tuple(sorted({event.channel for event in self._columns}))

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """The mechanisms with at least one release, sorted."""
        return tuple(sorted({event.mechanism for event in self._columns}))

    @property
    def counts(self) -> LedgerCounts:
        """Distinct records, releases in all, and the most releases of one record."""
        ids, totals = merge_counts(self._columns.values())
        return LedgerCounts(
            records=len(ids), releases=int(totals.sum()), max_releases_per_record=int(totals.max(initial=0))
        )

    def record(
        self,
        *,
        channel: str,
        mechanism: str,
        noise_multiplier: float,
        round: int,
        records: ArrayLike,
        whole_record_multiplier: float | None = None,
    ) -> None:
        """Add one release of each record named; a record named twice is counted twice.

        Args:
            channel: "activations", "labels" or "updates".
            mechanism: "gaussian" or "laplace".
            noise_multiplier: σ/Δ or b/Δ > 0, Δ the sensitivity at the ledger's radius.
            round: number of the round, ≥ 0.
            records: ids of the records released, shape (n,), integers ≥ 0, n ≥ 1.
            whole_record_multiplier: the same with Δ for any two records of the input box; None where it is not known.

        Raises:
            ValueError: if a value is out of range; the ledger is then unchanged.
        """
        event = make_event(
            channel=channel,
            mechanism=mechanism,
            noise_multiplier=noise_multiplier,
            round_number=round,
            whole_record_multiplier=whole_record_multiplier,
            radius=self.radius,
        )
        ids, counts = np.unique(check_vector("records", records, minimum=0), return_counts=True)
        columns = [(ids, counts.astype(np.int64))]
        if event in self._columns:
            columns.append(self._columns[event])
        self._columns[event] = merge_counts(columns)

    def delta_used(self, delta: float) -> float:
        """The δ that goes with ``epsilon(delta=delta).high``: 0 where no Gaussian was released."""
        return check_delta(delta, zero_allowed=True) if "gaussian" in self.mechanisms else 0.0

    def epsilon(self, *, delta: float, distance: float = 1.0) -> EpsilonBracket:
        """ε of everything released so far: the maximum over records.

        Args:
            delta: δ in (0, 1); 0 is allowed where no Gaussian was released.
            distance: k ≥ 1, the distance of the two records in multiples of the radius; inf for any two records.

        Returns:
            The bracket. Gaussian alone: both ends agree up to rounding. Laplace alone: ``high`` is the sum of the pure
            ε and holds at δ=0, ``low`` is that sum at δ=0 and the strongest single release's exact ε(δ) otherwise.
            Mixed: ``high`` adds both, ``low`` is the larger of the two.

        Raises:
            ValueError: if δ is out of range, δ is 0 with Gaussian releases, or distance < 1.

        Guarantee:
            Rounded outward. At distance k·R a release has the multiplier max(z/k, z_whole): a certificate L·R + slack
            and a cap 2C both satisfy Δ(kR) ≤ k·Δ(R) for k ≥ 1, and no two records differ by more than Δ_whole. With
            z_whole unknown, ``distance=inf`` gives ``high`` = inf.

        Edge cases:
            Nothing released: 0. The bracket assumes the multipliers were fixed beforehand.
        """
        delta, distance = self._check_delta(delta), _check_distance(distance)
        gaussian, laplace = self._groups("gaussian", distance), self._groups("laplace", distance)
        if gaussian is None or laplace is None:
            return EpsilonBracket(low=self.epsilon(delta=delta).low, high=math.inf, delta=self.delta_used(delta))
        pure_low, pure_high = largest_sum(laplace, power=1)
        high_laplace = fraction_up(pure_high)
        if delta == 0.0:
            low_laplace = fraction_down(pure_low)
        else:
            low_laplace = max((_laplace_low(group.multiplier, delta) for group in laplace), default=0.0)
        if not gaussian:
            return EpsilonBracket(low=low_laplace, high=high_laplace, delta=0.0)
        square_low, square_high = largest_sum(gaussian, power=2)
        low_gaussian = composed_gaussian_epsilon(square_low, delta=delta).low
        if laplace:
            high = largest_mixed_epsilon(gaussian, laplace, delta=delta)
        else:
            high = composed_gaussian_epsilon(square_high, delta=delta).high
        return EpsilonBracket(low=max(low_laplace, low_gaussian), high=high, delta=delta)

    def largest_release(self, *, delta: float, distance: float = 1.0) -> float:
        """ε of the strongest single release, rounded up; 0 where nothing was released.

        Args:
            delta: δ in (0, 1); 0 is allowed where no Gaussian was released. A Laplace release is taken at δ=0.
            distance: k ≥ 1, see ``epsilon``.

        Returns:
            ε ≥ 0, which holds at ``delta_used(delta)``; inf where a multiplier at ``distance`` is not known.

        Raises:
            ValueError: see ``epsilon``.
        """
        delta, distance = self._check_delta(delta), _check_distance(distance)
        gaussian, laplace = self._groups("gaussian", distance), self._groups("laplace", distance)
        if gaussian is None or laplace is None:
            return math.inf
        found = [composed_gaussian_epsilon(group.weight(2), delta=delta).high for group in gaussian]
        found += [fraction_up(group.weight(1)) for group in laplace]
        return max(found, default=0.0)

    def save(self, path: str | Path) -> None:
        """Write the ledger as versioned JSON, atomically.

        Args:
            path: file to write. Body: {"p": 1 | 2 | "inf", "radius": number | "any", "privacy_unit", "arithmetic",
                "heads_note", "classes": [{"channel", "mechanism", "noise_multiplier", "round",
                "whole_record_multiplier": number | null, "records": [id, …], "counts": [n, …]}, …]}; see storage.py
                for the envelope.

        Raises:
            OSError: if the folder cannot be written; the old file is then untouched.

        Guarantee:
            ``Ledger.load`` gives an equal ledger, to the last bit of every number.
        """
        classes = [
            {**asdict(event), "records": ids.tolist(), "counts": counts.tolist()}
            for event, (ids, counts) in self._columns.items()
        ]
        body = {name: getattr(self, name) for name in _FACTS} | {"p": norm_word(self.p), "classes": classes}
        write_document(Path(path), name=FORMAT, version=VERSION, body=body)

    @classmethod
    def load(cls, path: str | Path) -> "Ledger":
        """Read a ledger written by ``save``.

        Args:
            path: file to read.

        Returns:
            The ledger, ready to be extended.

        Raises:
            ValueError: if the file is corrupted, truncated, of another version, or holds a value that
                ``record`` refuses.
            OSError: if the file cannot be read.
        """
        path = Path(path)
        body = read_document(path, name=FORMAT, version=VERSION)
        try:
            if set(body) != {*_FACTS, "classes"} or not isinstance(body["classes"], list):
                raise ValueError(f"keys {sorted(body)} where {sorted({*_FACTS, 'classes'})} are due")
            ledger = cls(**{name: body[name] for name in _FACTS})
            for entry in body["classes"]:
                event, column = _read_class(entry, radius=ledger.radius)
                if event in ledger._columns:
                    raise ValueError(f"the class {event} occurs twice")
                ledger._columns[event] = column
        except ValueError as error:
            raise ValueError(f"{path} is no valid ledger: {error}; restore a file written by Ledger.save") from None
        return ledger

    def _check_delta(self, delta: float) -> float:
        delta = check_delta(delta, zero_allowed=True)
        if delta == 0.0 and "gaussian" in self.mechanisms:
            raise ValueError(
                "delta is 0.0: Gaussian releases have no finite epsilon at delta 0; pass 0 < delta < 1, e.g. delta=1e-5"
            )
        return delta

    def _groups(self, mechanism: str, distance: float) -> list[Group] | None:
        """The releases of one mechanism by their exact multiplier at ``distance``; None if one has none there."""
        found: dict[Fraction, list[tuple[Ints, Ints]]] = {}
        for event, column in self._columns.items():
            if event.mechanism == mechanism:
                multiplier = multiplier_at(event, distance)
                if multiplier is None:
                    return None
                found.setdefault(multiplier, []).append(column)
        merged = {multiplier: merge_counts(columns) for multiplier, columns in found.items()}
        return [Group(multiplier=key, ids=ids, counts=counts) for key, (ids, counts) in merged.items()]


_FACTS = ("p", "radius", "privacy_unit", "arithmetic", "heads_note")


def _check_distance(distance: float) -> float:
    if isinstance(distance, float) and math.isinf(distance) and distance > 0.0:
        return distance
    fix = "pass distance=1 for the radius itself, or math.inf for any two records"
    return check_real("distance", distance, minimum=1.0, exclusive=False, fix=fix)


def _laplace_low(multiplier: Fraction, delta: float) -> float:
    """A lower bound of one Laplace release's exact ε(δ) = 1/z + 2 ln(1 − δ)."""
    pure, saved = float(1 / multiplier), -2.0 * math.log1p(-delta)
    return max(0.0, pure - saved - 4 * 2.0**-52 * (pure + saved))


def _read_class(entry: object, *, radius: float | str) -> tuple[EventClass, tuple[Ints, Ints]]:
    names = {*EventClass.__dataclass_fields__, "records", "counts"}
    if not isinstance(entry, dict) or set(entry) != names:
        raise ValueError(f"a class must hold exactly {sorted(names)}")
    event = make_event(
        channel=entry["channel"],
        mechanism=entry["mechanism"],
        noise_multiplier=entry["noise_multiplier"],
        round_number=entry["round"],
        whole_record_multiplier=entry["whole_record_multiplier"],
        radius=radius,
    )
    ids, counts = (
        check_vector("records", entry["records"], minimum=0),
        check_vector("counts", entry["counts"], minimum=1),
    )
    if len(ids) != len(counts) or np.any(np.diff(ids) <= 0):
        raise ValueError(f"round {event.round}: records must be sorted and distinct, with one count each")
    return event, (ids, counts)
