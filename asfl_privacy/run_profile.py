"""A profile: where a round's time goes, measured over a few rounds of a run that writes nothing."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import torch

from asfl_privacy.accounting import Ledger
from asfl_privacy.config import SweepConfig
from asfl_privacy.data import Dataset
from asfl_privacy.execution import Executor, Failure, Progress, SerialExecutor, begin_run, run_rounds
from asfl_privacy.execution.choice import Choice, choose_executor, make_executor
from asfl_privacy.execution.executor import split_failures
from asfl_privacy.federated import METHODS, Collected, Federation, Method, Payload, State, Traffic, Update
from asfl_privacy.federated.phases import Remaining
from asfl_privacy.federated.stopwatch import PHASES, Seconds, Stopwatch
from asfl_privacy.mechanisms import ReleasePlan
from asfl_privacy.run import Run, federation_of
from asfl_privacy.run_facts import clients_of_records

T = TypeVar("T")

NUM_ROUNDS = 5
ONE_AFTER_THE_OTHER = ("serial",)
"""Executors under which no two phases run at once, so that phases and `other` make up the wall time."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where the time of a round went; every figure but the counts and memory is a mean over the measured rounds.

    Attributes:
        cell: The run in short.
        choice: Executor, and why.
        device: Where training ran.
        rounds_measured: Rounds the means are over.
        rounds_warm_up: Rounds before them.
        evaluations: Evaluations among the measured rounds.
        wall_seconds: Wall time.
        cpu_seconds: CPU time of this process and its workers; None where workers' cannot be read.
        seconds: By phase, in the order of PHASES; what clients do is summed over clients.
        client_seconds: What of `seconds` clients spent, summed over clients.
        clients_wall_seconds: Wall time of the clients' work.
        other_seconds: Wall time in no phase; where clients work side by side, outside the clients' work alone.
        traffic: Bytes by channel, of all measured rounds.
        peak_memory_bytes: Most memory of this process, 0 where the platform does not tell.
        peak_memory_workers_bytes: The same, added up over worker processes.
    """

    cell: str
    choice: Choice
    device: str
    rounds_measured: int
    rounds_warm_up: int
    evaluations: int
    wall_seconds: float
    cpu_seconds: float | None
    seconds: Seconds
    client_seconds: float
    clients_wall_seconds: float
    other_seconds: float
    traffic: Traffic
    peak_memory_bytes: int
    peak_memory_workers_bytes: int

    @property
    def one_after_the_other(self) -> bool:
        """Whether phases and `other` make up the wall time."""
        return self.choice.name in ONE_AFTER_THE_OTHER

    @property
    def bytes_a_round(self) -> dict[str, float]:
        """Bytes that cross the network in a round, by channel."""
        total = {name: getattr(self.traffic, name) for name in ("model", "activations", "labels")}
        return {name: value / self.rounds_measured for name, value in total.items()}

    def to_dict(self) -> dict[str, object]:
        """All figures under flat names, seconds and bytes a round named as in metrics.csv."""
        return {
            "cell": self.cell,
            "executor": self.choice.name,
            "executor_reason": self.choice.reason,
            "device": self.device,
            "rounds_measured": self.rounds_measured,
            "rounds_warm_up": self.rounds_warm_up,
            "evaluations": self.evaluations,
            "wall_seconds": self.wall_seconds,
            "cpu_seconds": self.cpu_seconds,
            **{f"seconds_{phase}": value for phase, value in self.seconds.items()},
            "seconds_other": self.other_seconds,
            "client_seconds": self.client_seconds,
            "clients_wall_seconds": self.clients_wall_seconds,
            **{f"bytes_{channel}": value for channel, value in self.bytes_a_round.items()},
            "peak_memory_bytes": self.peak_memory_bytes or None,
            "peak_memory_workers_bytes": self.peak_memory_workers_bytes or None,
        }


def profile_run(
    config: SweepConfig,
    run: Run,
    *,
    data: Dataset,
    num_rounds: int = NUM_ROUNDS,
    workers: int = 1,
    trace: Path | None = None,
    on_note: Callable[[str], None] = lambda note: None,
) -> Profile:
    """Run a few rounds of a prepared cell as `train` does, and measure them.

    Evaluations come as often as in training: rounds are measured from one evaluation to another, so their number is
    rounded up to a multiple of `evaluate_every`; where that is larger, there is one evaluation, at the end.

    Args:
        config: The configuration; its rounds set budgets and noise, not how many are measured.
        run: From `asfl_privacy.run.prepare_run`.
        data: The data set.
        num_rounds: Rounds to measure at least, ≥ 1.
        workers: Threads or processes that the run may use.
        trace: File for a Chrome trace of one more round, clients one after the other; None for none.
        on_note: Told which executor was chosen.

    Returns:
        The profile.

    Raises:
        ValueError: Fewer than one round, executor torchrun, or whatever a phase refuses.

    Guarantee:
        Nothing is written but the trace, which holds names and times of operations alone; a private run's noised
        activations stay in this process and its workers, and no ledger outlives them.
    """
    check_profile(config, num_rounds=num_rounds)
    span = min(config.evaluate_every, num_rounds)
    last = span + span * math.ceil(num_rounds / span)
    federation, method = federation_of(config, run, data=data), METHODS[run.cell.method]
    federation = _with_rounds(federation, last, evaluate_every=span)
    choice = choose_executor(config.executor, federation, method, workers=workers)
    on_note(f"executor {choice.name}: {choice.reason}")
    samples: dict[int, _Sample] = {}
    with make_executor(
        choice.name,
        federation,
        method,
        workers=workers,
        tolerate_failures=config.tolerate_failures == "yes",
        compile=config.compile == "yes",
    ) as executor:
        timed = _Timed(executor)

        def after_round(progress: Progress) -> None:
            if progress.rounds_done in (span, last):
                samples[progress.rounds_done] = timed.sample(progress)

        progress = run_rounds(federation, method, executor=timed, start=_start(federation), after_round=after_round)
        memory = _workers_memory()
    if trace is not None:
        _trace_round(federation, method, start=progress, file=trace)
    return _profile(
        samples[span], samples[last], progress, cell=run.cell.label, choice=choice, federation=federation, memory=memory
    )


def check_profile(config: SweepConfig, *, num_rounds: int) -> None:
    """Refuse what cannot be profiled, before time is spent.

    Raises:
        ValueError: Fewer than one round, or executor torchrun.
    """
    if num_rounds < 1:
        raise ValueError(f"measure {num_rounds} must be a whole number from 1 on; give for example {NUM_ROUNDS}")
    if config.executor == "torchrun":
        raise ValueError(
            "executor torchrun: a profile is of one machine's process and workers; profile another executor"
        )


def _with_rounds(federation: Federation, rounds: int, *, evaluate_every: int) -> Federation:
    settings = replace(federation.settings, rounds=rounds, evaluate_every=evaluate_every)
    return replace(federation, settings=settings)


def _start(federation: Federation) -> Progress:
    """The run before its first round, its ledger in memory alone."""
    ledger = None
    if federation.privacy is not None:
        ledger = Ledger(p=federation.privacy.p, radius=federation.privacy.radius)
        ledger.clients = clients_of_records(federation)
    return begin_run(federation, ledger=ledger)


@dataclass(frozen=True)
class _Sample:
    """Clocks and counters after a round."""

    rounds_done: int
    wall: float
    cpu: float | None
    clients_wall: float
    clients: Seconds
    traffic: Traffic


def _profile(
    first: _Sample,
    last: _Sample,
    progress: Progress,
    *,
    cell: str,
    choice: Choice,
    federation: Federation,
    memory: int,
) -> Profile:
    """Means over the rounds between two samples."""
    rounds = last.rounds_done - first.rounds_done
    evaluations = [e for e in progress.evaluations if e.round > first.rounds_done]
    watch = Stopwatch()
    for evaluation in evaluations:
        watch.add_all(evaluation.seconds)
    wall, clients_wall = last.wall - first.wall, last.clients_wall - first.clients_wall
    clients = sum(last.clients.values()) - sum(first.clients.values())
    phases = sum(watch.seconds.values())
    within = clients if choice.name in ONE_AFTER_THE_OTHER else clients_wall
    return Profile(
        cell=cell,
        choice=choice,
        device=federation.device.type,
        rounds_measured=rounds,
        rounds_warm_up=first.rounds_done,
        evaluations=len(evaluations),
        wall_seconds=wall / rounds,
        cpu_seconds=None if last.cpu is None or first.cpu is None else (last.cpu - first.cpu) / rounds,
        seconds={phase: watch.seconds.get(phase, 0.0) / rounds for phase in PHASES},
        client_seconds=clients / rounds,
        clients_wall_seconds=clients_wall / rounds,
        other_seconds=(wall - (phases - clients) - within) / rounds,
        traffic=Traffic(
            *(getattr(last.traffic, n) - getattr(first.traffic, n) for n in ("model", "activations", "labels"))
        ),
        peak_memory_bytes=progress.evaluations[-1].peak_memory,
        peak_memory_workers_bytes=memory,
    )


@dataclass
class _Timed:
    """An executor whose work is timed from outside, and its clients' seconds added up."""

    executor: Executor
    wall: float = 0.0
    clients: Stopwatch = field(default_factory=Stopwatch)

    @property
    def name(self) -> str:
        return self.executor.name

    def sample(self, progress: Progress) -> _Sample:
        return _Sample(
            rounds_done=progress.rounds_done,
            wall=time.perf_counter(),
            cpu=_cpu_seconds(),
            clients_wall=self.wall,
            clients=dict(self.clients.seconds),
            traffic=progress.traffic,
        )

    def collect(
        self, state: State, cohort: Sequence[int], *, plan: ReleasePlan | None, remaining: Remaining, round: int
    ) -> dict[int, Collected | Failure]:
        started = time.perf_counter()
        answers = self.executor.collect(state, cohort, plan=plan, remaining=remaining, round=round)
        self.wall += time.perf_counter() - started
        for answer in split_failures(answers)[0].values():
            self.clients.add_all(answer.seconds)
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
        started = time.perf_counter()
        answers = self.executor.train(
            state, cohort, plan=plan, collected=collected, received=received, remaining=remaining, round=round
        )
        self.wall += time.perf_counter() - started
        for answer in split_failures(answers)[0].values():
            self.clients.add_all(answer.seconds)
        return answers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The executor inside is left by whoever entered it."""


class _Labelled(SerialExecutor):
    """The serial executor, each client's work a span of that name in a trace."""

    def _each(self, cohort: Sequence[int], work: Callable[[int], T]) -> dict[int, T | Failure]:
        answers: dict[int, T | Failure] = {}
        for client in cohort:
            with torch.profiler.record_function(f"client {client}"):
                answers |= super()._each((client,), work)
        return answers


def _trace_round(federation: Federation, method: Method, *, start: Progress, file: Path) -> None:
    """Write a Chrome trace of the round that comes next, with its evaluation."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if federation.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    number = start.rounds_done + 1
    with (
        _Labelled(federation, method) as executor,
        torch.profiler.profile(activities=activities) as profiler,
        torch.profiler.record_function(f"round {start.rounds_done}"),
    ):
        run_rounds(_with_rounds(federation, number, evaluate_every=number), method, executor=executor, start=start)
    profiler.export_chrome_trace(str(file))


def _cpu_seconds() -> float | None:
    """CPU time of this process and its living workers so far; None where workers' cannot be read."""
    total = time.process_time()
    for child in multiprocessing.active_children():
        try:
            stat = Path(f"/proc/{child.pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return None
        user, system = stat.rpartition(")")[2].split()[11:13]
        total += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return total


def _workers_memory() -> int:
    """Most memory that the living workers have held, added up; 0 where there are none or the platform does not tell."""
    total = 0
    for child in multiprocessing.active_children():
        try:
            lines = Path(f"/proc/{child.pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            return 0
        total += 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return total
