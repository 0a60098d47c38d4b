"""The serial executor: one client after the other; the readable twin of whatever is faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar

from asfl_privacy.execution.client_work import collect_one, train_one
from asfl_privacy.execution.executor import Failure
from asfl_privacy.federated import Collected, Federation, Method, Payload, State, Update
from asfl_privacy.federated.phases import Remaining
from asfl_privacy.mechanisms import ReleasePlan

T = TypeVar("T")


class SerialExecutor:
    """One client after the other, in this thread.

    Args:
        federation: Clients, network and settings.
        method: Whose phases are run.
        tolerate_failures: Whether a failed client is answered for by a `Failure`.
    """

    name = "serial"

    def __init__(self, federation: Federation, method: Method, *, tolerate_failures: bool = False) -> None:
        self._federation = federation
        self._method = method
        self._tolerate_failures = tolerate_failures

    def collect(
        self, state: State, cohort: Sequence[int], *, plan: ReleasePlan | None, remaining: Remaining, round: int
    ) -> dict[int, Collected | Failure]:
        """See `Executor`."""
        federation, method = self._federation, self._method
        return self._each(
            cohort,
            lambda client: collect_one(
                method, state, client, federation=federation, plan=plan, remaining=remaining, round=round
            ),
        )

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
        return self._each(
            cohort,
            lambda client: train_one(
                self._method,
                state,
                client,
                federation=self._federation,
                plan=plan,
                own=collected[client].own,
                received=received.get(client),
                remaining=remaining,
                round=round,
            ),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is held."""

    def _each(self, cohort: Sequence[int], work: Callable[[int], T]) -> dict[int, T | Failure]:
        answers: dict[int, T | Failure] = {}
        for client in cohort:
            try:
                answers[client] = work(client)
            except Exception as error:  # noted and gone on without, where that was asked for
                if not self._tolerate_failures:
                    raise
                answers[client] = Failure(client, error)
        return answers
