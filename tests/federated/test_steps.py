"""Local steps against a loop written out by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import all_rows
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.federated.steps import Pool, Rule, draw_batch, draw_rows, run_steps


def make_pool(count=40, num_own=40):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 3, generator=generator)
    received = inputs[num_own:] if num_own < count else None
    return Pool(inputs=inputs[:num_own], received=received, labels=torch.arange(count) % 2)


def test_steps_are_torchs_plain_sgd_bit_for_bit():
    """Catches momentum, weight decay, a summed loss, a stale gradient."""
    pool, rng = make_pool(), np.random.default_rng(1)
    net, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(net.state_dict())
    run_steps(net, pool, num_steps=5, batch_size=8, rule=Rule(0.3), rng=np.random.default_rng(1))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.3)
    for _ in range(5):
        batch = torch.from_numpy(rng.choice(40, size=8, replace=False))
        optimizer.zero_grad()
        F.cross_entropy(twin(pool.inputs[batch]), pool.labels[batch]).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))


def test_parameters_that_the_factory_froze_do_not_move():
    net = nn.Linear(3, 2)
    net.weight.requires_grad_(False)
    before = net.weight.clone(), net.bias.clone()
    run_steps(net, make_pool(), num_steps=2, batch_size=8, rule=Rule(0.3), rng=np.random.default_rng(1))
    assert torch.equal(net.weight, before[0])
    assert not torch.equal(net.bias, before[1])


def test_a_batch_larger_than_the_pool_is_the_whole_pool_once():
    batch = draw_batch(5, batch_size=32, rng=np.random.default_rng(0))
    assert sorted(batch.tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("num_own", "expected"), [(40, 0), (0, 24), (20, None)])
def test_remote_records_are_counted(num_own, expected):
    taken = run_steps(
        nn.Linear(3, 2),
        make_pool(num_own=num_own),
        num_steps=3,
        batch_size=8,
        rule=Rule(0.1),
        rng=np.random.default_rng(0),
    )
    draws = np.random.default_rng(0)
    by_hand = sum(int((draws.choice(40, size=8, replace=False) >= num_own).sum()) for _ in range(3))
    assert taken.num_remote == by_hand
    assert expected is None or taken.num_remote == expected


@given(num_own=st.integers(0, 6), num_received=st.integers(0, 6), data=st.data())
def test_the_rows_of_a_pool_are_those_of_both_parts_joined(num_own, num_received, data):
    """The slow twin joins them. Catches: an offset, own rows for received ones, and a batch in no order read as if it were."""
    count = num_own + num_received
    joined = torch.arange(2.0 * count).reshape(count, 2)
    pool = Pool(inputs=joined[:num_own], received=joined[num_own:], labels=torch.zeros(count))
    assert (pool.num_own, pool.num_rows) == (num_own, count)
    drawn = data.draw(st.lists(st.integers(0, count - 1), unique=True)) if count else []
    where, own = torch.tensor(sorted(drawn), dtype=torch.int64), sum(row < num_own for row in drawn)
    assert torch.equal(pool.rows(where, num_own=own), joined[where])
    if 0 < own < len(drawn):
        with pytest.raises((IndexError, RuntimeError), match="out of range"):
            pool.rows(where.flip(0), num_own=own)


@pytest.mark.parametrize("num_own", [40, 25])
def test_rows_are_drawn_as_batches_are_and_own_ones_come_first(num_own):
    drawn = draw_rows(make_pool(num_own=num_own), batch_size=12, rng=np.random.default_rng(3))
    batch = draw_batch(40, batch_size=12, rng=np.random.default_rng(3))
    assert torch.equal(drawn, batch if num_own == 40 else batch.sort().values)


def test_no_steps_leave_the_network_as_it_was():
    net = nn.Linear(3, 2)
    before = net.weight.clone()
    assert (
        run_steps(net, make_pool(), num_steps=0, batch_size=8, rule=Rule(1.0), rng=np.random.default_rng(0)).num_remote
        == 0
    )
    assert torch.equal(net.weight, before)


def test_noisy_rows_are_corrected_and_clean_ones_are_not():
    """Catches: the correction on every row, on none, or on the rows of another batch."""
    T = torch.tensor([[0.75, 0.25], [0.125, 0.875]], dtype=torch.float64)
    noisy = torch.arange(40) >= 30
    pool = replace(make_pool(num_own=30), noisy=noisy)
    net, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(net.state_dict())
    run_steps(net, pool, num_steps=4, batch_size=8, rule=Rule(0.3), rng=np.random.default_rng(1), transition=T)
    rng, seen = np.random.default_rng(1), 0
    for _ in range(4):
        batch = rng.choice(40, size=8, replace=False)
        seen += int(noisy[batch].sum())
        loss = torch.zeros((), dtype=torch.float64)
        for row in batch:
            p, y = F.softmax(twin(all_rows(pool)[row]).double(), dim=0), int(pool.labels[row])
            loss = loss - torch.log(T[0, y] * p[0] + T[1, y] * p[1] if noisy[row] else p[y]) / 8
        gradients = torch.autograd.grad(loss, list(twin.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(twin.parameters(), gradients, strict=True):
                parameter -= 0.3 * gradient
    assert 0 < seen < 32
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(net.parameters(), twin.parameters(), strict=True))


def test_noisy_labels_without_their_transition_are_refused():
    """Catches: training on randomised labels as if they were true."""
    pool = replace(make_pool(), noisy=torch.ones(40, dtype=torch.bool))
    with pytest.raises(ValueError, match="without a transition"):
        run_steps(nn.Linear(3, 2), pool, num_steps=1, batch_size=8, rule=Rule(0.3), rng=np.random.default_rng(1))
