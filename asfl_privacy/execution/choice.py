"""The choice of an executor: by name, or from device, model size and method."""

from __future__ import annotations

import os
from dataclasses import dataclass

from asfl_privacy.execution.batched import BatchedExecutor, why_not_batched
from asfl_privacy.execution.executor import Executor, ExecutorRefusedError
from asfl_privacy.execution.global_generators import refuse_unseeded_draws
from asfl_privacy.execution.serial import SerialExecutor
from asfl_privacy.execution.threads import ThreadsExecutor, why_not_threads
from asfl_privacy.federated import Federation, Method

SMALL = 200_000
"""Parameters up to which stacked networks are faster than one client after the other on a core."""


@dataclass(frozen=True)
class Choice:
    """An executor's name, and why it was chosen."""

    name: str
    reason: str


def choose_executor(asked: str, federation: Federation, method: Method, *, workers: int) -> Choice:
    """What `auto` stands for.

    Args:
        asked: `auto`, or the name of an executor, which is then taken.
        federation: Clients, network and settings.
        method: What to run.
        workers: Processes or threads that may be used.

    Guarantee:
        Whether steps are batched, which changes sums in their last digits, depends on device, network and method alone,
        never on the number of workers or cores: a run repeats to the bit on another machine of the same arithmetic.
    """
    if asked != "auto":
        return Choice(asked, "asked for")
    size = sum(parameter.numel() for parameter in federation.model.parameters())
    on_cpu = federation.device.type == "cpu"
    if size <= SMALL or not on_cpu:
        reason = why_not_batched(federation, method)
        if reason is None:
            where = f"{size} parameters" if on_cpu else f"device {federation.device.type}"
            return Choice("batched", f"{where}: many clients at once")
    if not on_cpu:
        return Choice("serial", f"device {federation.device.type}; not batched, as {reason}")
    workers = min(workers, federation.settings.cohort)
    if workers < 2:
        return Choice("serial", "one worker")
    reason = why_not_threads(federation)
    if reason is not None:
        return Choice("processes", f"{workers} workers; not threads, as {reason}")
    return Choice("threads", f"{workers} workers")


def make_executor(
    name: str,
    federation: Federation,
    method: Method,
    *,
    workers: int = 1,
    tolerate_failures: bool = False,
    compile: bool = False,
) -> Executor:
    """The executor of a name, to be entered before it is used.

    Args:
        name: `serial`, `threads`, `processes`, `batched` or `torchrun`.
        federation: Clients, network and settings.
        method: Whose phases are run.
        workers: Threads or processes, ≥ 1, of those that have any; no more than the cohort are started.
        tolerate_failures: Whether the run goes on without clients that fail.
        compile: Whether the batched step is compiled.

    Raises:
        ExecutorRefusedError: An unknown name, or a network, method or device that the executor cannot run.
    """
    try:
        return _made(name, federation, method, workers=workers, tolerate_failures=tolerate_failures, compile=compile)
    except ValueError as error:
        raise ExecutorRefusedError(str(error)) from error


def _made(
    name: str, federation: Federation, method: Method, *, workers: int, tolerate_failures: bool, compile: bool
) -> Executor:
    if workers < 1:
        raise ValueError(f"workers {workers} must be a whole number from 1 on; give for example 2")
    refuse_unseeded_draws(federation)
    workers = min(workers, federation.settings.cohort)
    if name in ("threads", "processes") and federation.device.type != "cpu":
        raise ValueError(
            f"executor {name} with device {federation.device.type}: a GPU runs one process's kernels best; use batched"
        )
    if name == "serial":
        return SerialExecutor(federation, method, tolerate_failures=tolerate_failures)
    if name == "threads":
        return ThreadsExecutor(federation, method, workers=workers, tolerate_failures=tolerate_failures)
    if name == "processes":
        from asfl_privacy.execution.processes import ProcessesExecutor  # loads multiprocessing

        return ProcessesExecutor(federation, method, workers=workers, tolerate_failures=tolerate_failures)
    if name == "batched":
        return BatchedExecutor(
            federation, method, workers=workers, tolerate_failures=tolerate_failures, compile=compile
        )
    if name == "torchrun":
        from asfl_privacy.execution.distributed import RankedExecutor  # loads torch.distributed

        within = within_rank(federation, method)
        return RankedExecutor(federation, method, tolerate_failures=tolerate_failures, within=within)
    raise ValueError(f"executor {name!r} is unknown; use serial, threads, processes, batched or torchrun")


def within_rank(federation: Federation, method: Method) -> Executor:
    """What does one rank's own clients under torchrun: steps are batched on a GPU, where they can be."""
    if federation.device.type == "cuda" and why_not_batched(federation, method) is None:
        return BatchedExecutor(federation, method, tolerate_failures=True)
    return SerialExecutor(federation, method, tolerate_failures=True)


def sums_in_another_order(name: str, federation: Federation, method: Method) -> bool:
    """Whether an executor's results have other last digits than the serial one's."""
    return name == "batched" or (name == "torchrun" and within_rank(federation, method).name == "batched")


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
