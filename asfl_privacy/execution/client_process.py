"""What a worker process does: clients' phases, one after the other, until nobody is left to ask for them."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from asfl_privacy.execution.client_work import collect_one, train_one
from asfl_privacy.execution.shared_region import Region, pack, unpack
from asfl_privacy.federated import Collected, Federation, Method, State, Update
from asfl_privacy.federated.client_states import ClientState, ClientStates
from asfl_privacy.federated.phases import Remaining
from asfl_privacy.mechanisms import ReleasePlan

Phase = Literal["collect", "train"]
PR_SET_PDEATHSIG = 1


class Start(NamedTuple):
    """How a worker process begins.

    Attributes:
        parent: Process that it works for.
        ends_with_parent: Whether Linux may be asked to end it with the thread that started it.
        core: The core that it keeps to, or None.
        dtype: torch's default type.
        matmul_precision: torch's precision of float32 products.
    """

    parent: int
    ends_with_parent: bool
    core: int | None
    dtype: torch.dtype
    matmul_precision: str


class Attach(NamedTuple):
    """A region to map from now on under this name; the file's descriptor follows."""

    name: str
    size: int
    private: bool


class Setup(NamedTuple):
    """What a worker holds for its whole life, a parcel in region `setup`: federation and method."""

    header: bytes


class Broadcast(NamedTuple):
    """What all clients of a phase read, a parcel in the region of this name, or in none.

    Attributes:
        name: `state` (weights and server) or `facts` (plan and remaining).
        header: Of the parcel.
    """

    name: Literal["state", "facts"]
    header: bytes


class Task(NamedTuple):
    """One client's phase.

    Attributes:
        phase: `collect` or `train`.
        client: Client number.
        round: Round number.
        header: Of the parcel of what this client alone reads: its state, its own pool, what it received.
        at: Where in region `tasks` the parcel lies; None for one without pieces.
        answer_at: Where in the region of the phase's name the answer may be written; None for nowhere.
        answer_size: How many bytes there are.
    """

    phase: Phase
    client: int
    round: int
    header: bytes
    at: int | None
    answer_at: int | None
    answer_size: int


class Ready(NamedTuple):
    """The worker has read its setup."""


class Done(NamedTuple):
    """A client's phase is done.

    Attributes:
        header: Of the parcel of its outcome.
        size: Bytes of the parcel's pieces.
        is_placed: Whether they lie where they may be written; otherwise all is in the header.
    """

    header: bytes
    size: int
    is_placed: bool


class Failed(NamedTuple):
    """A client's phase, or the setup, raised.

    Attributes:
        is_refusal: Whether it raised a ValueError.
        kind: Name of the exception's type.
        message: Its text.
        notes: What was noted of the place.
        trace: Its traceback.
    """

    is_refusal: bool
    kind: str
    message: str
    notes: tuple[str, ...]
    trace: str


def work(connection: Connection, start: Start) -> NoReturn:
    """Answer every task that comes through the connection; end when the other side is gone.

    Args:
        connection: To the parent.
        start: How to begin.
    """
    _begin(start)
    worker = _Worker(connection)
    try:
        while True:
            answer = worker.handle(pickle.loads(connection.recv_bytes()))
            if answer is not None:
                connection.send_bytes(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))
    except (EOFError, ConnectionError):  # the parent has finished, or is no more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # nothing is left to be saved, and taking torch apart would only take time


class _Worker:
    """What a worker process holds."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._regions: dict[str, Region] = {}
        self._federation: Federation | None = None
        self._method: Method | None = None
        self._state: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] = ({}, {})
        self._facts: tuple[ReleasePlan | None, Remaining] = (None, None)

    def handle(self, message: object) -> Ready | Done | Failed | None:
        """Do what a message asks for; the answer, where one is due."""
        match message:
            case Attach(name=name, size=size, private=private):
                descriptor = recv_handle(self._connection)
                self._regions[name] = Region(descriptor, size, private=private)
                os.close(descriptor)
            case Setup(header=header):
                return self._set_up(header)
            case Broadcast(name="state", header=header):
                self._state = self._read(header, region="state")
            case Broadcast(name="facts", header=header):
                self._facts = self._read(header, region="facts")
            case Task() as task:
                return self._answer(task)
        return None

    def _read(self, header: bytes, *, region: str, at: int = 0) -> Any:  # noqa: ANN401 - whatever was packed
        memory = self._regions[region].memory[at:] if region in self._regions else None
        return unpack(header, memory=memory, regions=self._regions)

    def _set_up(self, header: bytes) -> Ready | Failed:
        try:
            federation, self._method = self._read(header, region="setup")
            self._federation = federation.replica()  # a network in memory of its own, the records where all read them
            if federation.privacy is not None and federation.privacy.updates == "dp-sgd":
                import opacus.grad_sample
                import opacus.validators  # noqa: F401 - imports for seconds, so before the first round
        except Exception as error:  # classes of the user's that this process does not find, say
            return _failed(error)
        return Ready()

    def _answer(self, task: Task) -> Done | Failed:
        try:
            outcome = self._outcome(task)
            parcel = pack(outcome)
            if parcel.size == 0:
                return Done(header=parcel.header, size=0, is_placed=False)
            if task.answer_at is not None and parcel.size <= task.answer_size:
                parcel.write(self._regions[task.phase].memory[task.answer_at :])
                return Done(header=parcel.header, size=parcel.size, is_placed=True)
            return Done(header=pack(outcome, inline=True).header, size=parcel.size, is_placed=False)
        except Exception as error:  # raised again in the parent
            return _failed(error)

    def _outcome(self, task: Task) -> Collected | Update:
        assert self._federation is not None
        assert self._method is not None
        client_state, own, received = self._read(task.header, region="tasks", at=task.at or 0)
        weights, server = self._state
        plan, remaining = self._facts
        state = State(weights=dict(weights), clients=OwnState(task.client, client_state), server=server)
        if task.phase == "collect":
            return collect_one(
                self._method,
                state,
                task.client,
                federation=self._federation,
                plan=plan,
                remaining=remaining,
                round=task.round,
            )
        return train_one(
            self._method,
            state,
            task.client,
            federation=self._federation,
            plan=plan,
            own=own,
            received=received,
            remaining=remaining,
            round=task.round,
        )


class OwnState(ClientStates):
    """What one client keeps, for that client's phases; whatever else is asked for is refused, not taken for absent.

    Args:
        client: Client number.
        state: What it keeps; `{}` for nothing.
    """

    def __init__(self, client: int, state: ClientState) -> None:
        self._client, self._state = client, state

    def __getitem__(self, client: int) -> ClientState:
        if client != self._client:
            raise ValueError(
                f"the phase of client {self._client} asked for what client {client} keeps: a worker process has only the "
                "client's own; use executor serial or threads"
            )
        if not self._state:
            raise KeyError(client)
        return self._state

    def __contains__(self, client: object) -> bool:
        return client == self._client and bool(self._state)

    def __iter__(self) -> Iterator[int]:
        raise ValueError(self._refusal())

    def __len__(self) -> int:
        raise ValueError(self._refusal())

    def updated(self, changes: Mapping[int, ClientState]) -> ClientStates:
        """Not a client's to do."""
        raise ValueError(self._refusal())

    def _refusal(self) -> str:
        return (
            f"the phase of client {self._client} asked for all clients' states: a worker process has only the client's own; "
            "use executor serial or threads"
        )


def _begin(start: Start) -> None:
    """Leave Ctrl-C to the parent, end when it ends, and keep to one thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if start.ends_with_parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != start.parent:  # it has ended before that was asked for
        os._exit(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(start.dtype)
    torch.set_float32_matmul_precision(start.matmul_precision)
    if start.core is not None:
        os.sched_setaffinity(0, {start.core})


def _failed(error: Exception) -> Failed:
    return Failed(
        is_refusal=isinstance(error, ValueError),
        kind=type(error).__name__,
        message=str(error),
        notes=tuple(getattr(error, "__notes__", ())),
        trace="".join(traceback.format_exception(error)),
    )
