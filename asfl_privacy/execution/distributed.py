"""The torchrun executor: clients sharded over ranks, payloads from rank to rank, the rounds on rank 0.

    rank 0   collect → facts of payloads ← ranks;  route, charge;  train → payloads between ranks → updates ← ranks

Rank 0 alone holds the ledger, routes, aggregates, evaluates and keeps checkpoints. Of a payload it knows who sent it, its
shape and what it costs; the values go from the sender's rank to the receiver's once rank 0 has charged them and said so.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self, TypeVar

import torch.distributed as dist

from asfl_privacy.execution.executor import ClientFailedError, Executor, Failure, WorkerDiedError
from asfl_privacy.execution.rank_channel import Channel
from asfl_privacy.execution.rank_share import ALL_CLIENTS, Answers, Order, Share, Shared, without_records
from asfl_privacy.execution.ranks import Ranks, clients_of, init_ranks, is_torchrun, run_facts
from asfl_privacy.execution.serial import SerialExecutor
from asfl_privacy.federated import Collected, Delivery, Federation, Method, Payload, State, Update
from asfl_privacy.federated.client_states import ClientState, MemoryClientStates
from asfl_privacy.federated.phases import Remaining
from asfl_privacy.mechanisms import ReleasePlan

__all__ = ["RankedExecutor", "Ranks", "init_ranks", "is_torchrun", "serve"]

T = TypeVar("T", Collected, Update)


class RankedExecutor:
    """Rank 0's side: says what is to be done, does its own share, and puts the answers together.

    Args:
        federation: Clients, network and settings; every rank has built the same.
        method: Whose phases are run.
        tolerate_failures: Whether a failed client is answered for by a `Failure`.
        within: Does this rank's own clients, made with `tolerate_failures=True`; None for one after the other.

    Raises:
        ValueError: Outside `init_ranks`, or on another rank than 0.

    Guarantee:
        The result is the serial executor's, bit for bit, where `within` has its bits and all ranks its arithmetic (as many
        threads as well). No payload's values reach a rank that works for neither its sender nor its receiver, and none
        leave the sender's rank before `train` is called.

    Edge cases:
        Client c is worked for by rank c modulo the number of ranks; one that has no client in a cohort waits. What clients
        keep lies on rank 0, for checkpoints, and goes to their ranks with each phase. Rank 0 holds a cohort's updates at
        once, so that methods sum them in client order.
    """

    name = "torchrun"

    def __init__(
        self,
        federation: Federation,
        method: Method,
        *,
        tolerate_failures: bool = False,
        within: Executor | None = None,
    ) -> None:
        if not dist.is_initialized() or dist.get_rank() != 0:
            raise ValueError(
                "executor torchrun is for rank 0 within init_ranks, and there is none here; start with torchrun, and call "
                "serve on the other ranks"
            )
        self._federation = federation
        self._method = method
        self._tolerate_failures = tolerate_failures
        self._channel = Channel(rank=0, device=federation.device)
        self._others = range(1, dist.get_world_size())
        self._share = Share(self._channel, within=within or _serially(federation, method))
        self._given: dict[int, Collected] = {}
        self._shared: Shared | None = None
        self._in_step = False

    def collect(
        self, state: State, cohort: Sequence[int], *, plan: ReleasePlan | None, remaining: Remaining, round: int
    ) -> dict[int, Collected | Failure]:
        """See `Executor`; activations and labels are stand-ins on torch's meta device."""
        self._shared = None  # sent anew each round, whatever became of the objects since
        order = Order("collect", round=round, cohort=tuple(cohort), remaining=remaining)
        answers = _only(Collected, self._carry_out(order, state, plan=plan), cohort)
        self._given = {client: answer for client, answer in answers.items() if isinstance(answer, Collected)}
        return answers

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
        """See `Executor`.

        Raises:
            ValueError: Something else was passed on than `collect` gave, of which the values lie on the ranks.
        """
        for client in cohort:
            if collected[client] is not self._given.get(client):
                raise ValueError(
                    f"round {round}, client {client}: this is not what collect gave, and the values lie on the client's rank; "
                    "pass collect's answers on as they are"
                )
        deliveries = tuple(
            Delivery(payload=self._announced(payload), receiver=receiver) for receiver, payload in received.items()
        )
        order = Order("train", round=round, cohort=tuple(cohort), remaining=remaining, deliveries=deliveries)
        return _only(Update, self._carry_out(order, state, plan=plan), cohort)

    def __enter__(self) -> Self:
        """Check that every rank is about to run the same.

        Raises:
            ValueError: One is not.
        """
        self._channel.broadcast(run_facts(self._federation, self._method))
        different = {rank: self._channel.receive(sender=rank) for rank in self._others}
        self._in_step = True
        for rank, names in different.items():
            if names:
                self._end()
                raise ValueError(
                    f"rank {rank} has another {' and '.join(names)} than rank 0: all ranks must run the same; start them with "
                    "the same flags, data and versions"
                )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tell the other ranks to end."""
        self._end()

    def _end(self) -> None:
        """Say that nothing follows; in the middle of a phase nobody listens, and ranks end when this process does."""
        if self._in_step:
            self._in_step = False
            with suppress(WorkerDiedError):
                self._channel.broadcast(Order("stop"))

    def _carry_out(self, order: Order, state: State, *, plan: ReleasePlan | None) -> Answers:
        """All ranks' answers; the first failure in the cohort's order is raised, where none is tolerated."""
        self._in_step = False
        shared = Shared(weights=state.weights, server=state.server, plan=plan)
        sent = None if shared.is_same(self._shared) else shared
        self._shared = shared
        kept = {rank: _kept(state, clients_of(rank, order.cohort)) for rank in self._others}
        follows = tuple(rank for rank, states in kept.items() if states)
        self._channel.broadcast(replace(order, shared=sent, kept_follows=follows))
        for rank in follows:
            self._channel.send(kept[rank], to=rank)
        answers = self._share.carry_out(order, state, plan=plan)
        for rank in self._others:
            for client, answer in self._channel.receive(sender=rank).items():
                answers[client] = Failure(client, answer.error(rank)) if isinstance(answer, Raised) else answer
        self._in_step = True
        fatal = (ALL_CLIENTS,) if self._tolerate_failures else (ALL_CLIENTS, *order.cohort)
        for client in fatal:
            failure = answers.get(client)
            if isinstance(failure, Failure):
                raise failure.error
        return answers

    def _announced(self, payload: Payload) -> Payload:
        """What ranks are told of a payload that a client has given."""
        given = self._given.get(payload.sender)
        if given is None or given.payload is not payload:
            raise ValueError(
                f"method {self._method.name} delivers another payload of client {payload.sender} than it collected: executor "
                "torchrun sends payloads from rank to rank as they are; use executor processes or serial"
            )
        return without_records(payload)


def serve(federation: Federation, method: Method, *, within: Executor | None = None) -> None:
    """The other ranks' side: do the work of this rank's clients until rank 0 ends it.

    Ctrl-C and SIGTERM are for rank 0 to answer, which ends its round and keeps the run: this rank serves on meanwhile.

    Args:
        federation: Clients, network and settings; every rank has built the same.
        method: Whose phases are run.
        within: As `RankedExecutor` takes it.

    Raises:
        WorkerDiedError: Another rank has ended without a word.
    """
    channel = Channel(rank=dist.get_rank(), device=federation.device)
    share = Share(channel, within=within or _serially(federation, method))
    shared = None
    with _signals_left_to_rank_0():
        mine, theirs = run_facts(federation, method), channel.hear()
        channel.send([name for name in mine if mine[name] != theirs[name]], to=0)
        while True:
            order: Order = channel.hear()
            if order.phase == "stop":
                return
            shared = order.shared or shared
            assert shared is not None  # the first order of a round brings it
            kept = channel.receive(sender=0) if channel.rank in order.kept_follows else {}
            state = State(weights=shared.weights, clients=MemoryClientStates().updated(kept), server=shared.server)
            answers = share.carry_out(order, state, plan=shared.plan)
            channel.send(
                {client: Raised.of(one) if isinstance(one, Failure) else one for client, one in answers.items()}, to=0
            )


@dataclass(frozen=True)
class Raised:
    """An exception on its way to rank 0, as text: not every exception survives pickling.

    Attributes:
        message: A refusal's own line, or `Failure.reason`.
        is_refusal: Whether it was a ValueError.
        traceback: Where it was raised.
    """

    message: str
    is_refusal: bool
    traceback: str

    @classmethod
    def of(cls, failure: Failure) -> Self:
        """What is said of a failure."""
        error = failure.error
        is_refusal = isinstance(error, ValueError)
        return cls(
            message=str(error) if is_refusal else failure.reason,
            is_refusal=is_refusal,
            traceback="".join(traceback.format_exception(error)),
        )

    def error(self, rank: int) -> Exception:
        """What rank 0 raises for it."""
        if self.is_refusal:
            return ValueError(self.message)
        return ClientFailedError(self.message, traceback=f"on rank {rank}:\n{self.traceback}")


def _serially(federation: Federation, method: Method) -> Executor:
    return SerialExecutor(federation, method, tolerate_failures=True)


def _kept(state: State, clients: Sequence[int]) -> dict[int, ClientState]:
    """What clients keep, of those that keep anything."""
    return {client: state.clients[client] for client in clients if client in state.clients}


def _only(kind: type[T], answers: Answers, cohort: Sequence[int]) -> dict[int, T | Failure]:
    """The answers of one phase, in the cohort's order."""
    ordered: dict[int, T | Failure] = {}
    for client in cohort:
        answer = answers[client]
        assert isinstance(answer, kind | Failure)
        ordered[client] = answer
    return ordered


@contextmanager
def _signals_left_to_rank_0() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM, where signals can be handled (the main thread)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
