"""Local steps of many clients at once: what `run_steps` does client by client, in a few calls of torch a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.accounting.checks import check_integer
from asfl_privacy.federated.batched_draws import draw_batches, join_pools, join_rows, to_device
from asfl_privacy.federated.correction import record_losses
from asfl_privacy.federated.stacked_network import Stacked, StackedNetwork, stack_network
from asfl_privacy.federated.steps import Pool, Rule, Taken, take_step
from asfl_privacy.federated.weights import Weights


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
class BatchedNetwork:
    """A network prepared for batched steps; made once and used round after round.

    Attributes:
        stacked: The network as a function of stacked weights.
        loss: Sum over clients of a batch's weighted losses: takes stacked weights, inputs (records, clients, …) and the
            batch's targets.
    """

    stacked: StackedNetwork
    loss: Callable[[Stacked, Tensor, Targets], Tensor]


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

    return BatchedNetwork(stacked=stacked, loss=_compiled(loss, device=device) if compile else loss)


def run_steps_batched(
    network: BatchedNetwork,
    weights: Sequence[Mapping[str, Tensor]],
    pools: Sequence[Pool],
    *,
    rngs: Sequence[np.random.Generator],
    num_steps: int,
    batch_size: int,
    rule: Rule,
    transition: Tensor | None = None,
    corrections: Sequence[Mapping[str, Tensor] | None] | None = None,
    keep_gradient: bool = False,
    at_once: int | None = None,
) -> tuple[list[Weights], list[Taken]]:
    """Take every client's SGD steps, all clients at once.

    Args:
        network: The whole network or its tail, prepared; `supports_batching` says of which networks it holds.
        weights: What each client starts from; entries that the network lacks are passed through.
        pools: What each client draws from, on the device of the network.
        rngs: Source of each client's mini-batches.
        num_steps: Number of steps; 0 leaves the weights as they were.
        batch_size: Records a step and client, the whole pool where it is smaller.
        rule: How a step moves the parameters.
        transition: As `run_steps`.
        corrections: Each client's, as `run_steps`; None for none.
        keep_gradient: As `run_steps`.
        at_once: Most clients to compute together, which bounds memory; None for all. Convolutions on a CPU are fastest
            with the few whose activations fit its cache.

    Returns:
        Each client's weights after its steps, and counts and mean gradient, in the order given.

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
        >>> pool = Pool(inputs=torch.ones(3, 2), labels=torch.tensor([0, 1, 1]))
        >>> rngs = [np.random.default_rng(seed) for seed in (0, 1)]
        >>> start = [net.state_dict()] * 2
        >>> after, taken = run_steps_batched(
        ...     batch_network(net), start, [pool] * 2, rngs=rngs, num_steps=1, batch_size=2, rule=Rule(lr=0.1)
        ... )
        >>> len(after), [one.num_remote for one in taken]
        (2, [0, 0])
    """
    _check_arguments(
        network.stacked, weights, pools, rngs=rngs, num_steps=num_steps, batch_size=batch_size, at_once=at_once
    )
    corrections = [None] * len(pools) if corrections is None else corrections
    if num_steps == 0 or not pools:
        nothing = {name: torch.zeros_like(network.stacked.templates[name]) for name in network.stacked.trained}
        return [dict(given) for given in weights], [Taken(0, dict(nothing) if keep_gradient else None) for _ in pools]
    draws = draw_batches(pools, rngs=rngs, num_steps=num_steps, batch_size=batch_size)
    results: list[Weights] = [{}] * len(pools)
    gradients: list[Weights | None] = [None] * len(pools)
    for members in _groups(draws.sizes, apart=network.stacked.mixes_records, at_once=at_once or len(pools)):
        largest = int(draws.sizes[members].max())
        after, kept = _run_group(
            network,
            [weights[i] for i in members],
            [pools[i] for i in members],
            rows=draws.rows[members, :, :largest],
            sizes=draws.sizes[members],
            rule=rule,
            transition=transition,
            corrections=[corrections[i] for i in members],
            keep_gradient=keep_gradient,
        )
        for place, i in enumerate(members):
            results[i] = {**weights[i], **after[place]}
            gradients[i] = kept[place] if keep_gradient else None
    return results, [Taken(*one) for one in zip(draws.num_remote, gradients, strict=True)]


def _run_group(
    network: BatchedNetwork,
    weights: Sequence[Mapping[str, Tensor]],
    pools: Sequence[Pool],
    *,
    rows: NDArray[np.int64],
    sizes: NDArray[np.int64],
    rule: Rule,
    transition: Tensor | None,
    corrections: Sequence[Mapping[str, Tensor] | None],
    keep_gradient: bool,
) -> tuple[list[Weights], list[Weights]]:
    """Steps of clients that are computed together, and their mean gradients; rows of shape (clients, steps, records)."""
    stacked = network.stacked
    values = {
        name: torch.stack([given[name].detach() for given in weights]).to(template)
        for name, template in stacked.templates.items()
    }
    trained = {name: values[name].requires_grad_() for name in stacked.trained}
    total = {name: torch.zeros_like(value) for name, value in trained.items()} if keep_gradient else {}
    correction, directions = _stacked_corrections(corrections, templates=stacked.templates), dict[str, Tensor]()
    num_clients, num_steps, num_records = rows.shape
    inputs, where = join_pools(pools, rows=rows)
    device = inputs.device
    batches = to_device(where.transpose(1, 2, 0), device).flatten(1)  # (steps, records, clients): see StackedNetwork
    steps = _targets(pools, rows=rows, sizes=sizes, transition=transition)
    for batch, targets in zip(batches, steps, strict=True):
        drawn = inputs.index_select(0, batch).reshape(num_records, num_clients, *inputs.shape[1:])
        loss = network.loss(values, drawn, targets)
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        gradients = {name: one for name, one in zip(trained, found, strict=True) if one is not None}
        for name, kept in total.items():
            if name in gradients:
                kept.add_(gradients[name], alpha=1.0 / num_steps)
        take_step(trained, gradients, rule=rule, correction=correction, directions=directions)
    return _apart(values, num_clients=num_clients), _apart(total, num_clients=num_clients)


def _apart(values: Stacked, *, num_clients: int) -> list[Weights]:
    """Each client's own rows, copied: a view would keep all clients' in memory."""
    return [{name: value.detach()[i].clone() for name, value in values.items()} for i in range(num_clients)]


def _stacked_corrections(
    corrections: Sequence[Mapping[str, Tensor] | None], *, templates: Mapping[str, Tensor]
) -> Stacked | None:
    """The corrections of all clients, one row a client; zeros for clients or parameters without."""
    names = dict.fromkeys(name for one in corrections if one is not None for name in one)
    if not names:
        return None
    given = [{} if one is None else one for one in corrections]
    return {
        name: torch.stack([one.get(name, torch.zeros_like(templates[name])) for one in given]).to(templates[name])
        for name in names
    }


def _loss(logits: Tensor, targets: Targets) -> Tensor:
    """Sum of the rows' losses by their shares; each client's mean loss, summed over clients."""
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    losses = F.cross_entropy(logits, targets.labels, reduction="none")
    if targets.noisy is not None and targets.log_transition is not None:  # as `record_losses`
        if targets.log_transition.shape[1] != logits.shape[1]:
            raise ValueError(
                f"transition has {targets.log_transition.shape[1]} classes, the network {logits.shape[1]}: it is one matrix "
                "of all classes; pass the matrix of these labels"
            )
        columns = targets.log_transition.to(logits)[targets.labels]
        corrected = -torch.logsumexp(F.log_softmax(logits, dim=1) + columns, dim=1)
        losses = torch.where(targets.noisy, corrected, losses)
    return torch.dot(losses, targets.shares.to(losses))


def _compiled(loss: Callable[[Stacked, Tensor, Targets], Tensor], *, device: torch.device) -> Callable[..., Tensor]:
    """The loss and its gradient as one kernel graph each."""
    if device.type != "cuda":
        return torch.compile(loss, dynamic=False)
    compiled = torch.compile(loss, mode="reduce-overhead", dynamic=False)

    def stepped(values: Stacked, inputs: Tensor, targets: Targets) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # torch's; the last step's gradients are used up, their memory is free
        return compiled(values, inputs, targets)

    return stepped


def _groups(sizes: NDArray[np.int64], *, apart: bool, at_once: int) -> list[list[int]]:
    """Which clients are computed together: batches of similar size, or of one size alone where they must be apart."""
    ordered = np.argsort(sizes, kind="stable")
    cuts = np.flatnonzero(np.diff(sizes[ordered]) if apart else np.zeros(0)) + 1
    return [
        part[first : first + at_once].tolist()
        for part in np.split(ordered, cuts)
        for first in range(0, len(part), at_once)
    ]


def _targets(
    pools: Sequence[Pool],
    *,
    rows: NDArray[np.int64],
    sizes: NDArray[np.int64],
    transition: Tensor | None,
) -> list[Targets]:
    """Each step's targets, gathered for all steps at once."""
    _, num_steps, num_records = rows.shape
    all_labels, starts = join_rows([pool.labels for pool in pools])
    device = all_labels.device

    def gather(values: Tensor, starts: Sequence[int]) -> Tensor:
        where = (rows + np.asarray(starts)[:, None, None]).transpose(1, 0, 2)
        return values[to_device(where, device).flatten(1)]

    labels = gather(all_labels, starts)
    noisy, log_transition = None, None
    if transition is not None or any(pool.noisy is not None for pool in pools):
        unmarked = torch.zeros_like if transition is None else torch.ones_like  # as `run_steps`: then all are noisy
        noisy = gather(
            *join_rows(
                [unmarked(pool.labels, dtype=torch.bool) if pool.noisy is None else pool.noisy for pool in pools]
            )
        )
        noisy = noisy if bool(noisy.any()) else None
    if noisy is not None:
        if transition is None:
            raise ValueError(
                "noisy labels without a transition: their loss cannot be corrected; pass transition=transition_matrix(...)"
            )
        one = torch.zeros(1, dtype=torch.int64, device=transition.device)
        record_losses(transition.new_zeros(1, len(transition)), one, transition=transition)  # refuses a wrong matrix
        log_transition = transition.detach().to(device).double().log().T.contiguous()
    shares = np.where(np.arange(num_records) < sizes[:, None], 1.0 / sizes[:, None], 0.0)
    share = to_device(shares, device).flatten()
    return [
        Targets(
            labels=labels[step],
            shares=share,
            noisy=None if noisy is None else noisy[step],
            log_transition=log_transition,
        )
        for step in range(num_steps)
    ]


def _check_arguments(
    network: StackedNetwork,
    weights: Sequence[Mapping[str, Tensor]],
    pools: Sequence[Pool],
    *,
    rngs: Sequence[np.random.Generator],
    num_steps: int,
    batch_size: int,
    at_once: int | None,
) -> None:
    check_integer("num_steps", num_steps, minimum=0)
    check_integer("batch_size", batch_size, minimum=1)
    if at_once is not None:
        check_integer("at_once", at_once, minimum=1)
    if not len(weights) == len(pools) == len(rngs):
        raise ValueError(
            f"{len(weights)} weights, {len(pools)} pools and {len(rngs)} generators: one of each a client is due; pass "
            "lists of one length"
        )
    for i, (given, pool) in enumerate(zip(weights, pools, strict=True)):
        missing = [name for name in network.templates if name not in given]
        if missing:
            raise ValueError(f"weights {i} lack {missing[0]}, which the network holds; pass its whole state dict")
        if len(pool.labels) == 0 or pool.num_rows != len(pool.labels):
            raise ValueError(
                f"pool {i} holds {pool.num_rows} inputs and {len(pool.labels)} labels: a mean loss needs one label an "
                "input and one record at least; leave the client out"
            )
        noisy = pool.noisy
        if noisy is not None and (noisy.dtype != torch.bool or noisy.shape != pool.labels.shape):
            raise ValueError(
                f"noisy of pool {i} is {noisy.dtype} of shape {tuple(noisy.shape)}: one bool a label is due, "
                f"{len(pool.labels)}; pass a mask"
            )
