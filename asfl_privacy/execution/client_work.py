"""One client's work in a phase, as every executor runs it: place named in errors, global draws seeded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from asfl_privacy.federated import Collected, Federation, Method, Payload, State, Update
from asfl_privacy.federated.phases import Remaining
from asfl_privacy.federated.steps import Pool
from asfl_privacy.federated.streams import torch_seed
from asfl_privacy.mechanisms import ReleasePlan


def collect_one(
    method: Method,
    state: State,
    client: int,
    *,
    federation: Federation,
    plan: ReleasePlan | None,
    remaining: Remaining,
    round: int,
) -> Collected:
    """The collect phase of one client.

    Raises:
        ValueError: The phase refused; the line names round and client.
        Exception: Whatever else went wrong, with a note of the place.
    """
    with named(round, client=client), repeatable_kernels(federation.device):
        return method.collect(state, client, federation=federation, plan=plan, remaining=remaining, round=round)


def train_one(
    method: Method,
    state: State,
    client: int,
    *,
    federation: Federation,
    plan: ReleasePlan | None,
    own: Pool | None,
    received: Payload | None,
    remaining: Remaining,
    round: int,
    seed_global_draws: bool = True,
) -> Update:
    """The train phase of one client.

    Layers such as dropout can only draw from torch's global generator: it is seeded, and left as it was; threads, which
    share it, leave it alone and refuse such layers.

    Raises:
        ValueError: The phase refused; the line names round and client.
        Exception: Whatever else went wrong, with a note of the place.
    """
    seeded = global_draws(federation, client=client, round=round) if seed_global_draws else nullcontext()
    with named(round, client=client), seeded, repeatable_kernels(federation.device):
        return method.train(
            state,
            client,
            federation=federation,
            plan=plan,
            own=own,
            received=received,
            remaining=remaining,
            round=round,
        )


@contextmanager
def global_draws(federation: Federation, *, client: int, round: int) -> Iterator[None]:
    """Seed torch's global generator for layers such as dropout, which can draw from nothing else; leave it as it was."""
    seed = torch_seed(federation.settings.seed, round=round, client=client, purpose="layers")
    if federation.device.type == "cpu":  # torch.manual_seed and fork_rng also visit every other kind of device
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            torch.default_generator.set_state(before)
        return
    devices = [federation.device] if federation.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


@contextmanager
def repeatable_kernels(device: torch.device) -> Iterator[None]:
    """Have cuDNN take the same kernels each time, none of which adds up in an order left to chance; put back afterwards.

    Guarantee:
        On CUDA the same seed then gives the same bits on the same kind of GPU with the same versions, as far as torch's
        own kernels do (`torch.use_deterministic_algorithms` lists those that do not). Compiled steps are not covered.
        Other devices and the precision settings are left alone.
    """
    if device.type != "cuda":
        yield
        return
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before


@contextmanager
def named(round: int, *, client: int | None = None) -> Iterator[None]:
    """Say round and client of whatever goes wrong: before a refusal's line, as a note on any other exception."""
    where = f"round {round}" if client is None else f"round {round}, client {client}"
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    except Exception as error:  # raised again, with the place named
        error.add_note(where)
        raise
