"""ASFL: activation sharing, a tail round, full local steps, and FedAvg (Algorithms 1 and 2)."""

from __future__ import annotations

from dataclasses import dataclass

from asfl_privacy.federated.methods.fedavg import FedAvg


@dataclass(frozen=True)
class ASFL(FedAvg):
    """FedAvg whose local work begins with τ' tail steps on exchanged activations, then τ full steps.

    Guarantee:
        With τ' = 0 it is FedAvg, bit for bit, and releases nothing. No gradient of the tail round reaches the head.

    Source:
        `Latent Information Sharing for Accelerating Federated Learning`, Algorithms 1 and 2.
    """

    name: str = "asfl"
    shares: bool = True
