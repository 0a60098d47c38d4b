"""How far training is, and how far clients disagree: the quantities that convergence proofs speak of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.federated.federation import Federation
from asfl_privacy.federated.weights import Weights


@dataclass(frozen=True)
class Diagnosis:
    """Gradients of the clients' objectives F_i at one point x, p_i = n_i/Σn_j.

    Attributes:
        loss: F(x) = Σ p_i·F_i(x), the mean cross-entropy of all training records.
        squared_gradient_norm: ‖∇F(x)‖².
        dissimilarity: Σ p_i·‖∇F_i(x) − ∇F(x)‖².
    """

    loss: float
    squared_gradient_norm: float
    dissimilarity: float


def diagnose(federation: Federation, weights: Weights, *, batch_size: int = 1024) -> Diagnosis:
    """Gradients of every client's whole objective at these weights, in evaluation mode and float64 sums.

    Args:
        federation: Clients and network; its scratch network is loaded with the weights.
        weights: x.
        batch_size: Records a pass, which bounds memory.

    Returns:
        The quantities.

    Raises:
        ValueError: A gradient that is not finite.

    Guarantee:
        Deterministic; nothing is trained and no generator moves. In exact arithmetic Σ p_i‖∇F_i‖² = ‖∇F‖² +
        dissimilarity.

    Edge cases:
        BatchNorm uses its running statistics, so that a record's loss does not depend on its batch. A parameter that
        the loss does not reach has gradient 0.

    Source:
        Karimireddy et al. 2020, (A1), bounded gradient dissimilarity.
    """
    federation.load(weights, training=False)
    parameters = [value for value in federation.model.parameters() if value.requires_grad]
    size = sum(value.numel() for value in parameters)
    total = torch.zeros(size, dtype=torch.float64, device=federation.device)
    squares = loss = 0.0
    num_records = sum(client.num_records for client in federation.clients)
    for client in federation.clients:
        if client.num_records == 0:
            continue
        gradient, mean_loss = _gradient(federation, client.inputs, client.labels, parameters, batch_size=batch_size)
        share = client.num_records / num_records
        total += share * gradient
        squares += share * float(gradient.square().sum())
        loss += share * mean_loss
    norm = float(total.square().sum())
    if not norm < float("inf"):
        raise ValueError("the global gradient is not finite: training diverged; lower lr")
    return Diagnosis(loss=loss, squared_gradient_norm=norm, dissimilarity=max(0.0, squares - norm))


def client_drift(before: Weights, results: Sequence[Weights], *, trained: Sequence[str]) -> float:
    """Mean over clients of ‖y_i − ȳ‖², ȳ their plain mean: how far local steps have carried them apart.

    Args:
        before: The round's global weights, for names and types.
        results: y_i of the round's clients.
        trained: Names of what trains.

    Example:
        >>> ends = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}]
        >>> client_drift({"w": torch.tensor([0.0])}, ends, trained=("w",))
        1.0
    """
    moved = torch.stack([_flat(result, trained) - _flat(before, trained) for result in results])
    return float((moved - moved.mean(0)).square().sum(1).mean())


def _gradient(
    federation: Federation, inputs: Tensor, labels: Tensor, parameters: Sequence[Tensor], *, batch_size: int
) -> tuple[Tensor, float]:
    """∇F_i, flat and in float64, and F_i."""
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64, device=federation.device)
    loss = 0.0
    for x, y in zip(torch.split(inputs, batch_size), torch.split(labels, batch_size), strict=True):
        value = F.cross_entropy(federation.model(x.clone()), y, reduction="sum")  # a block may work in place
        parts = torch.autograd.grad(value, parameters, allow_unused=True)
        filled = [torch.zeros_like(p) if part is None else part for p, part in zip(parameters, parts, strict=True)]
        total += torch.cat([part.flatten() for part in filled]).double() / len(labels)
        loss += float(value.detach()) / len(labels)
    return total, loss


def _flat(weights: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.cat([weights[name].double().flatten() for name in names])
