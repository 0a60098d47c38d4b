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
    """How records are spread: `iid`, `dirichlet:A` (concentration A > 0) or `shards:K` (K shards a client)."""

    kind: str
    parameter: float | None = None


def parse_partition(text: str) -> PartitionScheme:
    """Read a partition's name.

    Args:
        text: `iid`, `dirichlet:A` with A > 0, or `shards:K` with K ≥ 1.

    Returns:
        The scheme.

    Raises:
        ValueError: Anything else.

    Example:
        >>> parse_partition("dirichlet:0.1")
        PartitionScheme(kind='dirichlet', parameter=0.1)
    """
    kind, colon, value = text.partition(":")
    rule = "use iid, dirichlet:A with A > 0, or shards:K with a whole K ≥ 1"
    if kind == "iid" and not colon:
        return PartitionScheme("iid")
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
    labels: NDArray[np.int64], *, num_clients: int, scheme: PartitionScheme, rng: np.random.Generator
) -> Shares:
    """Spread records over clients so that each record belongs to exactly one client and no client is empty.

    Args:
        labels: Class of each record, shape (n,).
        num_clients: Number of clients, 1 … n.
        scheme: From `parse_partition`.
        rng: Source of randomness.

    Returns:
        For each client the sorted indices of its records.

    Raises:
        ValueError: More clients than records, or no draw (of `MAX_DRAWS`) that leaves every client a record.

    Source:
        Dirichlet: Hsu, Qi, Brown 2019 as used by Yurochkin et al. 2019 (one draw of client proportions a class).
        Shards: McMahan et al. 2017, §3 (sort by label, cut into K·N shards, K a client).

    Example:
        >>> shares = partition_records(np.arange(10) % 2, num_clients=2, scheme=parse_partition("iid"),
        ...                            rng=np.random.default_rng(0))
        >>> sorted(int(i) for share in shares for i in share)
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    count = int(labels.shape[0])
    if not 1 <= num_clients <= count:
        raise ValueError(f"clients {num_clients} must lie in 1 to {count}, the number of records; give fewer clients")
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


_SCHEMES: dict[str, Callable[[NDArray[np.int64], int, float | None, np.random.Generator], Shares]] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "shards": _shards,
}
