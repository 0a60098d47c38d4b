import itertools
import math

import pytest
import torch
from dense_oracle import EXACT_PAIRS, dense_matrix, dense_norm
from torch import nn

from sensitivity import certify, lower_bound, operator_norm
from sensitivity.capturing.capture import record
from sensitivity.composing.norm_dp import compose
from sensitivity.norms import NORMS
from sensitivity.operators.linear import matrix_table
from sensitivity.operators.operator import Effort

PAIRS = [(1, 1), (1, 2), (2, 2)]

EFFORT = Effort(dense_entries=600_000, symbol_flops=2e8)


class Residual(nn.Module):
    def __init__(self, *branches):
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x):
        total = self.branches[0](x)
        for branch in list(self.branches)[1:]:
            total = total + branch(x)
        return total


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def eighths():
    head = nn.Sequential(nn.Linear(1, 64, bias=False), nn.Linear(64, 64, bias=False))
    for layer in head:
        nn.init.constant_(layer.weight, 1 / 8)
    return head


def test_two_mixed_norms_do_not_multiply():
    """Golden (sensitivity.md §6): 1→2 = 8.0. Mutation caught: multiplying 1→2 by 1→2 says 1.0."""
    head = eighths()
    assert certify(head, p=1, q=2, input_shape=(1,)).value == pytest.approx(8.0, rel=1e-12)
    unsound = math.prod(operator_norm(layer, p=1, q=2) for layer in head)
    assert unsound == pytest.approx(1.0, rel=1e-12)
    assert dense_norm(dense_matrix(head, (1,)), 1, 2) == pytest.approx(8.0, rel=1e-12)


@pytest.mark.parametrize("seed", range(15))
def test_the_bound_of_a_chain_is_the_best_of_all_paths_of_norms(seed):
    """A second method: enumerate every sequence of intermediate norms, with tables from the dense matrices' own
    layers."""
    torch.manual_seed(seed)
    sizes = torch.randint(1, 7, (5,)).tolist()
    layers = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes)]
    tables = [matrix_table(layer.weight.detach().double().numpy()) for layer in layers]
    for p, q in [*EXACT_PAIRS, (2, 2)]:
        best = math.inf
        for path in itertools.product(range(3), repeat=len(layers) + 1):
            if NORMS[path[-1]] == q:
                first = 1.0 if p <= NORMS[path[0]] else sizes[0] ** (1 / NORMS[path[0]] - 1 / p)
                values = [table[r][s] for table, (r, s) in zip(tables, itertools.pairwise(path), strict=True)]
                best = min(best, first * math.prod(values))
        recording = record(nn.Sequential(*layers), input_shape=(sizes[0],), dtype=torch.float32)
        bound = compose(recording, p=p, q=q, effort=EFFORT, same_norm=False).value
        assert bound == pytest.approx(best, rel=1e-12)
        assert certify(nn.Sequential(*layers), p=p, q=q, input_shape=(sizes[0],)).value <= bound
        assert bound >= dense_norm(dense_matrix(nn.Sequential(*layers), (sizes[0],)), p, q) * (1 - 1e-14)


@pytest.mark.parametrize("seed", range(10))
def test_no_linear_graph_exceeds_its_bound(seed):
    """Sums, shared values and concatenations of random linear maps, against the dense matrix of the whole."""
    torch.manual_seed(seed)
    a, b, c = (nn.Linear(5, 5) for _ in range(3))

    def forward(x):
        left = a(x)
        shared = left + b(x)
        joined = torch.cat([c(shared), 2.0 * left, x - shared], dim=1)
        return joined - 0.5 * torch.cat([x, shared, left], dim=1)

    head = Function(forward)
    head.layers = nn.ModuleList([a, b, c])
    head.double()
    W = _matrix_of(forward, 5)
    for p, q in [*EXACT_PAIRS, (2, 2)]:
        value = certify(head, p=p, q=q, input_shape=(5,)).value
        assert dense_norm(W, p, q) * (1 - 1e-13) <= value <= dense_norm(W, p, q) * (1 + 1e-9)


def _matrix_of(forward, size):
    with torch.no_grad():
        return (forward(torch.eye(size).double()) - forward(torch.zeros(1, size).double())).T.numpy()


def test_a_residual_add_is_the_sum_of_its_branches():
    """Mutation caught: taking the larger branch. x + 2x moves three times as far as x."""
    double = nn.Linear(2, 2, bias=False)
    double.weight.data = 2.0 * torch.eye(2)
    for p, q in PAIRS:
        bound = certify(Residual(nn.Identity(), double), p=p, q=q, input_shape=(2,)).value
        assert bound == pytest.approx(3.0, rel=1e-12)


def test_a_branch_is_bounded_from_the_input_not_from_its_fork():
    """relu(4x) feeds both branches: 4·(1 + 3). Mutation caught: forgetting what came before the fork says 4."""
    scale, triple = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    scale.weight.data, triple.weight.data = 4.0 * torch.eye(2), 3.0 * torch.eye(2)
    head = nn.Sequential(scale, nn.ReLU(), Residual(nn.Identity(), triple))
    for p, q in PAIRS:
        assert certify(head, p=p, q=q, input_shape=(2,)).value == pytest.approx(16.0, rel=1e-12)


def test_a_value_that_is_used_twice_counts_twice():
    for function in (lambda x: x + x, lambda x: torch.cat([x, x], 1).sum(1, keepdim=True), lambda x: x.add_(x)):
        assert certify(Function(function), p=1, q=1, input_shape=(2,)).value == 2.0


def test_concatenation_takes_the_output_norm_of_its_branches():
    head = Function(lambda x: torch.cat([3.0 * x, 4.0 * x, torch.ones_like(torch.zeros(13, 1))[: x.shape[0]]], 1))
    plain = Function(lambda x: torch.cat([3.0 * x, 4.0 * x], 1))
    assert certify(plain, p=1, q=1, input_shape=(2,)).value == 7.0
    assert certify(plain, p=1, q=2, input_shape=(2,)).value == 5.0
    assert certify(plain, p=1, q=math.inf, input_shape=(2,)).value == 4.0
    with pytest.raises(ValueError, match="batch size"):
        certify(head, p=1, q=1, input_shape=(2,))


def test_the_product_method_uses_one_norm_and_is_never_tighter():
    torch.manual_seed(0)
    head = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    for p in (1, 2, math.inf):
        product = certify(head, p=p, q=p, input_shape=(1, 8, 8), method="product")
        layers = [operator_norm(head[0], p=p, q=p, input_shape=(1, 8, 8)), operator_norm(head[3], p=p, q=p)]
        assert product.value == pytest.approx(math.prod(layers), rel=1e-12)
        assert certify(head, p=p, q=p, input_shape=(1, 8, 8)).value <= product.value
        assert {layer.p for layer in product.layers} == {layer.q for layer in product.layers} == {p}


def test_layers_name_the_route_and_multiply_to_the_value():
    torch.manual_seed(1)
    head = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    recording = record(head, input_shape=(1, 8, 8), dtype=torch.float32)
    certificate = compose(recording, p=1, q=2, effort=EFFORT, same_norm=False)
    assert certify(head, p=1, q=2, input_shape=(1, 8, 8)).layers == certificate.layers
    assert [(layer.name, layer.kind) for layer in certificate.layers] == [
        ("0", "conv2d"),
        ("1", "relu"),
        ("3", "linear"),
    ]
    assert math.prod(layer.value for layer in certificate.layers) == pytest.approx(certificate.value, rel=1e-12)
    assert certificate.layers[0].p == 1
    assert certificate.layers[-1].q == 2
    for before, after in itertools.pairwise(certificate.layers):
        assert before.q == after.p


@pytest.mark.parametrize("seed", range(6))
def test_no_pair_of_inputs_exceeds_the_certificate_of_a_random_graph(seed):
    torch.manual_seed(seed)
    conv = lambda a, b, **more: nn.Conv2d(a, b, 3, padding=1, **more)  # noqa: E731
    head = nn.Sequential(
        conv(1, 4, stride=1 + seed % 2),
        [nn.ReLU(), nn.SiLU(), nn.GELU()][seed % 3],
        Residual(nn.Identity(), nn.Sequential(conv(4, 4, groups=2), nn.Tanh()), conv(4, 4, dilation=1)),
        [nn.MaxPool2d(2), nn.AvgPool2d(2), nn.MaxPool2d(3, 1)][seed % 3],
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.LazyLinear(6),
    ).eval()
    head(torch.zeros(2, 1, 8, 8))
    for p, q in PAIRS:
        found = lower_bound(head, p=p, q=q, input_shape=(1, 8, 8), num_starts=6, num_steps=20)
        assert 0.0 < found.value <= certify(head, p=p, q=q, input_shape=(1, 8, 8)).value
