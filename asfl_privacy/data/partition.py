"""Partitions: which client holds which record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_DRAWS = 200
"""Dirichlet draws before giving up on one in which every client holds a record."""

Shares = list[NDArray[np.int64]]


@dataclass(frozen=True)
class PartitionScheme:
    """How records are spread: `iid`, `dirichlet:A` (concentration A > 0), `shards:K` (K shards a client) or `natural`."""

    kind: str
    parameter: float | None = None


def parse_partition(text: str) -> PartitionScheme:
    """Read a partition's name.

    Args:
        text: `iid`, `dirichlet:A` with A > 0, `shards:K` with K ≥ 1, or `natural`.

    Returns:
        The scheme.

    Raises:
        ValueError: Anything else.

    Example:
        >>> parse_partition("dirichlet:0.1")
        PartitionScheme(kind='dirichlet', parameter=0.1)
    """
    kind, colon, value = text.partition(":")
    rule = "use iid, dirichlet:A with A > 0, shards:K with a whole K ≥ 1, or natural"
    if kind in ("iid", "natural") and not colon:
        return PartitionScheme(kind)
    if kind in ("dirichlet", "shards"):
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"partition {text!r} has no number after {kind}:; {rule}") from None
        if kind == "dirichlet" and np.isfinite(number) and number > 0:
            return PartitionScheme("dirichlet", number)
        if kind == "shards" and number >= 1 and number == int(min(number, 1e9)):
            return PartitionScheme("shards", number)
    raise ValueError(f"partition {text!r} is unknown; {rule}")


def partition_records(
    labels: NDArray[np.int64],
    *,
    num_clients: int,
    scheme: PartitionScheme,
    rng: np.random.Generator,
    groups: NDArray[np.int64] | None = None,
) -> Shares:
    """Spread records over clients so that no record belongs to two clients and no client is empty.

    Args:
        labels: Class of each record, shape (n,).
        num_clients: Number of clients, 1 … n.
        scheme: From `parse_partition`.
        rng: Source of randomness.
        groups: Whose each record is, shape (n,), for `natural`; None where that is not known.

    Returns:
        For each client the sorted indices of its records.

    Raises:
        ValueError: More clients than records or groups, no draw (of `MAX_DRAWS`) that leaves every client a record, or
            `natural` without groups.

    Guarantee:
        Every record belongs to exactly one client, except under `natural`: there each client is one group with all of its
        records, and the records of groups that were not drawn belong to none.

    Edge cases:
        `natural` draws the groups without replacement, as the first clients of a random order: the clients of a smaller
        number are the first of those of a larger one.

    Source:
        Dirichlet: Hsu, Qi, Brown 2019 as used by Yurochkin et al. 2019 (one draw of client proportions a class).
        Shards: McMahan et al. 2017, §3 (sort by label, cut into K·N shards, K a client).
        Natural: Caldas et al. 2018 (LEAF; a client a writer, of whom a part is sampled).

    Example:
        >>> shares = partition_records(np.arange(10) % 2, num_clients=2, scheme=parse_partition("iid"),
        ...                            rng=np.random.default_rng(0))
        >>> sorted(int(i) for share in shares for i in share)
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    count = int(labels.shape[0])
    if not 1 <= num_clients <= count:
        raise ValueError(f"clients {num_clients} must lie in 1 to {count}, the number of records; give fewer clients")
    if scheme.kind == "natural":
        return _natural(groups, num_records=count, num_clients=num_clients, rng=rng)
    return [np.sort(share) for share in _SCHEMES[scheme.kind](labels, num_clients, scheme.parameter, rng)]


def _iid(labels: NDArray[np.int64], num_clients: int, parameter: float | None, rng: np.random.Generator) -> Shares:
    return np.array_split(rng.permutation(labels.shape[0]), num_clients)


def _dirichlet(
    labels: NDArray[np.int64], num_clients: int, parameter: float | None, rng: np.random.Generator
) -> Shares:
    assert parameter is not None
    for _ in range(MAX_DRAWS):
        pieces: list[Shares] = [[] for _ in range(num_clients)]
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            proportions = rng.dirichlet(np.full(num_clients, parameter))
            if not np.isfinite(proportions).all():  # tiny A underflows to 0/0: the limit is one client takes all
                proportions = np.eye(num_clients)[rng.integers(num_clients)]
            cuts = np.floor(np.cumsum(proportions)[:-1] * len(members) + 0.5).astype(np.int64)
            for client, piece in enumerate(np.split(members, cuts)):
                pieces[client].append(piece)
        shares = [np.concatenate(piece) for piece in pieces]
        if min(len(share) for share in shares) >= 1:
            return shares
    raise ValueError(
        f"partition dirichlet:{parameter:g} left a client without records in each of {MAX_DRAWS} draws over {num_clients} "
        "clients; use a larger A or fewer clients"
    )


def _shards(labels: NDArray[np.int64], num_clients: int, parameter: float | None, rng: np.random.Generator) -> Shares:
    assert parameter is not None
    per_client = int(parameter)
    total = per_client * num_clients
    if total > labels.shape[0]:
        raise ValueError(
            f"partition shards:{per_client} over {num_clients} clients needs {total} records but there are "
            f"{labels.shape[0]}; use fewer shards or clients"
        )
    shuffled = rng.permutation(labels.shape[0])
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    shards = np.array_split(by_label, total)
    order = rng.permutation(total).reshape(num_clients, per_client)
    return [np.concatenate([shards[shard] for shard in row]) for row in order]


def _natural(
    groups: NDArray[np.int64] | None, *, num_records: int, num_clients: int, rng: np.random.Generator
) -> Shares:
    """Each client one group, drawn without replacement; the records of one group stay in their order."""
    if groups is None:
        raise ValueError(
            "partition natural needs data that say whose each record is, and these do not; use femnist or data of your own "
            "with train_groups, or another partition"
        )
    if groups.shape != (num_records,):
        raise ValueError(
            f"groups of shape {groups.shape} must name one group for each of {num_records} records; pass the group of each"
        )
    by_group = np.argsort(groups, kind="stable")
    numbers, first, sizes = np.unique(groups[by_group], return_index=True, return_counts=True)
    if num_clients > len(numbers):
        raise ValueError(
            f"clients {num_clients} with partition natural must be at most {len(numbers)}, the number of groups in the data; "
            "give fewer clients"
        )
    drawn = rng.permutation(len(numbers))[:num_clients]
    return [by_group[first[group] : first[group] + sizes[group]] for group in drawn]


_SCHEMES: dict[str, Callable[[NDArray[np.int64], int, float | None, np.random.Generator], Shares]] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "shards": _shards,
}
