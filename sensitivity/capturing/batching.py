"""Does a head compute the same whatever the batch size, the memory layout, or the moment?

A recording shows one run. Here the head is recorded again for an unknown batch size (which may appear as the first
size of a view and nowhere else), for one record, and for many records that are scattered in memory; all recordings
must show the same operators with the same constants, value by value.
"""

# ruff: noqa: ANN401  (arguments of recorded operators have no narrower type)
from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from sensitivity.capturing.capture import BATCH_SIZE, record
from sensitivity.capturing.recording import SIZED, VIEWS, Recording, Ref, map_leaves
from sensitivity.errors import UnsupportedModuleError
from sensitivity.fingerprint import tensor_digest

MANY = 10_007  # more records than a batch holds, so that thresholds on ordinary sizes show; nothing is allocated
_NO_CHANGE = ("clone", "alias", "detach")


def require_steady(head: nn.Module, recording: Recording, *, input_shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Refuse a head whose operators or constants differ between runs.

    Args:
        head: the module that was recorded.
        recording: its recording.
        input_shape: shape of one record.
        dtype: element type of the input.

    Returns:
        The program: the operators and the values of their constants, as text.

    Raises:
        UnsupportedModuleError: if another batch size, layout or run gives another program, or that cannot be excluded.

    Guarantee: the program is that of every batch size, unless forward looks at types, catches errors, or reads a clock
        or other state that changes outside the head.
    """
    program = program_text(recording)
    if program_of(head, input_shape=input_shape, dtype=dtype) != program:
        _refuse(head, "for an unknown batch size")
    scattered = record(head, input_shape=input_shape, dtype=dtype, batch_size=MANY, scattered=True)
    if program_text(scattered) != program:
        _refuse(head, f"on {MANY} records scattered in memory")
    return program


def program_of(head: nn.Module, *, input_shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """What a head computes now: the program of an unknown batch size and of one record.

    Args:
        head: the module.
        input_shape: shape of one record.
        dtype: element type of the input.

    Returns:
        The program, as `program_text` writes it.

    Raises:
        UnsupportedModuleError: if the head cannot be recorded, or the two differ.
    """
    program = program_text(record(head, input_shape=input_shape, dtype=dtype, batch_size=None))
    if program_text(record(head, input_shape=input_shape, dtype=dtype, batch_size=1)) != program:
        _refuse(head, "on 1 record")
    return program


def _refuse(head: nn.Module, words: str) -> NoReturn:
    raise UnsupportedModuleError(
        f"head ({type(head).__name__}) computes something else {words} than on {BATCH_SIZE} records (other operators "
        "or other constants): a bound must hold for any batch size, layout and run; make forward independent of these"
    )


def program_text(recording: Recording) -> str:
    """The operators that the output depends on as text, without the batch size and without copies.

    Example:
        >>> print(program_text(record(nn.ReLU(), input_shape=(3,), dtype=torch.float32)))
        0 = input () {} * (3,) torch.float32
        1 = relu ('%0',) {} * (3,) torch.float32
    """
    numbers: dict[int, int] = {}
    lines: list[str] = []
    for index in recording.reachable():
        node = recording.nodes[index]
        if node.op in _NO_CHANGE:
            numbers[index] = numbers[node.parents[0]]
            continue
        numbers[index] = len(lines)
        batched = node.shape[:1] == (recording.batch_size,)
        shape = f"* {node.shape[1:]}" if batched else str(node.shape)
        args, kwargs = map_leaves(lambda leaf: _leaf_text(leaf, numbers), (node.args, node.kwargs))
        if node.op in SIZED and len(args) > 1 and isinstance(args[1], list | tuple):
            args = args[:1]  # the sizes asked for, as numbers or −1, are those of the result
        op = "view" if node.op in VIEWS else node.op
        lines.append(f"{numbers[index]} = {op} {args} {kwargs} {shape} {node.dtype}")
    return "\n".join(lines)


def _leaf_text(leaf: Any, numbers: dict[int, int]) -> Any:
    if isinstance(leaf, Ref):
        return f"%{numbers[leaf.index]}"
    return f"tensor {tensor_digest(leaf)}" if isinstance(leaf, torch.Tensor) else leaf
