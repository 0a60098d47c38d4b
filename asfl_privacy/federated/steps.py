"""Local steps: plain SGD on mini-batches, on the whole network or on the tail alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.federated.correction import corrected_cross_entropy
from asfl_privacy.federated.weights import Weights


@dataclass(frozen=True)
class Pool:
    """What mini-batches are drawn from: inputs (or activations) and labels, the client's own rows first.

    Attributes:
        inputs: The client's own, shape (num_own, …).
        labels: Of all rows, shape (n,).
        received: Another client's rows, shape (n − num_own, …), which stay where they are: joining both would copy more
            than the steps read. None where all rows are own.
        noisy: Which labels went through randomised response, shape (n,); None where none of the run's did.
        records: Which records of the data set the own rows hold raw values of, shape (num_own,); None where they were
            released already, so that using them costs nothing more.
    """

    inputs: Tensor
    labels: Tensor
    received: Tensor | None = None
    noisy: Tensor | None = None
    records: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        """Refuse a pool whose rows and labels differ in number."""
        if len(self.labels) != self.num_rows:
            raise ValueError(
                f"a pool of {self.num_rows} inputs has {len(self.labels)} labels: each row has one; pass the rows' own labels"
            )

    @property
    def num_own(self) -> int:
        """How many rows, the first ones, are the client's own."""
        return len(self.inputs)

    @property
    def num_rows(self) -> int:
        """n, own and received."""
        return self.num_own + (0 if self.received is None else len(self.received))

    def rows(self, where: Tensor, *, num_own: int) -> Tensor:
        """The inputs of some rows, copied.

        Args:
            where: Row numbers in [0, n), own rows first, int64, shape (b,), on the device of the inputs.
            num_own: How many of these are own rows; told, since a GPU would have to be waited for.

        Example:
            >>> pool = Pool(inputs=torch.tensor([[1.0], [2.0]]), received=torch.tensor([[3.0]]), labels=torch.zeros(3))
            >>> pool.rows(torch.tensor([1, 2]), num_own=1).tolist()
            [[2.0], [3.0]]
        """
        own = self.inputs.index_select(0, where[:num_own])
        if self.received is None:
            return own
        return torch.cat([own, self.received.index_select(0, where[num_own:] - self.num_own)])


def draw_batch(num_records: int, *, batch_size: int, rng: np.random.Generator) -> Tensor:
    """Indices of one mini-batch: uniform without replacement, the whole pool where it is smaller than a batch."""
    return torch.from_numpy(rng.choice(num_records, size=min(batch_size, num_records), replace=False))


def draw_rows(pool: Pool, *, batch_size: int, rng: np.random.Generator) -> Tensor:
    """The rows of one mini-batch as `draw_batch` draws them, own rows first where there are received ones."""
    batch = draw_batch(len(pool.labels), batch_size=batch_size, rng=rng)
    return batch if pool.received is None else batch.sort().values


Objective = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes network, inputs (b, …) and labels (b,); returns logits (b, k) and what is added to the loss, shape ()."""


@dataclass(frozen=True)
class Rule:
    """How a step moves the parameters, after Sutskever et al. (2013) as torch.optim.SGD writes it.

    Attributes:
        lr: Learning rate η > 0.
        momentum: Share of the last step's direction that is kept, in [0, 1); the direction starts at zero in each
            stage of a client's round.
        weight_decay: λ ≥ 0; λ times the parameter is added to its gradient.
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Taken:
    """What plain steps leave besides the network.

    Attributes:
        num_remote: How many of the records drawn were remote.
        mean_gradient: Mean over the steps of the loss's raw gradient, by parameter name, before correction and weight
            decay; None where it was not asked for.
    """

    num_remote: int
    mean_gradient: Weights | None = None


def run_steps(
    network: nn.Module,
    pool: Pool,
    *,
    num_steps: int,
    batch_size: int,
    rule: Rule,
    rng: np.random.Generator,
    transition: Tensor | None = None,
    autocast: torch.dtype | None = None,
    correction: Mapping[str, Tensor] | None = None,
    objective: Objective | None = None,
    keep_gradient: bool = False,
) -> Taken:
    """Take SGD steps on the cross-entropy of mini-batches drawn anew each step.

    Args:
        network: What is trained, in place; only its own parameters move.
        pool: What is drawn from.
        num_steps: Number of steps; 0 leaves the network as it was.
        batch_size: Records a step.
        rule: How a step moves the parameters.
        rng: Source of the mini-batches.
        transition: P(noisy label | true label), shape (k, k), by which the loss of noisy rows is corrected; None where
            no label is noisy.
        autocast: Type of mixed precision, such as torch.bfloat16; None for the network's own. Parameters, the loss and
            the step itself keep their type.
        correction: Added to each step's gradient, by parameter name; parameters that it lacks get none.
        objective: What else is minimised; None for nothing.
        keep_gradient: Whether the mean raw gradient is kept.

    Returns:
        Counts, and the gradient.
    """
    parameters = {name: value for name, value in network.named_parameters() if value.requires_grad}
    total = {name: torch.zeros_like(value) for name, value in parameters.items()} if keep_gradient else {}
    if num_steps == 0:
        return Taken(num_remote=0, mean_gradient=total or None)
    batches = torch.stack([draw_rows(pool, batch_size=batch_size, rng=rng) for _ in range(num_steps)])
    own_counts: list[int] = (batches < pool.num_own).sum(1).tolist()
    if pool.labels.device.type == "cuda":  # one copy that nobody waits for, and no word from the GPU within the steps
        batches = batches.pin_memory().to(pool.labels.device, non_blocking=True)
    directions: dict[str, Tensor] = {}
    for batch, num_own in zip(batches.to(pool.labels.device), own_counts, strict=True):
        noisy = None if pool.noisy is None else pool.noisy[batch]
        inputs, labels = pool.rows(batch, num_own=num_own), pool.labels[batch]
        with torch.autocast(pool.inputs.device.type, dtype=autocast, enabled=autocast is not None):
            logits, extra = (network(inputs), None) if objective is None else objective(network, inputs, labels)
        if autocast is not None:
            logits = logits.to(pool.inputs.dtype)
        loss = corrected_cross_entropy(logits, labels, transition=transition, noisy=noisy)
        if extra is not None:
            loss = loss + extra.to(loss.dtype)
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        # a parameter that the network does not use stays as it is
        gradients = {name: one for name, one in zip(parameters, found, strict=True) if one is not None}
        for name, kept in total.items():
            if name in gradients:
                kept.add_(gradients[name], alpha=1.0 / num_steps)
        take_step(parameters, gradients, rule=rule, correction=correction, directions=directions)
    return Taken(num_remote=batches.numel() - sum(own_counts), mean_gradient=total if keep_gradient else None)


@torch.no_grad()
def take_step(
    parameters: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    *,
    rule: Rule,
    correction: Mapping[str, Tensor] | None,
    directions: dict[str, Tensor],
) -> None:
    """Move the parameters by one step; `directions` holds what momentum keeps from step to step.

    torch.optim.SGD would do the same, after seconds of imports in every worker.
    """
    if correction is None and not rule.weight_decay and not rule.momentum:
        if gradients:
            torch._foreach_add_([parameters[name] for name in gradients], list(gradients.values()), alpha=-rule.lr)
        return
    for name, gradient in gradients.items():
        value = parameters[name]
        if correction is not None and name in correction:
            gradient = gradient + correction[name]
        if rule.weight_decay:
            gradient = gradient.add(value, alpha=rule.weight_decay)
        if rule.momentum:
            if name in directions:
                directions[name].mul_(rule.momentum).add_(gradient)
            else:
                directions[name] = gradient.clone()
            gradient = directions[name]
        value.add_(gradient, alpha=-rule.lr)


@torch.no_grad()
def evaluate_batch(network: nn.Module, *, inputs: Tensor, labels: Tensor) -> tuple[int, float]:
    """How many records of a batch are right, and their summed cross-entropy; the network must be in evaluation mode."""
    logits = network(inputs.clone())  # a block may work in place
    return int((logits.argmax(1) == labels).sum()), float(F.cross_entropy(logits, labels, reduction="sum"))
