"""The work that every engine is given: data, network, mini-batches and clock; torch and numpy alone, for every environment.

A task is one folder: task.json (sizes and rates) and data.pt (who holds which record, initial weights); the records lie
beside it, once for all tasks of a data set. Mini-batches are drawn from the same streams as the package's own, so every
engine must end with the same weights up to float rounding.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

SERVER = -1  # stands in for the client in the server's own streams
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """Sizes and rates of one run.

    Attributes:
        data: "fashion-mnist", "digits", "synthetic-28" or "synthetic-8".
        model: "cnn" or "mlp-H", H hidden units.
        method: "fedavg" (tail_steps + full_steps full steps) or "asfl".
        clients: N.
        cohort: Clients a round.
        rounds: Rounds, the first of which warms up and is not timed.
        tail_steps: τ'.
        full_steps: τ.
        batch_size: Records a step.
        lr: Learning rate of plain SGD.
        exchange_layer: Block at whose end activations leave.
        placement: Where the release's noise sits; "" for none.
        seed: Seed of the run.
    """

    data: str
    model: str
    method: str = "fedavg"
    clients: int = 20
    cohort: int = 20
    rounds: int = 6
    tail_steps: int = 0
    full_steps: int = 10
    batch_size: int = 32
    lr: float = 0.05
    exchange_layer: str = "auto"
    placement: str = ""
    seed: int = 0

    @property
    def num_steps(self) -> int:
        """Local steps a client takes in a round."""
        return self.tail_steps + self.full_steps


@dataclass(frozen=True)
class Records:
    """Data of a task as a plain loop holds it: normalised once, one pair of tensors a client."""

    inputs: list[Tensor]
    labels: list[Tensor]
    test_inputs: Tensor
    test_labels: Tensor
    initial: Weights


def save_task(folder: Path, task: Task, *, order: Tensor, sizes: Tensor, initial: Weights) -> None:
    """Write a task's folder: `order` holds the clients' records, client after client, `sizes` how many each has."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "task.json").write_text(json.dumps(asdict(task), indent=1) + "\n", encoding="utf-8")
    torch.save({"order": order, "sizes": sizes, "initial": initial}, folder / "data.pt")


def records_file(folder: Path, task: Task) -> Path:
    """Where the records of a task's data set lie."""
    return folder.parent / f"{task.data}.pt"


def load_task(folder: Path) -> Task:
    """Read a task's sizes."""
    return Task(**json.loads((folder / "task.json").read_text(encoding="utf-8")))


def load_records(folder: Path) -> Records:
    """Read a task's data, normalised."""
    held = torch.load(folder / "data.pt", weights_only=True)
    raw = torch.load(records_file(folder, load_task(folder)), weights_only=True)
    order, sizes, mean, std = held["order"], held["sizes"].tolist(), raw["mean"], raw["std"]
    return Records(
        inputs=list(torch.split((raw["train_inputs"][order] - mean) / std, sizes)),
        labels=list(torch.split(raw["train_labels"][order], sizes)),
        test_inputs=(raw["test_inputs"] - mean) / std,
        test_labels=raw["test_labels"],
        initial=held["initial"],
    )


def build_network(model: str, *, input_shape: tuple[int, ...], num_classes: int = 10) -> nn.Sequential:
    """The plain network, whose blocks are named as in the package's; its weights are yet to be loaded.

    Example:
        >>> [name for name, _ in build_network("mlp-8", input_shape=(1, 8, 8)).named_children()]
        ['fc1', 'classifier']
    """
    if model == "cnn":
        channels, height, width = input_shape
        size = [math.ceil(math.ceil(side / 2) / 2) for side in (height, width)]
        return nn.Sequential(
            OrderedDict(
                conv1=nn.Sequential(nn.Conv2d(channels, 16, 3, stride=2, padding=1), nn.ReLU()),
                conv2=nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
                fc1=nn.Sequential(nn.Flatten(), nn.Linear(32 * size[0] * size[1], 64), nn.ReLU()),
                classifier=nn.Linear(64, num_classes),
            )
        )
    hidden = int(model.removeprefix("mlp-"))
    return nn.Sequential(
        OrderedDict(
            fc1=nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), hidden), nn.ReLU()),
            classifier=nn.Linear(hidden, num_classes),
        )
    )


def network_of(task: Task, records: Records) -> nn.Sequential:
    """The network with the initial weights."""
    network = build_network(task.model, input_shape=tuple(records.inputs[0].shape[1:]))
    network.load_state_dict(records.initial)
    return network


def stream(seed: int, *, round: int, client: int, purpose: str) -> np.random.Generator:
    """The package's stream of the same name, written again, so that peers need not install the package."""
    digest = hashlib.sha256(f"{seed}|{round}|{client}|{purpose}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def draw_cohort(task: Task, *, round: int) -> list[int]:
    """The clients of a round, ascending."""
    rng = stream(task.seed, round=round, client=SERVER, purpose="cohort")
    return sorted(int(c) for c in rng.choice(task.clients, size=task.cohort, replace=False))


def batches(
    num_records: int, task: Task, *, num_steps: int, round: int, client: int, purpose: str = "full steps"
) -> Iterator[Tensor]:
    """Positions of the records of each step's mini-batch, drawn anew each step without replacement."""
    rng = stream(task.seed, round=round, client=client, purpose=purpose)
    for _ in range(num_steps):
        yield torch.from_numpy(rng.choice(num_records, size=min(task.batch_size, num_records), replace=False))


def train_locally(
    network: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor, task: Task, *, where: Where
) -> int:
    """A client's full steps as plain PyTorch takes them; returns their number."""
    num_steps = 0
    for batch in batches(len(labels), task, num_steps=task.num_steps, round=where.round, client=where.client):
        optimizer.zero_grad()
        F.cross_entropy(network(inputs[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        num_steps += 1
    return num_steps


@dataclass(frozen=True)
class Where:
    """A client in a round."""

    round: int
    client: int


@torch.no_grad()
def evaluate(network: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[float, float]:
    """Accuracy (0–1) and mean cross-entropy."""
    logits = torch.cat([network(part) for part in torch.split(inputs, 1024)])
    return float((logits.argmax(1) == labels).float().mean()), float(F.cross_entropy(logits, labels))


class Clock:
    """Time stamps between rounds: tick() before the first round and after each one.

    Processor time and memory are those of this process and of all its descendants, ended ones included.
    """

    def __init__(self, task: Task) -> None:
        self.rounds = task.rounds
        self.stamps: list[float] = []
        self.cpu: list[float] = []
        self.peak_mib = 0.0

    def tick(self) -> None:
        """Take a stamp; processor time is read outside of the timed stretch, after the warm-up and at the end."""
        done = len(self.stamps)
        if done == 1:
            self.cpu.append(tree_seconds())
        self.stamps.append(time.time())
        if done == self.rounds:  # while the engine's processes live
            self.cpu.append(tree_seconds())
            self.peak_mib = tree_peak_mib()

    def measured(self) -> dict[str, object]:
        """Seconds of each timed round, processor seconds of a round, and what a run pays once."""
        walls = [after - before for before, after in zip(self.stamps[1:], self.stamps[2:], strict=False)]
        started = float(os.environ.get("BENCHMARK_STARTED", self.stamps[0]))
        return {
            "walls": walls,
            "cpu": (self.cpu[1] - self.cpu[0]) / len(walls),
            "once": self.stamps[1] - started - float(np.median(walls)),
            "peak_mib": self.peak_mib,
        }


def _descendants() -> list[Path]:
    """Folders in /proc of all live processes under this one."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue  # it has just ended
            children.setdefault(parent, []).append(int(folder.name))
    found, left = [], [os.getpid()]
    while left:
        for child in children.get(left.pop(), []):
            found.append(Path("/proc") / str(child))
            left.append(child)
    return found


def tree_seconds() -> float:
    """Processor seconds of this process, its live descendants, and all their ended children."""
    ended = os.times()
    total = time.process_time() + ended.children_user + ended.children_system
    for folder in _descendants():
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended in between: its parent's count holds it
        total += sum(int(value) for value in fields[11:15]) / CLOCK_TICKS
    return total


def tree_peak_mib() -> float:
    """Peak resident MiB of this process and its live descendants, summed; pages that they share count in each."""
    total = 0
    for folder in (Path("/proc/self"), *_descendants()):
        try:
            lines = (folder / "status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return total / 1024.0


def finish(out: Path, *, clock: Clock, weights: Weights, task: Task, records: Records, **more: object) -> None:
    """Evaluate the last weights and write OUT.json and OUT.pt."""
    network = build_network(task.model, input_shape=tuple(records.inputs[0].shape[1:]))
    network.load_state_dict(weights)
    accuracy, loss = evaluate(network, records.test_inputs, records.test_labels)
    torch.save({name: value.detach().clone() for name, value in weights.items()}, out.with_suffix(".pt"))
    facts = {**clock.measured(), "accuracy": accuracy, "loss": loss, **more}
    out.with_suffix(".json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
