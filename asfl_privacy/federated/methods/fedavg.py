"""FedAvg: local steps on the whole network, then the mean weighted by records (McMahan et al. 2017)."""

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
from asfl_privacy.federated.steps import Pool
from asfl_privacy.mechanisms import ReleasePlan


@dataclass(frozen=True)
class FedAvg:
    """Each sampled client takes τ' + τ full steps, the budget that ASFL splits; nothing but weights is shared.

    Guarantee:
        With one client it is plain SGD, bit for bit.

    Source:
        McMahan et al. 2017, Algorithm 1; the step budget as in the paper's comparison.
    """

    name: str = "fedavg"

    def prepare(self, state: State, *, federation: Federation, round: int) -> ReleasePlan | None:
        """Nothing is released."""
        return None

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
        """Nothing is collected."""
        return Collected()

    def route(self, payloads: Mapping[int, Payload], *, federation: Federation, round: int) -> tuple[Delivery, ...]:
        """Nothing is routed."""
        return ()

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
        """τ' + τ full steps."""
        stages = self.stages(client, federation=federation, own=own, received=received)
        return run_stages(stages, state, client, federation=federation, plan=plan, remaining=remaining, round=round)

    def stages(
        self, client: int, *, federation: Federation, own: Pool | None, received: Payload | None
    ) -> tuple[Stage, ...]:
        """The full steps."""
        num_steps = federation.settings.tail_steps + federation.settings.full_steps
        return (Stage(part="full", pool=own_records(federation, client), num_steps=num_steps),)

    def aggregate(self, state: State, updates: Mapping[int, Update]) -> State:
        """Mean weighted by records."""
        return fedavg_aggregate(state, updates)
