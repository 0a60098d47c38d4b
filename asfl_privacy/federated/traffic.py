"""Bytes that cross the network, by channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asfl_privacy.federated.phases import Delivery
from asfl_privacy.federated.weights import Weights, count_bytes


@dataclass(frozen=True)
class Traffic:
    """Bytes sent so far, by channel.

    Attributes:
        model: Weights down to and up from the sampled clients: 2P a client and round.
        activations: Released activations, client to client.
        labels: Their labels.
    """

    model: int = 0
    activations: int = 0
    labels: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.model + other.model, self.activations + other.activations, self.labels + other.labels)


def count_traffic(weights: Weights, *, cohort_size: int, deliveries: Sequence[Delivery]) -> Traffic:
    """Bytes of one round: the network to and from each sampled client, and each payload once.

    Args:
        weights: The network's weights as they are sent.
        cohort_size: Number of clients of the round.
        deliveries: Payloads of the round.

    Returns:
        The round's traffic.
    """
    payloads = [delivery.payload for delivery in deliveries]
    return Traffic(
        model=2 * cohort_size * count_bytes(weights),
        activations=sum(p.num_bytes for p in payloads),
        labels=sum(p.labels.numel() * p.labels.element_size() for p in payloads),
    )
