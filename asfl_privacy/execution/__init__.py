"""Executors: ways to run the same phases to the same result."""

from asfl_privacy.execution.executor import ClientFailedError, Executor, Failure, WorkerDiedError
from asfl_privacy.execution.progress import Evaluation, FailureNote, PlanFacts, Progress
from asfl_privacy.execution.rounds import RunStoppedError, begin_run, run_rounds, run_serially
from asfl_privacy.execution.serial import SerialExecutor
from asfl_privacy.execution.threads import ThreadsExecutor

__all__ = [
    "ClientFailedError",
    "Evaluation",
    "Executor",
    "Failure",
    "FailureNote",
    "PlanFacts",
    "Progress",
    "RunStoppedError",
    "SerialExecutor",
    "ThreadsExecutor",
    "WorkerDiedError",
    "begin_run",
    "run_rounds",
    "run_serially",
]
