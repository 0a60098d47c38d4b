"""The problem with known constants: what its docstring derives, held against autograd and against itself."""

import math

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.federated import TrainingSettings
from asfl_privacy.federated.diagnostics import diagnose

SETTINGS = {"cohort": 3, "rounds": 1, "tail_steps": 2, "full_steps": 2, "batch_size": 1, "lr": 0.01, "seed": 0}


@pytest.fixture(scope="module")
def smooth(paper):
    return paper("smooth_problem")


@pytest.fixture(scope="module")
def federation(smooth):
    problem = smooth.Problem(half=2, clients=3, records=5)
    return smooth.make_federation(problem, TrainingSettings(clients=3, **SETTINGS))


def loss(records, x):
    """q, mean over records, from the formula."""
    half = records.shape[1] // 2
    first, second = records[:, :half] - x[:half], records[:, half:] - x[half:]
    residuals = torch.cat([first + second, first - second], 1) / math.sqrt(2)
    return 1 + torch.log(1 + residuals**2).sum(1).mean()


def at(federation, x):
    weights = dict(federation.initial_weights)
    return weights | {"head.offset": x[: len(x) // 2].clone(), "tail.take.offset": x[len(x) // 2 :].clone()}


def some(*shape, seed=0, scale=2.0):
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_network_s_cross_entropy_and_gradient_are_the_formula_s(smooth, federation):
    """Catches: a head and a tail that take the same half, R without its 1/√2, a gradient of the other sign."""
    records, x = some(7, 4), some(4, seed=1).requires_grad_()
    federation.load(at(federation, x.detach()), training=True)
    value = F.cross_entropy(federation.model(records), torch.zeros(7, dtype=torch.int64))
    by_formula = loss(records, x)
    assert value.item() == pytest.approx(by_formula.item(), rel=1e-12)
    head, tail = torch.autograd.grad(value, list(federation.model.parameters()))
    expected = smooth.exact_gradients(records, x.detach()).mean(0)
    torch.testing.assert_close(torch.cat([head, tail]), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(by_formula, x)[0], expected, rtol=1e-10, atol=1e-12)


def test_far_records_do_not_overflow(smooth):
    """e^q itself would be infinite in float32 from q = 89 on."""
    logits = smooth.RobustLogits()(torch.full((1, 40), 15.0))
    expected = 1 + 20 * math.log(1 + 2 * 15.0**2)  # R doubles the squares of the first half, the second half is 0
    assert float(F.cross_entropy(logits, torch.zeros(1, dtype=torch.int64))) == pytest.approx(expected, rel=1e-6)


def test_no_curvature_leaves_the_interval_and_both_ends_are_reached(smooth):
    """Central differences of the gradient at random points; at x = a the Hessian is 2I, at r² = 3 it is −I/4."""

    def hessian(records, x, h=1e-5):
        steps = h * torch.eye(len(x), dtype=torch.float64)
        columns = [
            (smooth.exact_gradients(records, x + s).mean(0) - smooth.exact_gradients(records, x - s).mean(0)) / (2 * h)
            for s in steps
        ]
        return torch.linalg.eigvalsh(torch.stack(columns))

    low, high = smooth.LEAST_CURVATURE, smooth.SMOOTHNESS
    for seed in range(30):
        found = hessian(some(1 + seed % 3, 4, seed=seed, scale=1.0), some(4, seed=100 + seed, scale=1.0))
        assert low - 1e-6 <= float(found.min())
        assert float(found.max()) <= high + 1e-6
    x = some(4, seed=5)
    torch.testing.assert_close(hessian(x[None], x), torch.full((4,), high, dtype=torch.float64), atol=1e-6, rtol=0)
    away = x[None] - smooth.turned(torch.full((1, 4), math.sqrt(3.0), dtype=torch.float64))
    torch.testing.assert_close(hessian(away, x), torch.full((4,), low, dtype=torch.float64), atol=1e-6, rtol=0)


def test_gradients_move_no_faster_than_l(smooth):
    """‖∇F(x) − ∇F(y)‖ ≤ L‖x − y‖ for points near and far, and 99 % of it is reached near a record."""
    for seed in range(50):
        records, x = some(2, 6, seed=seed), some(6, seed=200 + seed)
        y = x + some(6, seed=400 + seed, scale=10.0 ** (seed % 5 - 3))
        moved = (smooth.exact_gradients(records, x).mean(0) - smooth.exact_gradients(records, y).mean(0)).norm()
        assert float(moved) <= smooth.SMOOTHNESS * float((x - y).norm()) * (1 + 1e-12)
    x, step = some(6), some(6, seed=1, scale=0.02)
    moved = smooth.exact_gradients(x[None], x + step).norm()
    assert float(moved) >= 0.99 * smooth.SMOOTHNESS * float(step.norm())


def test_no_clients_disagree_more_than_the_bound_and_records_at_1_reach_it(smooth, federation):
    """Σ p_i‖∇F_i‖² ≤ G² + ‖∇F‖², G² = 2n; where every r is 1 a gradient has exactly this square."""
    bound = smooth.Problem(half=2).heterogeneity
    for seed in range(10):
        found = diagnose(federation, at(federation, some(4, seed=seed)))
        assert found.dissimilarity <= bound
    ones = smooth.turned(torch.ones(1, 4, dtype=torch.float64))
    gradient = smooth.exact_gradients(ones, torch.zeros(4, dtype=torch.float64))
    assert float(gradient.square().sum()) == pytest.approx(bound)


def test_squares_of_clients_gradients_split_into_norm_and_dissimilarity(smooth, federation):
    """Σ p_i‖∇F_i‖² = ‖∇F‖² + Σ p_i‖∇F_i − ∇F‖², the left side client by client, the right one from both diagnoses."""
    x = some(4, seed=3)
    each = [smooth.exact_gradients(client.inputs, x).mean(0) for client in federation.clients]
    left = sum(float(one.square().sum()) for one in each) / 3
    exact, general = smooth.diagnose_exactly(federation, at(federation, x)), diagnose(federation, at(federation, x))
    for found in (exact, general):
        assert found.squared_gradient_norm + found.dissimilarity == pytest.approx(left, rel=1e-12)
    assert exact.squared_gradient_norm == pytest.approx(general.squared_gradient_norm, rel=1e-10)
    assert exact.dissimilarity == pytest.approx(general.dissimilarity, rel=1e-10)
    assert exact.loss == pytest.approx(general.loss, rel=1e-12)


def test_clients_have_centres_of_their_own_and_head_and_tail_the_same_way_to_go(smooth):
    """Without noise a client's records are its centre; the centres' mean is ±distance in every r."""
    problem = smooth.Problem(half=4, clients=5, records=2, distance=1.5, skew=0.5, noise=0.0)
    data = smooth.make_data(problem, seed=3)
    residuals = smooth.turned(data.train_inputs.double())
    assert torch.equal(data.train_groups, torch.arange(5).repeat_interleave(2))
    assert torch.equal(residuals[::2], residuals[1::2])
    assert len(residuals[::2].unique(dim=0)) == 5
    mean = residuals.mean(0)
    torch.testing.assert_close(mean.abs(), torch.full((8,), 1.5, dtype=torch.float64), atol=1e-6, rtol=0)
    way = smooth.turned(mean[None])[0]
    assert float(way[:4].norm()) == pytest.approx(float(way[4:].norm()), rel=1e-6)
    assert not torch.equal(data.train_inputs, smooth.make_data(problem, seed=4).train_inputs)


def test_clients_keep_their_records_in_float64_and_start_at_zero(smooth, federation):
    assert all(client.inputs.dtype == torch.float64 and client.num_records == 5 for client in federation.clients)
    assert all(len(set((client.records // 5).tolist())) == 1 for client in federation.clients)
    assert all(not value.any() and value.dtype == torch.float64 for value in federation.initial_weights.values())
    assert federation.split.exchange_layer == "head"


def test_sizes_that_give_no_problem_are_refused(smooth):
    with pytest.raises(ValueError, match="half 0 must be a whole number from 1"):
        smooth.Problem(half=0)
    with pytest.raises(ValueError, match="skew nan must be a finite number"):
        smooth.Problem(skew=math.nan)
    with pytest.raises(ValueError, match="4 clients and the problem has 3"):
        smooth.make_federation(smooth.Problem(clients=3), TrainingSettings(clients=4, **SETTINGS))
    with pytest.raises(ValueError, match="vectors of even length"):
        smooth.network(input_shape=(3,), num_classes=2)
