"""The processes executor: clients on worker processes that stay, with tensors in memory that all of them map."""

from __future__ import annotations

import os
import pickle
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch

from asfl_privacy.accounting.checks import check_integer
from asfl_privacy.execution.client_process import Broadcast, Done, Failed, Phase, Setup, Task
from asfl_privacy.execution.crew import Crew
from asfl_privacy.execution.executor import Failure, in_order
from asfl_privacy.execution.mailbox import Mailbox
from asfl_privacy.execution.shared_region import Parcel, pack
from asfl_privacy.execution.worker_handle import Sent, WorkerHandle, raised
from asfl_privacy.federated import Collected, Federation, Method, Payload, State, Update
from asfl_privacy.federated.phases import Remaining
from asfl_privacy.mechanisms import ReleasePlan

SMALL_MESSAGE = 16 * 1024
"""Bytes that a connection surely holds: no more is sent to a worker that may itself be sending."""


@dataclass(frozen=True)
class _Work:
    """One phase of a round that is going on."""

    phase: Phase
    round: int
    read_by: Callable[[int], tuple[object, ...]]
    waiting: deque[int]
    answers: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Exception] = field(default_factory=dict)


class ProcessesExecutor:
    """Clients on worker processes that are started once, each with one thread and a network of its own.

    Args:
        federation: Clients, network and settings. Its network must be one that pickle can send.
        method: Whose phases are run.
        workers: Number of processes, ≥ 1; no more than a cohort are started.
        tolerate_failures: Whether a failed client is answered for by a `Failure`, and a worker that died is replaced.
        shuffle: Handles answers in a random order, as tests of what must not depend on it need.

    Raises:
        ValueError: A network or method that pickle refuses, no Unix, or not enough memory to share the records in.

    Guarantee:
        The bits of `SerialExecutor` on one thread, for whichever worker does a client's work and in whichever order they
        end. The records are in memory once for all workers; a client's phase sees its own state, never another's. What a
        phase returned keeps its values for as long as it is kept: shared memory is written again only once nothing views
        it. Workers end with the executor and with this process, however it ends, and leave no file.

    Edge cases:
        In workers the data set has sizes but no values: phases read `federation.clients`, and one that reads the data
        set itself fails (torch: no data in a meta tensor). What does not fit into shared memory goes through pipes.
    """

    name = "processes"

    def __init__(
        self,
        federation: Federation,
        method: Method,
        *,
        workers: int,
        tolerate_failures: bool = False,
        shuffle: random.Random | None = None,
    ) -> None:
        if os.name != "posix":
            raise ValueError(f"executor processes on {os.name}: it shares memory as Unix does; use executor threads")
        self._num_workers = min(check_integer("workers", workers, minimum=1), federation.settings.cohort)
        self._tolerate_failures = tolerate_failures
        self._setup = _packed_setup(federation, method)
        self._mailbox = Mailbox(self._setup)
        self._crew = Crew(self._brief, replace=tolerate_failures, shuffle=shuffle)
        self._broadcasts: dict[str, bytes] = {}
        self._stated: tuple[int, object, object] | None = None

    def collect(
        self, state: State, cohort: Sequence[int], *, plan: ReleasePlan | None, remaining: Remaining, round: int
    ) -> dict[int, Collected | Failure]:
        """See `Executor`."""

        def read_by(client: int) -> tuple[object, ...]:
            return state.clients.get(client, {}), None, None

        return self._run("collect", state, cohort, read_by=read_by, facts=(plan, remaining), round=round)

    def train(
        self,
        state: State,
        cohort: Sequence[int],
        *,
        plan: ReleasePlan | None,
        collected: Mapping[int, Collected],
        received: Mapping[int, Payload],
        remaining: Remaining,
        round: int,
    ) -> dict[int, Update | Failure]:
        """See `Executor`."""

        def read_by(client: int) -> tuple[object, ...]:
            return state.clients.get(client, {}), collected[client].own, received.get(client)

        return self._run("train", state, cohort, read_by=read_by, facts=(plan, remaining), round=round)

    def __enter__(self) -> Self:
        """Start the workers, and wait until all are ready."""
        try:
            self._crew.start(self._num_workers)
        except BaseException:
            self._crew.end(at_once=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the workers, in the middle of their work where something went wrong."""
        self._crew.end(at_once=error is not None)

    def _run(
        self,
        phase: Phase,
        state: State,
        cohort: Sequence[int],
        *,
        read_by: Callable[[int], tuple[object, ...]],
        facts: tuple[ReleasePlan | None, Remaining],
        round: int,
    ) -> dict[int, Any]:
        if not self._crew.workers:
            raise ValueError("executor processes has no workers: they live within its with block; use it inside one")
        now = _Work(phase=phase, round=round, read_by=read_by, waiting=deque(cohort))
        try:
            self._make_room(phase, len(cohort))
            self._broadcast(state, facts, round=round)
            while now.waiting or self._crew.is_busy:
                self._hand_out(now)
                self._take_in(now)
        except BaseException:  # what workers have in work would be taken for answers of a later phase
            self._crew.end(at_once=True)
            raise
        for client in cohort:
            if client in now.failures:
                if not self._tolerate_failures:
                    raise now.failures[client]
                now.answers[client] = Failure(client, now.failures[client])
        return in_order(now.answers.items(), cohort)

    def _brief(self, worker: WorkerHandle) -> None:
        """Send a new worker all that it must know."""
        for name in self._mailbox.regions:
            self._attach(worker, name)
        worker.send(pickle.dumps(Setup(header=self._setup.header)))
        for message in self._broadcasts.values():
            worker.send(message)

    def _attach(self, worker: WorkerHandle, name: str) -> None:
        worker.attach(name, self._mailbox.regions[name], private=name == "setup")

    def _make_room(self, phase: Phase, cohort_size: int) -> None:
        for name in self._mailbox.make_room({"tasks": 2 * self._num_workers, phase: cohort_size}):
            self._stated = None  # what was sent may refer to the region before
            self._crew.tell(partial(self._attach, name=name))

    def _broadcast(self, state: State, facts: tuple[ReleasePlan | None, Remaining], *, round: int) -> None:
        """Write what all clients of the phase read; weights and the server's part once a round."""
        last = self._stated
        if last is None or last[0] != round or last[1] is not state.weights or last[2] is not state.server:
            self._write_for_all("state", (state.weights, state.server))
            self._stated = (round, state.weights, state.server)  # kept: what was sent may lie in what they view
        self._write_for_all("facts", facts)

    def _write_for_all(self, name: Literal["state", "facts"], value: object) -> None:
        header, is_new = self._mailbox.write(name, value)
        if is_new:
            self._crew.tell(partial(self._attach, name=name))
        message = self._broadcasts[name] = pickle.dumps(Broadcast(name=name, header=header))
        self._crew.tell(lambda worker: worker.send(message))

    def _hand_out(self, now: _Work) -> None:
        """Give free workers a client each, and busy ones a second, to go on with, while there are plenty."""
        for busy in (0, 1):
            for worker in tuple(self._crew.workers):
                if not now.waiting or (busy and len(now.waiting) <= self._num_workers):
                    return
                if worker.is_ready and len(worker.in_work) == busy:
                    self._assign(worker, now)

    def _assign(self, worker: WorkerHandle, now: _Work) -> None:
        """Send a worker the next client, or nothing where that is too much for one that is busy."""
        client = now.waiting.popleft()
        header, at = self._mailbox.post(now.read_by(client))
        answer_at, answer_size = self._mailbox.space(now.phase)
        message = pickle.dumps(
            Task(
                phase=now.phase,
                client=client,
                round=now.round,
                header=header,
                at=at,
                answer_at=answer_at,
                answer_size=answer_size,
            )
        )
        sent = Sent(client=client, round=now.round, at=at, answer_at=answer_at)
        if worker.in_work and len(message) > SMALL_MESSAGE:
            now.waiting.appendleft(client)
            self._mailbox.give_back("tasks", at)
            self._mailbox.give_back(now.phase, answer_at)
        else:
            self._crew.give(worker, message, sent)

    def _take_in(self, now: _Work) -> None:
        """Wait for answers, and take them."""
        for sent, outcome in self._crew.hear():
            self._mailbox.give_back("tasks", sent.at)
            if isinstance(outcome, Done):
                now.answers[sent.client] = self._mailbox.read(now.phase, outcome, at=sent.answer_at)
                continue
            self._mailbox.give_back(now.phase, sent.answer_at)
            if outcome is None:
                now.waiting.append(sent.client)
                continue
            now.failures[sent.client] = raised(outcome) if isinstance(outcome, Failed) else outcome
            if not self._tolerate_failures:
                now.waiting.clear()  # those before it have been sent: the first failure is always the same one


def _packed_setup(federation: Federation, method: Method) -> Parcel:
    """What every worker gets: the federation, its data set without values, and the method."""
    data = federation.data
    sizes: dict[str, Any] = {
        name: torch.empty_like(value, device="meta") for name, value in vars(data).items() if torch.is_tensor(value)
    }
    sent = replace(federation, data=replace(data, **sizes))
    for what, value in (("network", sent), ("method", method)):
        try:
            pack(value)
        except Exception as error:  # the user's blocks may hold anything; the line says how it failed
            raise ValueError(
                f"the {what} cannot be sent to a worker process ({type(error).__name__}: {' '.join(str(error).split())}): "
                "each worker needs one of its own; define its classes at the top of a module and hold in them only what "
                "pickle takes, or use executor serial or threads"
            ) from error
    return pack((sent, method))
