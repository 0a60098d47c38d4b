"""Partitions use no record twice, and leave no client empty."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asfl_privacy.data import parse_partition, partition_records

SCHEMES = ["iid", "dirichlet:0.1", "dirichlet:100", "shards:2"]


@given(
    scheme=st.sampled_from(SCHEMES), num_clients=st.integers(1, 8), count=st.integers(40, 200), seed=st.integers(0, 9)
)
def test_every_record_belongs_to_exactly_one_client(scheme, num_clients, count, seed):
    labels = np.random.default_rng(seed).integers(0, 5, count)
    try:
        shares = partition_records(
            labels, num_clients=num_clients, scheme=parse_partition(scheme), rng=np.random.default_rng(seed)
        )
    except ValueError as error:
        may_give_up = scheme == "dirichlet:0.1" and "in each of 200 draws" in str(error)
        if not may_give_up:
            raise
        return
    assert len(shares) == num_clients
    assert min(len(share) for share in shares) >= 1
    assert sorted(np.concatenate(shares).tolist()) == list(range(count))


def test_shards_give_each_client_at_most_k_labels_where_shards_are_pure():
    labels = np.repeat(np.arange(10), 40)  # 20 shards of 20 records, each of one label
    shares = partition_records(labels, num_clients=10, scheme=parse_partition("shards:2"), rng=np.random.default_rng(3))
    assert all(len(share) == 40 for share in shares)
    assert all(len(set(labels[share])) <= 2 for share in shares)


def test_a_small_dirichlet_parameter_is_more_skewed_than_a_large_one():
    labels = np.arange(2000) % 10

    def mean_largest_label_share(scheme):
        shares = partition_records(labels, num_clients=10, scheme=parse_partition(scheme), rng=np.random.default_rng(0))
        return np.mean([np.bincount(labels[s], minlength=10).max() / len(s) for s in shares])

    assert mean_largest_label_share("dirichlet:0.1") > 0.4
    assert mean_largest_label_share("dirichlet:1000") < 0.15
    assert mean_largest_label_share("iid") < 0.16


def test_dirichlet_proportions_have_the_variance_of_their_distribution():
    """Var of one client's share of a class is (1/N)(1−1/N)/(N·A+1), from the Dirichlet's second moment."""
    labels = np.zeros(4000, dtype=np.int64)
    scheme, clients = parse_partition("dirichlet:5"), 4
    shares = [
        len(share) / 4000
        for seed in range(300)
        for share in partition_records(labels, num_clients=clients, scheme=scheme, rng=np.random.default_rng(seed))
    ]
    expected = (1 / clients) * (1 - 1 / clients) / (clients * 5 + 1)
    assert np.var(shares) == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_same_generator_gives_the_same_partition(scheme):
    labels = np.arange(300) % 10
    first, second = (
        partition_records(labels, num_clients=5, scheme=parse_partition(scheme), rng=np.random.default_rng(7))
        for _ in range(2)
    )
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_an_impossible_dirichlet_draw_is_a_clear_error_after_bounded_tries():
    labels = np.zeros(1000, dtype=np.int64)
    with pytest.raises(ValueError, match="in each of 200 draws over 10 clients; use a larger A or fewer clients"):
        partition_records(
            labels, num_clients=10, scheme=parse_partition("dirichlet:1e-300"), rng=np.random.default_rng(0)
        )


def test_more_clients_than_records_or_shards_than_records_are_refused():
    labels = np.arange(6) % 2
    with pytest.raises(ValueError, match="clients 7 must lie in 1 to 6"):
        partition_records(labels, num_clients=7, scheme=parse_partition("iid"), rng=np.random.default_rng(0))
    with pytest.raises(ValueError, match="needs 8 records but there are 6"):
        partition_records(labels, num_clients=4, scheme=parse_partition("shards:2"), rng=np.random.default_rng(0))


@pytest.mark.parametrize(
    "text",
    [
        "IID",
        "iid:3",
        "dirichlet",
        "dirichlet:",
        "dirichlet:0",
        "dirichlet:-1",
        "dirichlet:nan",
        "dirichlet:inf",
        "shards",
        "shards:0",
        "shards:1.5",
        "shards:inf",
        "shards:nan",
        "shards:x",
        "natural:",
        "natural:3",
        "Natural",
        ":",
    ],
)
def test_a_partition_that_does_not_parse_lists_what_does(text):
    with pytest.raises(ValueError, match=r"use iid, dirichlet:A with A > 0, shards:K with a whole K ≥ 1, or natural"):
        parse_partition(text)


GROUPS = np.array([7, 3, 3, 9, 7, 3, 0])  # numbers need not follow each other


def natural(num_clients, *, groups=GROUPS, seed=0):
    labels = np.zeros(len(GROUPS), dtype=np.int64)
    scheme = parse_partition("natural")
    return partition_records(
        labels, num_clients=num_clients, scheme=scheme, rng=np.random.default_rng(seed), groups=groups
    )


def test_each_natural_client_is_one_whole_group():
    """By hand. Catches groups that are split, joined, or numbered by what they hold."""
    expected = [[0, 4], [1, 2, 5], [3], [6]]
    assert sorted(share.tolist() for share in natural(4)) == expected
    for seed in range(20):
        shares = [share.tolist() for share in natural(2, seed=seed)]
        assert all(share in expected for share in shares)
        assert shares[0] != shares[1]


def test_natural_clients_are_a_uniform_sample_of_the_groups():
    """Each of 4 groups is among 2 clients half of the time: 600 draws, 6 standard deviations. Catches the first N groups."""
    counts = np.zeros(4)
    firsts = np.zeros(4)
    for seed in range(600):
        drawn = [[7, 3, 9, 0].index(GROUPS[share[0]]) for share in natural(2, seed=seed)]
        counts[drawn] += 1
        firsts[drawn[0]] += 1
    assert np.abs(counts - 300).max() < 6 * np.sqrt(600 / 4)
    assert np.abs(firsts - 150).max() < 6 * np.sqrt(600 * 3 / 16)


def test_fewer_natural_clients_are_the_first_of_more():
    assert [s.tolist() for s in natural(2)] == [s.tolist() for s in natural(4)[:2]]


def test_natural_needs_groups_and_no_more_clients_than_groups():
    with pytest.raises(ValueError, match="clients 5 with partition natural must be at most 4, the number of groups"):
        natural(5)
    with pytest.raises(ValueError, match="partition natural needs data that say whose each record is"):
        natural(2, groups=None)
    with pytest.raises(ValueError, match=r"one group for each of 7 records"):
        natural(2, groups=GROUPS[:5])


def test_groups_change_no_other_partition():
    labels = np.arange(70) % 7
    for scheme in SCHEMES:
        one, other = (
            partition_records(
                labels, num_clients=4, scheme=parse_partition(scheme), rng=np.random.default_rng(1), groups=groups
            )
            for groups in (None, np.tile(GROUPS, 10))
        )
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
