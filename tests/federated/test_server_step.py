"""The server's step along the unweighted mean update, by hand."""

import math

import pytest
import torch

from asfl_privacy.federated import State, Update
from asfl_privacy.federated.server_step import server_step


def update(weights, *, num_records=1):
    return Update(weights=weights, num_records=num_records, drawn=0, drawn_remote=0)


def of(value, *, mean=0.0, count=0, frozen=2.0, dtype=torch.float32):
    return {
        "w": torch.tensor([value], dtype=dtype),
        "norm.running_mean": torch.tensor([mean], dtype=dtype),
        "norm.num_batches_tracked": torch.tensor(count),
        "frozen": torch.tensor([frozen], dtype=dtype),
    }


STATE = State(weights=of(1.0))
UPDATES = {4: update(of(2.0, mean=1.0, count=3), num_records=1), 1: update(of(4.0, mean=5.0, count=3), num_records=99)}


@pytest.mark.parametrize(("server_lr", "expected"), [(1.0, 3.0), (0.5, 2.0), (2.0, 5.0)])
def test_the_step_is_server_lr_times_the_unweighted_mean_update(server_lr, expected):
    """1 + η_g·((2 − 1) + (4 − 1))/2. Catches weights by records, a sum for a mean, and η_g on the mean itself."""
    after = server_step(STATE, UPDATES, trained=("w",), server_lr=server_lr).weights
    assert after["w"].tolist() == [expected]
    assert list(after) == list(STATE.weights)


@pytest.mark.parametrize("server_lr", [1.0, 0.5, 2.0])
def test_buffers_are_plain_means_and_what_does_not_train_stays(server_lr):
    """Catches an optimiser's step on running statistics, which can turn a variance negative, and counters as floats."""
    after = server_step(STATE, UPDATES, trained=("w",), server_lr=server_lr).weights
    assert after["norm.running_mean"].tolist() == [3.0]
    assert (after["norm.num_batches_tracked"].item(), after["norm.num_batches_tracked"].dtype) == (3, torch.int64)
    assert after["frozen"].tolist() == [2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_types_stay_and_the_order_of_arrival_does_not_matter(dtype, server_lr):
    start = State(weights=of(0.1, dtype=dtype))
    given = {i: update(of(0.1 * i, dtype=dtype)) for i in (3, 0, 7)}
    first = server_step(start, given, trained=("w",), server_lr=server_lr).weights["w"]
    other = server_step(start, dict(sorted(given.items())), trained=("w",), server_lr=server_lr).weights["w"]
    assert torch.equal(first, other)
    assert first.dtype == dtype


def test_a_cohort_of_one_at_step_1_is_the_clients_own_weights_bit_for_bit():
    own = of(math.pi, mean=math.e)
    after = server_step(STATE, {2: update(own)}, trained=("w",), server_lr=1.0).weights
    assert all(torch.equal(after[name], own[name]) for name in own)


def test_the_rest_of_the_state_stays():
    start = State(weights=of(1.0), server={"c": torch.ones(1)})
    after = server_step(start, UPDATES, trained=("w",), server_lr=0.5)
    assert after.server is start.server
    assert after.clients is start.clients


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_updates_that_are_not_finite_are_refused(server_lr):
    with pytest.raises(ValueError, match="w are not finite"):
        server_step(STATE, {0: update(of(math.nan))}, trained=("w",), server_lr=server_lr)


def test_a_step_that_overflows_is_refused():
    """Catches inf that only the next round would refuse, and the last round would evaluate."""
    with pytest.raises(ValueError, match=r"w are not finite after the server's step of 1e\+39.*lower server_lr"):
        server_step(STATE, UPDATES, trained=("w",), server_lr=1e39)
