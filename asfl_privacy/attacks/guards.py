"""What an attack asks of its arguments."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from asfl_privacy.accounting.checks import check_real


def check_batch(tensor: object, *, what: str, shape: tuple[int, ...] | None = None) -> Tensor:
    """Return a finite float32 or float64 batch of at least one row, detached, or raise ValueError.

    Args:
        tensor: shape (batch, ...).
        what: what the message calls it.
        shape: shape of one row, where it is known.
    """
    if not isinstance(tensor, Tensor) or tensor.dtype not in (torch.float32, torch.float64):
        kind = str(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{what} is {kind}: an attack works on float32 or float64 tensors; convert with .float()")
    if tensor.dim() < 2 or tensor.numel() == 0:
        raise ValueError(
            f"{what} has shape {tuple(tensor.shape)}: a batch of at least one row is due; pass (batch, ...)"
        )
    if shape is not None and tuple(tensor.shape[1:]) != shape:
        raise ValueError(f"{what} has rows of shape {tuple(tensor.shape[1:])}: {shape} is due; reshape the rows")
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{what} holds NaN or inf: there is nothing to rebuild from it; pass finite values")
    return tensor.detach()


def check_labels(labels: object, *, what: str, count: int) -> Tensor:
    """Return integer labels, shape (count,), or raise ValueError."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        kind = str(labels.dtype) if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"{what} is {kind}: a property is an integer or a truth value a record; pass an int64 tensor")
    if tuple(labels.shape) != (count,):
        raise ValueError(f"{what} has shape {tuple(labels.shape)}: one a record is due; pass shape ({count},)")
    return labels.detach()


def check_stddev(noise_stddev: object) -> float | None:
    """Return a noise standard deviation in 1e-30 … 1e30, or None where no noise was added; else raise ValueError."""
    if noise_stddev is None:
        return None
    number = check_real(
        "noise_stddev", noise_stddev, minimum=1e-30, exclusive=False, fix="pass noise_stddev=None for no noise"
    )
    if number > 1e30:
        raise ValueError(f"noise_stddev is {number:g}: it must be at most 1e30; nothing is left to attack beyond it")
    return number


def check_confidence(confidence: object) -> float:
    """Return a confidence level in (0, 1), or raise ValueError."""
    number = check_real("confidence", confidence, minimum=0.0, exclusive=True, fix="pass confidence=0.95")
    if number >= 1.0:
        raise ValueError(f"confidence is {number!r}: it must be below 1; pass confidence=0.95")
    return number


def check_settled(function: Callable[[Tensor], Tensor], *, what: str) -> None:
    """Refuse a module in train mode, identities aside: its output may be random or mix records."""
    if isinstance(function, nn.Module) and any(
        module.training for module in function.modules() if type(module) is not nn.Identity
    ):
        raise ValueError(f"{what} is in train mode: the attack needs what the release computed; call .eval()")


def check_rows(outputs: object, *, what: str, count: int) -> Tensor:
    """Return a function's output, finite and with one row a record, or raise ValueError."""
    if not isinstance(outputs, Tensor) or outputs.dim() < 2 or len(outputs) != count:
        shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(f"{what} turns {count} records into {shape}: one row a record is due; keep the batch first")
    if not math.isfinite(float(outputs.detach().abs().max())):
        raise ValueError(f"{what} gives NaN or inf: an attack needs finite values; check the weights")
    return outputs
