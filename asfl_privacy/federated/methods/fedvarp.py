"""FedVARP: the server remembers each client's last update (Jhunjhunwala et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from asfl_privacy.federated.federation import Federation
from asfl_privacy.federated.methods.local_method import LocalMethod
from asfl_privacy.federated.phases import State, Steps, Update
from asfl_privacy.federated.private_updates import trained_names
from asfl_privacy.federated.server_step import check_finite
from asfl_privacy.federated.weights import average_weights

LAST = "last_update."
"""What the name of Y_i begins with in a client's state, and that of the mean of all Y_j in the server's."""


@dataclass(frozen=True)
class FedVARP(LocalMethod):
    """Δ_i = (x − y_i)/(ητ); v = mean_S(Δ_i − Y_i) + (1/N)·Σ_j Y_j with the old Y; x ← x − η_g·ητ·v; then Y_i ← Δ_i.

    Y starts at zero and is the server's, N·P numbers of memory; nothing travels but weights. τ counts all local steps.

    Guarantee:
        With η_g = 1 and full participation it is FedAvg with an unweighted mean, up to rounding, and so is the first round
        over the cohort.

    Source:
        Jhunjhunwala, Sharma, Nagarkatti & Joshi 2022, `FedVARP: Tackling the variance due to partial client
        participation in federated learning`, Algorithm 2.
    """

    name: str = "fedvarp"

    def finish(
        self, update: Update, state: State, client: int, *, steps: Sequence[Steps], federation: Federation, round: int
    ) -> Update:
        """What the server remembers of the client: Δ_i of the weights as they were sent."""
        length = _length(federation, round=round)
        last = {
            LAST + name: (state.weights[name] - update.weights[name]) / length
            for name in trained_names(federation.model)
        }
        return replace(update, client_state={**state.clients.get(client, {}), **last})

    def aggregate(self, state: State, updates: Mapping[int, Update], *, federation: Federation, round: int) -> State:
        """The server's step; buffers are the plain mean."""
        ordered = sorted(updates)
        length = _length(federation, round=round) * federation.settings.options.server_lr
        weights = average_weights(
            [updates[client].weights for client in ordered], num_records=[1] * len(ordered), before=state.weights
        )
        server = {**state.server}
        earlier = {client: state.clients.get(client, {}) for client in ordered}  # once: each look-up copies
        for name in trained_names(federation.model):
            key, old = LAST + name, state.weights[name]
            zero = torch.zeros_like(old, dtype=torch.float64)
            changes = []
            for client in ordered:
                kept = updates[client].client_state
                assert kept is not None  # finish gave it
                changes.append(kept[key].double() - earlier[client].get(key, zero).double())
            change = torch.stack(changes)
            remembered = server[key].double() if key in server else zero
            weights[name] = (old.double() - length * (change.mean(0) + remembered)).to(old.dtype)
            server[key] = (remembered + change.sum(0) / len(federation.clients)).to(old.dtype)
        options = federation.settings.options
        check_finite(weights, trained=trained_names(federation.model), server_lr=options.server_lr)
        return replace(state, weights=weights, server=server)


def _length(federation: Federation, *, round: int) -> float:
    """ητ of a round, above 0."""
    settings = federation.settings
    lr, num_steps = settings.rule(round).lr, settings.tail_steps + settings.full_steps
    if not lr * num_steps > 0:  # 0/0 would be NaN
        raise ValueError(
            f"learning rate of round {round} is {lr:g} and local steps are {num_steps}: updates are divided by their product, "
            "which must be above 0; raise lr or the schedule's factor"
        )
    return lr * num_steps
