"""An executor that hands everything on to another one and notes how far each round's clients drifted apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from asfl_privacy.execution.executor import Executor, Failure, split_failures
from asfl_privacy.federated import Collected, Payload, State, Update
from asfl_privacy.federated.diagnostics import client_drift
from asfl_privacy.federated.phases import Remaining
from asfl_privacy.mechanisms import ReleasePlan


class WatchedExecutor:
    """What it is given does the work; client drift is read off the updates on their way to the server.

    Args:
        executor: Who does the work; entered and left with this one.
        trained: Names of the parameters that train.

    Attributes:
        drift: Client drift of the last round; None before the first.
    """

    def __init__(self, executor: Executor, *, trained: Sequence[str]) -> None:
        self._executor = executor
        self._trained = tuple(trained)
        self.drift: float | None = None

    @property
    def name(self) -> str:
        """See `Executor`."""
        return self._executor.name

    def collect(
        self, state: State, cohort: Sequence[int], *, plan: ReleasePlan | None, remaining: Remaining, round: int
    ) -> dict[int, Collected | Failure]:
        """See `Executor`."""
        return self._executor.collect(state, cohort, plan=plan, remaining=remaining, round=round)

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
        answers = self._executor.train(
            state, cohort, plan=plan, collected=collected, received=received, remaining=remaining, round=round
        )
        updates, _ = split_failures(answers)
        results = [update.weights for update in updates.values()]
        self.drift = client_drift(state.weights, results, trained=self._trained) if results else None
        return answers

    def __enter__(self) -> Self:
        self._executor.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See `Executor`."""
        self._executor.__exit__(kind, error, trace)
