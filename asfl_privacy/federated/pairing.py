"""Pairing: who sends its activations to whom in a round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def draw_pairing(clients: Sequence[int], *, rng: np.random.Generator) -> dict[int, int]:
    """Draw a random pairing of the round's clients.

    An even number of clients forms a uniform perfect matching and both sides of a pair swap. An odd number of three or
    more forms one cycle of three (a → b → c → a) and pairs. One client alone exchanges nothing.

    Args:
        clients: Client numbers of the round, distinct.
        rng: Source of randomness.

    Returns:
        {sender: receiver}; every client sends once and receives once, never to itself; empty for fewer than two.

    Example:
        >>> pairing = draw_pairing([3, 5, 8, 9], rng=np.random.default_rng(0))
        >>> all(pairing[pairing[sender]] == sender for sender in pairing)
        True
    """
    order = [clients[int(i)] for i in rng.permutation(len(clients))]
    if len(order) < 2:
        return {}
    receiver_of: dict[int, int] = {}
    if len(order) % 2 == 1:
        a, b, c = order[:3]
        receiver_of |= {a: b, b: c, c: a}
        order = order[3:]
    for a, b in zip(order[::2], order[1::2], strict=True):
        receiver_of |= {a: b, b: a}
    return receiver_of
