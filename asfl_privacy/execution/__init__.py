"""Executors: ways to run the same phases to the same result."""

from asfl_privacy.execution.serial import Evaluation, RunResult, RunStoppedError, run_serially

__all__ = ["Evaluation", "RunResult", "RunStoppedError", "run_serially"]
