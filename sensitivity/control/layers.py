"""The layers of a head whose weights control may scale, and what control refuses to touch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parametrize

from sensitivity.capturing.recording import place_of
from sensitivity.errors import UnsupportedModuleError
from sensitivity.shapes import is_positive_finite

LINEAR_TYPES: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


@dataclass(frozen=True, kw_only=True)
class ScalableLayer:
    """A linear layer whose weight may be scaled.

    Attributes:
        path: where it stands in the head.
        module: the layer.
        weight: its weight, a trainable leaf.
    """

    path: str
    module: nn.Module
    weight: nn.Parameter


def scalable_layers(head: nn.Module) -> tuple[ScalableLayer, ...]:
    """Linear layers with a trainable weight of their own, each once, in the order of the module tree.

    Args:
        head: a module that `certify` accepts.

    Returns:
        The layers. Frozen layers and subclasses, whose forward may be another, are left out.

    Raises:
        UnsupportedModuleError: if a linear layer's weight is parametrised, so that scaling what it is made from need
            not scale it.
        ValueError: if there is no layer to scale.
    """
    found: list[ScalableLayer] = []
    for path, module in head.named_modules():
        if parametrize.type_before_parametrizations(module) not in LINEAR_TYPES:
            continue
        if parametrize.is_parametrized(module, "weight"):
            names = " and ".join(type(made).__name__ for made in module.parametrizations["weight"])
            raise UnsupportedModuleError(
                f"{place_of(path, type(module).__name__)} has a weight parametrised by {names}: scaling what it is made "
                "from need not scale it; remove the parametrisation and cap the head in one way only"
            )
        weight = module.weight
        if isinstance(weight, nn.Parameter) and weight.requires_grad:
            found.append(ScalableLayer(path=path, module=module, weight=weight))
    if not found:
        raise ValueError(
            f"head ({type(head).__name__}) has no Linear, Conv or ConvTranspose layer with a trainable weight: nothing "
            "can be scaled to meet the cap; add such a layer or unfreeze one"
        )
    return tuple(found)


def distinct_weights(layers: tuple[ScalableLayer, ...]) -> list[torch.Tensor]:
    """The weights, tied ones once."""
    return [weight.detach() for weight in {id(layer.weight): layer.weight for layer in layers}.values()]


def require_cap(cap: float) -> float:
    """Check a cap.

    Raises:
        ValueError: unless it is a positive finite number.

    Example:
        >>> require_cap(2)
        2.0
    """
    if not is_positive_finite(cap):
        raise ValueError(f"cap={cap!r} is no cap: it must be a positive finite number; pass for example 1.0")
    return float(cap)
