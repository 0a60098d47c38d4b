"""The server's step along the mean update, not weighted by records, as SCAFFOLD and FedVARP take it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from asfl_privacy.federated.phases import State, Update
from asfl_privacy.federated.weights import average_weights


def server_step(state: State, updates: Mapping[int, Update], *, trained: Collection[str], server_lr: float) -> State:
    """X ← x + η_g·mean_S(y_i − x) for what trains; buffers are the plain mean, as running statistics are no step.

    Args:
        state: x.
        updates: y_i by client.
        trained: Names of what trains.
        server_lr: η_g; at 1 the result is the plain mean.

    Returns:
        The state with the new weights.
    """
    ordered = [updates[client] for client in sorted(updates)]
    mean = average_weights([update.weights for update in ordered], num_records=[1] * len(ordered))
    if server_lr == 1.0:
        return replace(state, weights=mean)
    stepped = {
        name: (old.double() + server_lr * (mean[name].double() - old.double())).to(old.dtype)
        if name in trained
        else mean[name]
        for name, old in state.weights.items()
    }
    return replace(state, weights=stepped)
