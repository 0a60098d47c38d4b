"""Placements: where in the head the noise sits, and what runs before and after it."""

from collections import OrderedDict

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def valid_placements(head: nn.Sequential) -> tuple[str, ...]:
    """The placements a head offers, from the input to its end.

    Args:
        head: nn.Sequential of named blocks.

    Returns:
        "input", "after:NAME" for each block, "exchange" (the end of the head, the same place as after its last block).

    Raises:
        ValueError: if the head is no plain nn.Sequential, or is empty.

    Example:
        >>> valid_placements(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
        ('input', 'after:0', 'after:1', 'exchange')
    """
    if type(head) is not nn.Sequential or len(head) == 0:
        raise ValueError(
            f"head is a {type(head).__name__}: noise is placed between the blocks of a non-empty nn.Sequential; "
            "wrap it as nn.Sequential(OrderedDict(block=head))"
        )
    return ("input", *(f"after:{name}" for name in head._modules), "exchange")


def split_head(head: nn.Sequential, placement: str) -> tuple[nn.Sequential, nn.Sequential]:
    """What runs before the noise and what runs after it; the modules are shared with ``head``.

    Args:
        head: nn.Sequential of named blocks.
        placement: one of ``valid_placements(head)``.

    Returns:
        (prefix, rest); prefix is empty for "input", rest is empty for "exchange".

    Raises:
        ValueError: for an unknown placement; the message lists the valid ones.
    """
    placements = valid_placements(head)
    if placement not in placements:
        raise ValueError(
            f"placement is {placement!r}: this head has {', '.join(placements)}; pass placement={placements[0]!r}"
        )
    blocks = [(name, module) for name, module in head._modules.items() if module is not None]
    cut = len(blocks) if placement == "exchange" else placements.index(placement)
    prefix, rest = nn.Sequential(OrderedDict(blocks[:cut])), nn.Sequential(OrderedDict(blocks[cut:]))
    prefix.training = rest.training = head.training
    return prefix, rest


def check_eval(head: nn.Module) -> None:
    """Refuse a head that is not wholly in eval mode.

    Raises:
        ValueError: naming the first module in train mode.
    """
    for name, module in head.named_modules():
        if module.training and isinstance(module, _BatchNorm):
            raise ValueError(
                f"head layer {name} is {type(module).__name__} in train mode: its output mixes records, so no "
                "per-record bound exists; call .eval() or use GroupNorm"
            )
    for name, module in head.named_modules():
        if module.training:
            where = f"layer {name}" if name else "the container"
            raise ValueError(f"head {where} is in train mode: a release runs the head as it is certified; call .eval()")


def check_place(prefix: nn.Module) -> None:
    """Refuse what runs before the noise on another device than the CPU.

    A certificate's claim about the forward pass is that of the CPU: a GPU may round products to TF32, and cuDNN may choose
    Winograd or FFT, which no error model covers.

    Raises:
        ValueError: naming a parameter or buffer and its device.
    """
    for name, tensor in [*prefix.named_parameters(), *prefix.named_buffers()]:
        if tensor.device.type != "cpu":
            raise ValueError(
                f"{name} of what runs before the noise is on {tensor.device}: rounding is bounded on the CPU only, where fast "
                "transforms and TF32 are out; pass copy.deepcopy(head).cpu() and inputs.cpu()"
            )


def check_dtype(head: nn.Module, inputs: torch.Tensor) -> None:
    """Refuse inputs whose precision differs from the head's.

    Raises:
        ValueError: naming both.
    """
    for name, parameter in head.named_parameters():
        if parameter.dtype != inputs.dtype:
            raise ValueError(
                f"inputs have dtype {inputs.dtype} and head parameter {name} has {parameter.dtype}: they must agree; "
                f"convert the inputs with .to({parameter.dtype})"
            )
