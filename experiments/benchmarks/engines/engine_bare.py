"""The floor: a plain PyTorch loop on one thread, as a careful user writes it for one experiment; FedAvg and ASFL."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from workload import (
    SERVER,
    Clock,
    Records,
    Task,
    Weights,
    Where,
    batches,
    draw_cohort,
    finish,
    load_records,
    load_task,
    network_of,
    stream,
    train_locally,
)


def average(results: Sequence[Weights], sizes: Sequence[int]) -> Weights:
    """The mean weighted by records."""
    total = sum(sizes)
    return {
        name: sum(result[name] * (size / total) for result, size in zip(results, sizes, strict=True))  # type: ignore[misc]
        for name in results[0]
    }


def copy_of(network: nn.Module) -> Weights:
    """The network's weights, detached from it."""
    return {name: value.detach().clone() for name, value in network.state_dict().items()}


def run_fedavg(task: Task, records: Records, clock: Clock) -> tuple[Weights, int]:
    """One network and one optimizer for all clients: plain SGD keeps no state."""
    network = network_of(task, records)
    optimizer = torch.optim.SGD(network.parameters(), lr=task.lr)
    weights, num_steps = copy_of(network), 0
    clock.tick()
    for round in range(task.rounds):
        results, sizes = [], []
        for client in draw_cohort(task, round=round):
            network.load_state_dict(weights)
            inputs, labels = records.inputs[client], records.labels[client]
            num_steps += train_locally(network, optimizer, inputs, labels, task, where=Where(round, client))
            results.append(copy_of(network))
            sizes.append(len(labels))
        weights = average(results, sizes)
        clock.tick()
    return weights, num_steps


def run_asfl(task: Task, records: Records, clock: Clock) -> tuple[Weights, int]:
    """Heads compute activations, pairs swap them, tails train on both halves, then full steps."""
    network = network_of(task, records)
    names = [name for name, _ in network.named_children()]
    cut = names.index(task.exchange_layer) + 1
    head, tail = network[:cut], network[cut:]
    tail_optimizer = torch.optim.SGD(tail.parameters(), lr=task.lr)
    optimizer = torch.optim.SGD(network.parameters(), lr=task.lr)
    weights, num_steps = copy_of(network), 0
    clock.tick()
    for round in range(task.rounds):
        cohort = draw_cohort(task, round=round)
        network.load_state_dict(weights)
        shared = {client: _activations(head, records, task, where=Where(round, client)) for client in cohort}
        partner = _pairs(cohort, task, round=round)
        results, sizes = [], []
        for client in cohort:
            network.load_state_dict(weights)
            activations, labels = (
                torch.cat(both) for both in zip(shared[client], shared[partner[client]], strict=True)
            )
            for batch in batches(
                len(labels), task, num_steps=task.tail_steps, round=round, client=client, purpose="tail steps"
            ):
                tail_optimizer.zero_grad()
                F.cross_entropy(tail(activations[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
                tail_optimizer.step()
                num_steps += 1
            inputs, labels = records.inputs[client], records.labels[client]
            for batch in batches(len(labels), task, num_steps=task.full_steps, round=round, client=client):
                optimizer.zero_grad()
                F.cross_entropy(network(inputs[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                num_steps += 1
            results.append(copy_of(network))
            sizes.append(len(labels))
        weights = average(results, sizes)
        clock.tick()
    return weights, num_steps


@torch.no_grad()
def _activations(head: nn.Module, records: Records, task: Task, *, where: Where) -> tuple[Tensor, Tensor]:
    inputs, labels = records.inputs[where.client], records.labels[where.client]
    wanted = min(math.ceil(task.tail_steps / 2) * task.batch_size, len(labels))
    rng = stream(task.seed, round=where.round, client=where.client, purpose="share")
    chosen = torch.from_numpy(rng.choice(len(labels), size=wanted, replace=False))
    return head(inputs[chosen]), labels[chosen]


def _pairs(cohort: Sequence[int], task: Task, *, round: int) -> dict[int, int]:
    """Whose activations each client receives; the cohort must be even."""
    rng = stream(task.seed, round=round, client=SERVER, purpose="pairing")
    order = [cohort[int(i)] for i in rng.permutation(len(cohort))]
    swaps = list(zip(order[::2], order[1::2], strict=True))
    return dict(swaps) | {b: a for a, b in swaps}


def main(folder: Path, out: Path) -> None:
    """Run a task."""
    task, records = load_task(folder), load_records(folder)
    clock = Clock(task)
    run = run_asfl if task.method == "asfl" else run_fedavg
    weights, num_steps = run(task, records, clock)
    finish(out, clock=clock, weights=weights, task=task, records=records, steps=num_steps, versions={})


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
