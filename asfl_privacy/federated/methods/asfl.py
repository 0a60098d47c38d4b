"""ASFL: activation sharing, a tail round, full local steps, and FedAvg (Algorithms 1 and 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from asfl_privacy.federated.federation import Federation
from asfl_privacy.federated.methods.fedavg import full_steps
from asfl_privacy.federated.phases import Collected, Delivery, Payload, State, Update, fedavg_aggregate
from asfl_privacy.federated.sharing import collect_activations, plan_sharing, route_activations, tail_pool
from asfl_privacy.federated.steps import Pool, run_steps
from asfl_privacy.federated.streams import numpy_stream
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
        self, state: State, client: int, *, federation: Federation, plan: ReleasePlan | None, round: int
    ) -> Collected:
        """Activations of ⌈τ'/2⌉ mini-batches under the global head."""
        if federation.settings.tail_steps == 0:
            return Collected()
        return collect_activations(state, client, federation=federation, plan=plan, round=round)

    def route(self, payloads: Mapping[int, Payload], *, federation: Federation, round: int) -> tuple[Delivery, ...]:
        """Random pairs swap."""
        return route_activations(payloads, federation=federation, round=round)

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
        """τ' tail steps, which leave the head untouched, then τ full steps."""
        federation.load(state.weights, training=True)
        drawn, drawn_remote = tail_round(client, federation=federation, own=own, received=received, round=round)
        update = full_steps(client, federation=federation, num_steps=federation.settings.full_steps, round=round)
        return replace(update, drawn=update.drawn + drawn, drawn_remote=drawn_remote)

    def aggregate(self, state: State, updates: Mapping[int, Update]) -> State:
        """Mean weighted by records."""
        return fedavg_aggregate(state, updates)


def tail_round(
    client: int, *, federation: Federation, own: Pool | None, received: Payload | None, round: int
) -> tuple[int, int]:
    """τ' steps of the scratch network's tail on I_i ∪ I_j; returns how many records were drawn, and how many remote."""
    if own is None:
        return 0, 0
    settings = federation.settings
    pool = tail_pool(own, received)
    remote = run_steps(
        federation.split.tail,
        pool,
        num_steps=settings.tail_steps,
        batch_size=settings.batch_size,
        lr=settings.lr,
        rng=numpy_stream(settings.seed, round=round, client=client, purpose="tail steps"),
    )
    return settings.tail_steps * min(settings.batch_size, len(pool.labels)), remote
