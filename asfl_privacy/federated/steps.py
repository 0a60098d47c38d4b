"""Local steps: plain SGD on mini-batches, on the whole network or on the tail alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.federated.correction import corrected_cross_entropy


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


def run_steps(
    network: nn.Module,
    pool: Pool,
    *,
    num_steps: int,
    batch_size: int,
    lr: float,
    rng: np.random.Generator,
    transition: Tensor | None = None,
    autocast: torch.dtype | None = None,
) -> int:
    """Take SGD steps on the cross-entropy of mini-batches drawn anew each step.

    Args:
        network: What is trained, in place; only its own parameters move.
        pool: What is drawn from.
        num_steps: Number of steps; 0 leaves the network as it was.
        batch_size: Records a step.
        lr: Learning rate.
        rng: Source of the mini-batches.
        transition: P(noisy label | true label), shape (k, k), by which the loss of noisy rows is corrected; None where
            no label is noisy.
        autocast: Type of mixed precision, such as torch.bfloat16; None for the network's own. Parameters, the loss and
            the step itself keep their type.

    Returns:
        How many of the records drawn were remote.
    """
    if num_steps == 0:
        return 0
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    batches = torch.stack([draw_rows(pool, batch_size=batch_size, rng=rng) for _ in range(num_steps)])
    own_counts: list[int] = (batches < pool.num_own).sum(1).tolist()
    if pool.labels.device.type == "cuda":  # one copy that nobody waits for, and no word from the GPU within the steps
        batches = batches.pin_memory().to(pool.labels.device, non_blocking=True)
    for batch, num_own in zip(batches.to(pool.labels.device), own_counts, strict=True):
        noisy = None if pool.noisy is None else pool.noisy[batch]
        with torch.autocast(pool.inputs.device.type, dtype=autocast, enabled=autocast is not None):
            logits = network(pool.rows(batch, num_own=num_own))
        if autocast is not None:
            logits = logits.to(pool.inputs.dtype)
        loss = corrected_cross_entropy(logits, pool.labels[batch], transition=transition, noisy=noisy)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        with torch.no_grad():  # torch.optim would do the same, after seconds of imports in every worker
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:  # a parameter that the network does not use stays as it is
                    parameter.add_(gradient, alpha=-lr)
    return batches.numel() - sum(own_counts)


@torch.no_grad()
def evaluate_batch(network: nn.Module, *, inputs: Tensor, labels: Tensor) -> tuple[int, float]:
    """How many records of a batch are right, and their summed cross-entropy; the network must be in evaluation mode."""
    logits = network(inputs.clone())  # a block may work in place
    return int((logits.argmax(1) == labels).sum()), float(F.cross_entropy(logits, labels, reduction="sum"))
