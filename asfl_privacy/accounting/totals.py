"""Totals: what every record, or every client, has spent, and the largest of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from asfl_privacy.accounting.columns import Column, add_column, merge_columns
from asfl_privacy.accounting.event import EventClass, multiplier_at
from asfl_privacy.accounting.rationals import fraction_up
from asfl_privacy.accounting.sampler_error import escape_probability

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_EXACT_TERMS = 8
_ULP = 2.0**-52
_TINY = Fraction(1e-290)  # below it floats lose their relative precision
_DENSE = 4  # vectors by id are used up to this many times the releases held, or 2**22 ids
_CELLS, _FEWEST_CLASSES, _MOST_CLASSES = 4_000_000, 64, 256


class LargestSum:
    """The largest Σ weight·count over units (records or clients), exact for up to 8 weights, outward otherwise.

    Args:
        size: how many units.
    """

    def __init__(self, size: int) -> None:
        self._sums = np.zeros(size, dtype=np.float64)
        self._terms: list[tuple[Fraction, Ints]] = []
        self._num_terms = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return self._num_terms == 0

    def add(self, weight: Fraction, counts: Ints) -> None:
        """Add ``weight`` > 0 times ``counts`` (shape (size,), kept, not copied)."""
        self._num_terms += 1
        if self._num_terms <= _EXACT_TERMS:
            self._terms.append((weight, counts))
        factor = max(fraction_up(weight), float(_TINY))
        with np.errstate(over="ignore"):
            # inf times no release is no spending
            self._sums += counts * factor if np.isfinite(factor) else np.where(counts > 0, np.inf, 0.0)

    def upper(self) -> Floats:
        """An upper bound of every unit's sum."""
        return self._sums * (1.0 + self._relative_error)

    def bounds(self) -> tuple[Fraction, Fraction]:
        """(low, high) around the largest sum; equal for up to 8 weights.

        Raises:
            ValueError: if the sum overflows.

        Guarantee:
            low ≤ the exact maximum ≤ high.
        """
        if self.is_empty or not len(self._sums):
            return Fraction(0), Fraction(0)
        largest, error = float(self._sums.max()), self._relative_error
        if not np.isfinite(largest):
            raise ValueError(
                "the releases' total overflows: a noise multiplier is so small that no finite epsilon exists; use more noise"
            )
        if self._num_terms > _EXACT_TERMS:
            nearest, excess = Fraction(largest), Fraction(error)
            return max(Fraction(0), nearest * (1 - excess) - self._num_terms * _TINY), nearest * (1 + excess)
        nearly = np.flatnonzero(self._sums >= largest * (1.0 - 4.0 * error))
        rows = np.stack([counts[nearly] for _, counts in self._terms], axis=1)
        rows = rows[:1] if bool((rows == rows[0]).all()) else np.unique(rows, axis=0)
        exact = max(
            sum((int(count) * weight for count, (weight, _) in zip(row, self._terms, strict=True)), Fraction(0))
            for row in rows
        )
        return exact, exact

    @property
    def _relative_error(self) -> float:
        """Bound on the relative error of a float sum of positive terms, each rounded three times before it is added."""
        return (self._num_terms + 4) * _ULP


@dataclass(frozen=True, kw_only=True)
class LedgerCounts:
    """How much a ledger holds: distinct records, releases in all, and the most releases of one record."""

    records: int
    releases: int
    max_releases_per_record: int


@dataclass(frozen=True, kw_only=True)
class PureClass:
    """Releases of one pure mechanism whose multipliers lie in a narrow range (mostly one value).

    Args:
        mechanism: "laplace" or "randomized-response".
        num_classes: k of randomised response.
        strongest: the least multiplier z of them, that of the largest ε0 = 1/z.
        weakest: the largest multiplier.
    """

    mechanism: str
    num_classes: int | None
    strongest: Fraction
    weakest: Fraction


@dataclass(frozen=True, kw_only=True)
class Tally:
    """What every unit has spent.

    Args:
        squares: Σ 1/z² of Gaussian releases.
        pure: Σ 1/z of the others.
        excess: Σ epsilon_excess.
        tail: Σ tail_probability.
        escape: Σ of the probabilities that noise leaves a neighbour's table, see ``sampler_error.escape_probability``.
        classes: pure mechanisms, by family (mechanism and num_classes), strongest first within each.
        counts: releases of every unit in each of ``classes``, shape (units, classes).
    """

    squares: LargestSum
    pure: LargestSum
    excess: LargestSum
    tail: LargestSum
    escape: LargestSum
    classes: tuple[PureClass, ...]
    counts: Ints


@dataclass(frozen=True, kw_only=True)
class _Cost:
    mechanism: str
    num_classes: int | None
    multiplier: Fraction
    excess: float
    tail: float
    drawn: str  # by client: "own" noise per record, "shared" by records whose shifts add up, or for the "whole" client


def tally_releases(
    parts: Mapping[EventClass, Sequence[Column]], *, distance: float, clients: Ints | None = None
) -> Tally | None:
    """Add up what every record, or every client, has spent.

    Args:
        parts: columns by event class.
        distance: of the two neighbours in multiples of the radius, ≥ 1; inf for any two records.
        clients: client of each record id, shape (records,); None to count by record.

    Returns:
        The tally; None where a multiplier at ``distance`` is not known.

    Raises:
        ValueError: by client, if a record has no client or a Laplace release is shared by records (channel updates).

    Guarantee:
        By client, for two clients that differ in every record, each by at most ``distance``. In the channels activations
        and labels every release has its own noise and depends on one record: given all that was released before, the
        releases of a client are independent mechanisms, each with its own record's multiplier, so they compose as the
        releases of one record do, and counts add up. In channel updates one noise draw covers the sum of all records
        that took part: changing k of them moves it by at most k·Δ, so it counts as k² releases at z (μ = k/z), not as k.
        Which of its c releases of an event class a record took part in is not kept; Σ k² over the releases is largest
        where the records with most releases take part together (the conjugate partition majorises all others), which is
        what is charged. An event class of channel updates must hold whole releases. With ``client_multiplier`` one draw
        covers the client: every record that it depends on has the same count, which is the number of releases.
    """
    grouped: dict[_Cost, list[Sequence[Column]]] = {}
    for event, columns in parts.items():
        multiplier, drawn = multiplier_at(event, distance), "own"
        if clients is not None and event.channel == "updates":
            drawn = "shared" if event.client_multiplier is None else "whole"
            if event.client_multiplier is not None:
                multiplier = Fraction(event.client_multiplier)
        if multiplier is None:
            return None
        if drawn == "shared" and event.mechanism != "gaussian":
            raise ValueError(
                f"channel updates holds {event.mechanism} releases: their noise is shared by records, and no total by client "
                'is known for it; use gaussian noise for updates, or unit="record"'
            )
        cost = _Cost(
            mechanism=event.mechanism,
            num_classes=event.num_classes,
            multiplier=multiplier,
            excess=event.epsilon_excess,
            tail=event.tail_probability,
            drawn=drawn,
        )
        grouped.setdefault(cost, []).append(columns)
    known, size = _index([column for columns in parts.values() for column in columns], clients=clients)
    num_units = size if clients is None else int(clients.max(initial=-1)) + 1
    squares, pure, excess, tail, escape = (LargestSum(num_units) for _ in range(5))
    classes, place = _classes({cost for cost in grouped if cost.mechanism != "gaussian"}, num_units=num_units)
    counts = np.zeros((num_units, len(classes)), dtype=np.int64)
    for cost, listed in grouped.items():
        if clients is not None and cost.drawn == "whole":
            releases = _most_by_client(listed, clients=clients, num_clients=num_units)
        else:
            releases = _dense([column for columns in listed for column in columns], size=size, known=known)
            if clients is not None:
                releases = _added_by_client(releases, clients=clients, num_clients=num_units)
        if cost.excess:
            excess.add(Fraction(cost.excess), releases)
        if cost.tail:
            tail.add(Fraction(cost.tail), releases)
            known_shift = cost.mechanism == "gaussian" and cost.drawn != "shared"
            leaves = escape_probability(cost.tail, multiplier=cost.multiplier) if known_shift else 1.0
            escape.add(Fraction(leaves), releases)
        if cost.mechanism == "gaussian":
            weights = releases
            if cost.drawn == "shared" and clients is not None:
                weights = _shared_squares(listed, clients=clients, num_clients=num_units)
            squares.add(1 / cost.multiplier**2, weights)
        else:
            pure.add(1 / cost.multiplier, releases)
            counts[:, place[cost]] += releases
    return Tally(squares=squares, pure=pure, excess=excess, tail=tail, escape=escape, classes=classes, counts=counts)


def count_releases(parts: Iterable[Sequence[Column]]) -> LedgerCounts:
    """How much the columns hold together."""
    columns = [column for one in parts for column in one]
    known, size = _index(columns, clients=None)
    dense = _dense(columns, size=size, known=known)
    return LedgerCounts(
        records=int(np.count_nonzero(dense)),
        releases=int(dense.sum()),
        max_releases_per_record=int(dense.max(initial=0)),
    )


def _index(columns: Sequence[Column], *, clients: Ints | None) -> tuple[Ints | None, int]:
    """Where counts are kept: by id (None, largest id + 1), or by place in the sorted ids that occur."""
    stop = max((column.stop for column in columns), default=0)
    if clients is not None:
        if stop > len(clients):
            raise ValueError(
                f"record {stop - 1} has no client: clients names {len(clients)} records; pass the client of every record"
            )
        return None, len(clients)
    if stop <= max(_DENSE * sum(column.length for column in columns), 2**22):
        return None, stop
    known = np.unique(np.concatenate([column.all_ids() for column in columns])).astype(np.int64)
    return known, len(known)


def _dense(columns: Iterable[Column], *, size: int, known: Ints | None) -> Ints:
    dense = np.zeros(size, dtype=np.int64)
    for column in columns:
        add_column(dense, column, known=known)
    return dense


def _added_by_client(counts: Ints, *, clients: Ints, num_clients: int) -> Ints:
    found = np.zeros(num_clients, dtype=np.int64)
    np.add.at(found, clients, counts)
    return found


def _most_by_client(listed: Sequence[Sequence[Column]], *, clients: Ints, num_clients: int) -> Ints:
    """Over event classes, the sum of the most releases of one record of each client."""
    total = np.zeros(num_clients, dtype=np.int64)
    for columns in listed:
        merged, most = merge_columns(columns), np.zeros(num_clients, dtype=np.int64)
        np.maximum.at(most, clients[merged.all_ids()], merged.all_counts())
        total += most
    return total


def _shared_squares(listed: Sequence[Sequence[Column]], *, clients: Ints, num_clients: int) -> Ints:
    """Σ k² over the releases of each event class, k the records of the client that a release may cover at once."""
    found = np.zeros(num_clients, dtype=np.float64)
    for columns in listed:
        merged = merge_columns(columns)
        owners, counts, before = clients[merged.all_ids()], merged.all_counts(), 0
        for count in np.unique(counts):
            together = np.bincount(owners[counts >= count], minlength=num_clients).astype(np.float64)
            found += float(count - before) * together**2
            before = int(count)
    if float(found.max(initial=0.0)) >= 2.0**53:
        raise ValueError(
            "the client total of channel updates overflows: more than 2**53 shared releases are no private training; "
            'ask for unit="record"'
        )
    return found.astype(np.int64)


def _classes(costs: set[_Cost], *, num_units: int) -> tuple[tuple[PureClass, ...], dict[_Cost, int]]:
    """Pure classes and each cost's place; many multipliers of a family share classes of equal logarithmic width."""
    limit = min(_MOST_CLASSES, max(_FEWEST_CLASSES, _CELLS // max(1, num_units)))
    distinct = {(cost.mechanism, cost.num_classes or 0, cost.multiplier) for cost in costs}
    families = sorted({key[:2] for key in distinct})
    classes: list[PureClass] = []
    place: dict[_Cost, int] = {}
    for family in families:
        multipliers = sorted(key[2] for key in distinct if key[:2] == family)
        runs = [[multiplier] for multiplier in multipliers]
        if len(distinct) > limit:
            logs = np.array([_log(multiplier) for multiplier in multipliers])
            most = max(1, limit // len(families))
            shelves = np.minimum((logs - logs[0]) / max(logs[-1] - logs[0], 1e-300) * most, most - 1).astype(int)
            runs = [[multipliers[index] for index in np.flatnonzero(shelves == shelf)] for shelf in np.unique(shelves)]
        for run in runs:
            for cost in costs:
                if (cost.mechanism, cost.num_classes or 0) == family and run[0] <= cost.multiplier <= run[-1]:
                    place[cost] = len(classes)
            classes.append(
                PureClass(mechanism=family[0], num_classes=family[1] or None, strongest=run[0], weakest=run[-1])
            )
    return tuple(classes), place


def _log(number: Fraction) -> float:
    return float(np.log(float(number))) if 1e-300 < number < 1e300 else 0.0
