"""What the methods have in common: activations may be shared first, then local steps, then an average."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from asfl_privacy.federated.federation import Federation
from asfl_privacy.federated.local_training import own_records, run_stages
from asfl_privacy.federated.phases import (
    Collected,
    Delivery,
    Payload,
    Remaining,
    Stage,
    State,
    Steps,
    Traffic,
    Update,
    fedavg_aggregate,
)
from asfl_privacy.federated.sharing import collect_activations, plan_sharing, route_activations, tail_pool
from asfl_privacy.federated.steps import Pool
from asfl_privacy.federated.traffic import count_traffic
from asfl_privacy.federated.weights import Weights
from asfl_privacy.mechanisms import ReleasePlan

SHARING = "+sharing"
"""What the name of a method whose clients share activations ends with."""


@dataclass(frozen=True)
class LocalMethod(ABC):
    """Local steps on the round's global network, and the mean weighted by records; methods override what differs.

    Attributes:
        name: What rows and flags call it.
        shares: Whether clients exchange activations and take a tail round before their local steps (latent sharing):
            τ' tail steps, then τ full ones; without it τ' + τ full steps.

    Guarantee:
        With τ' = 0 sharing changes nothing, bit for bit, and releases nothing. No gradient of the tail round reaches the
        head.

    Source:
        `Latent Information Sharing for Accelerating Federated Learning`, Algorithms 1 and 2.
    """

    name: str
    shares: bool = False

    @property
    def in_the_clear(self) -> str:
        """What clients send beside weights and payloads and nothing protects; empty for nothing."""
        return ""

    @property
    def exposes_records(self) -> bool:
        """Whether clients send something of single records that nothing noises, so that no private run is possible."""
        return False

    @property
    def cuts_network(self) -> bool:
        """Whether the exchange layer matters to the method."""
        return self.shares

    def check(self, federation: Federation) -> None:  # noqa: B027 - most methods take any network
        """Refuse a network or options that the method cannot work with, before anything is trained.

        Raises:
            ValueError: Naming them.
        """

    @property
    def has_global_network(self) -> bool:
        """Whether the state's weights are a network that the rounds train, so that its accuracy says something."""
        return True

    def prepare(self, state: State, *, federation: Federation, round: int) -> ReleasePlan | None:
        """Certificate of the head as it is now, and the noise calibrated from it; None where nothing is released."""
        if not self.shares or federation.settings.tail_steps == 0:
            return None
        return plan_sharing(state, federation=federation)

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
        """Activations of ⌈τ'/2⌉ mini-batches under the global head, where they are shared."""
        if not self.shares or federation.settings.tail_steps == 0:
            return Collected()
        return collect_activations(state, client, federation=federation, plan=plan, remaining=remaining, round=round)

    def route(self, payloads: Mapping[int, Payload], *, federation: Federation, round: int) -> tuple[Delivery, ...]:
        """Random pairs swap."""
        return route_activations(payloads, federation=federation, round=round) if self.shares else ()

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
        """The stages in order, from where the client starts, and what the client keeps of them."""
        stages = self.stages(state, client, federation=federation, own=own, received=received)
        begun = replace(state, weights=self.start(state, client))
        update, steps = run_stages(
            stages, begun, client, federation=federation, plan=plan, remaining=remaining, round=round
        )
        return self.finish(update, state, client, steps=steps, federation=federation, round=round)

    def start(self, state: State, client: int) -> Weights:
        """The weights that a client's local work begins with; here the round's global ones."""
        return state.weights

    def stages(
        self, state: State, client: int, *, federation: Federation, own: Pool | None, received: Payload | None
    ) -> tuple[Stage, ...]:
        """The tail round, where there are activations, and the full steps."""
        settings = federation.settings
        num_full = settings.full_steps if self.shares else settings.tail_steps + settings.full_steps
        full = Stage(part="full", pool=own_records(federation, client), num_steps=num_full)
        full = self.full_stage(full, state, client, federation=federation)
        if own is None:
            return (full,)
        return (Stage(part="tail", pool=tail_pool(own, received), num_steps=settings.tail_steps), full)

    def full_stage(self, plain: Stage, state: State, client: int, *, federation: Federation) -> Stage:
        """The full steps as the method takes them; here they are plain."""
        return plain

    def finish(
        self, update: Update, state: State, client: int, *, steps: Sequence[Steps], federation: Federation, round: int
    ) -> Update:
        """The update with what the client keeps of its local work; here it keeps nothing."""
        return update

    def aggregate(self, state: State, updates: Mapping[int, Update], *, federation: Federation, round: int) -> State:
        """Mean weighted by records."""
        return fedavg_aggregate(state, updates)

    def traffic(
        self, state: State, cohort: Sequence[int], deliveries: Sequence[Delivery], *, federation: Federation
    ) -> Traffic:
        """2P a client, and the payloads."""
        return count_traffic(state.weights, cohort_size=len(cohort), deliveries=deliveries)

    def measures(self, state: State, *, federation: Federation) -> Mapping[str, float]:
        """What the method itself measures of a state on the test records, by column; here nothing.

        Args:
            state: After some rounds.
            federation: Another replica than the one that trains; its scratch network may be changed.
        """
        return {}

    def sharing(self) -> LocalMethod:
        """The same method after latent sharing."""
        return replace(self, name=self.name + SHARING, shares=True)
