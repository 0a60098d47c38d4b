"""Global random state: what an audit puts back as it found it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def untouched_randomness() -> Iterator[None]:
    """Whatever is drawn or seeded inside, the global states of torch, numpy and random are as before afterwards.

    Guarantee:
        CPU and CUDA generators of torch, numpy's legacy generator and ``random``; also when the body raises. CUDA is
        not started where it was not in use.

    Example:
        >>> before = torch.get_rng_state()
        >>> with untouched_randomness():
        ...     _ = torch.randn(3)
        >>> bool((torch.get_rng_state() == before).all())
        True
    """
    started = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002  (the layer may use it)
    devices = torch.cuda.get_rng_state_all() if started else []
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])
        if started:
            torch.cuda.set_rng_state_all(devices)


def seed_everything(seed: int) -> None:
    """Seed every global generator that a layer may draw its noise from."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)
