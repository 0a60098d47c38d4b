"""The ledger: what was released of every record, and the ε it adds up to."""

import math
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from asfl_privacy.accounting.bracket import EpsilonBracket
from asfl_privacy.accounting.checks import (
    check_choice,
    check_delta,
    check_norm,
    check_radius,
    norm_word,
    number_words,
)
from asfl_privacy.accounting.columns import Column, column_of_releases, merge_columns
from asfl_privacy.accounting.event import CHANNELS, EventClass, check_vector, make_event
from asfl_privacy.accounting.ledger_file import (
    FORMAT,
    VERSION,
    VERSIONS,
    check_facts,
    decode_classes,
    decode_clients,
    encode_class,
    encode_clients,
)
from asfl_privacy.accounting.spending import check_distance, check_spending_delta, release_epsilon, spent_epsilon
from asfl_privacy.accounting.storage import read_versions, write_document
from asfl_privacy.accounting.totals import Ints, count_releases, tally_releases
from asfl_privacy.accounting.totals import LedgerCounts as LedgerCounts

PRIVACY_UNIT = "one record (example-level, local)"
UNITS = ("record", "client")
HEADS_NOTE = (
    "conditional on the sequence of heads: heads are learned from private data through model updates, so the total is "
    "unconditional only if the updates are protected too"
)
_MOST_PARTS = 64  # columns of one event class that are kept apart before they are added up


class Ledger:
    """Columnar account of releases: event classes, and an integer count per record in each.

    Args:
        p: norm of the neighbouring relation (1, 2 or inf) in raw input units.
        radius: R > 0, the largest p-distance of two neighbouring records; "any" for any two records of the input box.
        privacy_unit: what one neighbour differs in; only the unit named here is supported.
        heads_note: what the total is conditional on.
        clients: the client of every record, shape (records,), integers ≥ 0; None where it is not kept. Needed for
            totals by client.
        facts: plain JSON values kept beside the account, for a statement to be made from the file alone.

    Guarantee:
        ``epsilon`` is the maximum over records of the composed ε of ALL releases of that record: recipients are assumed
        to collude, and no amplification by sampling is claimed, because a recipient sees what it received.

    Source:
        Composition of Gaussians: μ² = Σ 1/z² (Dong, Roth & Su 2022, Corollary 3.3); the rest: privacy-loss distributions
        (pld.py) and basic composition, whichever is less.

    Example:
        >>> ledger = Ledger(p=2, radius=0.1)
        >>> fixed = {"channel": "activations", "mechanism": "gaussian", "noise_multiplier": 10.0}
        >>> for round_number in range(100):
        ...     ledger.record(**fixed, round=round_number, records=[3, 7])
        >>> round(ledger.epsilon(delta=1e-5).high, 3)
        4.377
    """

    def __init__(
        self,
        *,
        p: float | str,
        radius: float | str,
        privacy_unit: str = PRIVACY_UNIT,
        heads_note: str = HEADS_NOTE,
        clients: ArrayLike | None = None,
        facts: dict[str, object] | None = None,
    ) -> None:
        self.p = check_norm(p)
        self.radius = check_radius(radius)
        self.privacy_unit = check_choice("privacy_unit", privacy_unit, (PRIVACY_UNIT,))
        self.heads_note = check_choice("heads_note", heads_note, (HEADS_NOTE,))
        self.clients = clients
        self.facts = facts
        self._parts: dict[EventClass, list[Column]] = {}

    @property
    def clients(self) -> Ints | None:
        """The client of every record, or None; a copy is kept of what is assigned."""
        return self._clients

    @clients.setter
    def clients(self, clients: ArrayLike | None) -> None:
        kept = None if clients is None else check_vector("clients", clients, minimum=0)
        if kept is not None and int(kept.max()) >= 2**31:
            raise ValueError(f"clients holds {int(kept.max())}: clients are numbered from 0; pass numbers below 2**31")
        self._clients = kept

    @property
    def facts(self) -> dict[str, object] | None:
        """Plain JSON values kept beside the account, or None."""
        return self._facts

    @facts.setter
    def facts(self, facts: dict[str, object] | None) -> None:
        self._facts = check_facts(facts)

    def __repr__(self) -> str:
        return f"Ledger(p={norm_word(self.p)!r}, radius={self.radius!r}, event_classes={len(self._parts)})"

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same facts, classes and counts, to the last bit."""
        if not isinstance(other, Ledger):
            return NotImplemented
        return (
            self._head() == other._head()
            and self._parts.keys() == other._parts.keys()
            and all(self._column(event).equals(other._column(event)) for event in self._parts)
        )

    __hash__ = None  # type: ignore[assignment]  # a ledger grows, so equal ones do not stay equal

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
        return tuple(self._parts)

    @property
    def channels(self) -> tuple[str, ...]:
        """The channels with at least one release, sorted."""
        return tuple(sorted({event.channel for event in self._parts}))

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """The mechanisms with at least one release, sorted."""
        return tuple(sorted({event.mechanism for event in self._parts}))

    @property
    def samplers(self) -> tuple[str, ...]:
        """The samplers that drew at least one release, sorted."""
        return tuple(sorted({event.sampler for event in self._parts}))

    @property
    def is_reproducible(self) -> bool:
        """Whether any release was drawn by a seeded sampler: no guarantee towards whoever knows or guesses the seed."""
        return "seeded" in self.samplers

    @property
    def counts(self) -> LedgerCounts:
        """Distinct records, releases in all, and the most releases of one record."""
        return count_releases(self._parts.values())

    def counts_of(self, channel: str) -> LedgerCounts:
        """The counts of one channel."""
        return count_releases(self._of(channel).values())

    def releases_of(self, event: EventClass) -> tuple[Ints, Ints]:
        """The records of one event class and the releases of each.

        Args:
            event: one of ``event_classes``.

        Returns:
            (ids, counts), shape (n,) each, ids strictly increasing; copies.

        Raises:
            ValueError: if the ledger has no such class.
        """
        if event not in self._parts:
            raise ValueError(f"event is {event!r}: the ledger holds no such class; take one of event_classes")
        column = self._column(event)
        return column.all_ids().astype(np.int64), column.all_counts().astype(np.int64)

    def record(
        self,
        *,
        channel: str,
        mechanism: str,
        noise_multiplier: float,
        round: int,
        records: ArrayLike,
        whole_record_multiplier: float | None = None,
        num_classes: int | None = None,
        sampler: str = "float",
        epsilon_excess: float = 0.0,
        tail_probability: float = 0.0,
        client_multiplier: float | None = None,
    ) -> None:
        """Add one release of each record named; a record named twice is counted twice.

        Args:
            channel: "activations", "labels" or "updates". In updates one noise draw covers all records of a client that
                take part: name in one call (or in calls with equal arguments) all records of such a release.
            mechanism: "gaussian", "laplace" or, for labels, "randomized-response".
            noise_multiplier: σ/Δ or b/Δ > 0, Δ the sensitivity at the ledger's radius; 1/ε0 for randomised response.
            round: number of the round, ≥ 0.
            records: ids of the records released, shape (n,), integers ≥ 0, n ≥ 1.
            whole_record_multiplier: the same with Δ for any two records of the input box; None where it is not known.
            num_classes: k ≥ 2 for randomised response, else None.
            sampler: "lattice", "float" or "seeded", see EventClass.
            epsilon_excess: e ≥ 0 of one release, see EventClass.
            tail_probability: τ in [0, 1) of one release, see EventClass.
            client_multiplier: of a clipped client update, see EventClass; ``records`` are then all that it depends on.

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
            num_classes=num_classes,
            sampler=sampler,
            epsilon_excess=epsilon_excess,
            tail_probability=tail_probability,
            client_multiplier=client_multiplier,
        )
        column = column_of_releases(records)
        parts = self._parts.setdefault(event, [])
        parts.append(column)
        if len(parts) > _MOST_PARTS:
            self._parts[event] = [merge_columns(parts)]

    def delta_used(self, delta: float) -> float:
        """A δ at which every figure asked with ``delta`` holds, whatever the distance, the channel and the unit.

        Returns:
            ``delta`` itself; 0 where nothing was released. A single bracket may hold at δ=0 too: see its own ``delta``.
        """
        delta = check_delta(delta, zero_allowed=True)
        return delta if self._parts else 0.0

    def epsilon(
        self, *, delta: float, distance: float = 1.0, channel: str | None = None, unit: str = "record"
    ) -> EpsilonBracket:
        """ε of everything released so far: the maximum over records, or over clients.

        Args:
            delta: δ in (0, 1); 0 is allowed where no Gaussian was released and no sampler has a tail probability.
            distance: k ≥ 1, the distance of the two records in multiples of the radius; inf for any two records.
            channel: count this channel alone; None for all of them together.
            unit: "record", or "client": two neighbours differ in every record of a client, each by at most ``distance``;
                see tally_releases for why counts add up.

        Returns:
            The bracket, see spent_epsilon; ``bracket.delta`` is the δ at which ``high`` holds.

        Raises:
            ValueError: if δ is out of range or 0 where it must not be, distance < 1, or unit is "client" and
                ``clients`` is None or names too few records.

        Guarantee:
            Rounded outward. At distance k·R a release has the multiplier max(z/k, z_whole): a certificate L·R + slack
            and a cap 2C both satisfy Δ(kR) ≤ k·Δ(R) for k ≥ 1, and no two records differ by more than Δ_whole. With
            z_whole unknown, ``distance=inf`` gives ``high`` = inf. Randomised response has z at every distance.

        Edge cases:
            Nothing released: 0. The bracket assumes the multipliers were fixed beforehand.
        """
        distance, parts = check_distance(distance), self._of(channel)
        check_choice("unit", unit, UNITS)
        delta = check_spending_delta(delta, parts)
        if unit == "client" and self._clients is None:
            raise ValueError(
                'unit is "client": the ledger does not know whose the records are; set ledger.clients to the client of '
                "every record"
            )
        if not parts:
            return EpsilonBracket(low=0.0, high=0.0, delta=0.0)
        tally = tally_releases(parts, distance=distance, clients=self._clients if unit == "client" else None)
        if tally is None:
            low = self.epsilon(delta=delta, channel=channel, unit=unit).low
            return EpsilonBracket(low=low, high=math.inf, delta=delta)
        return spent_epsilon(tally, delta=delta)

    def largest_release(self, *, delta: float, distance: float = 1.0, channel: str | None = None) -> float:
        """ε of the strongest single release, rounded up; 0 where nothing was released.

        Args:
            delta: δ, see ``epsilon``. A release of another mechanism than the Gaussian is taken at δ=0.
            distance: k ≥ 1, see ``epsilon``.
            channel: count this channel alone; None for all of them.

        Returns:
            ε ≥ 0, which holds at ``delta_used(delta)``; inf where a multiplier at ``distance`` is not known.

        Raises:
            ValueError: see ``epsilon``.
        """
        distance, parts = check_distance(distance), self._of(channel)
        return release_epsilon(parts, delta=check_spending_delta(delta, parts), distance=distance)

    def save(self, path: str | Path) -> None:
        """Write the ledger as versioned JSON, atomically.

        Args:
            path: file to write. Body: {"p": 1 | 2 | "inf", "radius": number | "any", "privacy_unit", "heads_note",
                "facts": {…} | null, "clients": null | PACKED with "length", "classes": [{every field of EventClass,
                "records": COLUMN}, …]}; PACKED and COLUMN as in columns.py, the envelope as in storage.py.

        Raises:
            OSError: if the folder cannot be written; the old file is then untouched.
            ValueError: if ``facts`` was changed to what JSON cannot hold.

        Guarantee:
            ``Ledger.load`` gives an equal ledger, to the last bit of every number.
        """
        check_facts(self.facts)
        classes = [encode_class(event, self._column(event)) for event in self._parts]
        write_document(Path(path), name=FORMAT, version=VERSION, body={**self._head(), "classes": classes})

    @classmethod
    def load(cls, path: str | Path) -> "Ledger":
        """Read a ledger written by ``save``, or a file of version 1 (its releases count as drawn by sampler "float").

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
        version, body = read_versions(path, name=FORMAT, versions=VERSIONS)
        due = {"p", "radius", "privacy_unit", "heads_note", "classes"}
        due |= {"arithmetic"} if version == 1 else {"facts", "clients"}
        try:
            if set(body) != due:
                raise ValueError(f"keys {sorted(body)} where {sorted(due)} are due")
            if version == 1:
                check_choice("arithmetic", body.pop("arithmetic"), ("ideal arithmetic",))
            entries = body.pop("classes")
            ledger = cls(**{**body, "clients": decode_clients(body.get("clients"))})
            for event, column in decode_classes(entries, version=version, radius=ledger.radius):
                ledger._parts[event] = [column]
        except ValueError as error:
            raise ValueError(f"{path} is no valid ledger: {error}; restore a file written by Ledger.save") from None
        return ledger

    def _head(self) -> dict[str, object]:
        """What the file says beside the classes."""
        return {
            "p": norm_word(self.p),
            "radius": self.radius,
            "privacy_unit": self.privacy_unit,
            "heads_note": self.heads_note,
            "facts": self.facts,
            "clients": encode_clients(self._clients),
        }

    def _column(self, event: EventClass) -> Column:
        parts = self._parts[event]
        if len(parts) > 1:
            parts[:] = [merge_columns(parts)]
        return parts[0]

    def _of(self, channel: str | None) -> dict[EventClass, list[Column]]:
        if channel is None:
            return self._parts
        check_choice("channel", channel, CHANNELS)
        return {event: parts for event, parts in self._parts.items() if event.channel == channel}
