"""FedAvg: local steps on the whole network, then the mean weighted by records (McMahan et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asfl_privacy.federated.federation import Federation
from asfl_privacy.federated.local_training import Steps, finish_update, local_steps, trained_network
from asfl_privacy.federated.phases import Collected, Delivery, Payload, Remaining, State, Update, fedavg_aggregate
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
        federation.load(state.weights, training=True)
        num_steps = federation.settings.tail_steps + federation.settings.full_steps
        done = full_steps(
            client, federation=federation, plan=plan, num_steps=num_steps, remaining=remaining, round=round
        )
        return finish_update(state, client, federation=federation, steps=(done,), remaining=done.remaining, round=round)

    def aggregate(self, state: State, updates: Mapping[int, Update]) -> State:
        """Mean weighted by records."""
        return fedavg_aggregate(state, updates)


def full_steps(
    client: int,
    *,
    federation: Federation,
    plan: ReleasePlan | None,
    num_steps: int,
    remaining: Remaining,
    round: int,
) -> Steps:
    """Steps of the scratch network as it stands on one client's own records."""
    holder = federation.clients[client]
    return local_steps(
        trained_network(federation, plan, client=client, round=round),
        Pool(inputs=holder.inputs, labels=holder.labels, num_own=holder.num_records, records=holder.records),
        client=client,
        federation=federation,
        num_steps=num_steps,
        purpose="full steps",
        remaining=remaining,
        round=round,
    )
