"""Where clients' networks put the classes: centroids of features, and how far clients disagree about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asfl_privacy.federated.federation import Federation
from asfl_privacy.federated.weights import Weights

Records = Literal["own", "common"]
"""Whose records the features are of: each client's own training records, or the test records, the same for all."""


@dataclass(frozen=True)
class Centroids:
    """Class centroids, one row a client and class, clients and then classes ascending.

    Attributes:
        clients: Client numbers, shape (n,).
        labels: Classes, shape (n,).
        means: Mean features μ_{i,c}, shape (n, d), float64.
    """

    clients: NDArray[np.int64]
    labels: NDArray[np.int64]
    means: NDArray[np.float64]


@dataclass(frozen=True)
class Scatter:
    """How far the clients' centroids lie apart within a class, and the classes from each other.

    Attributes:
        within: Mean over classes of the mean over clients of ‖μ_{i,c} − μ_c‖², μ_c the mean over clients.
        between: Mean over classes of ‖μ_c − μ‖², μ the mean of the μ_c.
        num_classes: Number of classes that count.
    """

    within: float
    between: float
    num_classes: int


def client_centroids(
    federation: Federation,
    networks: Mapping[int, Weights],
    *,
    after: str,
    records: Records,
    min_records: int = 5,
    batch_size: int = 1024,
) -> Centroids:
    """Mean features of each class under each client's network, in evaluation mode and float64 sums.

    Args:
        federation: Clients and data.
        networks: Weights of a network by client number.
        after: Block whose output, flattened, is the latent space.
        records: `own` gives a client the classes of which it has records; the centroids of two clients then differ by
            their records too. `common` gives every client every class on the same test records, those of which it has
            no record among them: what differs is the network alone.
        min_records: Fewest records that a centroid is a mean of, ≥ 1; classes with fewer are left out.
        batch_size: Records a pass, which bounds memory.

    Returns:
        The centroids.

    Raises:
        ValueError: A block that there is not, `min_records` below 1, or features that are not finite.

    Guarantee:
        A copy of the network is run: weights given, the federation's network and what it keeps stay as they are, and no
        test record reaches a network that trains. Deterministic for networks that draw nothing in evaluation.
    """
    names = [name for name, _ in federation.model.named_children()]
    if after not in names:
        raise ValueError(f"block {after!r} is not of this network; use one of {', '.join(names)}")
    if min_records < 1:
        raise ValueError(f"min_records {min_records} must be at least 1: a mean needs a record; give for example 5")
    replica, data = federation.replica(), federation.data
    blocks = nn.Sequential(*list(replica.model.children())[: names.index(after) + 1])
    clients, labels, means = [], [], []
    for client in sorted(networks):
        holder = federation.clients[client]
        inputs, classes = (
            (data.test_inputs, data.test_labels) if records == "common" else (holder.inputs, holder.labels)
        )
        replica.load(networks[client], training=False)
        sums, counts = _class_sums(
            blocks,
            inputs.to(federation.device),
            classes.to(federation.device),
            num_classes=data.num_classes,
            batch_size=batch_size,
        )
        found = torch.nonzero(counts >= min_records).flatten()
        mean = sums[found] / counts[found].unsqueeze(1)
        if not bool(torch.isfinite(mean).all()):
            raise ValueError(f"client {client}: features after {after} are not finite: training diverged; lower lr")
        clients += [client] * len(found)
        labels += found.tolist()
        means.append(mean.cpu().numpy())
    return Centroids(
        np.array(clients, dtype=np.int64),
        np.array(labels, dtype=np.int64),
        np.concatenate(means) if means else np.empty((0, 0)),
    )


def scatter(centroids: Centroids) -> Scatter | None:
    """Within-class and between-class scatter, every class and every client of a class weighing the same.

    Args:
        centroids: From `client_centroids`.

    Returns:
        The scatter, or None where fewer than two classes count.

    Guarantee:
        within / between does not change when the space is moved, turned or scaled.

    Edge cases:
        A class with one client's centroid alone has nothing to be compared with: it counts in neither part.

    Source:
        Fukunaga 1990, `Introduction to statistical pattern recognition`, §10.2: traces of S_w and S_b, with equal priors.

    Example:
        >>> two = np.array([[0.0], [2.0], [10.0], [12.0]])
        >>> scatter(Centroids(np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1]), two))
        Scatter(within=1.0, between=25.0, num_classes=2)
    """
    groups = [centroids.means[centroids.labels == label] for label in np.unique(centroids.labels)]
    groups = [group for group in groups if len(group) > 1]
    if len(groups) < 2:
        return None
    class_means = np.stack([group.mean(0) for group in groups])
    within = [float(np.square(group - mean).sum(1).mean()) for group, mean in zip(groups, class_means, strict=True)]
    between = float(np.square(class_means - class_means.mean(0)).sum(1).mean())
    return Scatter(within=float(np.mean(within)), between=between, num_classes=len(groups))


@torch.no_grad()
def _class_sums(
    blocks: nn.Sequential, inputs: Tensor, labels: Tensor, *, num_classes: int, batch_size: int
) -> tuple[Tensor, Tensor]:
    """Sums of flattened features by class, (k, d) in float64, and numbers of records, (k,)."""
    counts = torch.bincount(labels, minlength=num_classes)
    sums = torch.zeros(num_classes, 1, dtype=torch.float64, device=inputs.device)
    for x, y in zip(torch.split(inputs, batch_size), torch.split(labels, batch_size), strict=True):
        features = blocks(x.clone()).flatten(1).double()  # cloned, as a block may work in place
        sums = sums + torch.zeros(num_classes, features.shape[1], dtype=torch.float64, device=x.device).index_add_(
            0, y, features
        )
    return sums, counts
