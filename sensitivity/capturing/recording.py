"""A recording: the operators that a head applied to a batch, as facts."""

# ruff: noqa: ANN401  (arguments of recorded operators have no narrower type)
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

INPUT = "input"
VIEWS = ("view", "_unsafe_view", "_reshape_alias", "reshape")
SIZED = (*VIEWS, "expand")  # their second argument is a shape, whose first size is the batch size
PIECES = ("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "unbind")


@dataclass(frozen=True)
class Ref:
    """A value that depends on the input: the index of the node that made it."""

    index: int


@dataclass(frozen=True, kw_only=True)
class Node:
    """One operator that ran on data.

    Attributes:
        op: functional name of the operator, such as "convolution"; "input" for the input itself.
        overload: the overload's name, such as "Tensor".
        parents: nodes whose values it read.
        args: positional arguments; a `Ref` for each value, tensors for constants.
        kwargs: keyword arguments, likewise; "piece" numbers the results of operators that cut a value into pieces.
        shape: shape of the result, batch first.
        dtype: its element type.
        path: module path inside the head ("" for the head itself).
        module: class name of that module.
    """

    op: str
    overload: str = ""
    parents: tuple[int, ...] = ()
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    path: str = ""
    module: str = ""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The operators of one run, in order.

    Attributes:
        nodes: all operators; node 0 is the input.
        output: index of the node that the head returned.
        batch_size: records in the batch.
    """

    nodes: tuple[Node, ...]
    output: int
    batch_size: int

    def reachable(self) -> list[int]:
        """Indices of the nodes that the output depends on, in order."""
        wanted, stack = set[int](), [self.output]
        while stack:
            index = stack.pop()
            if index not in wanted:
                wanted.add(index)
                stack.extend(self.nodes[index].parents)
        return sorted(wanted)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Arguments of an operator with every leaf replaced; much faster than a general tree map.

    Example:
        >>> map_leaves(lambda leaf: leaf + 1, ([1, 2], {"a": 3}))
        ([2, 3], {'a': 4})
    """
    if isinstance(value, list):
        return [map_leaves(function, item) for item in value]
    if isinstance(value, tuple):
        return tuple([map_leaves(function, item) for item in value])
    if isinstance(value, dict):
        return {key: map_leaves(function, item) for key, item in value.items()}
    return function(value)


def leaves_of(value: Any) -> Iterator[Any]:
    """Leaves of the arguments of an operator, in order.

    Example:
        >>> list(leaves_of(([1, 2], {"a": 3})))
        [1, 2, 3]
    """
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves_of(item)
    else:
        yield value


def place_of(path: str, module: str) -> str:
    """Words that name a place in a head, for messages.

    Example:
        >>> place_of("0.conv", "Conv2d")
        "head layer '0.conv' (Conv2d)"
    """
    return f"head layer {path!r} ({module})" if path else f"head ({module})"
