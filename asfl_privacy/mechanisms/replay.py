"""Replay: a layer that draws gives its recomputation under activation checkpointing the draw of the first run."""

from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict

import torch
import torch.utils.checkpoint

CAPACITY = 256
_CHECKPOINT = torch.utils.checkpoint.__file__


class Replay:
    """Outputs of calls inside checkpointed blocks, by the bytes of what came in.

    Guarantee:
        ``recall`` gives a stored output only while a backward pass recomputes a checkpointed block, and then always that
        of the latest call with the same bytes; it never gives fresh noise there, since gradients would belong to another
        draw and the block's output would have been released twice. Nothing is kept outside checkpointed blocks.

    Edge cases:
        Only the latest ``CAPACITY`` calls are kept; a recomputation of an older one is refused.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()

    def keep(self, given: torch.Tensor, drawn: torch.Tensor) -> None:
        """Remember the output of a call, if a checkpointed block is running for the first time."""
        if not _in_checkpoint():
            return
        key = _digest(given)
        self._kept[key] = drawn
        self._kept.move_to_end(key)
        while len(self._kept) > CAPACITY:
            self._kept.popitem(last=False)

    def recall(self, given: torch.Tensor) -> torch.Tensor | None:
        """The output of the first run, while a backward pass recomputes a checkpointed block; else None.

        Raises:
            ValueError: where it is no longer kept, or the block computed something else the second time.
        """
        if not (torch._C._current_graph_task_id() != -1 and _in_checkpoint()):
            return None
        found = self._kept.get(_digest(given))
        if found is None:
            raise ValueError(
                "a checkpointed block is recomputed and its noise is not kept: it changed in between, or more than "
                f"{CAPACITY} calls have passed; keep the noise layer outside checkpointed blocks"
            )
        return found


def _in_checkpoint() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINT:
            return True
        frame = frame.f_back  # type: ignore[assignment]  # None ends the walk
    return False


def _digest(tensor: torch.Tensor) -> bytes:
    values = tensor.detach().cpu().contiguous()
    words = f"{tuple(values.shape)}{values.dtype}{tensor.device}".encode()
    return hashlib.blake2b(words + values.reshape(-1).view(torch.uint8).numpy().tobytes(), digest_size=32).digest()
