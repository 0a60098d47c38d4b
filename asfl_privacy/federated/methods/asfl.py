"""ASFL: activation sharing, a tail round, full local steps, and FedAvg (Algorithms 1 and 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asfl_privacy.federated.federation import Federation
from asfl_privacy.federated.local_training import own_records, run_stages
from asfl_privacy.federated.phases import (
    Collected,
    Delivery,
    Payload,
    Remaining,
    Stage,
    State,
    Update,
    fedavg_aggregate,
)
from asfl_privacy.federated.sharing import collect_activations, plan_sharing, route_activations, tail_pool
from asfl_privacy.federated.steps import Pool
from asfl_privacy.mechanisms import ReleasePlan


@dataclass(frozen=True)
class ASFL:
    """FedAvg whose local work begins with τ' tail steps on exchanged activations, then τ full steps.

    Guarantee:
        With τ' = 0 it is FedAvg, bit for bit, and releases nothing. No gradient of the tail round reaches the head.

    Source:
        `Latent Information Sharing for Accelerating Federated Learning`, Algorithms 1 and 2.
    """

    name: str = "asfl"

    def prepare(self, state: State, *, federation: Federation, round: int) -> ReleasePlan | None:
        """Certificate of the head as it is now, and the noise calibrated from it."""
        return plan_sharing(state, federation=federation) if federation.settings.tail_steps > 0 else None

    def collect(
        self,
        state: State,
        client: int,
        *,
        federation: Federation,
        plan: ReleasePlan | None,
        remaining: Remaining,
        round: int,
    ) -> Collected:
        """Activations of ⌈τ'/2⌉ mini-batches under the global head."""
        if federation.settings.tail_steps == 0:
            return Collected()
        return collect_activations(state, client, federation=federation, plan=plan, remaining=remaining, round=round)

    def route(self, payloads: Mapping[int, Payload], *, federation: Federation, round: int) -> tuple[Delivery, ...]:
        """Random pairs swap."""
        return route_activations(payloads, federation=federation, round=round)

    def train(
        self,
        state: State,
        client: int,
        *,
        federation: Federation,
        plan: ReleasePlan | None,
        own: Pool | None,
        received: Payload | None,
        remaining: Remaining,
        round: int,
    ) -> Update:
        """τ' tail steps, which leave the head untouched, then τ full steps."""
        stages = self.stages(client, federation=federation, own=own, received=received)
        return run_stages(stages, state, client, federation=federation, plan=plan, remaining=remaining, round=round)

    def stages(
        self, client: int, *, federation: Federation, own: Pool | None, received: Payload | None
    ) -> tuple[Stage, ...]:
        """The tail round, where there are activations, and the full steps."""
        settings = federation.settings
        full = Stage(part="full", pool=own_records(federation, client), num_steps=settings.full_steps)
        if own is None:
            return (full,)
        return (Stage(part="tail", pool=tail_pool(own, received), num_steps=settings.tail_steps), full)

    def aggregate(self, state: State, updates: Mapping[int, Update]) -> State:
        """Mean weighted by records."""
        return fedavg_aggregate(state, updates)
