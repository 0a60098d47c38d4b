"""The rounds of a run: every phase in order, what leaves charged before it leaves, whichever executor does the work."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

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
from asfl_privacy.execution.client_work import named
from asfl_privacy.execution.evaluation import Evaluator
from asfl_privacy.execution.executor import Executor, Failure, split_failures
from asfl_privacy.execution.progress import Evaluation, FailureNote, Progress, plan_facts
from asfl_privacy.execution.serial import SerialExecutor
from asfl_privacy.federated import (
    Charge,
    Delivery,
    Federation,
    Method,
    Payload,
    Privacy,
    State,
    sample_cohort,
)
from asfl_privacy.federated.phases import Remaining
from asfl_privacy.federated.stopwatch import Stopwatch
from asfl_privacy.mechanisms import ReleasePlan
from asfl_privacy.mechanisms.label_randomiser import response_multiplier

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]  # stands for "not measured here"

T = TypeVar("T")


class RunStoppedError(Exception):
    """The run was asked to stop between two rounds."""


@dataclass(frozen=True)
class _Round:
    """What stays the same within one round."""

    number: int
    cohort: tuple[int, ...]
    plan: ReleasePlan | None
    watch: Stopwatch


def begin_run(
    federation: Federation,
    *,
    ledger: Ledger | None,
    journal: Journal | None = None,
    run_id: str = "run",
    state: State | None = None,
) -> Progress:
    """A run before its first round.

    Args:
        federation: Clients, network and settings.
        ledger: Empty ledger of the run, in which releases are recorded before they are delivered; None for a run
            without privacy.
        journal: The data set's ledger over all runs, in which releases are recorded too, before they are delivered.
        run_id: Names this run in the journal.
        state: The state to begin with; None for the initial weights and nothing kept.

    Raises:
        ValueError: A ledger without privacy, privacy without a ledger, or a ledger that counts in other units.
    """
    privacy = federation.privacy
    if (ledger is None) != (privacy is None):
        raise ValueError(
            "a private run needs a ledger, and a run without privacy must not have one; give both or neither"
        )
    account = None
    if ledger is not None and privacy is not None:
        if (ledger.p, ledger.radius) != (privacy.p, privacy.radius):
            raise ValueError(
                f"the ledger counts at p {ledger.p:g} and radius {ledger.radius}, the run's noise is for p {privacy.p:g} "
                f"and radius {privacy.radius}; make the ledger with the run's own"
            )
        account = open_account(
            ledger, privacy=privacy, num_records=federation.data.num_records, journal=journal, run_id=run_id
        )
    return Progress(
        rounds_done=0,
        state=State(weights=federation.initial_weights) if state is None else state,
        account=account,
    )


def run_rounds(
    federation: Federation,
    method: Method,
    *,
    executor: Executor,
    start: Progress,
    evaluation_threads: int = 1,
    should_stop: Callable[[], bool] = lambda: False,
    on_evaluation: Callable[[Evaluation], None] = lambda evaluation: None,
    after_round: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Train from where a run stands to the settings' number of rounds.

    Args:
        federation: Clients, network and settings.
        method: What to run.
        executor: Does the clients' work; entered already.
        start: From `begin_run` or a checkpoint; its account is changed in place.
        evaluation_threads: Threads that an evaluation is spread over; its result does not depend on them.
        should_stop: Asked before every round.
        on_evaluation: Told of every evaluation.
        after_round: Told of the run after every round.

    Returns:
        The run after its last round.

    Raises:
        ValueError: A phase refused; the line names round and client.
        RunStoppedError: `should_stop` said so.

    Guarantee:
        The result does not depend on the executor, but for one that says that its sums are in another order.
    """
    _refuse_open_channels(federation, method)
    settings, progress, watch = federation.settings, start, Stopwatch(federation.device)
    began, seconds_before = time.perf_counter(), start.seconds
    with Evaluator(federation, threads=evaluation_threads) as evaluator:
        for number in range(start.rounds_done, settings.rounds):
            if should_stop():
                raise RunStoppedError(f"stopped after {number} of {settings.rounds} rounds")
            progress, plan = _run_round(progress, number, federation, method, executor=executor, watch=watch)
            if (number + 1) % settings.evaluate_every == 0 or number + 1 == settings.rounds:
                evaluation = _evaluated(progress, method, evaluator=evaluator, plan=plan, watch=watch)
                watch = Stopwatch(federation.device)
                progress = replace(progress, evaluations=(*progress.evaluations, evaluation))
                on_evaluation(evaluation)
            progress = replace(progress, seconds=seconds_before + time.perf_counter() - began)
            after_round(progress)
    return progress


def _refuse_open_channels(federation: Federation, method: Method) -> None:
    """Refuse a private run in which something leaves that nothing noises and no ledger counts.

    Raises:
        ValueError: Naming it.
    """
    privacy = federation.privacy
    if privacy is not None and (method.exposes_records or (method.in_the_clear and privacy.updates != "none")):
        raise ValueError(
            f"method {method.name} in a private run with updates {privacy.updates}: its clients send {method.in_the_clear} in "
            "the clear, which no ledger counts; use method asfl, fedavg or fedvarp"
        )


def run_serially(
    federation: Federation,
    method: Method,
    *,
    ledger: Ledger | None,
    journal: Journal | None = None,
    run_id: str = "run",
    should_stop: Callable[[], bool] = lambda: False,
    on_evaluation: Callable[[Evaluation], None] = lambda evaluation: None,
) -> Progress:
    """A whole run, one client after the other: `begin_run`, then `run_rounds` on the serial executor."""
    start = begin_run(federation, ledger=ledger, journal=journal, run_id=run_id)
    with SerialExecutor(federation, method) as executor:
        return run_rounds(
            federation, method, executor=executor, start=start, should_stop=should_stop, on_evaluation=on_evaluation
        )


def _run_round(
    progress: Progress,
    number: int,
    federation: Federation,
    method: Method,
    *,
    executor: Executor,
    watch: Stopwatch,
) -> tuple[Progress, ReleasePlan | None]:
    state, account = progress.state, progress.account
    with watch.phase("certificate"), named(number):
        plan = method.prepare(state, federation=federation, round=number)
    now = _Round(number=number, cohort=sample_cohort(federation, round=number), plan=plan, watch=watch)
    left = _remaining_releases(account, now, federation=federation)
    collected, failed = _answers(
        executor.collect(state, now.cohort, plan=plan, remaining=left, round=number), now, phase="collect"
    )
    kept = {client: done.client_state for client, done in collected.items() if done.client_state is not None}
    payloads = {client: done.payload for client, done in collected.items() if done.payload is not None}
    with watch.phase("exchange"):
        deliveries = method.route(payloads, federation=federation, round=number)
        if account is not None:
            leaving = _leaving(payloads, deliveries, privacy=federation.privacy)
            with named(number):
                charge(account, leaving, num_records=federation.data.num_records, round=number)
        received = deliver(deliveries)
    if kept:
        state = replace(state, clients=state.clients.updated(kept))
    left = _remaining_updates(account, now, federation=federation)
    updates, lost = _answers(
        executor.train(
            state,
            tuple(collected),
            plan=plan,
            collected=collected,
            received=received,
            remaining=left,
            round=number,
        ),
        now,
        phase="train",
    )
    if account is not None:
        spent = [one for update in updates.values() for one in update.charges]
        with named(number):
            charge(account, spent, num_records=federation.data.num_records, round=number)
    with watch.phase("aggregate"), named(number):
        state = method.aggregate(state, updates, federation=federation, round=number)
        kept = {client: done.client_state for client, done in updates.items() if done.client_state is not None}
        if kept:
            state = replace(state, clients=state.clients.updated(kept))
    traffic = method.traffic(state, now.cohort, deliveries, federation=federation)
    facts = None if plan is None else plan_facts(plan)
    largest = progress.largest_plan
    progress = replace(
        progress,
        rounds_done=number + 1,
        state=state,
        largest_plan=facts
        if largest is None or (facts is not None and facts.sensitivity > largest.sensitivity)
        else largest,
        traffic=progress.traffic + traffic,
        drawn=progress.drawn + sum(update.drawn for update in updates.values()),
        drawn_remote=progress.drawn_remote + sum(update.drawn_remote for update in updates.values()),
        failures=(*progress.failures, *failed, *lost),
    )
    return progress, plan


def deliver(deliveries: Sequence[Delivery]) -> dict[int, Payload]:
    """What each client receives; from here on it has left its sender."""
    return {delivery.receiver: delivery.payload for delivery in deliveries}


def _answers(
    answers: Mapping[int, T | Failure], now: _Round, *, phase: str
) -> tuple[dict[int, T], tuple[FailureNote, ...]]:
    """The answers of those that did their work, their time noted, and a note of each that failed."""
    good, failures = split_failures(answers)
    if not good:  # nobody is left to go on with
        raise failures[0].error
    for answer in good.values():
        now.watch.add_all(answer.seconds)  # type: ignore[attr-defined]  # Collected and Update both have it
    notes = (FailureNote(round=now.number, client=f.client, phase=phase, reason=f.reason) for f in failures)
    return good, tuple(notes)


def _leaving(
    payloads: Mapping[int, Payload], deliveries: Sequence[Delivery], *, privacy: Privacy | None
) -> list[Charge]:
    """Charges of what leaves its client: delivered payloads, and those that the sender's own tail round trains on."""
    delivered = {delivery.payload.sender for delivery in deliveries}
    uses_own = privacy is not None and privacy.own == "released"
    return [one for sender, payload in payloads.items() if sender in delivered or uses_own for one in payload.charges]


def _remaining_releases(account: Account | None, now: _Round, *, federation: Federation) -> Remaining:
    """How many more releases of this round's kind each record may take."""
    if account is None or now.plan is None:
        return None
    plan, privacy = now.plan, federation.privacy
    labels = None if privacy is None else privacy.label_epsilon
    left = remaining(
        account,
        mechanism=plan.mechanism.family,
        noise_multiplier=plan.noise_multiplier,
        epsilon_excess=plan.epsilon_excess,
        tail_probability=plan.tail_probability,
        once="activations" if privacy is not None and privacy.noise == "once" else None,
        label_multiplier=None if labels is None else response_multiplier(labels),
    )
    for client in now.cohort:
        hold_back(account, left, records=federation.clients[client].records)
    return left


def _remaining_updates(account: Account | None, now: _Round, *, federation: Federation) -> Remaining:
    """How many more noised steps or updates each record may enter."""
    if account is None:
        return None
    left = remaining_updates(account, federation=federation)
    for client in now.cohort:
        hold_back(account, left, records=federation.clients[client].records)
    return left


def _evaluated(
    progress: Progress, method: Method, *, evaluator: Evaluator, plan: ReleasePlan | None, watch: Stopwatch
) -> Evaluation:
    state, accuracy, loss = progress.state, None, None
    with watch.phase("evaluate"):
        if method.has_global_network:
            accuracy, loss = evaluator.evaluate(state.weights, round=progress.rounds_done)
        measures = evaluator.measures(method, state, round=progress.rounds_done)
    return Evaluation(
        round=progress.rounds_done,
        accuracy=accuracy,
        loss=loss,
        sensitivity=None if plan is None else plan.sensitivity.value,
        noise_scale=None if plan is None else plan.scale,
        traffic=progress.traffic,
        seconds=watch.seconds,
        peak_memory=peak_memory(),
        measures=measures,
    )


def peak_memory() -> int:
    """Most bytes that this process has held in memory, 0 where the platform does not say.

    A process inherits the peak of the one that forked it, so on Linux the peak since its own start is read.
    """
    with contextlib.suppress(OSError, StopIteration), open("/proc/self/status", encoding="ascii") as status:  # noqa: PTH123
        return 1024 * int(next(line for line in status if line.startswith("VmHWM")).split()[1])
    if resource is None:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
