"""Centroids and their scatter against hand work and plain loops over records."""

import numpy as np
import pytest
import torch
from federations import make_federation
from hypothesis import given
from hypothesis import strategies as st

from asfl_privacy.federated.latent_space import Centroids, client_centroids, scatter
from asfl_privacy.models import build_model


def centroids_of(rows):
    """From (client, class, mean) triples."""
    clients, labels, means = zip(*rows, strict=True)
    return Centroids(np.array(clients), np.array(labels), np.array(means, dtype=np.float64))


HAND = [(0, 3, (0, 0)), (1, 3, (2, 0)), (2, 3, (4, 0)), (0, 7, (2, 6)), (2, 7, (2, 10))]
"""Class 3: mean (2, 0), squared distances 4, 0, 4. Class 7: mean (2, 8), squared distances 4, 4. Their mean: (2, 4)."""


def test_scatter_is_what_is_found_by_hand():
    """Catches: sums for means, clients pooled over classes, classes weighted by their clients, n − 1 for n."""
    found = scatter(centroids_of(HAND))
    assert found.within == pytest.approx((8 / 3 + 4) / 2)
    assert found.between == pytest.approx((16 + 16) / 2)
    assert found.num_classes == 2


def test_a_class_that_one_client_has_counts_in_neither_part():
    """Catches: a lone centroid counted as agreement, or kept in the mean of the classes."""
    assert scatter(centroids_of([*HAND, (5, 1, (100, 100))])) == scatter(centroids_of(HAND))


def test_fewer_than_two_classes_have_no_scatter():
    assert scatter(centroids_of(HAND[:3])) is None
    assert scatter(centroids_of([*HAND[:3], (0, 4, (1, 1))])) is None


@given(scale=st.floats(0.01, 100), shift=st.floats(-10, 10), angle=st.floats(0, 6), seed=st.integers(0, 2**16))
def test_the_ratio_does_not_depend_on_where_the_space_lies_or_how_large_it_is(scale, shift, angle, seed):
    """Catches: one part squared and the other not, distances to the origin."""
    rng = np.random.default_rng(seed)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    before = Centroids(np.tile(np.arange(3), 4), np.repeat(np.arange(4), 3), rng.normal(size=(12, 2)))
    after = Centroids(before.clients, before.labels, scale * before.means @ turn.T + shift)
    one, other = scatter(before), scatter(after)
    assert other.within / other.between == pytest.approx(one.within / one.between, rel=1e-6)


def other_networks(federation, digits):
    """Untrained networks, one a client."""
    return {
        client: build_model("small-cnn", data=digits, seed=10 + client).state_dict()
        for client in range(len(federation.clients))
    }


@pytest.mark.parametrize("after", ["conv2", "fc1"])
@pytest.mark.parametrize("records", ["own", "common"])
def test_centroids_are_the_means_that_plain_loops_find(digits, after, records):
    """Catches: another client's weights or records, a batch's means averaged, training records for test records."""
    federation = make_federation(digits, partition="dirichlet:0.1", clients=4, cohort=4)
    networks = other_networks(federation, digits)
    found = client_centroids(federation, networks, after=after, records=records, min_records=5, batch_size=37)
    expected = []
    for client, weights in networks.items():
        holder, features = federation.clients[client], {}
        model = build_model("small-cnn", data=digits, seed=0)
        model.load_state_dict(weights)
        own = (holder.inputs, holder.labels)
        for x, y in zip(*(own if records == "own" else (digits.test_inputs, digits.test_labels)), strict=True):
            value = x.unsqueeze(0)
            for name, block in model.named_children():
                value = block(value)
                if name == after:
                    break
            features.setdefault(int(y), []).append(value.detach().flatten().double().numpy())
        expected += [(client, y, np.mean(rows, axis=0)) for y, rows in sorted(features.items()) if len(rows) >= 5]
    assert found.clients.tolist() == [client for client, _, _ in expected]
    assert found.labels.tolist() == [label for _, label, _ in expected]
    np.testing.assert_allclose(found.means, np.stack([mean for _, _, mean in expected]), rtol=1e-4, atol=1e-5)
    if records == "common":
        assert len(found.labels) == 4 * 10
    else:
        assert 4 < len(found.labels) < 4 * 10  # the partition leaves clients without some classes


def test_clients_with_one_network_agree_on_common_records_and_not_on_their_own(digits):
    """Catches: records of the clients where those of all are due, and the reverse."""
    federation = make_federation(digits)
    networks = dict.fromkeys(range(6), federation.initial_weights)
    same = scatter(client_centroids(federation, networks, after="fc1", records="common"))
    assert same.within < 1e-25 * same.between  # a mean of equal numbers is rounded
    assert scatter(client_centroids(federation, networks, after="fc1", records="own")).within > 0


def test_a_mean_of_too_few_records_is_left_out(digits):
    federation = make_federation(digits, partition="dirichlet:0.1")
    networks = dict.fromkeys(range(6), federation.initial_weights)
    counts = [torch.bincount(client.labels, minlength=10) for client in federation.clients]
    for least in (1, 5, 40):
        found = client_centroids(federation, networks, after="conv2", records="own", min_records=least)
        assert len(found.labels) == sum(int((count >= least).sum()) for count in counts)
    none = client_centroids(federation, networks, after="conv2", records="own", min_records=10**6)
    assert len(none.labels) == 0
    assert scatter(none) is None


def test_measuring_changes_neither_the_networks_nor_any_draw(digits):
    federation = make_federation(digits)
    networks = other_networks(federation, digits)
    before = {name: value.clone() for name, value in networks[2].items()}
    scratch = {name: value.clone() for name, value in federation.model.state_dict().items()}
    draws = torch.get_rng_state()
    client_centroids(federation, networks, after="fc1", records="common")
    assert all(torch.equal(value, before[name]) for name, value in networks[2].items())
    assert all(torch.equal(value, scratch[name]) for name, value in federation.model.state_dict().items())
    assert federation.model.training
    assert torch.equal(draws, torch.get_rng_state())


def test_what_cannot_be_measured_is_refused(digits):
    federation = make_federation(digits)
    broken = {0: {name: value * float("nan") for name, value in federation.initial_weights.items()}}
    with pytest.raises(ValueError, match="client 0: features after fc1 are not finite: training diverged"):
        client_centroids(federation, broken, after="fc1", records="own")
    with pytest.raises(ValueError, match="block 'fc9' is not of this network"):
        client_centroids(federation, broken, after="fc9", records="own")
    with pytest.raises(ValueError, match="min_records 0 must be at least 1"):
        client_centroids(federation, broken, after="fc1", records="own", min_records=0)
