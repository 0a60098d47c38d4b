"""The head/tail split at the exchange layer, where activations leave a client."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from asfl_privacy.models.build import block_names

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
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


def split_model(model: nn.Sequential, exchange_layer: str) -> Split:
    """Cut a network after a named block.

    Args:
        model: Sequence of named blocks.
        exchange_layer: Name of the block at whose end activations leave, any but the last; `auto` takes the last block
            with a convolution, or, without convolutions, the block before the last.

    Returns:
        Head and tail.

    Raises:
        ValueError: A name that is no block, or the last block; or a head with batch statistics, which mix records.

    Example:
        >>> net = nn.Sequential(OrderedDict(a=nn.Linear(2, 3), b=nn.ReLU(), c=nn.Linear(3, 2)))
        >>> split_model(net, "b").tail
        Sequential(
          (c): Linear(in_features=3, out_features=2, bias=True)
        )
    """
    names = block_names(model)
    candidates = names[:-1]
    if exchange_layer == "auto":
        chosen, reason = _automatic(model, candidates)
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
    _refuse_mixed_records(head)
    return Split(head=head, tail=tail, exchange_layer=chosen, reason=reason)


def _automatic(model: nn.Sequential, candidates: tuple[str, ...]) -> tuple[str, str]:
    with_convolution = [
        name for name in candidates if any(isinstance(m, _CONVOLUTIONS) for m in model.get_submodule(name).modules())
    ]
    if with_convolution:
        return with_convolution[-1], "the last block with a convolution"
    return candidates[-1], "the block before the last, as no block has a convolution"


def _refuse_mixed_records(head: nn.Sequential) -> None:
    """Refuse a head that computes batch statistics: its output for one record depends on the others."""
    for name, module in head.named_modules():
        if isinstance(module, _MIXING_NORMS) and (module.training or not module.track_running_stats):
            raise ValueError(
                f"head layer {name} is {type(module).__name__} in train mode: its output mixes records, so no per-record "
                "bound exists; let the factory call .eval() on it, use GroupNorm, or choose an earlier exchange layer"
            )
