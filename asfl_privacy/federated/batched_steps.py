"""Local steps of many clients at once: what `run_steps` does client by client, in a few calls of torch a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.accounting.checks import check_integer
from asfl_privacy.federated.correction import record_losses
from asfl_privacy.federated.stacked_network import Stacked, StackedNetwork, stack_network
from asfl_privacy.federated.steps import Pool
from asfl_privacy.federated.weights import Weights


@dataclass(frozen=True)
class BatchedNetwork:
    """A network prepared for batched steps; made once and used round after round.

    Attributes:
        stacked: The network as a function of stacked weights.
        loss: Sum over clients of a batch's weighted losses: takes stacked weights, inputs (records, clients, …) and the
            batch's targets.
    """

    stacked: StackedNetwork
    loss: Callable[[Stacked, Tensor, Targets], Tensor]


@dataclass(frozen=True)
class Targets:
    """What the loss of one step's batches needs besides logits, row by row: client after client, shape (n,).

    Attributes:
        labels: True or randomised labels.
        shares: 1/b for the b records of a client's batch, 0 for padding.
        noisy: Which labels are randomised; None where none is.
        log_transition: Log of P(noisy label | true label), column by column, shape (k, k); None where none is noisy.
    """

    labels: Tensor
    shares: Tensor
    noisy: Tensor | None
    log_transition: Tensor | None


@dataclass(frozen=True)
class _Draws:
    """All mini-batches of some clients.

    Attributes:
        rows: Rows of each client's own pool, shape (clients, steps, records); padding repeats the batch's first record.
        sizes: True records of each client's batches, shape (clients,).
        num_remote: How many of the records drawn were remote, one count a client.
    """

    rows: NDArray[np.int64]
    sizes: NDArray[np.int64]
    num_remote: list[int]


def batch_network(
    network: nn.Module,
    *,
    autocast: torch.dtype | None = None,
    channels_last: bool = False,
    compile: bool = False,
) -> BatchedNetwork:
    """Prepare a network for `run_steps_batched`.

    Args:
        network: In the mode in which it trains; it is copied.
        autocast: Type of mixed precision in training, such as torch.bfloat16; None for none.
        channels_last: Whether images are computed with channels in the last dimension of memory.
        compile: Whether torch.compile fuses the step, with CUDA graphs on a GPU; the first step then takes seconds.

    Returns:
        The network, prepared.

    Raises:
        ValueError: As `stack_network`.
    """
    stacked = stack_network(network, channels_last=channels_last)
    device = next((value.device for value in stacked.templates.values()), torch.device("cpu"))

    def loss(values: Stacked, inputs: Tensor, targets: Targets) -> Tensor:
        with nullcontext() if autocast is None else torch.autocast(device.type, dtype=autocast):
            logits = stacked.logits(values, inputs)
        return _loss(logits.flatten(0, 1), targets)

    if compile:
        loss = torch.compile(loss, mode="reduce-overhead" if device.type == "cuda" else None, dynamic=False)
    return BatchedNetwork(stacked=stacked, loss=loss)


def run_steps_batched(
    network: BatchedNetwork,
    weights: Sequence[Mapping[str, Tensor]],
    pools: Sequence[Pool],
    *,
    rngs: Sequence[np.random.Generator],
    num_steps: int,
    batch_size: int,
    lr: float,
    transition: Tensor | None = None,
) -> tuple[list[Weights], list[int]]:
    """Take every client's SGD steps, all clients at once.

    Args:
        network: The whole network or its tail, prepared; `supports_batching` says of which networks it holds.
        weights: What each client starts from; entries that the network lacks are passed through.
        pools: What each client draws from, on the device of the network.
        rngs: Source of each client's mini-batches.
        num_steps: Number of steps; 0 leaves the weights as they were.
        batch_size: Records a step and client, the whole pool where it is smaller.
        lr: Learning rate.
        transition: As `run_steps`.

    Returns:
        Each client's weights after its steps, and how many of the records it drew were remote, in the order given.

    Raises:
        ValueError: Lists of different lengths, an empty pool, weights that lack an entry of the network, noisy labels
            without a transition.

    Guarantee:
        The mini-batches are those of `run_steps` with the same generators, bit for bit, and the weights those it would
        leave, up to rounding. A padded row repeats a true record of its batch and has weight 0 in the loss, so it adds
        exact zeros. A client whose numbers are not finite leaves the others' as they are.

    Edge cases:
        Clients whose batches differ in size are padded to the largest; where records mix (BatchNorm in train mode, or a
        network that only vmap can run) clients of one size are computed together instead, without padding.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> pool = Pool(inputs=torch.ones(3, 2), labels=torch.tensor([0, 1, 1]), num_own=3)
        >>> rngs = [np.random.default_rng(seed) for seed in (0, 1)]
        >>> start = [net.state_dict()] * 2
        >>> after, num_remote = run_steps_batched(
        ...     batch_network(net), start, [pool] * 2, rngs=rngs, num_steps=1, batch_size=2, lr=0.1
        ... )
        >>> len(after), num_remote
        (2, [0, 0])
    """
    _check_arguments(network.stacked, weights, pools, rngs=rngs, num_steps=num_steps, batch_size=batch_size)
    if num_steps == 0 or not pools:
        return [dict(given) for given in weights], [0] * len(pools)
    draws = _draw(pools, rngs=rngs, num_steps=num_steps, batch_size=batch_size)
    results: list[Weights] = [{}] * len(pools)
    for members in _groups(draws.sizes, apart=network.stacked.mixes_records):
        largest = int(draws.sizes[members].max())
        after = _run_group(
            network,
            [weights[i] for i in members],
            [pools[i] for i in members],
            rows=draws.rows[members, :, :largest],
            sizes=draws.sizes[members],
            lr=lr,
            transition=transition,
        )
        for i, trained in zip(members, after, strict=True):
            results[i] = {**weights[i], **trained}
    return results, draws.num_remote


def _run_group(
    network: BatchedNetwork,
    weights: Sequence[Mapping[str, Tensor]],
    pools: Sequence[Pool],
    *,
    rows: NDArray[np.int64],
    sizes: NDArray[np.int64],
    lr: float,
    transition: Tensor | None,
) -> list[Weights]:
    """Steps of clients that are computed together; rows of shape (clients, steps, records)."""
    stacked = network.stacked
    values = {
        name: torch.stack([given[name] for given in weights]).to(template)
        for name, template in stacked.templates.items()
    }
    trained = [values[name].requires_grad_() for name in stacked.trained]
    num_clients, num_steps, num_records = rows.shape
    inputs, starts = _joined([pool.inputs for pool in pools])
    device = inputs.device
    where = (rows + np.asarray(starts)[:, None, None]).transpose(1, 2, 0)  # (steps, records, clients): see StackedNetwork
    batches = _to_device(where, device).flatten(1)
    steps = _targets(pools, rows=rows, sizes=sizes, transition=transition, like=trained)
    for batch, targets in zip(batches, steps, strict=True):
        drawn = inputs.index_select(0, batch).unflatten(0, (num_records, num_clients))
        if device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        loss = network.loss(values, drawn, targets)
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        used = [(p, g) for p, g in zip(trained, gradients, strict=True) if g is not None]
        with torch.no_grad():
            torch._foreach_add_([p for p, _ in used], [g for _, g in used], alpha=-lr)
    return [
        {name: value.detach()[i].clone() for name, value in values.items()}  # a view would keep all clients' in memory
        for i in range(num_clients)
    ]


def _loss(logits: Tensor, targets: Targets) -> Tensor:
    """Sum of the rows' losses by their shares; each client's mean loss, summed over clients."""
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    losses = F.cross_entropy(logits, targets.labels, reduction="none")
    if targets.noisy is not None and targets.log_transition is not None:  # as `record_losses`
        columns = targets.log_transition.to(logits)[targets.labels]
        corrected = -torch.logsumexp(F.log_softmax(logits, dim=1) + columns, dim=1)
        losses = torch.where(targets.noisy, corrected, losses)
    return torch.dot(losses, targets.shares.to(losses))
