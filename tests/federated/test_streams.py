"""Streams are independent of each other, the same everywhere, and nothing global."""

import itertools
import random

import numpy as np
import torch

from asfl_privacy.federated.streams import SERVER, noise_source, numpy_stream, torch_stream

KEYS = [
    {"round": round, "client": client, "purpose": purpose}
    for round, client, purpose in itertools.product((-1, 0, 1, 11), (SERVER, 0, 1, 11), ("share", "noise", "pairing"))
]


def test_streams_differ_in_seed_round_client_and_purpose():
    """Catches a key that runs its parts together: (1, 11) and (11, 1) differ."""
    for make in (
        lambda seed, key: numpy_stream(seed, **key).random(4).tobytes(),
        lambda seed, key: torch.rand(4, generator=torch_stream(seed, **key)).numpy().tobytes(),
        lambda seed, key: noise_source(seed=seed, **key).words(4).tobytes(),
    ):
        draws = {make(seed, key) for seed in (0, 1, 11) for key in KEYS}
        assert len(draws) == 3 * len(KEYS)


def test_asking_for_a_stream_touches_no_global_generator():
    states = (random.getstate(), np.random.get_state()[1].copy(), torch.random.get_rng_state())  # noqa: NPY002
    numpy_stream(0, round=0, client=0, purpose="x").random()
    torch.rand(1, generator=torch_stream(0, round=0, client=0, purpose="x"))
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])  # noqa: NPY002
    assert torch.equal(torch.random.get_rng_state(), states[2])


def test_the_first_draws_never_change():
    """Other machines and later versions must repeat a table; NumPy promises Philox's stream, worked out from its key."""
    import hashlib

    key = int.from_bytes(hashlib.sha256(b"7|2|3|share").digest()[:16], "little")
    expected = np.random.Generator(np.random.Philox(key=key)).random(3)
    assert np.array_equal(numpy_stream(7, round=2, client=3, purpose="share").random(3), expected)


def test_noise_comes_from_the_seed_or_from_the_system():
    """Catches: a seed of 0 taken for none, by which a run could not be repeated; a seed behind the system's noise."""
    key = {"round": 0, "client": 1, "purpose": "noise"}
    first, again = (noise_source(seed=0, **key) for _ in range(2))
    assert first.is_reproducible
    assert first.words(8).tobytes() == again.words(8).tobytes()
    system = [noise_source(seed=None, **key) for _ in range(2)]
    assert not any(source.is_reproducible for source in system)
    assert system[0].words(8).tobytes() != system[1].words(8).tobytes()
