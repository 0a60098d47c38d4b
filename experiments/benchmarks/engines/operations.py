"""Arithmetic of a client's round, counted by torch from the operations that run: what no engine can leave out."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.flop_counter import FlopCounterMode
from workload import Task, build_network


def operations_of(task: Task, *, input_shape: tuple[int, ...]) -> int:
    """Floating-point operations of products and convolutions in one client's round, forward and backward.

    Args:
        task: Its network, method, steps and batch; `exchange_layer` must name a block where activations are shared.
        input_shape: Of one record.

    Example:
        >>> task = Task(data="digits", model="mlp-32", full_steps=1, batch_size=1)
        >>> operations_of(task, input_shape=(1, 8, 8)) == 2 * (64 * 32 + 32 * 10) * 2 + 2 * 32 * 10
        True
    """
    network = build_network(task.model, input_shape=input_shape)
    batch = torch.zeros(task.batch_size, *input_shape)
    if task.method != "asfl":
        return task.num_steps * _step(network, batch)
    names = [name for name, _ in network.named_children()]
    cut = names.index(task.exchange_layer) + 1
    head, tail = network[:cut], network[cut:]
    with torch.no_grad(), FlopCounterMode(display=False) as shared:
        activations = head(batch)
    sharing = math.ceil(task.tail_steps / 2) * shared.get_total_flops()
    return sharing + task.tail_steps * _step(tail, activations) + task.full_steps * _step(network, batch)


def _step(network: nn.Module, inputs: Tensor) -> int:
    labels = torch.zeros(len(inputs), dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(F.cross_entropy(network(inputs), labels), list(network.parameters()))
    return counter.get_total_flops()
