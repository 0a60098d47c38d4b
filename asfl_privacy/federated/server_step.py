"""The server's step along the mean update, not weighted by records, as SCAFFOLD and FedVARP take it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from asfl_privacy.federated.phases import State, Update
from asfl_privacy.federated.weights import Weights, average_weights


def server_step(state: State, updates: Mapping[int, Update], *, trained: Collection[str], server_lr: float) -> State:
    """The step x ← x + η_g·mean_S(y_i − x) for what trains; buffers are the plain mean, as running statistics are no step.

    Args:
        state: x.
        updates: y_i by client.
        trained: Names of what trains.
        server_lr: η_g; at 1 the result is the plain mean.

    Returns:
        The state with the new weights.

    Raises:
        ValueError: Weights that are not finite, of a client or after the step.
    """
    ordered = [updates[client] for client in sorted(updates)]
    mean = average_weights([update.weights for update in ordered], num_records=[1] * len(ordered), before=state.weights)
    if server_lr == 1.0:
        return replace(state, weights=mean)
    stepped = {
        name: (old.double() + server_lr * (mean[name].double() - old.double())).to(old.dtype)
        if name in trained
        else mean[name]
        for name, old in state.weights.items()
    }
    check_finite(stepped, trained=trained, server_lr=server_lr)
    return replace(state, weights=stepped)


def check_finite(weights: Weights, *, trained: Collection[str], server_lr: float) -> None:
    """Refuse weights that a server's step made infinite or NaN; what does not train, a mask say, may be so."""
    for name in trained:
        if not bool(torch.isfinite(weights[name]).all()):
            raise ValueError(
                f"weights {name} are not finite after the server's step of {server_lr:g} times the mean update: training "
                "diverged; lower server_lr or lr"
            )
