"""Does a head run the same operators whatever the batch size?

A recording shows one batch size. Here the head is recorded for a single record as well, and exported with the batch
size as an unknown: `torch.export` refuses programs that branch on an unknown size. Export is slow (a fifth of a
second), so its verdict is remembered for the program: module types, modes, code, simple attributes, what the code reads
from closures and globals, and the operators recorded. Weight values are not part of a program, since export refuses
branches on them as well.
"""

# ruff: noqa: ANN401  (arguments of recorded operators have no narrower type)
from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from sensitivity.capture import Recording, record
from sensitivity.errors import UnsupportedModuleError
from sensitivity.fingerprint import structure_of

_REMEMBERED = 256
_verdicts: OrderedDict[str, None] = OrderedDict()


def require_any_batch_size(
    head: nn.Module, recording: Recording, *, input_shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Refuse a head whose operators depend on the batch size.

    Args:
        head: the module that was recorded.
        recording: its recording.
        input_shape: shape of one record.
        dtype: element type of the input.

    Raises:
        UnsupportedModuleError: if another batch size runs other operators, or that cannot be excluded.

    Guarantee: the recorded operators are those of every batch size, up to what the module's text names.
    """
    modules = [f"{module.training} {structure_of(module)}" for module in head.modules()]
    key = "\n".join([f"{input_shape} {dtype}", *modules, program_text(recording)])
    if key in _verdicts:
        _verdicts.move_to_end(key)
        return
    single = record(head, input_shape=input_shape, dtype=dtype, batch_size=1)
    if program_text(single) != program_text(recording):
        raise UnsupportedModuleError(
            f"head ({type(head).__name__}) runs other operators on 1 record than on {recording.batch_size}: a bound "
            "must hold for any batch size; make forward independent of the batch size"
        )
    _require_export(head, input_shape=input_shape, dtype=dtype)
    _verdicts[key] = None
    while len(_verdicts) > _REMEMBERED:
        _verdicts.popitem(last=False)


def program_text(recording: Recording) -> str:
    """The operators of a recording as text, with the batch size left out and constants by shape.

    Example:
        >>> print(program_text(record(nn.ReLU(), input_shape=(3,), dtype=torch.float32)))
        input () {} (3,) -> *
        relu (Ref(index=0),) {} (3,) -> *
        output 1
    """
    lines = []
    for node in recording.nodes:
        args, kwargs = pytree.tree_map(_shape_only, (node.args, node.kwargs))
        batched = bool(node.shape) and node.shape[0] == recording.batch_size
        shape = node.shape[1:] if batched else node.shape
        shown = _without_batch(args, node.op, recording.batch_size)
        lines.append(f"{node.op} {shown} {kwargs} {shape} -> {'*' if batched else ''}")
    return "\n".join([*lines, f"output {recording.output}"])


def _shape_only(leaf: Any) -> Any:
    return f"tensor{tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else leaf


def _without_batch(args: tuple[Any, ...], op: str, batch_size: int) -> str:
    """Arguments as text; the size lists of views start with the batch size."""
    if (
        op in ("view", "_unsafe_view", "_reshape_alias", "reshape")
        and len(args) > 1
        and isinstance(args[1], list | tuple)
    ):
        sizes = list(args[1])
        if sizes and sizes[0] in (batch_size, -1):
            return f"({args[0]}, ['*', {', '.join(map(str, sizes[1:]))}])"
    return str(args)


def _require_export(head: nn.Module, *, input_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    device = next((t.device for t in (*head.parameters(), *head.buffers())), torch.device("cpu"))
    batch = torch.zeros((7, *input_shape), dtype=dtype, device=device)
    logger = logging.getLogger("torch")
    level = logger.level
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logger.setLevel(logging.CRITICAL)
            torch.export.export(
                _Named(head), (batch,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},), strict=False
            )
    except Exception as error:
        reason = " ".join(str(error).split()).split(" For more information")[0][:200]
        raise UnsupportedModuleError(
            f"head ({type(head).__name__}) cannot be exported for an unknown batch size ({reason}): a bound must hold "
            "for any batch size; make forward independent of the batch size and of values"
        ) from error
    finally:
        logger.setLevel(level)


class _Named(nn.Module):
    """The head behind one positional argument, whatever its forward calls it."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(batch)
        return result
