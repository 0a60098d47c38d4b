"""What every executor is: the clients' phases of a round, run to the same result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TypeVar

from asfl_privacy.federated import Collected, Payload, State, Update
from asfl_privacy.federated.phases import Remaining
from asfl_privacy.mechanisms import ReleasePlan

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """A client whose work in a phase failed, where that is tolerated.

    Attributes:
        client: Client number.
        error: What it raised; round and client are named in it.
    """

    client: int
    error: Exception

    @property
    def reason(self) -> str:
        """What went wrong, in one line."""
        return reason_of(self.error)


class ClientFailedError(RuntimeError):
    """A client's work failed in another process; says what was raised there, with round and client.

    Args:
        message: In one line.
        traceback: Of the other process.
    """

    def __init__(self, message: str, *, traceback: str) -> None:
        super().__init__(message)
        self.traceback = traceback


class ExecutorRefusedError(ValueError):
    """An executor that cannot run this network, method or device; nothing has been run."""


class WorkerDiedError(RuntimeError):
    """A process that did clients' work has ended; the line says which, how, and what it was doing."""


def reason_of(error: BaseException) -> str:
    """What went wrong and where, in one line; a refusal's or another process's own line as it is."""
    text = " ".join(str(error).split())
    if isinstance(error, ValueError | ClientFailedError):  # named already
        return text
    where = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))
    return f"{where}{type(error).__name__}: {text}"


class Executor(Protocol):
    """The clients' phases of one federation and method; a context manager that gives back what it holds.

    Guarantee:
        Collect and train answer for every client of the cohort. Without `tolerate_failures` the first failure is
        raised, with round and client named; with it the failed client's answer is a `Failure`.
    """

    @property
    def name(self) -> str:
        """What rows and flags call it."""
        ...

    def collect(
        self, state: State, cohort: Sequence[int], *, plan: ReleasePlan | None, remaining: Remaining, round: int
    ) -> dict[int, Collected | Failure]:
        """The collect phase of each client of the cohort."""
        ...

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
        """The train phase of each client of the cohort, from what it collected and received."""
        ...

    def __enter__(self) -> Self:
        """Start what the executor needs."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back."""
        ...


def split_failures(answers: Mapping[int, T | Failure]) -> tuple[dict[int, T], list[Failure]]:
    """Answers of the clients that did their work, and the failures."""
    good: dict[int, T] = {}
    failures = []
    for client, answer in answers.items():
        if isinstance(answer, Failure):
            failures.append(answer)
        else:
            good[client] = answer
    return good, failures


def in_order(answers: Iterable[tuple[int, T]], cohort: Sequence[int]) -> dict[int, T]:
    """Answers in the order of the cohort, in whichever order they came."""
    by_client = dict(answers)
    return {client: by_client[client] for client in cohort}
