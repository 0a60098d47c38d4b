"""Local steps against a loop written out by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.federated.steps import Pool, draw_batch, run_steps


def make_pool(count=40, num_own=40):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 3, generator=generator)
    return Pool(inputs=inputs, labels=torch.arange(count) % 2, num_own=num_own)


def test_steps_are_torchs_plain_sgd_bit_for_bit():
    """Catches momentum, weight decay, a summed loss, a stale gradient."""
    pool, rng = make_pool(), np.random.default_rng(1)
    net, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(net.state_dict())
    run_steps(net, pool, num_steps=5, batch_size=8, lr=0.3, rng=np.random.default_rng(1))
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
    run_steps(net, make_pool(), num_steps=2, batch_size=8, lr=0.3, rng=np.random.default_rng(1))
    assert torch.equal(net.weight, before[0])
    assert not torch.equal(net.bias, before[1])


def test_a_batch_larger_than_the_pool_is_the_whole_pool_once():
    batch = draw_batch(5, batch_size=32, rng=np.random.default_rng(0))
    assert sorted(batch.tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("num_own", "expected"), [(40, 0), (0, 24), (20, None)])
def test_remote_records_are_counted(num_own, expected):
    remote = run_steps(
        nn.Linear(3, 2), make_pool(num_own=num_own), num_steps=3, batch_size=8, lr=0.1, rng=np.random.default_rng(0)
    )
    draws = np.random.default_rng(0)
    by_hand = sum(int((draws.choice(40, size=8, replace=False) >= num_own).sum()) for _ in range(3))
    assert remote == by_hand
    assert expected is None or remote == expected


def test_no_steps_leave_the_network_as_it_was():
    net = nn.Linear(3, 2)
    before = net.weight.clone()
    assert run_steps(net, make_pool(), num_steps=0, batch_size=8, lr=1.0, rng=np.random.default_rng(0)) == 0
    assert torch.equal(net.weight, before)


def test_noisy_rows_are_corrected_and_clean_ones_are_not():
    """Catches: the correction on every row, on none, or on the rows of another batch."""
    T = torch.tensor([[0.75, 0.25], [0.125, 0.875]], dtype=torch.float64)
    noisy = torch.arange(40) >= 30
    pool = replace(make_pool(num_own=30), noisy=noisy)
    net, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(net.state_dict())
    run_steps(net, pool, num_steps=4, batch_size=8, lr=0.3, rng=np.random.default_rng(1), transition=T)
    rng, seen = np.random.default_rng(1), 0
    for _ in range(4):
        batch = rng.choice(40, size=8, replace=False)
        seen += int(noisy[batch].sum())
        loss = torch.zeros((), dtype=torch.float64)
        for row in batch:
            p, y = F.softmax(twin(pool.inputs[row]).double(), dim=0), int(pool.labels[row])
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
        run_steps(nn.Linear(3, 2), pool, num_steps=1, batch_size=8, lr=0.3, rng=np.random.default_rng(1))
