"""Functions that torch takes apart before they reach the dispatcher, recorded whole.

Instance and group norms fold the batch into the channels, products of more than two dimensions fold it into the rows,
and circular padding writes into views. What is left of them at the dispatcher mixes the batch with other dimensions,
which no rule could follow; so these calls are caught one layer higher, where they still say what they mean.

A call that is not caught (through a tensor subclass, inside a function transform, or from within another function) is
recorded in its pieces, as ever.
"""

# ruff: noqa: ANN401  (arguments of recorded operators have no narrower type)
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from sensitivity.capturing.recording import leaves_of
from sensitivity.capturing.traced import Traced

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer, Traced)


class Scribe(Protocol):
    """What a handler needs of the recorder."""

    def record_whole(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Write one operator down and return its result."""

    def refuse(self, what: str, rule: str, fix: str) -> Any:
        """Raise."""


class Composites(TorchFunctionMode):
    """Catches the functions of `_HANDLERS` where they read a traced value."""

    def __init__(self, scribe: Scribe) -> None:
        super().__init__()
        self._scribe = scribe

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is None or not _is_plain(args, kwargs):
            return func(*args, **kwargs)
        made = handler(self._scribe, *args, **kwargs)
        return func(*args, **kwargs) if made is None else made


def _is_plain(args: Any, kwargs: Any) -> bool:
    """Whether a call reads a traced value, and nothing but torch itself has a say in what it does."""
    tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return (
        not is_transformed
        and all(type(tensor) in _PLAIN for tensor in tensors)
        and any(isinstance(tensor, Traced) for tensor in tensors)
    )


def _pad(scribe: Scribe, input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    """Circular padding; the other modes are operators of their own."""
    if mode != "circular":
        return None
    return scribe.record_whole("pad", F.pad, (input, list(pad), mode))


def _instance_norm(
    scribe: Scribe,
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if use_input_stats and running_mean is not None:
        scribe.refuse(
            "updates its running statistics in forward (instance_norm)",
            "the next release would come from another head",
            "call .eval()",
        )

    def run(data: Any, gain: Any, shift: Any, mean: Any, variance: Any, *rest: Any) -> Any:
        return F.instance_norm(data, mean, variance, gain, shift, *rest)

    args = (input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps)
    return scribe.record_whole("instance_norm", run, args)


def _torch_instance_norm(
    scribe: Scribe,
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    return _instance_norm(scribe, input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def _group_norm(
    scribe: Scribe,
    input: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """The dispatcher's operator, without the batch size among its arguments."""

    def run(data: Any, gain: Any, shift: Any, batch: Any, channels: int, pixels: int, groups: int, eps: float) -> Any:
        return F.group_norm(data, groups, gain, shift, eps)

    if input.ndim < 2:
        return None
    channels, pixels = input.shape[1], 1
    for size in input.shape[2:]:
        pixels *= size
    args = (input, weight, bias, "batch", channels, pixels, num_groups, eps)
    return scribe.record_whole("native_group_norm", run, args)


def _rms_norm(scribe: Scribe, input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    if eps is None:
        eps = torch.finfo(input.dtype).eps
    return scribe.record_whole("rms_norm", F.rms_norm, (input, list(normalized_shape), weight, eps))


def _linear(scribe: Scribe, input: Any, weight: Any, bias: Any = None) -> Any:
    """Products over more than two dimensions; two are an operator of the dispatcher."""
    if not isinstance(input, Traced) or input.ndim < 3 or isinstance(weight, Traced) or weight.ndim != 2:
        return None
    return scribe.record_whole("linear", F.linear, (input, weight, bias))


def _product(scribe: Scribe, data: Any, weight: Any) -> Any:
    """data·Wᵀ for any number of dimensions."""
    made = _linear(scribe, data, weight)
    return F.linear(data, weight) if made is None else made


def _matmul(scribe: Scribe, input: Any, other: Any) -> Any:
    """Products with a constant matrix or vector on either side, as linear layers over the last dimension."""
    if isinstance(input, Traced) and not isinstance(other, Traced):
        if other.ndim == 2 and input.ndim >= 3:
            return _product(scribe, input, other.t())
        if other.ndim == 1 and input.ndim >= 2:
            return _product(scribe, input, other.unsqueeze(0)).squeeze(-1)
    elif isinstance(other, Traced) and not isinstance(input, Traced) and other.ndim >= 3:
        if input.ndim == 2:
            return _product(scribe, other.transpose(-1, -2), input).transpose(-1, -2)
        if input.ndim == 1:
            return _product(scribe, other.transpose(-1, -2), input.unsqueeze(0)).squeeze(-1)
    return None


def _reversed_matmul(scribe: Scribe, input: Any, other: Any) -> Any:
    return _matmul(scribe, other, input)


def _einsum(scribe: Scribe, *args: Any) -> Any:
    """Einstein sums that contract one dimension of each record with a constant matrix or vector."""
    if not (len(args) == 3 and isinstance(args[0], str)):
        return None
    first, second = args[1:]
    if isinstance(first, Traced) == isinstance(second, Traced):
        return None
    data, weight = (first, second) if isinstance(first, Traced) else (second, first)
    letters = _letters(args[0], data_first=data is first, data_ndim=data.ndim)
    if letters is None or len(letters[1]) != weight.ndim:
        return None
    of_data, of_weight, of_result = letters
    contracted = [letter for letter in of_weight if letter in of_data and letter not in of_result]
    new = [letter for letter in of_weight if letter not in of_data]
    kept = [letter for letter in of_data if letter not in contracted]
    is_product = (
        len(contracted) == 1
        and len(contracted) + len(new) == len(of_weight) <= 2
        and sorted(kept + new) == sorted(of_result)
    )
    if not is_product:
        return None
    if not new:
        weight = weight.unsqueeze(0)
    elif of_weight[0] == contracted[0]:
        weight = weight.t()
    made = _product(scribe, data.movedim(of_data.index(contracted[0]), -1), weight)
    if not new:
        made = made.squeeze(-1)
    order = [*kept, *new]
    return made.permute([order.index(letter) for letter in of_result])


def _letters(equation: str, *, data_first: bool, data_ndim: int) -> tuple[list[str], list[str], list[str]] | None:
    """Indices of the data, the weight and the result, or None where they are not given in full or repeat.

    Example:
        >>> _letters("...j,kj->...k", data_first=True, data_ndim=3)
        (['0', '1', 'j'], ['k', 'j'], ['0', '1', 'k'])
    """
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != 2:
        return None
    data, weight = terms if data_first else reversed(terms)
    spelled = len(data.replace("...", ""))
    unnamed = "".join(map(str, range(data_ndim - spelled))) if "..." in data else ""
    data, result = data.replace("...", unnamed, 1), result.replace("...", unnamed, 1)
    if len(data) != data_ndim or any("." in term or len(set(term)) != len(term) for term in (data, weight, result)):
        return None
    return list(data), list(weight), list(result)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.pad: _pad,
    torch._C._nn.pad: _pad,
    F.instance_norm: _instance_norm,
    torch.instance_norm: _torch_instance_norm,
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.Tensor.__rmatmul__: _reversed_matmul,
    torch.einsum: _einsum,
}
