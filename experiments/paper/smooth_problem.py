"""A federated problem that is smooth and not convex, its constants known, trained as a network by any method.

A record is a = (a₁, a₂) ∈ R²ⁿ, the parameters are x = (u, v) ∈ R²ⁿ, and a record's loss is

    q(x; a) = 1 + Σ_k φ(r_k),    φ(t) = log(1 + t²),    r = R(a − x),    R = [[I, I], [I, −I]]/√2.

The head takes u from a₁ and hands (a₁ − u, a₂) on, which is what clients exchange; the tail takes v from a₂, turns both by
R and gives the logits (0, log(e^q − 1)), whose cross-entropy for label 0 is q. Since R mixes u with v, head and tail must
agree. F_i is the mean of q over client i's records, F the mean over all.

Smoothness. φ'(t) = 2t/(1 + t²), φ''(t) = 2(1 − t²)/(1 + t²)². With s = t² the derivative of (1 − s)/(1 + s)² is
(s − 3)/(1 + s)³, so φ'' falls from 2 at 0 to −1/4 at t² = 3 and rises to 0 from there. R is orthogonal and symmetric, so
the Hessian R diag(φ''(r)) R has its eigenvalues in [−1/4, 2]: L = 2 for every F_i and F, attained at x = a, and where
|r_k| > 1 the loss is concave.

Heterogeneity. |φ'| ≤ 1, attained at 1, so ‖∇F_i‖² ≤ 2n everywhere; Σ p_i‖∇F_i − ∇F‖² = Σ p_i‖∇F_i‖² − ‖∇F‖² and so
Σ p_i‖∇F_i‖² ≤ G² + B²‖∇F‖² holds with B = 1 and G² = 2n.

Start. At x₀ = 0 every residual of a client's centre is about `distance`, where φ' is large: there is no flat stretch before
the descent, and F(x₀) − F* ≤ F(x₀) − 1, since q ≥ 1.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from asfl_privacy.data import Dataset
from asfl_privacy.data.dataset import make_dataset
from asfl_privacy.federated import Federation, TrainingSettings, build_federation
from asfl_privacy.federated.diagnostics import Diagnosis
from asfl_privacy.federated.federation import Clients
from asfl_privacy.federated.weights import Weights

SMOOTHNESS: Final = 2.0
"""L, the largest eigenvalue that any Hessian has."""
LEAST_CURVATURE: Final = -0.25
"""The smallest eigenvalue that any Hessian has."""
BOX: Final = 16.0
"""Records are within ±BOX in each coordinate."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Sizes of the problem.

    Attributes:
        half: n; there are 2n parameters.
        clients: Number of clients, each with a centre of its own.
        records: Records a client.
        distance: From the start x₀ = 0 to the mean of the centres, in each coordinate r_k; u and v have the same way to go.
        skew: Standard deviation of the centres in each coordinate.
        noise: Standard deviation of a client's records around its centre, which makes mini-batches differ.
    """

    half: int = 4
    clients: int = 10
    records: int = 20
    distance: float = 1.0
    skew: float = 0.5
    noise: float = 0.5

    def __post_init__(self) -> None:
        """Refuse sizes that give no problem.

        Raises:
            ValueError: Naming the first.
        """
        for name in ("half", "clients", "records"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be a whole number from 1 on; give for example 4")
        for name in ("distance", "skew", "noise"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} {value:g} must be a finite number from 0 on; give for example 0.5")

    @property
    def heterogeneity(self) -> float:
        """G², which no dissimilarity of gradients exceeds."""
        return 2.0 * self.half


class Offset(nn.Module):
    """Takes its parameter from one half of each record's coordinates."""

    def __init__(self, half: int, *, first: bool) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(half))
        self.first = first

    def forward(self, records: Tensor) -> Tensor:
        """Shape (b, 2n) in and out."""
        none = torch.zeros_like(self.offset)
        parts = (self.offset, none) if self.first else (none, self.offset)
        return records - torch.cat(parts)


class RobustLogits(nn.Module):
    """Two logits whose cross-entropy for label 0 is 1 + Σ log(1 + r²), r the turned input."""

    def forward(self, residuals: Tensor) -> Tensor:
        """Shape (b, 2n) in, (b, 2) out."""
        q = 1.0 + torch.log1p(turned(residuals).square()).sum(1)
        return torch.stack(
            [torch.zeros_like(q), q + torch.log1p(-torch.exp(-q))], dim=1
        )  # log(e^q − 1), never too large


def turned(vectors: Tensor) -> Tensor:
    """R times each row, shape (b, 2n); its own inverse.

    Example:
        >>> turned(turned(torch.tensor([[3.0, 4.0]]))).round(decimals=4)
        tensor([[3., 4.]])
    """
    first, second = vectors.chunk(2, dim=1)
    return torch.cat([first + second, first - second], dim=1) / math.sqrt(2.0)


def network(*, input_shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """The problem as a network of two blocks, named `smooth_problem:network` in a configuration.

    Raises:
        ValueError: Records that are no vectors of even length.
    """
    if len(input_shape) != 1 or input_shape[0] % 2:
        raise ValueError(f"records of shape {input_shape} must be vectors of even length; take data of this problem")
    half = input_shape[0] // 2
    tail = nn.Sequential(OrderedDict(take=Offset(half, first=False), loss=RobustLogits()))
    return nn.Sequential(OrderedDict(head=Offset(half, first=True), tail=tail))


def make_data(problem: Problem, *, seed: int) -> Dataset:
    """Records of every client, who is told apart by `train_groups`.

    Args:
        problem: Sizes.
        seed: Draws centres and records.

    Returns:
        The data set; the test records are the training records, as nothing is to be predicted. The centres' mean is
        ±distance in every coordinate r_k, exactly: the second half's signs alternate, so that half of the coordinates of
        u, and the others of v, are all that is far from its place.
    """
    rng = np.random.default_rng([seed, 0x5300])
    size = 2 * problem.half
    centres = rng.normal(0.0, problem.skew, (problem.clients, size))
    signs = np.where(np.arange(size) < problem.half, 1.0, (-1.0) ** np.arange(size))
    centres += problem.distance * signs - centres.mean(0)
    residuals = centres[:, None, :] + rng.normal(0.0, problem.noise, (problem.clients, problem.records, size))
    rows = turned(torch.from_numpy(residuals.reshape(-1, size))).numpy()
    labels = np.zeros(len(rows), dtype=np.int64)
    return make_dataset(
        "smooth problem",
        train=(rows, labels),
        test=(rows, labels),
        num_classes=2,
        input_box=(-BOX, BOX),
        train_groups=np.repeat(np.arange(problem.clients), problem.records),
    )


def make_federation(problem: Problem, settings: TrainingSettings) -> Federation:
    """The problem's clients and network in float64, starting at x = 0.

    Args:
        problem: Sizes.
        settings: Sizes and rates of the run; as many clients as the problem has, and its seed draws the records.

    Raises:
        ValueError: Another number of clients.
    """
    if settings.clients != problem.clients:
        raise ValueError(
            f"settings ask for {settings.clients} clients and the problem has {problem.clients}; give one number"
        )
    made = build_federation(
        make_data(problem, seed=settings.seed),
        model_name=f"{__name__}:network",
        partition="natural",
        settings=replace(settings, exchange_layer="head"),
        privacy=None,
    )
    made.model.double()
    data = replace(made.data, train_inputs=made.data.train_inputs.double(), test_inputs=made.data.test_inputs.double())
    shares = [client.records for client in made.clients]
    clients = Clients(shares, inputs=data.train_inputs, labels=data.train_labels, device=made.device)
    weights = {name: value.double() for name, value in made.initial_weights.items()}
    return replace(made, data=data, clients=clients, initial_weights=weights)


def exact_gradients(records: Tensor, x: Tensor) -> Tensor:
    """∇_x q at x of each record, by hand: −R φ'(R(a − x)).

    Args:
        records: Shape (m, 2n).
        x: (u, v), shape (2n,).

    Returns:
        Shape (m, 2n).
    """
    residuals = turned(records - x)
    return -turned(2.0 * residuals / (1.0 + residuals.square()))


def diagnose_exactly(federation: Federation, weights: Weights) -> Diagnosis:
    """What `asfl_privacy.federated.diagnostics.diagnose` finds on this problem, from the formula and at a tenth of the time.

    Args:
        federation: From `make_federation`.
        weights: x.

    Guarantee:
        In exact arithmetic the same; all sums are in float64.
    """
    x = torch.cat([weights["head.offset"], weights["tail.take.offset"]])
    records = torch.cat([client.inputs for client in federation.clients])
    counts = [client.num_records for client in federation.clients]
    shares = torch.tensor(counts, dtype=torch.float64) / sum(counts)
    means = torch.stack([one.mean(0) for one in torch.split(exact_gradients(records, x), counts)])
    total = shares @ means
    return Diagnosis(
        loss=1.0 + float(torch.log1p(turned(records - x).square()).sum(1).mean()),
        squared_gradient_norm=float(total.square().sum()),
        dissimilarity=float(shares @ (means - total).square().sum(1)),
    )
