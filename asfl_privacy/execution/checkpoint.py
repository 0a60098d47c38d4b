"""Checkpoints: a run between two rounds as a folder that is whole or not there, from which it goes on to the same bits.

checkpoint-NNNNNN/ holds weights.safetensors, server.safetensors, of a private run the account's files, of client states
in memory clients.safetensors, and, written last, checkpoint.json: the numbers, the index of client states on disk, how far
the log of releases went, and every other file's SHA-256; accounting/storage.py has its envelope. NNNNNN counts checkpoints.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asfl_privacy.accounting.storage import read_document, sync_path, write_document
from asfl_privacy.execution.account_file import read_account, write_account
from asfl_privacy.execution.progress import Progress
from asfl_privacy.execution.progress_file import decode_progress, encode_progress
from asfl_privacy.execution.release_log import LogPosition
from asfl_privacy.federated import State
from asfl_privacy.federated.client_states import ClientStates, DiskClientStates, MemoryClientStates
from asfl_privacy.federated.tensor_file import decode_tensors, encode_tensors

FORMAT, VERSION = "asfl-privacy checkpoint", 1
JSON_FILE, CLIENTS_FOLDER = "checkpoint.json", "clients"
_WEIGHTS, _SERVER, _CLIENTS = "weights.safetensors", "server.safetensors", "clients.safetensors"
_NAME = re.compile(r"checkpoint-(\d{6,})")
_UNFINISHED, _REMOVED = ".unfinished-", ".removed-"


@dataclass(frozen=True)
class Checkpoint:
    """What `read_checkpoint` found.

    Attributes:
        progress: The run between two rounds; its account has no journal.
        log: How far the log of releases went.
        notes: What a reader must be told, one line each: damaged checkpoints that were passed over.
    """

    progress: Progress
    log: LogPosition
    notes: tuple[str, ...] = ()


class _DamagedError(Exception):
    """A checkpoint is not whole."""


def write_checkpoint(folder: Path, progress: Progress, *, fingerprint: str, log: LogPosition | None = None) -> Path:
    """Write a checkpoint; when this returns it is on the disk, and earlier ones and the client files they used are gone.

    Args:
        folder: Of the run's checkpoints; made if it is missing. Client states on disk must lie in its folder `clients`.
        progress: The run between two rounds.
        fingerprint: Names the configuration; reading asks for the same.
        log: `ReleaseLog.position` of this moment; None for a run without one.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: The disk is full or refuses: the checkpoint before stays whole, and nothing half-written is left.
        ValueError: Client states that lie elsewhere.

    Guarantee:
        Wherever a kill, a crash of the machine or an error falls, `read_checkpoint` then gives the checkpoint before or the
        whole new one: files reach the disk before the folder gets its name, and only afterwards is anything deleted.

    Edge cases:
        What earlier attempts left unfinished is removed. An old folder that cannot be removed stays, and does no harm.
    """
    clients = progress.state.clients
    if isinstance(clients, DiskClientStates) and clients.folder.resolve() != (folder / CLIENTS_FOLDER).resolve():
        raise ValueError(
            f"client states lie in {clients.folder}: a checkpoint in {folder} can only name those in its folder "
            f"{CLIENTS_FOLDER!r}; make them with DiskClientStates({str(folder / CLIENTS_FOLDER)!r})"
        )
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True)
            sync_path(folder.parent)
        _sweep(folder)
        earlier = _checkpoints(folder)
        number = 1 + max(earlier, default=0)
        scratch = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder))
        try:
            if isinstance(clients, DiskClientStates):
                clients.sync()
            _fill(scratch, progress, fingerprint=fingerprint, log=LogPosition() if log is None else log)
            path = scratch.rename(folder / f"checkpoint-{number:06d}")
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        sync_path(folder)
    except OSError as error:
        raise OSError(
            f"no checkpoint of round {progress.rounds_done} can be written in {folder} ({error.strerror or error}): the one "
            "before, if any, is whole; make room, or check the folder, and resume"
        ) from error
    for old in earlier.values():
        with contextlib.suppress(
            OSError
        ):  # renamed first: a folder that is half removed must not look like a checkpoint
            old.rename(folder / f"{_REMOVED}{old.name}")
    _sweep(folder)
    if isinstance(clients, DiskClientStates):
        with contextlib.suppress(OSError):
            clients.prune()
    return path


def read_checkpoint(folder: Path, *, fingerprint: str, device: torch.device | str | None = None) -> Checkpoint | None:
    """The newest whole checkpoint of a run.

    Args:
        folder: Of the run's checkpoints.
        fingerprint: Of the configuration that is to go on; that of the checkpoint must be the same.
        device: Where tensors are put; None for where each of them was.

    Returns:
        The checkpoint; None where none was ever written.

    Raises:
        ValueError: No checkpoint is whole, or the newest is of another configuration or version.

    Guarantee:
        A file that differs by one bit from what was written is not used, up to SHA-256 (client states on disk: their size
        now and their CRC-32 when they are read). Where the newest checkpoint is damaged and the one before is still
        there, that one is taken and `notes` say so: its rounds are executed again, and since the log of releases is never
        cut, `ReleaseLog.replay_after` of its position still counts everything that was sent.
    """
    notes: list[str] = []
    for _, path in sorted(_checkpoints(folder).items(), reverse=True):
        try:
            progress, log = _read(path, fingerprint=fingerprint, device=device)
        except _DamagedError as error:
            notes.append(f"{path} is damaged ({error})")
            continue
        ending = f"the run goes on from {path.name}, after round {progress.rounds_done}"
        return Checkpoint(progress=progress, log=log, notes=tuple(f"{note}: {ending}" for note in notes))
    if notes:
        raise ValueError(
            f"{'; '.join(notes)}: a run goes on from a whole checkpoint only, and none is left; restore a copy of the folder, "
            "or start anew in another one"
        )
    return None


def _fill(scratch: Path, progress: Progress, *, fingerprint: str, log: LogPosition) -> None:
    """Write every file of a checkpoint and bring them to the disk, the JSON last."""
    clients = progress.state.clients
    tensors: dict[str, Mapping[str, Tensor]] = {_WEIGHTS: progress.state.weights, _SERVER: progress.state.server}
    index = None
    if isinstance(clients, DiskClientStates):
        index = {str(client): name for client, name in clients.index.items()}
    else:
        tensors[_CLIENTS] = {f"{number}/{name}": value for number in clients for name, value in clients[number].items()}
    for name, values in tensors.items():
        (scratch / name).write_bytes(encode_tensors(values))
    if progress.account is not None:
        write_account(scratch, progress.account)
    digests = {}
    for path in sorted(scratch.iterdir()):
        digests[path.name] = _digest(path)
        sync_path(path)
    body = {
        "fingerprint": fingerprint,
        "progress": encode_progress(progress),
        "is_private": progress.account is not None,
        "clients": index,
        "log": asdict(log),
        "files": digests,
    }
    write_document(scratch / JSON_FILE, name=FORMAT, version=VERSION, body=body)
    sync_path(scratch)


def _read(path: Path, *, fingerprint: str, device: torch.device | str | None) -> tuple[Progress, LogPosition]:
    body = _body(path)
    if body.get("fingerprint") != fingerprint:
        raise ValueError(
            f"{path} is of another configuration ({body.get('fingerprint')!r} where {fingerprint!r} is asked): a run goes on "
            "only as it began; resume with its own configuration, or start anew in another folder"
        )
    try:
        for name, digest in body["files"].items():
            if _digest(path / name) != digest:
                raise _DamagedError(f"{name} does not match its SHA-256")
        tensors = {
            name: decode_tensors((path / name).read_bytes(), name=str(path / name), device=device)
            for name in (_WEIGHTS, _SERVER, *((_CLIENTS,) if body["clients"] is None else ()))
        }
        clients: ClientStates
        if body["clients"] is None:
            states: dict[int, dict[str, Tensor]] = {}
            for key, value in tensors[_CLIENTS].items():
                number, _, name = key.partition("/")
                states.setdefault(int(number), {})[name] = value
            clients = MemoryClientStates().updated(states)
        else:
            clients = DiskClientStates.reopen(path.parent / CLIENTS_FOLDER, body["clients"], device=device)
        state = State(weights=tensors[_WEIGHTS], clients=clients, server=tensors[_SERVER])
        account = read_account(path) if body["is_private"] else None
        progress = Progress(state=state, account=account, **decode_progress(body["progress"]))
        return progress, LogPosition(**body["log"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _DamagedError(" ".join(str(error).split())) from error


def _body(path: Path) -> dict[str, Any]:
    """What checkpoint.json says; a file of another version is refused, never passed over for an older one."""
    file = path / JSON_FILE
    words: Any = None
    with contextlib.suppress(OSError, ValueError):
        words = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(words, dict) and words.get("format") == FORMAT and words.get("version") != VERSION:
        raise ValueError(
            f"{file} has version {words.get('version')!r}: this program reads version {VERSION}; resume with the program that "
            "wrote it"
        )
    try:
        return read_document(file, name=FORMAT, version=VERSION)
    except (OSError, ValueError) as error:
        raise _DamagedError(" ".join(str(error).split())) from error


def _checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints of a folder by number, whole or not."""
    if not folder.is_dir():
        return {}
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in found if match is not None}


def _sweep(folder: Path) -> None:
    """Remove what a killed attempt left, and what was put aside to be removed."""
    for path in folder.iterdir():
        if path.name.startswith((_UNFINISHED, _REMOVED)):
            shutil.rmtree(path, ignore_errors=True)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
