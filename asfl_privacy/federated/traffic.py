"""Bytes that cross the network, by channel."""

from __future__ import annotations

from collections.abc import Sequence

from asfl_privacy.federated.phases import Delivery, Traffic
from asfl_privacy.federated.weights import Weights, count_bytes


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
