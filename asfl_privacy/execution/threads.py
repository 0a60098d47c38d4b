"""The threads executor: clients on a pool of threads, each with a scratch network of its own."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeVar

import torch

from asfl_privacy.execution.client_work import collect_one, train_one
from asfl_privacy.execution.executor import Failure
from asfl_privacy.execution.global_generators import generators_moved
from asfl_privacy.federated import Collected, Federation, Method, Payload, State, Update
from asfl_privacy.federated.phases import Remaining
from asfl_privacy.mechanisms import ReleasePlan

T = TypeVar("T")

SHARED_DRAWS = (
    "the network draws from torch's global generator (dropout), which threads share, so no two runs would be alike"
)


class ThreadsExecutor:
    """Clients on threads of this process; torch's kernels run outside Python's lock.

    Args:
        federation: Clients, network and settings; each thread trains a replica of the network.
        method: Whose phases are run.
        workers: Number of threads; each runs its kernels on one core.
        tolerate_failures: Whether a failed client is answered for by a `Failure`.

    Raises:
        ValueError: A network that draws from torch's global generator (dropout), which threads share; both when it shows
            in a first forward pass and, where it shows later, after the phase in which it drew.
    """

    name = "threads"

    def __init__(
        self, federation: Federation, method: Method, *, workers: int, tolerate_failures: bool = False
    ) -> None:
        reason = why_not_threads(federation)
        if reason is not None:
            raise ValueError(f"executor threads: {reason}; use executor processes or serial")
        self._federation = federation
        self._method = method
        self._tolerate_failures = tolerate_failures
        self._replicas: queue.SimpleQueue[Federation] = queue.SimpleQueue()
        for _ in range(workers):
            self._replicas.put(federation.replica())
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="client")

    def collect(
        self, state: State, cohort: Sequence[int], *, plan: ReleasePlan | None, remaining: Remaining, round: int
    ) -> dict[int, Collected | Failure]:
        """See `Executor`."""

        def work(client: int, federation: Federation) -> Collected:
            return collect_one(
                self._method, state, client, federation=federation, plan=plan, remaining=remaining, round=round
            )

        return self._each(cohort, work)

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

        def work(client: int, federation: Federation) -> Update:
            return train_one(
                self._method,
                state,
                client,
                federation=federation,
                plan=plan,
                own=collected[client].own,
                received=received.get(client),
                remaining=remaining,
                round=round,
                seed_global_draws=False,
            )

        with _no_global_draws(round):
            return self._each(cohort, work)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the threads to end."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _each(self, cohort: Sequence[int], work: Callable[[int, Federation], T]) -> dict[int, T | Failure]:
        def on_a_replica(client: int) -> T:
            replica = self._replicas.get()
            try:
                return work(client, replica)
            finally:
                self._replicas.put(replica)

        futures = {client: self._pool.submit(on_a_replica, client) for client in cohort}
        answers: dict[int, T | Failure] = {}
        try:
            for client, future in futures.items():
                try:
                    answers[client] = future.result()
                except Exception as error:  # noted and gone on without, where that was asked for
                    if not self._tolerate_failures:
                        raise
                    answers[client] = Failure(client, error)
        finally:
            for future in futures.values():
                future.cancel()
        return answers


def why_not_threads(federation: Federation) -> str | None:
    """Why the clients cannot be trained on threads; None where they can."""
    if federation.privacy is not None and federation.privacy.updates == "dp-sgd":
        return "updates dp-sgd examines the network under seeds of torch's global generator, which threads share"
    return SHARED_DRAWS if "torch" in generators_moved(federation) else None


@contextmanager
def _no_global_draws(round: int) -> Iterator[None]:
    """Refuse what happened inside where it drew from the generator that all threads share."""
    before = torch.default_generator.get_state()
    yield
    if not torch.equal(before, torch.default_generator.get_state()):
        torch.default_generator.set_state(before)
        raise ValueError(f"round {round}: executor threads: {SHARED_DRAWS}; use executor processes or serial")
