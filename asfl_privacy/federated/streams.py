"""Random streams: one independent generator for each (seed, round, client, purpose), nothing global.

Every executor asks for the same streams, so all give the same result, and switching one use of randomness off (the
noise, say) leaves every other draw as it was. A known seed voids privacy: noise from these streams serves experiments.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from asfl_privacy.mechanisms.lattice import SeededSource, SystemSource, WordSource

SERVER = -1
"""Stands in for the client in the server's own streams."""


def numpy_stream(seed: int, *, round: int, client: int, purpose: str) -> np.random.Generator:
    """A NumPy generator (Philox, 128-bit key) for draws of records, pairs and cohorts.

    Args:
        seed: The run's seed.
        round: Round number, or −1 for what happens once a run.
        client: Client number, or `SERVER`.
        purpose: What it is for; different purposes never share a stream.

    Returns:
        The generator.

    Example:
        >>> a = numpy_stream(0, round=1, client=2, purpose="share").integers(1000, size=3)
        >>> b = numpy_stream(0, round=1, client=2, purpose="share").integers(1000, size=3)
        >>> bool((a == b).all())
        True
    """
    key = int.from_bytes(_digest(seed, round, client, purpose)[:16], "little")
    return np.random.Generator(np.random.Philox(key=key))


def torch_stream(seed: int, *, round: int, client: int, purpose: str) -> torch.Generator:
    """A CPU torch generator for noise and for layers that draw.

    torch's CPU generator keeps 32 bits of its seed, so two streams coincide with probability 2⁻³² a pair.

    Args:
        seed: The run's seed.
        round: Round number, or −1 for what happens once a run.
        client: Client number, or `SERVER`.
        purpose: What it is for.

    Returns:
        The generator.
    """
    return torch.Generator().manual_seed(torch_seed(seed, round=round, client=client, purpose=purpose))


def torch_seed(seed: int, *, round: int, client: int, purpose: str) -> int:
    """The seed of `torch_stream`, for code that can only draw from torch's global generator."""
    return int.from_bytes(_digest(seed, round, client, purpose)[:4], "little")


def noise_source(*, seed: int | None, round: int, client: int, purpose: str) -> WordSource:
    """Where noise comes from: a stream of its own from the run's seed, or the system's cryptographic source.

    Args:
        seed: The run's seed, for experiments, which voids every guarantee; None for the system's source.
        round: Round number, or −1 for what happens once a run.
        client: Client number.
        purpose: What it is for.
    """
    return SystemSource() if seed is None else SeededSource(_digest(seed, round, client, purpose))


def _digest(seed: int, round: int, client: int, purpose: str) -> bytes:
    return hashlib.sha256(f"{seed}|{round}|{client}|{purpose}".encode()).digest()
