"""Local computation of a client's round (Table 2): every method's rounds in turns, one client at a time, on one thread."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import torch
from material import Measured
from recipe import rate_of
from runs import Runs, config_of

from asfl_privacy.accounting import Ledger
from asfl_privacy.cli.one_cell import one_cell
from asfl_privacy.config import SweepConfig
from asfl_privacy.configured_data import load_data
from asfl_privacy.data import Dataset
from asfl_privacy.execution import (
    Evaluation,
    Failure,
    Progress,
    RunStoppedError,
    SerialExecutor,
    begin_run,
    run_rounds,
)
from asfl_privacy.federated import METHODS, Collected, Federation, Method, Payload, State, Update
from asfl_privacy.federated.methods import SplitFedV2
from asfl_privacy.federated.phases import Remaining
from asfl_privacy.federated.stopwatch import Stopwatch
from asfl_privacy.federated.streams import SERVER, numpy_stream
from asfl_privacy.mechanisms import ReleasePlan
from asfl_privacy.reporting.records import Record
from asfl_privacy.run import federation_of, prepare_run
from asfl_privacy.run_facts import clients_of_records

REPEATS, WARM_UP, EPSILON = 5, 1, 4.0
SHARING, TRAINING = "sharing", "training"
Clock = Callable[[], float]


@dataclass(frozen=True)
class Contender:
    """A method that is timed.

    Attributes:
        federation: Its clients, which all contenders share, and a network of its own.
        method: Whose rounds are run.
        name: Columns of its records that say what it is.
    """

    federation: Federation
    method: Method
    name: Mapping[str, str]


def measure(fields: Mapping[str, Any], options: Mapping[str, Any], *, runs: Runs) -> Measured:
    """Time every method's local work.

    Args:
        fields: Of every run's configuration.
        options: `methods`, FedAvg among them; `rates` or `lr`; `repeats`, rounds of each method that count; `warm_up`,
            rounds before them, after which corrections and prototypes are there; `exchange_layers`, cuts at which methods
            that share are timed, where not at their own; `noised`, methods that are timed with Gaussian noise too, at
            `epsilon` a release; `seed`.
        runs: Not asked: workers would share the cores with what is timed.

    Returns:
        The table `timings`.

    Raises:
        ValueError: Options out of range, or a method that refuses its round.
    """
    repeats, warm_up = _count(options, "repeats", REPEATS), _count(options, "warm_up", WARM_UP)
    with _one_thread():
        records, _ = time_rounds(
            contenders(fields, options, rounds=warm_up + repeats),
            warm_up=warm_up,
            repeats=repeats,
            seed=int(options.get("seed", 0)),
        )
    return Measured(tables={"timings": records})


def contenders(fields: Mapping[str, Any], options: Mapping[str, Any], *, rounds: int) -> list[Contender]:
    """Who is timed: every method without noise, and those of `noised` with it.

    Args:
        fields: As in `measure`.
        options: As in `measure`.
        rounds: How many a run must have at least.

    Raises:
        ValueError: FedAvg is missing, noise for a method that shares nothing, or fields that break a rule.
    """
    noised, layers = list(options.get("noised", [])), list(options.get("exchange_layers", []))
    if "fedavg" not in options["methods"]:
        raise ValueError("methods lack fedavg, whose time the others' are relative to; add it")
    strangers = [name for name in noised if name not in options["methods"] or not METHODS[name].shares]
    if strangers:
        raise ValueError(f"noised {strangers[0]}: it is not timed or shares no activations; name asfl, say")
    noise = {"mech": ["gaussian"], "epsilon": [float(options.get("epsilon", EPSILON))], "evaluate_every": 1}
    clean = {"mech": ["none"], "evaluate_every": 10 * rounds}  # evaluations cost time, and tell nothing here
    asked = [
        {**fields, "rounds": max(rounds, fields.get("rounds", 0)), **rate_of(method, options), **cut, **mech}
        | {"method": [method], "seed": int(options.get("seed", 0))}
        for method in options["methods"]
        for cut in ([{"exchange_layer": [one]} for one in layers] if METHODS[method].shares and layers else [{}])
        for mech in ([clean, noise] if method in noised else [clean])
    ]
    configs = [config_of(one) for one in asked]
    data = load_data(configs[0])
    made: list[Contender] = []
    for config in configs:
        one = _contender(config, data=data)
        if made:  # the same records in the same place, held once
            one = replace(one, federation=replace(one.federation, clients=made[0].federation.clients))
        made.append(one)
    return made


def time_rounds(
    contenders: Sequence[Contender], *, warm_up: int, repeats: int, seed: int, clock: Clock = time.perf_counter
) -> tuple[list[Record], list[Progress]]:
    """Run everybody's first round, then everybody's second, and so on, in an order drawn anew each time, and time them.

    Args:
        contenders: Who is timed, with the same seed, so that a round's cohort is the same for all.
        warm_up: Rounds that are run and not recorded, ≥ 1.
        repeats: Rounds that are recorded, ≥ 1.
        seed: Of the order.
        clock: Gives seconds.

    Returns:
        A record for each contender, recorded round and client; and where each run has come to.

    Raises:
        ValueError: A run of fewer rounds than are timed, or a round that was refused; the line names the method.

    Guarantee:
        Timing changes nothing: each run is bit for bit that of the serial executor. A slower spell of the machine falls on
        all contenders alike, as far as it is longer than one round of each.
    """
    for one in contenders:
        if one.federation.settings.rounds < warm_up + repeats:
            raise ValueError(
                f"{one.method.name}: its run has {one.federation.settings.rounds} rounds and {warm_up + repeats} are timed; "
                "give it as many"
            )
    clocks = [ClientClock(one.federation, one.method, clock=clock) for one in contenders]
    progress = [_begin(one.federation) for one in contenders]
    records: list[Record] = []
    for number in range(warm_up + repeats):
        order = numpy_stream(seed, round=number, client=SERVER, purpose="timing order").permutation(len(contenders))
        for index in order.tolist():
            one = contenders[index]
            progress[index], certificate = _one_round(one, executor=clocks[index], start=progress[index])
            if number < warm_up:
                continue
            records += [
                {
                    **one.name,
                    "repeat": number - warm_up,
                    "client": client,
                    "records": one.federation.clients[client].num_records,
                    "seconds_sharing": watch.seconds[SHARING],
                    "seconds_training": watch.seconds[TRAINING],
                    "seconds_certificate": certificate,
                }
                for client, watch in clocks[index].clients.items()
            ]
    return records, progress


class ClientClock:
    """The serial executor, each client's work timed from outside: what a method does around its steps counts too.

    Sharing is the collect phase, 0 where nothing is shared. Training is the train phase: the network loaded, tail and full
    steps with whatever the method adds to them, and what it computes of them afterwards, such as class means. SplitFed
    V2's clients take their steps, both halves, while the server aggregates: there the time is that of aggregating the one
    client alone, whose result is thrown away; the mean of one client's heads in it is next to nothing beside the steps.

    Args:
        federation: Clients, network and settings.
        method: Whose phases are run.
        clock: Gives seconds.
    """

    name = "serial"

    def __init__(self, federation: Federation, method: Method, *, clock: Clock) -> None:
        self._inner = SerialExecutor(federation, method)
        self._federation, self._method, self._clock = federation, method, clock
        self.clients: dict[int, Stopwatch] = {}
        """Seconds of `SHARING` and `TRAINING` of the last round, by client."""

    def collect(
        self, state: State, cohort: Sequence[int], *, plan: ReleasePlan | None, remaining: Remaining, round: int
    ) -> dict[int, Collected | Failure]:
        """See `Executor`."""
        self.clients = {client: Stopwatch(self._federation.device, clock=self._clock) for client in cohort}
        answers: dict[int, Collected | Failure] = {}
        for client, watch in self.clients.items():
            with watch.phase(SHARING):
                answers |= self._inner.collect(state, (client,), plan=plan, remaining=remaining, round=round)
            found = answers[client]
            if isinstance(found, Collected) and found.payload is None:
                watch.seconds[SHARING] = 0.0
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
        """See `Executor`."""
        answers: dict[int, Update | Failure] = {}
        for client in cohort:
            watch = self.clients[client]
            with contextlib.nullcontext() if isinstance(self._method, SplitFedV2) else watch.phase(TRAINING):
                answers |= self._inner.train(
                    state,
                    (client,),
                    plan=plan,
                    collected=collected,
                    received=received,
                    remaining=remaining,
                    round=round,
                )
            update = answers[client]
            if isinstance(self._method, SplitFedV2) and isinstance(update, Update):
                with watch.phase(TRAINING):
                    self._method.aggregate(state, {client: update}, federation=self._federation, round=round)
        return answers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is held."""


def _contender(config: SweepConfig, *, data: Dataset) -> Contender:
    wanted, cell = one_cell(config, command="a timed round")
    run = prepare_run(wanted, cell, data=data)
    federation = federation_of(wanted, run, data=data)
    name = {
        "data": wanted.data,
        "model": wanted.model,
        "method": cell.method,
        "mech": cell.mech,
        "exchange_layer": run.cell.exchange_layer or "",
        "device": federation.device.type,
    }
    return Contender(federation=federation, method=METHODS[cell.method], name=name)


def _begin(federation: Federation) -> Progress:
    """The run before its first round, its ledger in memory alone."""
    if federation.privacy is None:
        return begin_run(federation, ledger=None)
    ledger = Ledger(p=federation.privacy.p, radius=federation.privacy.radius)
    ledger.clients = clients_of_records(federation)
    return begin_run(federation, ledger=ledger)


def _one_round(one: Contender, *, executor: ClientClock, start: Progress) -> tuple[Progress, float | None]:
    """The run a round later, and how long the round's certificate took, where one was made and the round evaluated."""
    done: list[Progress] = []
    certificates: list[float] = []

    def note(evaluation: Evaluation) -> None:
        if evaluation.sensitivity is not None:
            certificates.append(evaluation.seconds["certificate"])

    try:
        with contextlib.suppress(RunStoppedError):  # before the round after, unless this was the last
            run_rounds(
                one.federation,
                one.method,
                executor=executor,
                start=start,
                should_stop=lambda: bool(done),
                on_evaluation=note,
                after_round=done.append,
            )
    except ValueError as error:
        raise ValueError(f"{one.method.name}: {error}") from error
    return done[0], (certificates[0] if certificates else None)


def _count(options: Mapping[str, Any], name: str, default: int) -> int:
    value = int(options.get(name, default))
    if value < 1:
        raise ValueError(f"{name} {value} must be a whole number from 1 on; give for example {default}")
    return value


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
