"""A pairing is a permutation without fixed points made of swaps, and one cycle of three where the number is odd."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asfl_privacy.federated.pairing import draw_pairing


@given(clients=st.lists(st.integers(0, 99), unique=True, max_size=15), seed=st.integers(0, 99))
def test_every_client_sends_once_and_receives_once_and_never_from_itself(clients, seed):
    pairing = draw_pairing(clients, rng=np.random.default_rng(seed))
    if len(clients) < 2:
        assert pairing == {}
        return
    assert sorted(pairing) == sorted(pairing.values()) == sorted(clients)
    assert all(sender != receiver for sender, receiver in pairing.items())
    not_swapped = [sender for sender in pairing if pairing[pairing[sender]] != sender]
    assert len(not_swapped) == (3 if len(clients) % 2 else 0)
    assert all(pairing[pairing[pairing[sender]]] == sender for sender in not_swapped)


def test_all_perfect_matchings_of_four_are_equally_likely():
    """Each of the three has probability 1/3; 3,000 draws stay within five standard deviations (129)."""
    counts = Counter(draw_pairing([0, 1, 2, 3], rng=np.random.default_rng(seed))[0] for seed in range(3000))
    assert all(abs(counts[partner] - 1000) < 130 for partner in (1, 2, 3))


@pytest.mark.parametrize("clients", [[], [4]])
def test_fewer_than_two_clients_exchange_nothing(clients):
    assert draw_pairing(clients, rng=np.random.default_rng(0)) == {}
