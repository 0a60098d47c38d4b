"""FedAvg: local steps on the whole network, then the mean weighted by records (McMahan et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asfl_privacy.federated.federation import Federation
from asfl_privacy.federated.phases import Collected, Delivery, Payload, State, Update, fedavg_aggregate
from asfl_privacy.federated.steps import Pool, run_steps
from asfl_privacy.federated.streams import numpy_stream
from asfl_privacy.federated.weights import read_weights
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
        self, state: State, client: int, *, federation: Federation, plan: ReleasePlan | None, round: int
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
        own: Pool | None,
        received: Payload | None,
        round: int,
    ) -> Update:
        """τ' + τ full steps."""
        federation.load(state.weights, training=True)
        num_steps = federation.settings.tail_steps + federation.settings.full_steps
        return full_steps(client, federation=federation, num_steps=num_steps, round=round)

    def aggregate(self, state: State, updates: Mapping[int, Update]) -> State:
        """Mean weighted by records."""
        return fedavg_aggregate(state, updates)


def full_steps(client: int, *, federation: Federation, num_steps: int, round: int) -> Update:
    """Steps of the scratch network as it stands on one client's own records."""
    settings = federation.settings
    holder = federation.clients[client]
    pool = Pool(inputs=holder.inputs, labels=holder.labels, num_own=holder.num_records)
    rng = numpy_stream(settings.seed, round=round, client=client, purpose="full steps")
    run_steps(federation.model, pool, num_steps=num_steps, batch_size=settings.batch_size, lr=settings.lr, rng=rng)
    return Update(
        weights=read_weights(federation.model),
        num_records=holder.num_records,
        drawn=num_steps * min(settings.batch_size, holder.num_records),
        drawn_remote=0,
    )
