"""The serial executor: every phase, one client after the other; the readable twin of whatever is faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from asfl_privacy.accounting import Ledger
from asfl_privacy.accounting.journal import Journal
from asfl_privacy.execution.charging import (
    Account,
    charge,
    hold_back,
    open_account,
    remaining,
    remaining_updates,
)
from asfl_privacy.federated import (
    Charge,
    Collected,
    Delivery,
    Federation,
    Method,
    Payload,
    Privacy,
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
        held_back: Records whose budget was spent before the run ended.
        largest_plan: The plan of the round with the most noise, or None.
        traffic: Bytes by channel.
        remote_fraction: α, the share of remote records in all records drawn.
        seconds: Wall time of the rounds, evaluation included.
    """

    state: State
    evaluations: tuple[Evaluation, ...]
    ledger: Ledger | None
    held_back: int
    largest_plan: ReleasePlan | None
    traffic: Traffic
    remote_fraction: float
    seconds: float


def run_serially(
    federation: Federation,
    method: Method,
    *,
    ledger: Ledger | None,
    journal: Journal | None = None,
    run_id: str = "run",
    should_stop: Callable[[], bool] = lambda: False,
    on_evaluation: Callable[[Evaluation], None] = lambda evaluation: None,
) -> RunResult:
    """Train for the settings' number of rounds.

    Args:
        federation: Clients, network and settings.
        method: What to run.
        ledger: Empty ledger of the run, in which releases are recorded before they are delivered; None for a run
            without privacy.
        journal: The data set's ledger over all runs, in which releases are recorded too, before they are delivered.
        run_id: Names this run in the journal.
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
    account = None
    if ledger is not None and privacy is not None:
        account = open_account(
            ledger, privacy=privacy, num_records=federation.data.num_records, journal=journal, run_id=run_id
        )
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
        collected = _collect(state, cohort, method, federation=federation, plan=plan, account=account, round=round)
        state = replace(state, clients={**state.clients, **{c: done.client_state for c, done in collected.items()}})
        payloads = {c: done.payload for c, done in collected.items() if done.payload is not None}
        deliveries = method.route(payloads, federation=federation, round=round)
        if account is not None:
            leaving = _leaving(payloads, deliveries, privacy=privacy)
            with _named(round):
                charge(account, leaving, num_records=federation.data.num_records, round=round)
        if plan is not None and (largest_plan is None or plan.sensitivity.value > largest_plan.sensitivity.value):
            largest_plan = plan
        received = deliver(deliveries)
        updates = _train(
            state,
            cohort,
            method,
            federation=federation,
            plan=plan,
            collected=collected,
            received=received,
            account=account,
            round=round,
        )
        if account is not None:
            spent = [one for client in cohort for one in updates[client].charges]
            with _named(round):
                charge(account, spent, num_records=federation.data.num_records, round=round)
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
        held_back=0 if account is None else int(account.held_back.sum()),
        largest_plan=largest_plan,
        traffic=traffic,
        remote_fraction=drawn_remote / drawn if drawn else 0.0,
        seconds=time.perf_counter() - started,
    )


def deliver(deliveries: Sequence[Delivery]) -> dict[int, Payload]:
    """What each client receives; from here on it has left its sender."""
    return {delivery.receiver: delivery.payload for delivery in deliveries}


def _leaving(
    payloads: Mapping[int, Payload], deliveries: Sequence[Delivery], *, privacy: Privacy | None
) -> list[Charge]:
    """Charges of what leaves its client: delivered payloads, and those that the sender's own tail round trains on."""
    delivered = {delivery.payload.sender for delivery in deliveries}
    uses_own = privacy is not None and privacy.own == "released"
    return [one for sender, payload in payloads.items() if sender in delivered or uses_own for one in payload.charges]


def _collect(
    state: State,
    cohort: Sequence[int],
    method: Method,
    *,
    federation: Federation,
    plan: ReleasePlan | None,
    account: Account | None,
    round: int,
) -> dict[int, Collected]:
    left = None
    if account is not None and plan is not None:
        left = remaining(
            account,
            mechanism=plan.mechanism.family,
            noise_multiplier=plan.noise_multiplier,
            epsilon_excess=plan.epsilon_excess,
            tail_probability=plan.tail_probability,
            once="activations" if federation.privacy is not None and federation.privacy.noise == "once" else None,
        )
        for client in cohort:
            hold_back(account, left, records=federation.clients[client].records)
    collected = {}
    for client in cohort:
        with _named(round, client=client):
            collected[client] = method.collect(
                state, client, federation=federation, plan=plan, remaining=left, round=round
            )
    return collected


def _train(
    state: State,
    cohort: Sequence[int],
    method: Method,
    *,
    federation: Federation,
    plan: ReleasePlan | None,
    collected: Mapping[int, Collected],
    received: Mapping[int, Payload],
    account: Account | None,
    round: int,
) -> dict[int, Update]:
    left = None
    if account is not None:
        left = remaining_updates(account, federation=federation)
        for client in cohort:
            hold_back(account, left, records=federation.clients[client].records)
    updates = {}
    for client in cohort:
        # Layers such as dropout can only draw from torch's global generator: seed it, and leave it as it was.
        with _named(round, client=client), torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed(federation.settings.seed, round=round, client=client, purpose="layers"))
            updates[client] = method.train(
                state,
                client,
                federation=federation,
                plan=plan,
                own=collected[client].own,
                received=received.get(client),
                remaining=left,
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
