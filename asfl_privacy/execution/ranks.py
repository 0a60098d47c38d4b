"""Ranks: the processes that torchrun starts, how they meet, and whether all are about to run the same."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from asfl_privacy.execution.rank_channel import answering
from asfl_privacy.federated import Federation, Method

TIMEOUT = timedelta(minutes=30)
"""The longest that a rank waits for one that has not ended, as it does while that one trains its clients."""

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells each process."""

VALUES_AT_ONCE = 2**20
"""Numbers digested in one piece."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a run, as one of them sees them.

    Attributes:
        rank: 0 … world_size − 1; rank 0 runs the rounds.
        world_size: Number of processes.
        device: Where this one trains.
    """

    rank: int
    world_size: int
    device: torch.device


def is_torchrun() -> bool:
    """Whether torchrun started this process (or another launcher that sets the same variables)."""
    return all(name in os.environ for name in VARIABLES)


@contextmanager
def init_ranks(device: torch.device | str, *, timeout: timedelta = TIMEOUT) -> Iterator[Ranks]:
    """Join the other ranks, and leave them at the end.

    Args:
        device: `cpu`, or `cuda` for a GPU a rank.
        timeout: The longest wait for a rank whose connection is open; one that has ended is noticed at once.

    Raises:
        ValueError: No torchrun, or a device that ranks cannot train on.
        WorkerDiedError: The ranks do not meet.
    """
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(
            f"executor torchrun without ranks ({', '.join(missing)} not set): torchrun starts the processes; run torchrun "
            "--nproc-per-node 2 --module asfl_privacy train --executor torchrun and the other flags"
        )
    own = _own_device(torch.device(device))
    with answering(f"a rank at {os.environ['MASTER_ADDR']} port {os.environ['MASTER_PORT']}"):
        if own.type == "cuda":
            torch.cuda.set_device(own)
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=own)
        else:
            dist.init_process_group("gloo", timeout=timeout)
    try:
        yield Ranks(rank=dist.get_rank(), world_size=dist.get_world_size(), device=own)
    finally:
        dist.destroy_process_group()


def clients_of(rank: int, cohort: Sequence[int]) -> tuple[int, ...]:
    """The clients of a cohort that a rank works for: always the same ones, so that their data stay with it."""
    return tuple(client for client in cohort if rank_of(client) == rank)


def rank_of(client: int) -> int:
    """The rank that works for a client."""
    return client % dist.get_world_size()


def run_facts(federation: Federation, method: Method) -> dict[str, str]:
    """What must be alike on all ranks, by name, as texts and digests to compare."""
    data, model = federation.data, federation.model
    records = hashlib.blake2b()
    for client in federation.clients:
        records.update(client.records.tobytes() + b"|")
    return {
        "settings": repr(federation.settings),
        "privacy": repr(federation.privacy),
        "method": f"{method.name} {type(method).__qualname__}",
        "data": _digest({"inputs": data.train_inputs, "labels": data.train_labels}) + f" {data.input_box}",
        "partition": records.hexdigest(),
        "network": f"{_digest(federation.initial_weights)} {model} {federation.split.exchange_layer}",
        "torch version": torch.__version__,
    }


def _own_device(asked: torch.device) -> torch.device:
    if asked.type == "cpu":
        return asked
    if asked.type != "cuda":
        raise ValueError(f"executor torchrun on device {asked}: ranks train on cpu or cuda; use --device cpu")
    place, beside = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if beside > torch.cuda.device_count():
        raise ValueError(
            f"{beside} ranks on a machine with {torch.cuda.device_count()} CUDA devices: NCCL needs one for each rank; give "
            "torchrun --nproc-per-node no more than that"
        )
    return torch.device("cuda", place)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b()
    for name, value in tensors.items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}|".encode())
        for part in torch.split(value.detach().reshape(-1), VALUES_AT_ONCE):
            digest.update(part.cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
