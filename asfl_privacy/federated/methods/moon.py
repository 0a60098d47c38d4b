"""MOON: features are drawn to the global network's and away from the client's own earlier ones (Li, He & Song 2021)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.federated.federation import Federation
from asfl_privacy.federated.methods.local_method import LocalMethod
from asfl_privacy.federated.phases import Stage, State, Steps, Update
from asfl_privacy.federated.steps import Objective
from asfl_privacy.federated.weights import Weights, load_weights

PREVIOUS = "previous."
"""What the name of a weight of the previous network begins with in a client's state."""


@dataclass(frozen=True)
class Moon(LocalMethod):
    """Full steps on cross-entropy + μ·CE([cos(h, h_glob), cos(h, h_prev)]/T, target 0); nothing but weights travels.

    h is what the network's last block reads. The global network is the round's, the previous one what the client sent
    after its own last participation: its weights, where updates are noised the noised ones, which have left it already.
    A client that takes part for the first time has the global network for a previous one. Both are frozen copies in
    evaluation mode without gradients. After latent sharing the tail round is plain.

    Guarantee:
        With μ = 0 it is FedAvg, bit for bit, and keeps nothing. Where the previous network is the global one, the extra
        loss is μ·log 2 with gradient 0, exactly: a client's first participation is FedAvg's, bit for bit. The frozen
        networks move no statistic and draw nothing, unless blocks draw in evaluation mode.

    Edge cases:
        The paper's projection head is part of the network (`models.add_projection`); without one h is the classifier's
        own input. A record whose h is all zeros has no direction: its extra loss is μ·log 2 and its gradient 0.

    Source:
        Li, He & Song 2021, `Model-contrastive federated learning`, equation (3) and Algorithm 1.
    """

    name: str = "moon"

    def full_stage(self, plain: Stage, state: State, client: int, *, federation: Federation) -> Stage:
        """Full steps with the contrastive loss added, μ = 0 aside."""
        options = federation.settings.options
        if options.mu == 0:
            return plain
        kept = state.clients.get(client, {})
        objective = contrastive_objective(
            federation.model,
            global_weights=state.weights,
            previous_weights={name: kept.get(PREVIOUS + name, value) for name, value in state.weights.items()},
            mu=options.mu,
            temperature=options.temperature,
        )
        return replace(plain, objective=objective)

    def finish(
        self, update: Update, state: State, client: int, *, steps: Sequence[Steps], federation: Federation, round: int
    ) -> Update:
        """The client keeps the weights that it sends, beside what it kept of its releases; nothing where μ = 0."""
        if federation.settings.options.mu == 0:
            return update
        previous = {PREVIOUS + name: value for name, value in update.weights.items()}
        return replace(update, client_state={**state.clients.get(client, {}), **previous})


def contrastive_objective(
    model: nn.Sequential,
    *,
    global_weights: Weights,
    previous_weights: Mapping[str, Tensor],
    mu: float,
    temperature: float,
) -> Objective:
    """What MOON's full steps minimise beside the cross-entropy.

    Args:
        model: Gives the blocks; copied, left as it is.
        global_weights: Of the round's network.
        previous_weights: Of the client's previous network, the same names.
        mu: μ ≥ 0.
        temperature: T > 0.

    Returns:
        The objective. The network that it is called with has the model's blocks, or is a `Sequential` of a head and a
        tail made of them, of which the head may hold more (a noise layer); it and the inputs are left as any forward
        pass leaves them.

    Raises:
        ValueError: A network of one block; when called, features that are not one vector of real numbers a record.
    """
    names = tuple(model._modules)
    if len(names) < 2:
        raise ValueError(
            f"the network is one block, {', '.join(names) or 'none'}: method moon compares what the last block reads with "
            "the same of other weights, so a block must come before it; split the network into two blocks or more"
        )
    to_global, to_previous = (_frozen_blocks(model, weights) for weights in (global_weights, dict(previous_weights)))

    def objective(network: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():  # on copies of the inputs: a block may work in place
            h_glob, h_prev = (_run(blocks, inputs.clone()) for blocks in (to_global, to_previous))
        *blocks, last = _blocks(network, num_blocks=len(names))
        features = _run(blocks, inputs)
        vectors = [_vectors(one, count=len(inputs), block=names[-1]) for one in (features, h_glob, h_prev)]
        loss = contrastive_loss(vectors[0], h_glob=vectors[1], h_prev=vectors[2], temperature=temperature)
        return last(features), mu * loss

    return objective


def contrastive_loss(h: Tensor, *, h_glob: Tensor, h_prev: Tensor, temperature: float) -> Tensor:
    """Mean over the records of −log(e^(cos(h, h_glob)/T) / (e^(cos(h, h_glob)/T) + e^(cos(h, h_prev)/T))).

    Args:
        h: Features under training, shape (b, d).
        h_glob: The global network's, shape (b, d).
        h_prev: The previous network's, shape (b, d).
        temperature: T > 0.

    Returns:
        A scalar.

    Guarantee:
        Where h_prev is h_glob it is log 2 and the gradient in h is 0, exactly.

    Edge cases:
        A row of h that is all zeros counts log 2 and has gradient 0; an all-zero h_glob or h_prev has cosine 0 with all.

    Source:
        Li, He & Song 2021, equation (3), written as log(1 + e^(gap/T)) with the gap cos(h, h_prev) − cos(h, h_glob) =
        ĥ·(ĥ_prev − ĥ_glob), ĥ = h/|h|: one difference, which is exactly 0 where both networks are the same.

    Example:
        >>> h, far = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 2.0]])
        >>> float(contrastive_loss(h, h_glob=far, h_prev=far, temperature=0.5)) == float(torch.tensor(2.0).log())
        True
        >>> round(float(contrastive_loss(h, h_glob=h, h_prev=far, temperature=0.5)), 4)  # log(1 + e⁻²)
        0.1269
    """
    away = F.normalize(h_prev, dim=1) - F.normalize(h_glob, dim=1)
    gap = (F.normalize(h, dim=1) * away).sum(1) / temperature
    has_direction = (h != 0).any(1)  # elsewhere the derivative of h/|h| is that of h/1e-12
    return -F.logsigmoid(-torch.where(has_direction, gap, torch.zeros_like(gap))).mean()


def _frozen_blocks(model: nn.Sequential, weights: Weights) -> list[nn.Module]:
    """All blocks but the last, copied, with these weights, in evaluation mode, without gradients."""
    frozen = copy.deepcopy(model)
    load_weights(frozen, weights)
    return list(frozen.eval().requires_grad_(requires_grad=False))[:-1]


def _blocks(network: nn.Module, *, num_blocks: int) -> list[nn.Module]:
    """The blocks of a network that has the model's, or that is a head and a tail made of them, the head kept whole.

    A model of two blocks has one in each half, so that both readings give the same.
    """
    assert isinstance(network, nn.Sequential)  # local training hands over nothing else
    if len(network) == num_blocks:
        return list(network)
    head, tail = list(network)
    assert isinstance(tail, nn.Sequential)
    return [head, *tail]


def _run(blocks: Iterable[nn.Module], inputs: Tensor) -> Tensor:
    output = inputs
    for block in blocks:
        output = block(output)
    return output


def _vectors(features: object, *, count: int, block: str) -> Tensor:
    """One vector a record, apart from the features, which the last block may change in place; float32 or more."""
    if not isinstance(features, Tensor) or not features.is_floating_point() or features.shape[:1] != (count,):
        form = f"{features.dtype} of shape {tuple(features.shape)}" if isinstance(features, Tensor) else type(features)
        raise ValueError(
            f"block {block!r} reads {form} for {count} records: method moon compares one vector of real numbers a record; "
            "let the block before it give a float tensor of shape (records, …)"
        )
    return features.clone().reshape(count, -1).to(torch.promote_types(features.dtype, torch.float32))
