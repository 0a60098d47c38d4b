"""The projection head: two layers before the last block, in whose space features are compared."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

BLOCK = "projection"
_SUFFIX = "+projection"
_BEFORE = (nn.Flatten, nn.Dropout, nn.Identity)
"""What may stand before the classifier's Linear within its block: its output has the numbers of its input."""


def read_projection(name: str) -> tuple[str, int | None]:
    """Name of the network without its projection, and the projection's width.

    Args:
        name: A model's name, or NAME+projection:WIDTH.

    Raises:
        ValueError: A projection whose width is no whole number from 1 on.

    Example:
        >>> read_projection("small-cnn+projection:256"), read_projection("my_nets:wide")
        (('small-cnn', 256), ('my_nets:wide', None))
    """
    base, suffix, width = name.rpartition(_SUFFIX)
    if not suffix:
        return name, None
    number = width.removeprefix(":")
    if not base or number == width or not (number.isascii() and number.isdigit()) or int(number) < 1:
        raise ValueError(
            f"model {name!r} names a projection of no width; give NAME+projection:WIDTH with a whole number from 1 on, e.g. "
            "small-cnn+projection:256"
        )
    return base, int(number)


def add_projection(model: nn.Sequential, width: int) -> nn.Sequential:
    """Put a block `projection` before the last one, which reads its outputs from then on.

    The block is Linear(d → d), ReLU, Linear(d → width), d being what the last block's Linear took so far; a new Linear of
    `width` inputs takes that one's place. Initial weights are torch's own, from its global generator.

    Args:
        model: Sequence of named blocks; its last is a Linear, or a Sequential in which nothing but Flatten, Dropout and
            Identity comes before the first Linear. Left as it is; all blocks but the last are shared with the result.
        width: Number of features after the projection, ≥ 1; 256 in the paper.

    Returns:
        The network with one block more.

    Raises:
        ValueError: A width below 1, a network of one block or with a block `projection` already, or a last block of
            another make, whose Linear has hooks or shares its parameters with another module.

    Edge cases:
        The block flattens what it gets from dimension 1 on. The new Linear has a bias, trains and is in training mode
        where the old one had, did and was.

    Source:
        Li, He & Song 2021, `Model-contrastive federated learning`, §4.1: a two-layer MLP of output size 256.

    Example:
        >>> net = nn.Sequential(OrderedDict(body=nn.Linear(3, 8), out=nn.Linear(8, 2)))
        >>> add_projection(net, 4)
        Sequential(
          (body): Linear(in_features=3, out_features=8, bias=True)
          (projection): Sequential(
            (0): Flatten(start_dim=1, end_dim=-1)
            (1): Linear(in_features=8, out_features=8, bias=True)
            (2): ReLU()
            (3): Linear(in_features=8, out_features=4, bias=True)
          )
          (out): Linear(in_features=4, out_features=2, bias=True)
        )
    """
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise ValueError(f"projection width {width!r} must be a whole number from 1 on; give for example 256")
    blocks = list(zip(model._modules, model, strict=True))
    if type(model) is not nn.Sequential or len(blocks) < 2 or BLOCK in model._modules:
        raise ValueError(
            f"blocks {', '.join(model._modules)} take no projection: it needs an nn.Sequential of two blocks or more, none of "
            f"them named {BLOCK!r}; rename or split a block"
        )
    name, last = blocks[-1]
    inner = list(zip(last._modules, last, strict=True)) if type(last) is nn.Sequential else [("", last)]
    at = next((i for i, (_, module) in enumerate(inner) if type(module) not in _BEFORE), len(inner))
    linear = inner[at][1] if at < len(inner) else None
    if type(linear) is not nn.Linear or _is_tied_or_hooked(linear, last=last, model=model):
        raise ValueError(
            f"block {name!r} takes no projection before it: its first layer, Flatten and Dropout aside, must be a plain "
            "nn.Linear without hooks that shares no parameter with another module, so that it can be made anew; end the "
            "network with such a block"
        )
    features, device = linear.in_features, linear.weight.device
    projection = nn.Sequential(nn.Flatten(), nn.Linear(features, features), nn.ReLU(), nn.Linear(features, width)).to(
        linear.weight
    )
    made = nn.Linear(width, linear.out_features, bias=linear.bias is not None, device=device, dtype=linear.weight.dtype)
    made.train(linear.training)
    for parameter, old in zip(made.parameters(), linear.parameters(), strict=True):
        parameter.requires_grad_(old.requires_grad)
    inner[at] = (inner[at][0], made)
    rebuilt: nn.Module = made
    if type(last) is nn.Sequential:
        rebuilt = nn.Sequential(OrderedDict(inner))
        rebuilt.training = last.training
    grown = nn.Sequential(OrderedDict([*blocks[:-1], (BLOCK, projection), (name, rebuilt)]))
    grown.training = model.training
    return grown


def _is_tied_or_hooked(linear: nn.Linear, *, last: nn.Module, model: nn.Module) -> bool:
    """Whether making the Linear anew would lose a tie to another module, a hook, or something that it keeps beside."""
    if any(table for module in (linear, last, model) for table in _hooks(module)):
        return True
    if set(linear._parameters) != {"weight", "bias"} or linear._buffers or linear._modules:
        return True
    own = {id(parameter) for parameter in linear.parameters()}
    names = [name for name, value in model.named_parameters(remove_duplicate=False) if id(value) in own]
    return len(names) != len(own)


def _hooks(module: nn.Module) -> list[object]:
    """Tables of hooks that a module may have."""
    return [table for name, table in vars(module).items() if name.endswith("_hooks")]
