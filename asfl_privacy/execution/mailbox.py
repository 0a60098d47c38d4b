"""The parent's side of shared memory: where it writes what workers read, and where they write their answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asfl_privacy.execution.client_process import Done, Phase
from asfl_privacy.execution.shared_region import Parcel, Region, SharedRegion, Slots, aligned, pack, unpack

ROOM = 1.25
"""Memory taken for messages, as a multiple of the largest one so far."""


class Mailbox:
    """Regions by name: `setup`, `state` and `facts` hold one parcel each; `tasks`, `collect` and `train` are cut into slots.

    Args:
        setup: What every worker reads once.

    Attributes:
        regions: All of them, for a worker to map.

    Raises:
        ValueError: There is no room for the setup.

    Guarantee:
        Whatever does not fit goes through the pipe, so that sizes matter to speed alone; the next phase has room for the
        largest message so far.
    """

    def __init__(self, setup: Parcel) -> None:
        try:
            region = SharedRegion(max(1, setup.size))
        except OSError as error:
            raise ValueError(
                f"the records need {setup.size} bytes of memory to be shared in, and there is no room ({error.strerror}): free "
                "some in /dev/shm or the temporary folder, or use executor threads"
            ) from error
        setup.write(region.memory)
        self.regions: dict[str, SharedRegion] = {"setup": region}
        self._slots: dict[str, Slots] = {}
        self._wanted: dict[str, int] = {}

    def make_room(self, counts: Mapping[str, int]) -> list[str]:
        """Let slots grow to what was wanted so far; nobody may be using the old ones but by tensors that were lent.

        Args:
            counts: Slots needed, by name.

        Returns:
            Names of the regions that have been replaced, for all workers to map.
        """
        grown = []
        for name, count in counts.items():
            have, size = self._slots.get(name), self._wanted.get(name, 0)
            if size == 0 or (have is not None and have.size >= size and have.count >= count):
                continue
            size = aligned(int(size * ROOM))
            if self._grow(name, size * count):
                self._slots[name] = Slots(self.regions[name], size=size)
                grown.append(name)
        return grown

    def write(self, name: str, value: object) -> tuple[bytes, bool]:
        """Write what all workers read, over what was there.

        Args:
            name: `state` or `facts`.
            value: What to write.

        Returns:
            Header of the parcel, and whether the region has been replaced, so that workers must map it first.
        """
        parcel, grown = pack(value, known=self._known), False
        if name not in self.regions or self.regions[name].size < parcel.size:
            grown = self._grow(name, max(1, int(parcel.size * ROOM)))
            if not grown:
                return pack(value, inline=True, known=self._known).header, False
        parcel.write(self.regions[name].memory)
        return parcel.header, grown

    def post(self, value: object) -> tuple[bytes, int | None]:
        """Write what one client reads.

        Returns:
            Header of the parcel and the slot of `tasks` that holds its pieces, to be given back; None for none.
        """
        parcel = pack(value, known=self._known)
        if parcel.size == 0:
            return parcel.header, None
        self._wanted["tasks"] = max(self._wanted.get("tasks", 0), parcel.size)
        slots = self._slots.get("tasks")
        at = slots.take() if slots is not None and parcel.size <= slots.size else None
        if slots is None or at is None:
            return pack(value, inline=True, known=self._known).header, None
        parcel.write(slots.bytes_at(at))
        return parcel.header, at

    def space(self, phase: Phase) -> tuple[int | None, int]:
        """A slot for an answer, or None, and its size."""
        slots = self._slots.get(phase)
        return (None, 0) if slots is None else (slots.take(), slots.size)

    def read(self, phase: Phase, done: Done, *, at: int | None) -> Any:  # noqa: ANN401 - what the phase returned
        """The value of an answer; its slot gives itself back once no tensor of it is left."""
        if done.is_placed and at is not None:
            return unpack(done.header, memory=self._slots[phase].lend(at))
        self._wanted[phase] = max(self._wanted.get(phase, 0), done.size)
        self.give_back(phase, at)
        return unpack(done.header)

    def give_back(self, name: str, at: int | None) -> None:
        """A slot that nobody uses; None is none."""
        if at is not None:
            self._slots[name].give_back(at)

    @property
    def _known(self) -> Mapping[str, Region]:
        """Regions in which tensors of this process may lie: answers that are still kept."""
        return {name: slots.region for name, slots in self._slots.items() if name != "tasks"}

    def _grow(self, name: str, size: int) -> bool:
        try:
            self.regions[name] = SharedRegion(size)
        except OSError:  # no room: through the pipe, then
            return False
        return True
