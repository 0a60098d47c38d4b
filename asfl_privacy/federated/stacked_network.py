"""A network on many clients' parameters at once: each layer's weights lie stacked, one row a client.

Sequences of common layers are rewritten with batched products and grouped convolutions, which on small networks costs a
fraction of torch.func.vmap; anything else is left to it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.models.nets import Normalize

Stacked = Mapping[str, Tensor]
"""Parameters and buffers by state-dict name, one row a client: shape (clients, …)."""

Layout = Literal["clients", "channels"]
"""Where an activation keeps its clients: `clients` is (clients, records, …); `channels` is (records, clients·channels, …),
the shape in which convolutions with one group a client, pooling and norms of torch do all clients in one call."""

_ELEMENTWISE = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.LogSigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Hardtanh,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Identity,
)
_POOLS = (
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_CONVOLUTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d}
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@dataclass(frozen=True)
class StackedNetwork:
    """A network as a function of stacked weights.

    Attributes:
        logits: Takes weights (clients, …) and inputs (records, clients, …); returns logits (clients, records, k).
            Statistics that the network updates are updated in the weights given, in place.
        mixes_records: Whether a record's logits may depend on the other records of its client's batch, so that a batch
            must hold true records alone.
        trained: Names of the parameters that train, in the network's order.
        templates: Every entry of the network's state dict, for its shape, type and device.
    """

    logits: Callable[[Stacked, Tensor], Tensor]
    mixes_records: bool
    trained: tuple[str, ...]
    templates: Mapping[str, Tensor]


@dataclass(frozen=True)
class _Layer:
    """One layer: the layout it takes and returns (None for either), and what it computes."""

    layout: Layout | None
    apply: Callable[[Stacked, Tensor], Tensor]


def stack_network(network: nn.Module, *, channels_last: bool = False) -> StackedNetwork:
    """Rewrite a network to run on many clients' weights at once.

    Args:
        network: In the mode in which it trains; copied, so that later changes of mode do not matter.
        channels_last: Whether images are computed with channels in the last dimension of memory.

    Returns:
        The network as a function of stacked weights. Which networks vmap cannot do shows when it is called:
        `supports_batching` tells beforehand.

    Raises:
        ValueError: Parameters that several modules share.

    Guarantee:
        In exact arithmetic client i's logits are those of the network with weights i on inputs i. No number of one
        client is multiplied or added to one of another.

    Edge cases:
        Layers are matched by exact type and only without hooks or a forward of their own; all others go through
        torch.func.vmap, where records are taken to mix.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
        >>> two = {name: torch.stack([value, value]) for name, value in net.state_dict().items()}
        >>> stack_network(net).logits(two, torch.zeros(5, 2, 3)).shape
        torch.Size([2, 5, 2])
    """
    network = copy.deepcopy(network)
    every = [name for name, _ in network.named_parameters(remove_duplicate=False)]
    unique = [name for name, _ in network.named_parameters()]
    if len(every) != len(unique):
        shared = sorted(set(every) - set(unique))
        raise ValueError(
            f"parameter {shared[0]} is shared by several modules: each row would drift apart; train unbatched"
        )
    templates = {name: value.detach() for name, value in network.state_dict().items()}
    trained = tuple(name for name, parameter in network.named_parameters() if parameter.requires_grad)
    layers = _layers(network)
    if layers is None:
        return StackedNetwork(_vmapped(network), mixes_records=True, trained=trained, templates=templates)
    mixes = any(isinstance(m, _BATCH_NORMS) and _uses_batch_statistics(m) for m in network.modules())
    logits = _chained(layers, channels_last=channels_last)
    return StackedNetwork(logits, mixes_records=mixes, trained=trained, templates=templates)


def _chained(layers: tuple[_Layer, ...], *, channels_last: bool) -> Callable[[Stacked, Tensor], Tensor]:
    def logits(values: Stacked, inputs: Tensor) -> Tensor:
        num_clients, layout = inputs.shape[1], "clients"
        x = inputs.transpose(0, 1)
        for layer in layers:
            if layer.layout is not None and layer.layout != layout:
                x = _to_channels(x) if layer.layout == "channels" else _to_clients(x, num_clients)
                if layer.layout == "channels" and channels_last and x.dim() == 4:
                    x = x.contiguous(memory_format=torch.channels_last)
                layout = layer.layout
            x = layer.apply(values, x)
        return x if layout == "clients" else _to_clients(x, num_clients)

    return logits


def _vmapped(network: nn.Module) -> Callable[[Stacked, Tensor], Tensor]:
    def one(values: dict[str, Tensor], inputs: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(network, values, (inputs,))
        return result

    def logits(values: Stacked, inputs: Tensor) -> Tensor:
        result: Tensor = torch.func.vmap(one, in_dims=(0, 1), randomness="error")(dict(values), inputs)
        return result

    return logits


def _to_channels(x: Tensor) -> Tensor:
    """(clients, records, channels, …) as (records, clients·channels, …)."""
    return x.transpose(0, 1).flatten(1, 2)


def _to_clients(x: Tensor, num_clients: int) -> Tensor:
    """(records, clients·channels, …) as (clients, records, channels, …)."""
    return x.reshape(len(x), num_clients, -1, *x.shape[2:]).transpose(0, 1)


def _layers(network: nn.Module) -> tuple[_Layer, ...] | None:
    """The network's layers in order, or None where one is not known."""
    found: list[_Layer] = []
    for name, module in _in_order(network):
        layer = _layer(f"{name}." if name else "", module)
        if layer is None:
            return None
        found.append(layer)
    return tuple(found)


def _in_order(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """What a sequence calls, sequences within it opened up."""
    if type(module) is nn.Sequential and _is_plain(module):
        for child, part in module._modules.items():  # named_children leaves out a module that stands twice
            assert part is not None
            yield from _in_order(part, f"{name}.{child}" if name else child)
    else:
        yield name, module


def _is_plain(module: nn.Module) -> bool:
    """Whether calling it is its class's forward and nothing else."""
    return "forward" not in vars(module) and not any(getattr(module, hooks, None) for hooks in _HOOKS)


def _uses_batch_statistics(module: nn.Module) -> bool:
    return module.training or getattr(module, "running_mean", None) is None


def _layer(prefix: str, module: nn.Module) -> _Layer | None:
    """How a layer runs for all clients at once; None where it is not known."""
    kind = type(module)
    if not _is_plain(module):
        return None
    if kind in _ELEMENTWISE:
        return _Layer(None, lambda values, x: module(x))
    if kind in _DROPOUTS and not module.training:
        return _Layer(None, lambda values, x: x)
    if kind in _POOLS and not getattr(module, "return_indices", False):
        return _Layer("channels", lambda values, x: module(x))
    if isinstance(module, nn.Flatten) and kind is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        return _Layer("clients", lambda values, x: x.flatten(2))
    if kind is nn.Linear:
        return _Layer("clients", _linear(prefix, has_bias=module.bias is not None))
    if isinstance(module, (nn.Conv1d, nn.Conv2d)) and kind in _CONVOLUTIONS and module.padding_mode == "zeros":
        return _Layer("channels", _convolution(prefix, module))
    if isinstance(module, nn.GroupNorm) and kind is nn.GroupNorm:
        return _Layer("channels", _group_norm(prefix, module))
    if isinstance(module, nn.LayerNorm) and kind is nn.LayerNorm:
        return _Layer("clients", _layer_norm(prefix, module))
    if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)) and kind in _BATCH_NORMS and module.momentum is not None:
        return _Layer("channels", _batch_norm(prefix, module))
    if kind is Normalize:
        return _Layer("clients", _normalize(prefix))
    return None


def _linear(prefix: str, *, has_bias: bool) -> Callable[[Stacked, Tensor], Tensor]:
    def apply(values: Stacked, x: Tensor) -> Tensor:
        transposed = values[prefix + "weight"].transpose(1, 2)
        rows = x if x.dim() == 3 else x.flatten(1, -2)
        bias = values[prefix + "bias"].unsqueeze(1) if has_bias else None
        y = torch.bmm(rows, transposed) if bias is None else torch.baddbmm(bias, rows, transposed)
        return y if x.dim() == 3 else y.reshape(*x.shape[:-1], -1)

    return apply


def _convolution(prefix: str, module: nn.Conv1d | nn.Conv2d) -> Callable[[Stacked, Tensor], Tensor]:
    convolve = _CONVOLUTIONS[type(module)]
    stride, padding, dilation, groups = module.stride, module.padding, module.dilation, module.groups

    def apply(values: Stacked, x: Tensor) -> Tensor:
        weight, bias = values[prefix + "weight"], values.get(prefix + "bias")
        return convolve(
            x,
            weight.flatten(0, 1),
            None if bias is None else bias.flatten(),
            stride,
            padding,
            dilation,
            len(weight) * groups,
        )

    return apply


def _group_norm(prefix: str, module: nn.GroupNorm) -> Callable[[Stacked, Tensor], Tensor]:
    channels, groups, eps = module.num_channels, module.num_groups, module.eps

    def apply(values: Stacked, x: Tensor) -> Tensor:
        weight, bias = values.get(prefix + "weight"), values.get(prefix + "bias")
        return F.group_norm(
            x,
            x.shape[1] // channels * groups,
            None if weight is None else weight.flatten(),
            None if bias is None else bias.flatten(),
            eps,
        )

    return apply


def _layer_norm(prefix: str, module: nn.LayerNorm) -> Callable[[Stacked, Tensor], Tensor]:
    shape, eps = module.normalized_shape, module.eps

    def apply(values: Stacked, x: Tensor) -> Tensor:
        y = F.layer_norm(x, shape, None, None, eps)
        ones = (1,) * (y.dim() - 1 - len(shape))  # records, and what lies before the normalised dimensions
        weight, bias = values.get(prefix + "weight"), values.get(prefix + "bias")
        if weight is not None:
            y = y * weight.reshape(len(weight), *ones, *shape)
        return y if bias is None else y + bias.reshape(len(bias), *ones, *shape)

    return apply


def _batch_norm(prefix: str, module: nn.BatchNorm1d | nn.BatchNorm2d) -> Callable[[Stacked, Tensor], Tensor]:
    uses_batch, momentum, eps = _uses_batch_statistics(module), module.momentum, module.eps
    counts = module.training and module.track_running_stats

    def flat(values: Stacked, name: str) -> Tensor | None:
        value = values.get(prefix + name)
        return None if value is None else value.view(-1)  # a view, so that statistics are updated in place

    def apply(values: Stacked, x: Tensor) -> Tensor:
        counter = values.get(prefix + "num_batches_tracked")
        if counts and counter is not None:
            counter.add_(1)
        mean = flat(values, "running_mean") if counts or not uses_batch else None
        var = flat(values, "running_var") if counts or not uses_batch else None
        assert momentum is not None
        return F.batch_norm(x, mean, var, flat(values, "weight"), flat(values, "bias"), uses_batch, momentum, eps)

    return apply


def _normalize(prefix: str) -> Callable[[Stacked, Tensor], Tensor]:
    def apply(values: Stacked, x: Tensor) -> Tensor:
        return (x - values[prefix + "mean"].unsqueeze(1)) / values[prefix + "std"].unsqueeze(1)

    return apply
