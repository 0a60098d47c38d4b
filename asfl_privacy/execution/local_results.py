"""What local work makes of the global network at each client: one round's phases without its aggregation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from asfl_privacy.execution.client_work import named
from asfl_privacy.execution.executor import Executor, split_failures
from asfl_privacy.execution.rounds import deliver
from asfl_privacy.federated import Federation, Method, State
from asfl_privacy.federated.weights import Weights


def local_networks(
    state: State, clients: Sequence[int], *, federation: Federation, method: Method, executor: Executor, round: int
) -> dict[int, Weights]:
    """The networks y_i that these clients would send after this round's local work, activation sharing included.

    Args:
        state: The round's state: the global network and what clients and server keep. It stays as it is.
        clients: Who takes part, ascending; pairs are drawn among them.
        federation: Clients, network and settings.
        method: Whose phases are run.
        executor: Does the clients' work; entered already.
        round: Round number, which learning rate and draws belong to.

    Returns:
        Weights by client number.

    Raises:
        ValueError: A private run, whose releases would go uncounted here, a method whose clients have no network of
            their own after the phase, or whatever a phase refuses.
        Exception: The first failure of a client.

    Guarantee:
        With the round's own cohort these are the networks that `run_rounds` averages, bit for bit on the same executor.

    Edge cases:
        Where no step moves any client (a learning rate of 0), no network is the client's own, and that is refused too.
    """
    if federation.privacy is not None:
        raise ValueError(
            "a private run: what clients would release for this measurement no ledger counts; measure a run without noise"
        )
    with named(round):
        plan = method.prepare(state, federation=federation, round=round)
    collected, failures = split_failures(executor.collect(state, clients, plan=plan, remaining=None, round=round))
    if failures:
        raise failures[0].error
    payloads = {client: done.payload for client, done in collected.items() if done.payload is not None}
    received = deliver(method.route(payloads, federation=federation, round=round))
    kept = {client: done.client_state for client, done in collected.items() if done.client_state is not None}
    if kept:
        state = replace(state, clients=state.clients.updated(kept))
    updates, failures = split_failures(
        executor.train(state, clients, plan=plan, collected=collected, received=received, remaining=None, round=round)
    )
    if failures:
        raise failures[0].error
    networks = {client: update.weights for client, update in updates.items()}
    if not any(_moved(weights, before=state.weights) for weights in networks.values()):
        raise ValueError(
            f"method {method.name} leaves no client with a network of its own after local work: there is nothing to measure; "
            "use a method whose clients send the networks that they trained, with an lr above 0"
        )
    return networks


def _moved(weights: Weights, *, before: Weights) -> bool:
    """Whether a network is there and differs from the one that it began as."""
    return any(not torch.equal(value, before[name]) for name, value in weights.items())
