"""The channel between ranks: what rank 0 says to all, what one rank says to another, and payloads from rank to rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asfl_privacy.execution.executor import WorkerDiedError
from asfl_privacy.execution.rank_messages import (
    CPU,
    Packed,
    Shapes,
    count_bytes,
    from_bytes,
    pack,
    to_bytes,
    unpack,
)


@dataclass(frozen=True)
class Shipment:
    """Tensors that go from one rank straight to another.

    Attributes:
        sender: Rank.
        receiver: Rank, another one.
        shapes: Types and shapes.
    """

    sender: int
    receiver: int
    shapes: Shapes


@dataclass(frozen=True)
class Channel:
    """This rank's end of the connections between all ranks.

    What lies on an accelerator goes over its own backend (NCCL), everything else over gloo.

    Attributes:
        rank: This rank.
        device: Its device.

    Raises:
        WorkerDiedError: By every function: another rank has ended, or did not answer in time.
    """

    rank: int
    device: torch.device

    def broadcast(self, value: object) -> None:
        """Say something to every rank; they hear it. For rank 0."""
        packed = pack(value, device=self.device)
        with answering("another rank"):
            for part in _parts(packed):
                dist.broadcast(part, 0)

    def hear(self) -> Any:  # noqa: ANN401  # whatever rank 0 says
        """What rank 0 says to every rank. For the others."""
        return unpack(self._take(lambda part: dist.broadcast(part, 0), sender=0))

    def send(self, value: object, *, to: int) -> None:
        """Say something to one rank, which receives it."""
        packed = pack(value, device=self.device)
        with answering(f"rank {to}"):
            for part in _parts(packed):
                dist.send(part, to)

    def receive(self, *, sender: int) -> Any:  # noqa: ANN401  # whatever is sent
        """What one rank sends to this one."""
        return unpack(self._take(lambda part: dist.recv(part, sender), sender=sender))

    def exchange(
        self, shipments: Sequence[Shipment], outgoing: Mapping[int, Sequence[Tensor]]
    ) -> dict[int, list[Tensor]]:
        """Send and receive many tensors at once.

        Args:
            shipments: The same list on every rank.
            outgoing: For the shipments that this rank sends, by their place in the list, the tensors.

        Returns:
            For those that it receives, by place, the tensors.
        """
        operations, arriving = [], {}
        for place, shipment in enumerate(shipments):
            if shipment.sender == self.rank:
                buffer = to_bytes(outgoing[place], device=self.device)
                operations.append(dist.P2POp(dist.isend, buffer, shipment.receiver, tag=place + 1))
            elif shipment.receiver == self.rank:
                buffer = torch.empty(count_bytes(shipment.shapes), dtype=torch.uint8, device=self.device)
                operations.append(dist.P2POp(dist.irecv, buffer, shipment.sender, tag=place + 1))
                arriving[place] = buffer
        if operations:
            with answering("another rank"):
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
        return {place: from_bytes(buffer, shipments[place].shapes) for place, buffer in arriving.items()}

    def _take(self, fill: Callable[[Tensor], object], *, sender: int) -> Packed:
        with answering(f"rank {sender}"):
            lengths = torch.empty(3, dtype=torch.int64)
            fill(lengths)
            places = (CPU, CPU, self.device)
            buffers = [
                torch.empty(int(length), dtype=torch.uint8, device=place)
                for length, place in zip(lengths, places, strict=True)
            ]
            for buffer in buffers:
                if len(buffer):
                    fill(buffer)
        skeleton, host, device = buffers
        return Packed(skeleton=skeleton.numpy().tobytes(), host=host, device=device)


def _parts(packed: Packed) -> list[Tensor]:
    """What is sent of a packed object, in order: lengths, then all that is not empty."""
    skeleton = torch.frombuffer(bytearray(packed.skeleton), dtype=torch.uint8)
    buffers = [skeleton, packed.host, packed.device]
    return [torch.tensor([len(buffer) for buffer in buffers]), *(buffer for buffer in buffers if len(buffer))]


@contextmanager
def answering(who: str) -> Iterator[None]:
    """Say which rank is gone when a connection breaks or times out.

    Raises:
        WorkerDiedError: In place of the backend's error.
    """
    try:
        yield
    except RuntimeError as error:  # gloo's own; that of torch.distributed is one too
        reason = re.sub(r"^\[\S+\] ", "", str(error).split("\n")[0]).split(". This is typically")[0]
        raise WorkerDiedError(
            f"{who} does not answer ({reason}): it has ended or hangs, and its own output says why; start the run again "
            "with --resume"
        ) from error
