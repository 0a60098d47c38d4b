"""What every method is: explicit state and five phases that executors run in order.

    prepare → collect (a client) → route → train (a client) → aggregate

Phases take state and return state; none keeps anything between calls, so resume, replay and test are the same call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from asfl_privacy.federated.client_states import ClientState, ClientStates, MemoryClientStates
from asfl_privacy.federated.federation import Federation
from asfl_privacy.federated.steps import Objective, Pool
from asfl_privacy.federated.stopwatch import Seconds
from asfl_privacy.federated.weights import Weights, average_weights
from asfl_privacy.mechanisms import ReleasePlan

Remaining = NDArray[np.int64] | None
"""How many more releases of the phase's kind each record of the data set may take, shape (records,); None: no limit."""


@dataclass(frozen=True)
class State:
    """All that a run carries from one round to the next.

    Attributes:
        weights: The global network's; of a method that has none, the initial ones.
        clients: What single clients keep, by number; absent for clients that keep nothing.
        server: What the method keeps beside the network, by name.
    """

    weights: Weights
    clients: ClientStates = field(default_factory=MemoryClientStates)
    server: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Charge:
    """What must stand in the ledger before something leaves a client: one release of each record named.

    Attributes:
        channel: `activations`, `labels` or `updates`.
        mechanism: `gaussian`, `laplace` or `randomized-response`.
        noise_multiplier: σ/Δ, b/Δ or 1/ε at the ledger's radius.
        whole_record_multiplier: The same for any two records.
        records: By their index in the data set; one named twice is released twice, shape (n,).
        once: Whether a record's release is drawn once and kept, so that it is charged the first time only.
        sampler: `lattice`, `float` or `seeded`.
        num_classes: k of randomised response, or None.
        epsilon_excess: Error of the sampler in one release, as the ledger takes it.
        tail_probability: Likewise.
        client_multiplier: σ/Δ for any change of the client's records at once, where one release covers them all.
    """

    channel: str
    mechanism: str
    noise_multiplier: float
    whole_record_multiplier: float
    records: NDArray[np.int64]
    once: bool
    sampler: str
    num_classes: int | None = None
    epsilon_excess: float = 0.0
    tail_probability: float = 0.0
    client_multiplier: float | None = None


@dataclass(frozen=True)
class Payload:
    """What one client sends its partner.

    Attributes:
        sender: Client number.
        activations: Released outputs of the head, shape (n, …).
        labels: Their labels, in the clear or randomised, smallest unsigned type, shape (n,).
        records: Which records they come from; never sent, shape (n,).
        charges: What the sender's ledger must hold before the payload leaves; never sent.
        num_bytes: Bytes of the activations as they are sent.
    """

    sender: int
    activations: Tensor
    labels: Tensor
    records: NDArray[np.int64]
    charges: tuple[Charge, ...] = ()
    num_bytes: int = 0


@dataclass(frozen=True)
class Collected:
    """A client's outcome of the collect phase.

    Attributes:
        payload: What may leave, or None where the method shares nothing.
        own: The client's own activations and labels for its tail round; they stay with it.
        client_state: What the client keeps from now on, or None where that has not changed.
        seconds: Time it took, by phase.
    """

    payload: Payload | None = None
    own: Pool | None = None
    client_state: ClientState | None = None
    seconds: Seconds = field(default_factory=dict)


@dataclass(frozen=True)
class Delivery:
    """One payload on its way."""

    payload: Payload
    receiver: int


@dataclass(frozen=True)
class Update:
    """A client's outcome of the train phase.

    Attributes:
        weights: Its network after local steps; empty where a method does not send it.
        num_records: n_i, its weight in the average.
        drawn: Records drawn in all its steps.
        drawn_remote: How many of them came from another client.
        charges: What the client's ledger must hold before its update leaves; never sent.
        client_state: What the client keeps from now on, or None where that has not changed.
        seconds: Time it took, by phase.
    """

    weights: Weights
    num_records: int
    drawn: int
    drawn_remote: int
    charges: tuple[Charge, ...] = ()
    client_state: ClientState | None = None
    seconds: Seconds = field(default_factory=dict)


@dataclass(frozen=True)
class Steps:
    """What local steps leave besides the scratch network.

    Attributes:
        drawn: Records drawn.
        drawn_remote: How many of them came from another client.
        charges: What the ledger must hold before anything computed from the network leaves.
        remaining: How many more noised steps each record may enter, or None for no limit.
        mean_gradient: Mean raw gradient of the steps, by parameter name of what they trained; None where it was not kept.
    """

    drawn: int
    drawn_remote: int
    charges: tuple[Charge, ...]
    remaining: Remaining
    mean_gradient: Weights | None = None


@dataclass(frozen=True)
class Traffic:
    """Bytes sent so far, by channel.

    Attributes:
        model: Weights, and what else of the network's size a method sends, down to and up from the sampled clients.
        activations: Activations, and gradients with respect to them.
        labels: Their labels.
    """

    model: int = 0
    activations: int = 0
    labels: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.model + other.model, self.activations + other.activations, self.labels + other.labels)


@dataclass(frozen=True)
class Stage:
    """One part of a client's local work: plain steps of the tail or of the whole network on a pool.

    Attributes:
        part: What is trained; the rest stays as the stage before left it.
        pool: What mini-batches are drawn from.
        num_steps: Number of steps.
        correction: Added to each step's gradient, by parameter name of the part; None for none.
        objective: What else is minimised; None for nothing.
        keep_gradient: Whether the mean raw gradient is kept.
    """

    part: Literal["tail", "full"]
    pool: Pool
    num_steps: int
    correction: Weights | None = None
    objective: Objective | None = None
    keep_gradient: bool = False

    @property
    def purpose(self) -> str:
        """Names the stream of its mini-batches."""
        return f"{self.part} steps"


class Method(Protocol):
    """A federated method; executors run its phases."""

    @property
    def name(self) -> str:
        """What rows and flags call it."""
        ...

    @property
    def shares(self) -> bool:
        """Whether clients exchange activations before their local steps."""
        ...

    @property
    def in_the_clear(self) -> str:
        """What clients send beside weights and payloads and nothing protects; empty for nothing."""
        ...

    @property
    def exposes_records(self) -> bool:
        """Whether clients send something of single records that nothing noises, so that no private run is possible."""
        ...

    @property
    def cuts_network(self) -> bool:
        """Whether the exchange layer matters to the method."""
        ...

    def check(self, federation: Federation) -> None:
        """Refuse a network or options that the method cannot work with, before anything is trained."""
        ...

    @property
    def has_global_network(self) -> bool:
        """Whether the state's weights are a network that the rounds train, which evaluations are of."""
        ...

    def prepare(self, state: State, *, federation: Federation, round: int) -> ReleasePlan | None:
        """Certificate and noise of the head as it is now; None where nothing private is released."""
        ...

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
        """One client's activations under the round's global head, of records that may still be released."""
        ...

    def route(self, payloads: Mapping[int, Payload], *, federation: Federation, round: int) -> tuple[Delivery, ...]:
        """Who receives what."""
        ...

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
        """One client's local steps, of which those that are noised use records within their budget alone."""
        ...

    def aggregate(self, state: State, updates: Mapping[int, Update], *, federation: Federation, round: int) -> State:
        """The next round's state."""
        ...

    def traffic(
        self, state: State, cohort: Sequence[int], deliveries: Sequence[Delivery], *, federation: Federation
    ) -> Traffic:
        """Bytes of a round, by channel, given the state after it."""
        ...

    def measures(self, state: State, *, federation: Federation) -> Mapping[str, float]:
        """What the method itself measures of a state on the test records, by column; empty for nothing."""
        ...


@runtime_checkable
class StagedMethod(Method, Protocol):
    """A method whose `train` is `run_stages` of its stages and `finish`, so that many clients can take steps at once."""

    def start(self, state: State, client: int) -> Weights:
        """The weights that a client's local work begins with."""
        ...

    def stages(
        self, state: State, client: int, *, federation: Federation, own: Pool | None, received: Payload | None
    ) -> tuple[Stage, ...]:
        """One client's local work, in order."""
        ...

    def finish(
        self, update: Update, state: State, client: int, *, steps: Sequence[Steps], federation: Federation, round: int
    ) -> Update:
        """The update with what the client keeps of its local work."""
        ...


def fedavg_aggregate(state: State, updates: Mapping[int, Update]) -> State:
    """FedAvg's mean over the round's clients, in client order."""
    ordered = [updates[client] for client in sorted(updates)]
    weights = average_weights(
        [u.weights for u in ordered], num_records=[u.num_records for u in ordered], before=state.weights
    )
    return replace(state, weights=weights)
