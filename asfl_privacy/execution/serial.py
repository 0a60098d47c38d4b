"""The serial executor: every phase, one client after the other; the readable twin of whatever is faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from asfl_privacy.accounting import Ledger
from asfl_privacy.federated import (
    Collected,
    Delivery,
    Federation,
    Method,
    State,
    Traffic,
    Update,
    count_traffic,
    sample_cohort,
)
from asfl_privacy.federated.steps import evaluate
from asfl_privacy.federated.streams import torch_seed
from asfl_privacy.mechanisms import ReleasePlan


class RunStoppedError(Exception):
    """The run was asked to stop between two rounds."""


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of the global network on the test records, after `round` rounds.

    Attributes:
        round: Rounds done.
        accuracy: 0–1.
        loss: Mean cross-entropy.
        sensitivity: Sensitivity that the round's noise was calibrated from; None without private releases.
        noise_scale: σ or b of the round; None without private releases.
    """

    round: int
    accuracy: float
    loss: float
    sensitivity: float | None
    noise_scale: float | None


@dataclass(frozen=True)
class RunResult:
    """What a run leaves.

    Attributes:
        state: The last state.
        evaluations: In order of rounds.
        ledger: Every private release that was delivered; None without privacy, where no account would be true.
        largest_plan: The plan of the round with the most noise, or None.
        traffic: Bytes by channel.
        remote_fraction: α, the share of remote records in all records drawn.
        seconds: Wall time of the rounds, evaluation included.
    """

    state: State
    evaluations: tuple[Evaluation, ...]
    ledger: Ledger | None
    largest_plan: ReleasePlan | None
    traffic: Traffic
    remote_fraction: float
    seconds: float


def run_serially(
    federation: Federation,
    method: Method,
    *,
    ledger: Ledger | None,
    should_stop: Callable[[], bool] = lambda: False,
    on_evaluation: Callable[[Evaluation], None] = lambda evaluation: None,
) -> RunResult:
    """Train for the settings' number of rounds.

    Args:
        federation: Clients, network and settings.
        method: What to run.
        ledger: Empty ledger of the run, in which releases are recorded before they are delivered; None for a run
            without privacy.
        should_stop: Asked before every round.
        on_evaluation: Told of every evaluation.

    Returns:
        The result.

    Raises:
        ValueError: A phase refused; the line names round and client.
        RunStoppedError: `should_stop` said so.
    """
    if (ledger is None) != (federation.privacy is None):
        raise ValueError(
            "a private run needs a ledger, and a run without privacy must not have one; give both or neither"
        )
    privacy = federation.privacy
    if ledger is not None and privacy is not None and (ledger.p, ledger.radius) != (privacy.p, privacy.radius):
        raise ValueError(
            f"the ledger counts at p {ledger.p:g} and radius {ledger.radius}, the run's noise is for p {privacy.p:g} and "
            f"radius {privacy.radius}; make the ledger with the run's own"
        )
    settings = federation.settings
    started = time.perf_counter()
    state = State(weights=federation.initial_weights)
    once_counted = np.zeros(federation.data.num_records, dtype=bool)
    evaluations: list[Evaluation] = []
    largest_plan: ReleasePlan | None = None
    traffic = Traffic()
    drawn = drawn_remote = 0
    for round in range(settings.rounds):
        if should_stop():
            raise RunStoppedError(f"stopped before round {round} of {settings.rounds}")
        cohort = sample_cohort(federation, round=round)
        with _named(round):
            plan = method.prepare(state, federation=federation, round=round)
        collected = _collect(state, cohort, method, federation=federation, plan=plan, round=round)
        state = replace(state, clients={**state.clients, **{c: done.client_state for c, done in collected.items()}})
        payloads = {c: done.payload for c, done in collected.items() if done.payload is not None}
        deliveries = method.route(payloads, federation=federation, round=round)
        if plan is not None and ledger is not None:
            record_releases(
                ledger, deliveries, plan=plan, federation=federation, once_counted=once_counted, round=round
            )
            if largest_plan is None or plan.scale > largest_plan.scale:
                largest_plan = plan
        updates = _train(
            state, cohort, method, federation=federation, collected=collected, deliveries=deliveries, round=round
        )
        with _named(round):
            state = method.aggregate(state, updates)
        traffic += count_traffic(state.weights, cohort_size=len(cohort), deliveries=deliveries)
        drawn += sum(update.drawn for update in updates.values())
        drawn_remote += sum(update.drawn_remote for update in updates.values())
        if (round + 1) % settings.evaluate_every == 0 or round + 1 == settings.rounds:
            evaluations.append(_evaluated(state, federation=federation, plan=plan, rounds_done=round + 1))
            on_evaluation(evaluations[-1])
    return RunResult(
        state=state,
        evaluations=tuple(evaluations),
        ledger=ledger,
        largest_plan=largest_plan,
        traffic=traffic,
        remote_fraction=drawn_remote / drawn if drawn else 0.0,
        seconds=time.perf_counter() - started,
    )


def record_releases(
    ledger: Ledger,
    deliveries: Sequence[Delivery],
    *,
    plan: ReleasePlan,
    federation: Federation,
    once_counted: np.ndarray,
    round: int,
) -> None:
    """Count every record whose noised activation is about to be delivered.

    With `--noise once` a record's noise is drawn once and kept, so all its later deliveries are post-processing of the
    first and are not counted again; `once_counted` (shape (records,), changed in place) remembers which were.
    """
    assert federation.privacy is not None
    for delivery in deliveries:
        records = delivery.payload.records
        if federation.privacy.noise == "once":
            records = records[~once_counted[records]]
            once_counted[records] = True
        if len(records):
            ledger.record(
                channel="activations",
                mechanism=plan.mechanism.family,
                noise_multiplier=plan.noise_multiplier,
                round=round,
                records=records,
                whole_record_multiplier=plan.whole_record_multiplier,
            )


def _collect(
    state: State,
    cohort: Sequence[int],
    method: Method,
    *,
    federation: Federation,
    plan: ReleasePlan | None,
    round: int,
) -> dict[int, Collected]:
    collected = {}
    for client in cohort:
        with _named(round, client=client):
            collected[client] = method.collect(state, client, federation=federation, plan=plan, round=round)
    return collected


def _train(
    state: State,
    cohort: Sequence[int],
    method: Method,
    *,
    federation: Federation,
    collected: dict[int, Collected],
    deliveries: Sequence[Delivery],
    round: int,
) -> dict[int, Update]:
    received = {delivery.receiver: delivery.payload for delivery in deliveries}
    updates = {}
    for client in cohort:
        # Layers such as dropout can only draw from torch's global generator: seed it, and leave it as it was.
        with _named(round, client=client), torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed(federation.settings.seed, round=round, client=client, purpose="layers"))
            updates[client] = method.train(
                state,
                client,
                federation=federation,
                own=collected[client].own,
                received=received.get(client),
                round=round,
            )
    return updates


def _evaluated(state: State, *, federation: Federation, plan: ReleasePlan | None, rounds_done: int) -> Evaluation:
    federation.load(state.weights, training=False)
    accuracy, loss = evaluate(
        federation.model,
        inputs=federation.data.test_inputs.to(federation.device),
        labels=federation.data.test_labels.to(federation.device),
    )
    return Evaluation(
        round=rounds_done,
        accuracy=accuracy,
        loss=loss,
        sensitivity=None if plan is None else plan.sensitivity.value,
        noise_scale=None if plan is None else plan.scale,
    )


@contextmanager
def _named(round: int, *, client: int | None = None) -> Iterator[None]:
    """Say round and client of whatever goes wrong: before a refusal's line, as a note on any other exception."""
    where = f"round {round}" if client is None else f"round {round}, client {client}"
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    except Exception as error:  # raised again, with the place named
        error.add_note(where)
        raise
