"""A method for tests that keeps something for each client and on the server, as control variates do."""

from dataclasses import dataclass, replace

import torch

from asfl_privacy.federated.methods import ASFL


@dataclass(frozen=True)
class Momentum(ASFL):
    """ASFL whose clients remember how far their last update went, of the size of the network, and lean a tenth that way.

    The server keeps the mean of what the round's clients remember; both must come back to the same bits, wherever a
    client is trained and whenever its state is read.
    """

    name: str = "momentum"
    stages = None  # its training is more than stages of plain steps

    def train(self, state, client, *, federation, plan, own, received, remaining, round):
        stages = ASFL().stages(state, client, federation=federation, own=own, received=received)
        from asfl_privacy.federated.local_training import run_stages

        update, _ = run_stages(
            stages, state, client, federation=federation, plan=plan, remaining=remaining, round=round
        )
        last = state.clients.get(client, {})
        floats = {name for name, value in state.weights.items() if value.is_floating_point()}
        moved = {f"moved.{name}": update.weights[name] - state.weights[name] for name in sorted(floats)}
        weights = {
            name: value + 0.1 * last[f"moved.{name}"] + 0.01 * state.server.get(name, torch.zeros(()))
            if name in floats and f"moved.{name}" in last
            else value
            for name, value in update.weights.items()
        }
        return replace(update, weights=weights, client_state={**last, **moved})

    def aggregate(self, state, updates, *, federation, round):
        ordered = [updates[client] for client in sorted(updates)]
        names = [name for name, value in state.weights.items() if value.is_floating_point()]
        server = {
            name: torch.stack([update.client_state[f"moved.{name}"] for update in ordered]).double().mean(0).float()
            for name in names
        }
        return replace(super().aggregate(state, updates, federation=federation, round=round), server=server)
