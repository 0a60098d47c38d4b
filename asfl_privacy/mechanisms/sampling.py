"""Noise streams: where the random numbers of a release come from.

A stream is keyed afresh on every call: from the operating system where no generator is given, else from the next words
of the caller's generator. The key also hashes the mechanism, so two mechanisms given one seed do not share a stream.
Draws are double precision, since torch's own float32 normals never exceed 5.77; there is no log(0) and no cut tail.
"""

import hashlib
import secrets

import numpy as np
import torch


def noise_stream(generator: torch.Generator | None, *, mechanism: str) -> np.random.Generator:
    """A fresh stream of random numbers for one call.

    Args:
        generator: advanced by this call; None draws the key from the operating system.
        mechanism: words that tell this mechanism from every other.

    Returns:
        A numpy generator (Philox).

    Guarantee:
        Calls in sequence, and mechanisms of different name, get different keys but for hash collisions. Whoever knows
        the generator's seed can subtract the noise: with a generator given there is no privacy towards them.
    """
    if generator is None:
        key = secrets.token_bytes(32)
    else:
        words = torch.randint(0, 2**62, (5,), generator=generator, device=generator.device, dtype=torch.int64)
        key = words.cpu().numpy().tobytes()
    digest = hashlib.blake2b(key + mechanism.encode(), digest_size=32).digest()
    seeds = np.random.SeedSequence(int.from_bytes(digest, "big"), pool_size=8)
    return np.random.Generator(np.random.Philox(seeds))


def to_tensor_like(noise: np.ndarray, tensor: torch.Tensor) -> torch.Tensor:
    """The noise in the type and on the device of ``tensor``."""
    return torch.from_numpy(noise).to(dtype=tensor.dtype).to(device=tensor.device)
