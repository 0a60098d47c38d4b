"""What single clients keep between rounds: immutable mappings, in memory or one file a client and version."""

from __future__ import annotations

import os
import re
import threading
import zlib
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from asfl_privacy.accounting.storage import sync_path
from asfl_privacy.federated.tensor_file import check_tensor_file, compact, decode_tensors, encode_tensors

ClientState = Mapping[str, Tensor]

CACHE_BYTES = 64 * 2**20
_SYNC_THREADS = 16
_NAME = re.compile(r"(\d+)\.(\d+)\.([0-9a-f]{8})\.safetensors")


class ClientStates(Mapping[int, ClientState]):
    """Client number → what the client keeps, for the clients that keep anything; numbers ascend when iterated.

    Guarantee:
        A handle never changes: `updated` gives another one, and tensors that were given or got share no memory with
        those kept, so changing them in place changes no handle.
    """

    @abstractmethod
    def updated(self, changes: Mapping[int, ClientState]) -> ClientStates:
        """Another handle in which these clients keep what is given; one that keeps nothing (`{}`) is left out.

        Args:
            changes: By client number ≥ 0; all that the client keeps from now on.

        Raises:
            ValueError: A tensor that cannot be kept.
            OSError: A file cannot be written; nothing has changed then.
        """

    # Equality of mappings compares values, and that of tensors has no truth value: handles are equal if identical.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class MemoryClientStates(ClientStates):
    """Client states in memory.

    Example:
        >>> none = MemoryClientStates()
        >>> some = none.updated({3: {"c": torch.tensor([1.0])}})
        >>> len(none), list(some), some[3]["c"]
        (0, [3], tensor([1.]))
    """

    def __init__(self) -> None:
        self._states: dict[int, dict[str, Tensor]] = {}

    def __getitem__(self, client: int) -> dict[str, Tensor]:
        return _copied(self._states[client])

    def __contains__(self, client: object) -> bool:
        return client in self._states

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._states))

    def __len__(self) -> int:
        return len(self._states)

    def updated(self, changes: Mapping[int, ClientState]) -> MemoryClientStates:
        """See `ClientStates`."""
        after = MemoryClientStates()
        after._states = self._states | {_checked(client): _copied(state) for client, state in changes.items() if state}
        for client, state in changes.items():
            if not state:
                after._states.pop(client, None)
        return after


class DiskClientStates(ClientStates):
    """Client states in a folder, one safetensors file for each client and version; read when they are asked for.

    Files are named CLIENT.VERSION.CRC32.safetensors and never overwritten, so an earlier handle, or a checkpoint, stays
    valid until `prune` is told to forget it. In memory are the index and the files read or written last. A pickled
    handle holds folder and index alone: the process that gets it reads the files itself.

    Args:
        folder: Made if it is missing. Two runs must not share one.
        cache_bytes: The most bytes of files that all handles of one chain keep in memory, ≥ 0.

    Guarantee:
        The bits come back as they were given. A file of other bits than were written is refused when it is read, up to
        the 2⁻³² of a CRC: the sum guards against failing disks, not against forgery.

    Edge cases:
        Files are on the disk for certain only after `sync`. Nothing is locked: one process at a time may update.
    """

    def __init__(self, folder: str | Path, *, cache_bytes: int = CACHE_BYTES) -> None:
        self._store = _Store(Path(folder), cache_bytes=cache_bytes)
        self._index: dict[int, str] = {}
        self._store.folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def reopen(
        cls,
        folder: str | Path,
        index: Mapping[int, str] | Mapping[str, str],
        *,
        device: torch.device | str | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> DiskClientStates:
        """The handle whose index this is.

        Args:
            folder: Where the files lie.
            index: From `index`, also after a way through JSON, which makes text of the numbers.
            device: Where tensors are put that are read from now on; None for where each of them was.
            cache_bytes: See the class.

        Raises:
            ValueError: A file is missing or not whole, or the index names what is no file of that client.
        """
        states = cls(folder, cache_bytes=cache_bytes)
        states._store.device = device
        for key, name in index.items():
            found = _NAME.fullmatch(name)
            if found is None or found[1] != str(key):
                raise ValueError(f"client {key} has file {name!r}: no name of a file of its own; restore the index")
            states._store.check(name)
            states._index[int(key)] = name
            states._store.version = max(states._store.version, int(found[2]))
        return states

    @property
    def folder(self) -> Path:
        """Where the files lie."""
        return self._store.folder

    @property
    def index(self) -> dict[int, str]:
        """Client number → file name: all that `reopen` needs."""
        return {client: self._index[client] for client in self}

    def __getitem__(self, client: int) -> dict[str, Tensor]:
        return self._store.read(self._index[client])

    def __contains__(self, client: object) -> bool:
        return client in self._index

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._index))

    def __len__(self) -> int:
        return len(self._index)

    def updated(self, changes: Mapping[int, ClientState]) -> Self:
        """See `ClientStates`."""
        after = object.__new__(type(self))
        after._store, after._index = self._store, dict(self._index)
        self._store.version += 1
        written: list[str] = []
        try:
            for client, state in changes.items():
                if state:
                    after._index[client] = self._store.write(_checked(client), state)
                    written.append(after._index[client])
                else:
                    after._index.pop(client, None)
        except BaseException:
            self._store.remove(written)
            raise
        return after

    def sync(self) -> None:
        """Wait until every file of this handle is on the disk, for a checkpoint that is to name them.

        Raises:
            OSError: The disk refuses.
        """
        self._store.sync(self._index.values())

    def prune(self, *, keep: Iterable[DiskClientStates] = ()) -> int:
        """Delete the files that neither this handle nor one of `keep` names; any other handle is void from then on.

        Args:
            keep: Handles of the same folder, those of checkpoints on the disk among them.

        Returns:
            The number of files deleted; files with other names than a state's are left alone.
        """
        named = set(self._index.values()).union(*(states._index.values() for states in keep))
        with os.scandir(self.folder) as entries:
            strays = [entry.name for entry in entries if _NAME.fullmatch(entry.name) and entry.name not in named]
        self._store.remove(strays)
        return len(strays)


class _Store:
    """The files of a folder, shared by all handles of a chain: read and written here, the last ones kept as bytes."""

    def __init__(self, folder: Path, *, cache_bytes: int) -> None:
        self.folder, self.cache_bytes = folder, cache_bytes
        self.device: torch.device | str | None = None
        self.version = 0
        self._cache: OrderedDict[str, bytes] = OrderedDict()
        self._cached = 0
        self._unsynced: set[str] = set()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        names = ("folder", "cache_bytes", "device", "version")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["folder"], cache_bytes=state["cache_bytes"])  # type: ignore[misc]
        self.device, self.version = state["device"], state["version"]

    def write(self, client: int, state: ClientState) -> str:
        """Write a new file, and say its name; a version that an earlier attempt has written is skipped."""
        data = encode_tensors(state)
        while True:
            name = f"{client}.{self.version}.{zlib.crc32(data):08x}.safetensors"
            try:
                stream = (self.folder / name).open("xb", buffering=0)
                break
            except FileExistsError:
                self.version += 1
        with stream:
            try:
                left = memoryview(data)
                while left:
                    left = left[stream.write(left) :]
            except BaseException:
                (self.folder / name).unlink(missing_ok=True)
                raise
        with self._lock:
            self._unsynced.add(name)
            self._keep(name, data)
        return name

    def read(self, name: str) -> dict[str, Tensor]:
        """The tensors of a file."""
        with self._lock:
            data = self._cache.get(name)
            if data is not None:
                self._cache.move_to_end(name)
        path = self.folder / name
        if data is None:
            data = path.read_bytes()
            if f"{zlib.crc32(data):08x}" != name.split(".")[2]:
                raise ValueError(
                    f"{path} is damaged (its CRC-32 is not that of its name): what the client kept is not known; restore a "
                    "copy of the file"
                )
            with self._lock:
                self._keep(name, data)
        return decode_tensors(data, name=str(path), device=self.device)

    def check(self, name: str) -> None:
        """Refuse a file that is missing or not as long as its header says."""
        path = self.folder / name
        try:
            with path.open("rb") as stream:
                start = stream.read(8)
                start += stream.read(min(int.from_bytes(start, "little"), 2**27))
                check_tensor_file(start, size=os.fstat(stream.fileno()).st_size, name=str(path))
        except OSError as error:
            raise ValueError(
                f"{path} cannot be read ({error.strerror}): a client's state is lost without it; restore a copy of the file"
            ) from None

    def sync(self, names: Iterable[str]) -> None:
        """Bring files to the disk that are not there for certain, and the folder."""
        due = self._unsynced.intersection(names)
        if due:
            with ThreadPoolExecutor(_SYNC_THREADS) as pool:  # a file system flushes what is asked for at once together
                list(pool.map(sync_path, (self.folder / name for name in sorted(due))))
            sync_path(self.folder)
            with self._lock:
                self._unsynced -= due

    def remove(self, names: Iterable[str]) -> None:
        """Delete files."""
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
            with self._lock:
                self._unsynced.discard(name)
                self._cached -= len(self._cache.pop(name, b""))

    def _keep(self, name: str, data: bytes) -> None:
        if len(data) > self.cache_bytes or name in self._cache:
            return
        self._cache[name] = data
        self._cached += len(data)
        while self._cached > self.cache_bytes:
            self._cached -= len(self._cache.popitem(last=False)[1])


def _checked(client: int) -> int:
    if isinstance(client, bool) or not isinstance(client, int) or client < 0:
        raise ValueError(f"client is {client!r}: clients are numbered by integers ≥ 0; pass the client's number")
    return client


def _copied(state: ClientState) -> dict[str, Tensor]:
    return {name: compact(value) for name, value in state.items()}
