"""SplitFed V2: one tail on the server, which the clients' steps train one client after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from asfl_privacy.federated.federation import Federation
from asfl_privacy.federated.local_training import local_steps, own_records
from asfl_privacy.federated.methods.splitfed import SplitFed, steps_per_round
from asfl_privacy.federated.phases import Payload, Stage, State, Steps, Update
from asfl_privacy.federated.steps import Pool
from asfl_privacy.federated.streams import SERVER, numpy_stream, torch_seed
from asfl_privacy.federated.weights import Weights, average_weights, read_weights


@dataclass(frozen=True)
class SplitFedV2(SplitFed):
    """Heads start from the round's global one and are averaged, weighted by records; the one tail goes on throughout.

    Clients take their steps in random order. As each begins with the tail that the one before left, no two can work at
    once: `train` answers for the client alone, and `aggregate` takes all steps, in one place whichever executor runs the
    rest. Momentum starts at zero with each client, in both halves. Buffers of the tail are as the last client left them.

    Guarantee:
        Every executor gives the same bits. With one client a round it is FedAvg, bit for bit. The order of the clients
        does not depend on which of them failed.

    Edge cases:
        A client that fails before its turn is left out, where that is tolerated; one that fails in its own steps ends the
        run, and is named, as the tail that the next one needs is lost.

    Source:
        Thapa et al. 2022, SplitFedV2: the server-side model is updated in sequence, clients in random order, and not
        averaged. The paper leaves open whether momentum goes on from client to client.
    """

    name: str = "splitfed-v2"

    def __post_init__(self) -> None:
        """Refuse sharing.

        Raises:
            ValueError: `shares`.
        """
        if self.shares:
            raise ValueError(
                f"method {self.name} has one tail, which trains on every client's activations in each round, so there is no "
                "tail of a client's own for a tail round; use splitfed-v1+sharing, or splitfed-v2 without sharing"
            )

    def stages(
        self, state: State, client: int, *, federation: Federation, own: Pool | None, received: Payload | None
    ) -> tuple[Stage, ...]:
        """None: the client's steps wait for the tail."""
        return ()

    def finish(
        self, update: Update, state: State, client: int, *, steps: Sequence[Steps], federation: Federation, round: int
    ) -> Update:
        """The count of what the client will draw in its turn."""
        rows = min(federation.settings.batch_size, update.num_records)
        return replace(update, drawn=steps_per_round(self, federation) * rows)

    def aggregate(self, state: State, updates: Mapping[int, Update], *, federation: Federation, round: int) -> State:
        """All clients' steps, in random order, then the mean of the heads.

        Raises:
            ValueError: Steps that diverged, or whatever they refuse; the line names the client.
        """
        in_head = frozenset(federation.split.head.state_dict())
        num_steps = steps_per_round(self, federation)
        current: Weights = dict(state.weights)
        trained: dict[int, Weights] = {}
        for client in _order(updates, federation=federation, round=round):
            with _turn(client, federation=federation, round=round):
                current = {name: state.weights[name] if name in in_head else current[name] for name in current}
                federation.load(current, training=True)
                stage = Stage(part="full", pool=own_records(federation, client), num_steps=num_steps)
                local_steps(federation.model, stage, client=client, federation=federation, remaining=None, round=round)
                current = read_weights(federation.model)
                _refuse_divergence(current, before=state.weights)
            trained[client] = {name: current[name] for name in current if name in in_head}
        clients = sorted(updates)
        heads = average_weights(
            [trained[client] for client in clients], num_records=[updates[client].num_records for client in clients]
        )
        return replace(state, weights=current | heads)


def _order(updates: Mapping[int, Update], *, federation: Federation, round: int) -> list[int]:
    """Whose turn is when: drawn over all clients, so that nobody's absence changes the order of the others."""
    rng = numpy_stream(federation.settings.seed, round=round, client=SERVER, purpose="splitfed order")
    return [client for client in rng.permutation(len(federation.clients)).tolist() if client in updates]


def _refuse_divergence(weights: Weights, *, before: Weights) -> None:
    """Refuse what is not finite and has changed; a mask that was not finite before may stay as it is."""
    for name, value in weights.items():
        if not bool(torch.isfinite(value).all()) and not torch.equal(value, before[name]):
            raise ValueError(f"weights {name} are not finite after its steps: training diverged; lower lr")


@contextmanager
def _turn(client: int, *, federation: Federation, round: int) -> Iterator[None]:
    """What surrounds a client's training in every executor: draws seeded, kernels that repeat, the client named."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    devices = [federation.device] if federation.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(torch_seed(federation.settings.seed, round=round, client=client, purpose="layers"))
            cudnn.deterministic, cudnn.benchmark = True, False
            yield
    except ValueError as error:
        raise ValueError(f"client {client}: {error}") from error
    except Exception as error:  # raised again, with the client named
        error.add_note(f"round {round}, client {client}")
        raise
    finally:
        cudnn.deterministic, cudnn.benchmark = before
