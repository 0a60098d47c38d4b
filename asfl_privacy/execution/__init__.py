"""Executors: ways to run the same phases to the same result."""

from asfl_privacy.execution.executor import Executor, Failure
from asfl_privacy.execution.progress import Evaluation, FailureNote, PlanFacts, Progress
from asfl_privacy.execution.rounds import RunStoppedError, begin_run, run_rounds, run_serially
from asfl_privacy.execution.serial import SerialExecutor
from asfl_privacy.execution.threads import ThreadsExecutor

__all__ = [
    "Evaluation",
    "Executor",
    "Failure",
    "FailureNote",
    "PlanFacts",
    "Progress",
    "RunStoppedError",
    "SerialExecutor",
    "ThreadsExecutor",
    "begin_run",
    "run_rounds",
    "run_serially",
]
