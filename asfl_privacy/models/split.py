"""The head/tail split at the exchange layer, where activations leave a client."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from asfl_privacy.models.build import block_names

_MIXING_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Split:
    """A network cut in two; both halves share their modules with it.

    Attributes:
        head: Input-side blocks y, up to and including the exchange layer.
        tail: Output-side blocks z.
        exchange_layer: Name of the head's last block.
        reason: Why this layer.
    """

    head: nn.Sequential
    tail: nn.Sequential
    exchange_layer: str
    reason: str


def split_model(
    model: nn.Sequential, exchange_layer: str, *, input_shape: tuple[int, ...] | None = None, may_mix: bool = False
) -> Split:
    """Cut a network after a named block.

    Args:
        model: Sequence of named blocks.
        exchange_layer: Name of the block at whose end activations leave, any but the last, or `auto`.
        input_shape: Shape of one record, which `auto` needs for its rule: the earliest block whose activations take at
            most half of the bytes of the largest and which leaves at least half of the parameters to the tail round, or
            else the earliest, among the blocks with parameters up to them and in the next. Model and label bytes are the
            same wherever activations leave, and a tail round that trains a small part of the network was seen to lose
            accuracy (reports/figure4-digits and others).
        may_mix: Whether the head may mix records: for methods that cut the network nowhere, to which the halves are
            nothing but names.

    Returns:
        Head and tail.

    Raises:
        ValueError: A name that is no block, or the last block; `auto` without a shape; a head with batch statistics, which
            mix records; one module that stands as two blocks.

    Guarantee:
        `auto` looks at the modules and at activations of zeros: at no record, so the choice gives nothing away.

    Edge cases:
        `auto` passes over blocks whose head mixes records, and over blocks that do not give one tensor with a row a
        record. Blocks without parameters go with the layer before them: the cut comes after activation function and
        pooling. A network with parameters in its last block alone can only exchange its records under a fixed map;
        `auto` cuts there all the same, and its reason says so.

    Example:
        >>> net = nn.Sequential(OrderedDict(a=nn.Linear(2, 3), b=nn.ReLU(), c=nn.Linear(3, 2)))
        >>> split_model(net, "b").tail
        Sequential(
          (c): Linear(in_features=3, out_features=2, bias=True)
        )
        >>> split_model(net, "auto", input_shape=(2,)).exchange_layer
        'b'
    """
    names = block_names(model)
    candidates = names[:-1]
    if exchange_layer == "auto":
        if input_shape is None:
            raise ValueError("exchange layer auto needs the shape of one record; pass input_shape, or name a block")
        chosen, reason = _by_bytes(model, activation_bytes(model, input_shape=input_shape))
    elif exchange_layer in candidates:
        chosen, reason = exchange_layer, "asked for"
    else:
        raise ValueError(
            f"exchange layer {exchange_layer!r} is not a block that can end the head; use auto or one of "
            f"{', '.join(candidates)}"
        )
    cut = names.index(chosen) + 1
    blocks = list(model.named_children())
    head = nn.Sequential(OrderedDict(blocks[:cut]))
    tail = nn.Sequential(OrderedDict(blocks[cut:]))
    head.training = tail.training = model.training
    if not any(parameter.requires_grad for parameter in tail.parameters()):
        raise ValueError(
            f"exchange layer {chosen!r} leaves a tail without parameters to train; use one of "
            f"{', '.join(name for name in candidates if name != chosen) or 'another model'}"
        )
    if not may_mix:
        _refuse_mixed_records(head)
    return Split(head=head, tail=tail, exchange_layer=chosen, reason=reason)


@torch.no_grad()
def activation_bytes(model: nn.Sequential, *, input_shape: tuple[int, ...]) -> dict[str, int | None]:
    """Bytes of one record's activations after every block but the last, as they are when they leave without noise.

    Args:
        model: Sequence of named blocks; a copy of it is run, evaluating, on zeros.
        input_shape: Shape of one record.

    Returns:
        Bytes by block; None for a block that does not give one tensor with a row a record, which cannot leave.

    Example:
        >>> net = nn.Sequential(OrderedDict(a=nn.Linear(2, 3), b=nn.ReLU(), c=nn.Linear(3, 2)))
        >>> activation_bytes(net, input_shape=(2,))
        {'a': 12, 'b': 12}
    """
    num_rows = 2
    device = next((value.device for value in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    found: dict[str, int | None] = {}
    copied = copy.deepcopy(model).eval()  # a block may count its calls
    with torch.random.fork_rng(devices=[]):  # or draw
        activations: object = torch.zeros(num_rows, *input_shape, device=device)
        for name, block in list(copied.named_children())[:-1]:
            activations = block(activations)
            found[name] = None
            if isinstance(activations, Tensor) and activations.ndim > 0 and len(activations) == num_rows:
                found[name] = activations.nbytes // num_rows
    return found


def _by_bytes(model: nn.Sequential, sizes: Mapping[str, int | None]) -> tuple[str, str]:
    """The rule, and its numbers."""
    blocks, names = [block for _, block in model.named_children()], list(sizes)
    before_layer = [i for i in range(len(sizes)) if _has_parameters(blocks[i + 1 : i + 2])]
    between = [i for i in before_layer if _has_parameters(blocks[: i + 1])]
    cuts = between or before_layer or [len(sizes) - 1]
    fitting = {i: size for i in cuts if (size := sizes[names[i]]) is not None and not _mixes(blocks[: i + 1])}
    if not fitting:  # the cut is refused for what it is
        return names[cuts[0]], "no block fits better"
    tail_share = {i: _num_trained(blocks[i + 1 :]) / max(1, _num_trained(blocks)) for i in fitting}
    widest = max(fitting, key=lambda i: fitting[i])
    good = [i for i, size in fitting.items() if 2 * size <= fitting[widest] and tail_share[i] >= 0.5]
    chosen = next(iter(good or fitting))
    asked = f"at most half of the activations of {names[widest]} and leaves at least half of the parameters to the tail round"
    of = "of the blocks between layers with parameters"
    reason = f"{of} the earliest that takes {asked}" if good else f"{of} the earliest, as none takes {asked}"
    reason += f" ({fitting[chosen]:,} of {fitting[widest]:,} bytes a record, {100 * tail_share[chosen]:.1f} %)"
    if not between:
        reason += "; no parameters lie before it, so that what leaves is the records under a fixed map"
    return names[chosen], reason


def _num_trained(blocks: Sequence[nn.Module]) -> int:
    """Parameters that are trained, one that several blocks share once."""
    return sum(parameter.numel() for parameter in nn.ModuleList(blocks).parameters() if parameter.requires_grad)


def _has_parameters(blocks: Sequence[nn.Module]) -> bool:
    return any(next(block.parameters(), None) is not None for block in blocks)


def _is_mixing(module: nn.Module) -> bool:
    """Whether a module computes batch statistics: its output for one record depends on the others."""
    return isinstance(module, _MIXING_NORMS) and (module.training or not module.track_running_stats)


def _mixes(blocks: Sequence[nn.Module]) -> bool:
    return any(_is_mixing(module) for block in blocks for module in block.modules())


def _refuse_mixed_records(head: nn.Sequential) -> None:
    """Refuse a head that computes batch statistics."""
    for name, module in head.named_modules():
        if _is_mixing(module):
            raise ValueError(
                f"head layer {name} is {type(module).__name__} in train mode: its output mixes records, so no per-record "
                "bound exists; let the factory call .eval() on it, use GroupNorm, or choose an earlier exchange layer"
            )
