"""BlazeFL: its base trainers, one client after the other, with a thread pool, and with a process pool over shared memory."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from blazefl.core import (
    BaseClientTrainer,
    IPCMode,
    ProcessPoolClientTrainer,
    SHMHandle,
    ThreadPoolClientTrainer,
    deserialize_model,
    serialize_model,
)
from torch import Tensor, nn
from workload import Clock, Records, Task, Where, finish, load_records, load_task, network_of, train_locally

HELD: dict[str, Any] = {}  # what forked workers inherit: task and records


@dataclass
class Down:
    """Server to client."""

    parameters: Tensor
    round: int


@dataclass
class Up:
    """Client to server."""

    client: int
    parameters: Any  # Tensor, or its handle in shared memory
    num_records: int
    steps: int


def train_one(network: nn.Module, down: Down, client: int) -> Up:
    """A client's work."""
    task, records = HELD["task"], HELD["records"]
    deserialize_model(network, down.parameters)
    optimizer = torch.optim.SGD(network.parameters(), lr=task.lr)
    inputs, labels = records.inputs[client], records.labels[client]
    steps = train_locally(network, optimizer, inputs, labels, task, where=Where(down.round, client))
    return Up(client, serialize_model(network), len(labels), steps)


class Serial(BaseClientTrainer[Up, Down]):
    """One network, one client after the other."""

    def __init__(self, network: nn.Module) -> None:
        self.network, self.cache = network, []

    def local_process(self, payload: Down, cid_list: list[int]) -> None:
        """Train the clients."""
        self.cache = [train_one(self.network, payload, client) for client in cid_list]

    def uplink_package(self) -> list[Up]:
        """What they send."""
        return self.cache


class Threads(ThreadPoolClientTrainer[Up, Down]):
    """A network of its own for each client, as BlazeFL's FedAvg makes it."""

    def __init__(self, workers: int) -> None:
        self.num_parallels, self.device, self.device_count = workers, "cpu", 0
        self.cache, self.stop_event = [], threading.Event()

    def worker(self, cid: int, device: str, payload: Down, stop_event: threading.Event) -> Up:
        """Train one client."""
        return train_one(network_of(HELD["task"], HELD["records"]), payload, cid)

    def uplink_package(self) -> list[Up]:
        """What the clients send."""
        package, self.cache = self.cache, []
        return package


class Processes(ProcessPoolClientTrainer[Up, Down, int]):
    """Forked workers; parameters travel through shared memory."""

    def __init__(self, workers: int, network: nn.Module) -> None:
        self.num_parallels, self.device, self.device_count = workers, "cpu", 0
        self.share_dir, self.ipc_mode = Path(), IPCMode.SHARED_MEMORY
        self.cache, self.stop_event = [], mp.Manager().Event()
        self.buffer = serialize_model(network)

    def prepare_uplink_package_buffer(self) -> Up:
        """Where a worker puts its parameters."""
        return Up(-1, self.buffer.clone(), 0, 0)

    def get_client_config(self, cid: int) -> int:
        """All a worker must be told."""
        return cid

    @staticmethod
    def worker(
        config: Any,  # noqa: ANN401 - BlazeFL's own signature allows paths
        payload: Any,  # noqa: ANN401
        device: str,
        stop_event: threading.Event,
        *,
        shm_buffer: Up | None = None,
    ) -> Up:
        """Train one client."""
        if "network" not in HELD:
            HELD["network"] = network_of(HELD["task"], HELD["records"])
        up = train_one(HELD["network"], payload, config)
        assert shm_buffer is not None
        shm_buffer.parameters.copy_(up.parameters)
        up.parameters = SHMHandle()
        return up

    def uplink_package(self) -> list[Up]:
        """What the clients send."""
        package, self.cache = self.cache, []
        return package


def average(ups: Iterable[Up]) -> Tensor:
    """The mean weighted by records, as BlazeFL's FedAvg handler takes it."""
    ordered = sorted(ups, key=lambda up: up.client)
    total = sum(up.num_records for up in ordered)
    mean = torch.zeros_like(ordered[0].parameters)
    for up in ordered:
        mean.add_(up.parameters, alpha=up.num_records / total)
    return mean


def run(trainer: Any, task: Task, records: Records, clock: Clock) -> tuple[nn.Module, int]:  # noqa: ANN401
    """BlazeFL leaves the loop of rounds to its user."""
    network, steps = network_of(task, records), 0
    clock.tick()
    for round in range(task.rounds):
        trainer.local_process(Down(serialize_model(network), round), list(range(task.clients)))
        ups = trainer.uplink_package()
        steps += sum(up.steps for up in ups)
        deserialize_model(network, average(ups))
        clock.tick()
    return network, steps


def main(folder: Path, out: Path, kind: str, workers: int) -> None:
    """Run a task."""
    task, records = load_task(folder), load_records(folder)
    HELD.update(task=task, records=records)
    network = network_of(task, records)
    torch.optim.SGD(network.parameters(), lr=task.lr)  # its imports, once, so that forked workers inherit them
    trainers = {
        "serial": lambda: Serial(network),
        "threads": lambda: Threads(workers),
        "processes": lambda: Processes(workers, network),
    }
    clock = Clock(task)
    trained, steps = run(trainers[kind](), task, records, clock)
    finish(
        out,
        clock=clock,
        weights=trained.state_dict(),
        task=task,
        records=records,
        steps=steps,
        versions={"blazefl": version("blazefl")},
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
