"""Part 7, freshness: outputs lie on the claimed lattice; no fork, seed, copy or pickle repeats noise."""

from __future__ import annotations

import copy
import math
import os
import pickle
import select
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from asfl_privacy.audit.inputs import make_inputs
from asfl_privacy.audit.probe import Layer, Probe, RefusedError, set_mode
from asfl_privacy.audit.randomness import seed_everything
from asfl_privacy.audit.residuals import Residuals, unround
from asfl_privacy.audit.significance import Evidence, cosines, normal_scores, too_aligned

NUM_SCALARS = 512
FORK_TIMEOUT_S = 60.0
MEANING = "cosine between residuals"


def check_lattice(residuals: Residuals) -> list[Evidence]:
    """Whether every output is a multiple of the claimed spacing."""
    worst = max(residuals.calls, key=lambda call: call.off_lattice / call.u.size)
    fraction = worst.off_lattice / worst.u.size
    return [
        Evidence(
            where=worst.where,
            observed=fraction,
            expected=0.0,
            p_value=0.0 if fraction > 0.0 else 1.0,
            num_tests=1,
            meaning="fraction of outputs off the claimed lattice",
        )
    ]


def check_freshness(probe: Probe, *, mode: str, stream: np.random.Generator) -> tuple[list[Evidence], list[str]]:
    """Compare noise drawn after a fork, a seed, a deepcopy and a pickle with noise drawn beside it.

    Args:
        probe: the layer.
        mode: "train", "eval" or "call".
        stream: draws the input and the positions within lattice cells.

    Returns:
        Evidence, and notes on what was not possible; a refusal to be copied or forked is safe.

    Guarantee:
        For an honest layer every p-value is valid. Global generators are seeded here: the caller restores them.
    """
    set_mode(mode, probe.layer, probe.tap)
    rows = max(2, math.ceil(NUM_SCALARS / probe.claim.size))
    inputs = probe.tensor(make_inputs("edge", rows=rows, claim=probe.claim, stream=stream))
    found: list[Evidence] = []
    notes: list[str] = []

    def compare(name: str, first: Callable[[], np.ndarray], second: Callable[[], np.ndarray]) -> None:
        try:
            draws = [unround(draw(), claim=probe.claim, stream=stream).ravel() for draw in (first, second)]
        except _NotPossibleError as error:
            notes.append(f"{name}: {error}")
            return
        scores = [normal_scores(draw, family=probe.claim.family) for draw in draws]
        found.append(_evidence(f"{mode} mode, {name}", *scores))

    def seeded() -> np.ndarray:
        seed_everything(20_240_229)
        return _draw(probe, inputs)

    compare("the same seed set twice", seeded, seeded)
    for name, duplicate in (("deepcopy", copy.deepcopy), ("pickle", _pickled)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                twin = replace(probe, layer=duplicate(probe.layer))
        except Exception as error:  # whatever it raises, no copy exists
            notes.append(f"{name}: refused, {type(error).__name__}")
            continue
        compare(f"a {name} and the original", partial(_draw, twin, inputs), partial(_draw, probe, inputs))
    if hasattr(os, "fork") and probe.device.type == "cpu":
        children = [_Child(partial(_draw, probe, inputs)) for _ in range(2)]
        answers = [child.answer(shape=(rows, -1)) for child in children]
        compare("two forked children", answers[0], answers[1])
        compare("a forked child and its parent", answers[0], partial(_draw, probe, inputs))
    else:
        notes.append("fork: not possible here")
    return found, notes


class _NotPossibleError(Exception):
    """A draw that could not be made."""


def _draw(probe: Probe, inputs: torch.Tensor) -> np.ndarray:
    try:
        return probe.residuals(inputs, probe.outputs(inputs))
    except RefusedError as error:
        raise _NotPossibleError(f"refused, {error}") from error


def _pickled(layer: Layer) -> Layer:
    twin: Layer = pickle.loads(pickle.dumps(layer))
    return twin


class _Child:
    """A forked child that makes one draw and sends it back."""

    def __init__(self, draw: Callable[[], np.ndarray]) -> None:
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads at a fork
            self.process = os.fork()
        if self.process == 0:
            try:
                os.close(reader)
                torch.set_num_threads(1)  # a forked OpenMP pool may hang
                with os.fdopen(writer, "wb") as pipe:
                    pipe.write(np.ascontiguousarray(draw(), dtype=np.float64).tobytes())
            finally:
                os._exit(0)  # no handlers, no flushing of the parent's files
        os.close(writer)
        self.data = _read(reader, process=self.process)

    def answer(self, *, shape: tuple[int, int]) -> Callable[[], np.ndarray]:
        """The draw, as a function that raises where the child sent none."""

        def draw() -> np.ndarray:
            if not self.data:
                raise _NotPossibleError("the forked child refused or gave no answer")
            return np.frombuffer(self.data, dtype=np.float64).reshape(shape)

        return draw


def _read(reader: int, *, process: int) -> bytes:
    """All the child sends; nothing if it hangs, in which case it is ended."""
    parts: list[bytes] = []
    deadline = time.monotonic() + FORK_TIMEOUT_S
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                os.kill(process, signal.SIGKILL)
                parts.clear()
                break
            part = pipe.read(65536)
            if not part:
                break
            parts.append(part)
    os.waitpid(process, 0)
    return b"".join(parts)


def _evidence(where: str, first: np.ndarray, second: np.ndarray) -> Evidence:
    cosine = float(cosines(first, second))
    p_value = float(too_aligned(np.array(cosine), count=first.size))
    return Evidence(where=where, observed=cosine, expected=0.0, p_value=p_value, num_tests=1, meaning=MEANING)
