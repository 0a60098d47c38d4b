"""Clients whose cross-entropy is ½h(w − a)² up to a constant: rounds that can be worked out by hand, through the real code.

A record is (h, a) and its label 0; logits (0, log(exp(q) − 1)) have cross-entropy q = 1 + ½h(w − a)². The head passes
records through, the tail is the parameters.
"""

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import torch
from executor_contract import assert_same_run
from federations import make_tiny
from torch import nn

from asfl_privacy.data import Dataset
from asfl_privacy.execution import begin_run, run_rounds
from asfl_privacy.execution.checkpoint import read_checkpoint, write_checkpoint
from asfl_privacy.execution.choice import make_executor
from asfl_privacy.federated import Federation, State, TrainingSettings, build_federation
from asfl_privacy.federated.federation import Client
from asfl_privacy.federated.schedules import Schedule

WEIGHT, SHIFT = "well.w", "shift.s"
TWO = ((1.0, 0.0), (9.0, 1.0))
"""Curvature h and minimiser a of two clients; the sum of both is least at 9/10."""
FIVE = ((1.0, 0.0), (9.0, 1.0), (4.0, -0.5), (2.0, 2.0), (0.5, -1.0))


class Well(nn.Module):
    """Logits whose cross-entropy for label 0 is 1 + ½h(w − a)²."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, records):
        q = 1.0 + 0.5 * records[:, 0] * (self.w - records[:, 1]) ** 2
        return torch.stack([torch.zeros_like(q), torch.log(torch.expm1(q))], dim=1)


class Shift(nn.Module):
    """Moves every minimiser by −s, so that the loss is ½h(s + w − a)² and both parameters have one gradient."""

    def __init__(self):
        super().__init__()
        self.s = nn.Parameter(torch.zeros(1))

    def forward(self, records):
        return torch.stack([records[:, 0], records[:, 1] - self.s], dim=1)


def well(*, input_shape, num_classes):
    """One parameter, w."""
    return nn.Sequential(OrderedDict(through=nn.Flatten(), well=Well()))


def shifted(*, input_shape, num_classes):
    """Two parameters in two blocks, s and w."""
    return nn.Sequential(OrderedDict(through=nn.Flatten(), shift=Shift(), well=Well()))


def make_wells(wells=TWO, *, records=None, model_name="quadratic:well", **changes) -> Federation:
    """One client for each (h, a), in float64, of `records[i]` equal records, one by default."""
    counts = [1] * len(wells) if records is None else records
    inputs = torch.tensor([one for one, count in zip(wells, counts, strict=True) for _ in range(count)])
    labels = torch.zeros(len(inputs), dtype=torch.int64)
    data = Dataset("wells", inputs, labels, inputs, labels, num_classes=2, input_box=(-10.0, 10.0))
    settings = {
        "clients": len(wells),
        "cohort": len(wells),
        "rounds": 20,
        "tail_steps": 0,
        "full_steps": 10,
        "batch_size": 1000,
        "lr": 0.05,
        "seed": 0,
        "exchange_layer": "through",
        "evaluate_every": 1000,
    } | changes
    federation = build_federation(
        data, model_name=model_name, partition="iid", settings=TrainingSettings(**settings), privacy=None
    )
    federation.model.double()
    ends = np.cumsum(counts)
    clients = tuple(
        Client(i, np.arange(end - count, end), inputs[end - count : end].double(), labels[end - count : end])
        for i, (end, count) in enumerate(zip(ends, counts, strict=True))
    )
    weights = {name: value.double() for name, value in federation.initial_weights.items()}
    data = replace(data, train_inputs=inputs.double(), test_inputs=inputs.double())
    return replace(federation, data=data, clients=clients, initial_weights=weights)


def every_state(federation, method, *, executor="serial", start=None) -> list[State]:
    """The state before the first round and after each."""
    begun = begin_run(federation, ledger=None, state=start)
    states = [begun.state]
    with make_executor(executor, federation, method) as running:
        run_rounds(
            federation,
            method,
            executor=running,
            start=begun,
            after_round=lambda progress: states.append(progress.state),
        )
    return states


def end(federation, method, **how) -> float:
    """w after the last round."""
    return float(every_state(federation, method, **how)[-1].weights[WEIGHT])


def plain_end(well, w, *, steps, lr):
    """Where plain gradient descent on ½h(w − a)² ends: a + (1 − lr·h)^steps·(w − a)."""
    h, a = well
    return a + (1.0 - lr * h) ** steps * (w - a)


def skewed_run(data, method, *, executor="serial", start=None, rounds=4, **changes):
    """Three of five unequal clients a round on the first digits, with momentum, decay and a falling rate."""
    sizes = {"clients": 5, "cohort": 3, "partition": "dirichlet:0.5", "momentum": 0.5, "weight_decay": 1e-3}
    federation = make_tiny(data, rounds=rounds, schedule=Schedule("step", 0.5, (2,)), **(sizes | changes))
    with make_executor(executor, federation, method, workers=2) as running:
        begun = begin_run(federation, ledger=None) if start is None else start
        return run_rounds(federation, method, executor=running, start=begun)


def assert_goes_on_from_a_checkpoint(data, method, *, folder):
    """Two rounds, a checkpoint, and two more in a federation made anew are four rounds, to the bit."""
    write_checkpoint(folder, skewed_run(data, method, rounds=2), fingerprint="here")
    found = read_checkpoint(folder, fingerprint="here")
    assert_same_run(skewed_run(data, method, start=found.progress), skewed_run(data, method))
