"""FedAvg: local steps on the whole network, then the mean weighted by records (McMahan et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from asfl_privacy.federated.methods.local_method import LocalMethod


@dataclass(frozen=True)
class FedAvg(LocalMethod):
    """Each sampled client takes τ' + τ full steps, the budget that ASFL splits; nothing but weights is shared.

    Guarantee:
        With one client it is plain SGD, bit for bit.

    Source:
        McMahan et al. 2017, Algorithm 1; the step budget as in the paper's comparison.
    """

    name: str = "fedavg"
