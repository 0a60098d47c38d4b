import math

import numpy as np
import pytest
import torch
from dense_oracle import EXACT_PAIRS, dense_matrix, dense_norm
from torch import nn

from sensitivity import UnsupportedModuleError, certify
from sensitivity.capturing.capture import record
from sensitivity.norms import NORMS, repeated_table
from sensitivity.operators.linear import cumulative_table, matrix_table


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


GENERATOR = torch.Generator().manual_seed(0)
W = torch.randn(4, 3, generator=GENERATOR)
V = torch.randn(3, generator=GENERATOR)

PRODUCTS = {
    "Linear on matrices": (nn.Linear(3, 5), (2, 3)),
    "Linear on 4-D records": (nn.Linear(3, 2, bias=False), (2, 1, 2, 3)),
    "Linear with one output": (nn.Linear(3, 1), (2, 3)),
    "x @ W": (lambda x: x @ W.t(), (2, 3)),
    "x @ W on vectors": (lambda x: x @ W.t(), (3,)),
    "x.matmul(W)": (lambda x: x.matmul(W.t()), (2, 2, 3)),
    "torch.matmul by names": (lambda x: torch.matmul(input=x, other=W.t()), (2, 3)),
    "W @ x": (lambda x: W @ x, (3, 2)),
    "matmul(W, x)": (lambda x: torch.matmul(W, x), (2, 3, 2)),
    "x @ v": (lambda x: x @ V, (2, 3)),
    "x @ v on vectors": (lambda x: (x @ V).unsqueeze(1), (3,)),
    "v @ x": (lambda x: V @ x, (3, 2)),
    "einsum last": (lambda x: torch.einsum("bij,kj->bik", x, W), (2, 3)),
    "einsum middle": (lambda x: torch.einsum("bji,kj->bki", x, W), (3, 2)),
    "einsum permuting": (lambda x: torch.einsum("bji,kj->bik", x, W), (3, 2)),
    "einsum weight first": (lambda x: torch.einsum("jk,bji->bik", W.t(), x), (3, 2)),
    "einsum with an ellipsis": (lambda x: torch.einsum("...j,kj->...k", x, W), (2, 2, 3)),
    "einsum with a vector": (lambda x: torch.einsum("bij,j->bi", x, V), (2, 3)),
    "einsum on vectors": (lambda x: torch.einsum("bj, kj -> bk", x, W), (3,)),
    "einsum of one": (lambda x: torch.einsum("bij->bji", x), (2, 3)),
    "cumsum": (lambda x: x.cumsum(1), (5,)),
    "cumsum in the middle": (lambda x: torch.cumsum(x, -2), (4, 2)),
    "scaling per channel": (lambda x: V[:, None] * x, (3, 2)),
    "division": (lambda x: x / torch.tensor([2.0, 4.0]), (3, 2)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_constants_have_the_norms_of_their_dense_matrix(name):
    """Mutations caught: contracting another dimension, or leaving out the copies over leading dimensions."""
    made, shape = PRODUCTS[name]
    head = made if isinstance(made, nn.Module) else Function(made)
    A = dense_matrix(head, shape) if isinstance(made, nn.Module) else jacobian(made, shape)
    for p, q in [*EXACT_PAIRS, (2, 2)]:
        bound, truth = certify(head, p=p, q=q, input_shape=shape).value, dense_norm(A, p, q)
        assert truth * (1 - 1e-6) <= bound <= truth * (1 + 1e-6), (p, q)
    n, m = A.shape[1], A.shape[0]
    signs = np.array(np.meshgrid(*[[-1.0, 1.0]] * n)).reshape(n, -1)
    duals = np.array(np.meshgrid(*[[-1.0, 1.0]] * m)).reshape(m, -1)
    for (p, q), truth in {
        (math.inf, 1): np.abs(A @ signs).sum(axis=0).max(),
        (math.inf, 2): np.linalg.norm(A @ signs, axis=0).max(),
        (2, 1): np.linalg.norm(A.T @ duals, axis=0).max(),
    }.items():
        assert certify(head, p=p, q=q, input_shape=shape).value >= truth * (1 - 1e-6), (p, q)


def jacobian(function, shape):
    """The float32 matrix of a linear function whose constants are float32, one basis record at a time."""
    size = math.prod(shape)
    return function(torch.eye(size).reshape(size, *shape)).reshape(size, -1).T.double().numpy()


def test_a_linear_layer_on_many_dimensions_is_one_operator():
    recording = record(nn.Linear(3, 5), input_shape=(2, 3), dtype=torch.float32)
    assert [recording.nodes[index].op for index in recording.reachable()] == ["input", "linear"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x @ x.transpose(1, 2),
        lambda x: torch.bmm(x, torch.ones(13, 2, 2)),
        lambda x: x @ torch.ones(13, 2, 2),
        lambda x: torch.einsum("bij,bjk->bik", x, torch.ones(13, 2, 2)),
        lambda x: torch.einsum("bij,bj->bi", x, torch.ones(13, 2)),
        lambda x: torch.einsum("bij,kb->kij", x, torch.ones(4, 13)),
        lambda x: torch.einsum("bij,kj->ikb", x, torch.ones(4, 2)),
        lambda x: torch.einsum("bij,kj->kib", x, torch.ones(13, 2)),
        lambda x: torch.einsum("bij,bkj->bik", x, x),
        lambda x: nn.functional.bilinear(x, x, torch.ones(3, 2, 2)),
        lambda x: nn.functional.bilinear(x, torch.ones(13, 2, 2), torch.ones(3, 2, 2)),
        lambda x: nn.functional.linear(torch.ones(13, 4, 2), x[0]),
        lambda x: torch.tensordot(torch.ones(13, 13), x, dims=([1], [0])),
        lambda x: torch.ones(13, 13) @ x.flatten(1),
        lambda x: x.mT @ torch.ones(2, 2) @ x,
        lambda x: x.cumprod(1),
        lambda x: nn.functional.scaled_dot_product_attention(x, x, x),
        lambda x: nn.functional.linear(x, torch.ones(2, 2), x[:, 0]),
    ],
)
def test_products_that_mix_records_or_two_moving_values_are_refused(function):
    with pytest.raises(UnsupportedModuleError, match=r"head \(Function\)"):
        certify(Function(function), p=1, q=1, input_shape=(2, 2))


@pytest.mark.parametrize("n", [1, 2, 3, 17, 200])
def test_the_running_sum_has_the_norms_of_its_triangle(n):
    L, table = np.tril(np.ones((n, n))), cumulative_table(n)
    for p, q in [*EXACT_PAIRS, (2, 2)]:
        bound, truth = table[NORMS.index(p)][NORMS.index(q)], dense_norm(L, p, q)
        assert truth * (1 - 1e-14) <= bound <= truth * (1 + 1e-13), (p, q)
    # L has no negative entry, so the hard norms are taken at vectors without negative entries.
    assert table[2][0] == L.sum()
    assert table[2][1] == pytest.approx(np.linalg.norm(L.sum(axis=1)), rel=1e-14)
    assert table[1][0] == pytest.approx(np.linalg.norm(L.sum(axis=0)), rel=1e-14)


@pytest.mark.parametrize("copies", [1, 2, 5])
def test_repeating_an_operator_gives_the_norms_of_the_block_diagonal_matrix(copies):
    A = np.random.default_rng(copies).normal(size=(2, 2))
    table, whole = repeated_table(matrix_table(A), copies=copies), np.kron(np.eye(copies), A)
    for p, q in [*EXACT_PAIRS, (2, 2)]:
        assert table[NORMS.index(p)][NORMS.index(q)] == pytest.approx(dense_norm(whole, p, q), rel=1e-12)
    signs = np.array(np.meshgrid(*[[-1.0, 1.0]] * 2)).reshape(2, -1)
    single = np.abs(A @ signs).sum(axis=0).max()
    assert table[2][0] >= copies * single * (1 - 1e-14)


def test_constants_added_to_the_input_move_nothing():
    """Positional embeddings: an embedding of constant indices is a constant."""

    class Positioned(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions = nn.Embedding(6, 3)
            self.project = nn.Linear(3, 2)

        def forward(self, x):
            return self.project(x + self.positions(torch.arange(x.shape[1])))

    head = Positioned()
    W = head.project.weight.detach().double().numpy()
    assert certify(head, p=2, q=2, input_shape=(6, 3)).value == pytest.approx(np.linalg.norm(W, 2), rel=1e-12)
    assert certify(head, p=1, q=1, input_shape=(6, 3)).value == pytest.approx(np.abs(W).sum(axis=0).max(), rel=1e-12)


def test_an_embedding_of_the_input_is_refused():
    with pytest.raises(UnsupportedModuleError, match="head"):
        certify(Function(lambda x: nn.functional.embedding(x.long(), W)), p=1, q=1, input_shape=(2,))


def test_a_bias_that_is_the_input_is_refused():
    """linear(x, 0, x) is x: its norm is 1, and that of the weights alone 0."""

    class OwnBias(nn.Module):
        def forward(self, x):
            return torch.nn.functional.linear(x, torch.zeros(3, 3), x)

    with pytest.raises(UnsupportedModuleError, match="bias depends on the input"):
        certify(OwnBias(), p=2, q=2, input_shape=(2, 3))
