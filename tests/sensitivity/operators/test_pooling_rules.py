import math

import numpy as np
import pytest
import torch
from dense_oracle import dense_matrix
from torch import nn

from sensitivity import UnsupportedModuleError, certify, operator_norm
from sensitivity.capturing.capture import record
from sensitivity.operators.pooling_rules import AVERAGES, MAXIMA, average_matrix, maximum_pattern


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


POOLS = [
    (nn.AvgPool1d(3, 2, padding=1), (2, 9)),
    (nn.AvgPool2d(3, 2, padding=1, ceil_mode=True), (2, 6, 7)),
    (nn.AvgPool2d((2, 3), (1, 2), padding=(1, 0), count_include_pad=False), (3, 5, 6)),
    (nn.AvgPool2d(2, divisor_override=7), (2, 4, 4)),
    (nn.AvgPool3d((2, 1, 3), 2, padding=(1, 0, 1)), (2, 4, 3, 5)),
    (nn.AdaptiveAvgPool1d(4), (2, 9)),
    (nn.AdaptiveAvgPool2d((3, 1)), (2, 7, 5)),
    (nn.AdaptiveAvgPool3d((2, 3, 2)), (1, 3, 4, 5)),
    (nn.AdaptiveAvgPool2d(1), (2, 7, 5)),
    (Function(lambda x: x.mean(1)), (2, 3, 4)),
    (Function(lambda x: x.mean((3, 1), keepdim=True)), (2, 3, 4)),
    (Function(lambda x: x.sum((-1,))), (2, 3, 4)),
    (Function(lambda x: x.mean((1, 2, 3))), (2, 3, 4)),
]


@pytest.mark.parametrize(("layer", "shape"), POOLS, ids=str)
def test_the_matrix_of_an_average_is_what_it_does_to_basis_records(layer, shape):
    """Dense oracle. Mutations caught: axes or channels in the wrong order, divisors of the wrong window."""
    recording = record(layer, input_shape=shape, dtype=torch.float64)
    index = next(i for i, node in enumerate(recording.nodes) if node.op in AVERAGES)
    node = recording.nodes[index]
    source = recording.nodes[node.parents[0]]
    matrix = average_matrix(node, source)
    truth = dense_matrix(layer, shape)
    assert matrix.shape == truth.shape
    assert np.allclose(matrix.toarray(), truth, rtol=1e-15, atol=0.0)
    assert matrix.nnz == np.count_nonzero(truth)


@pytest.mark.parametrize(
    ("head", "shape", "words"),
    [
        (nn.FractionalMaxPool2d(2, output_size=2), (1, 4, 4), "FractionalMaxPool2d"),
        (nn.LPPool2d(2, 2), (1, 4, 4), "LPPool2d"),
        (nn.AvgPool2d(2), (4, 4), "give each record channels and pixels"),
        (Function(lambda x: x.amax(0)), (4, 4), "records mix|batch"),
        (Function(lambda x: x.amax()), (4, 4), "."),
        (Function(lambda x: x.max(0).values), (13,), "records mix|batch"),
        (Function(lambda x: x.sum()), (4,), "."),
        (Function(lambda x: x.mean((0, 1), keepdim=True)), (4,), "records mix|batch"),
    ],
    ids=str,
)
def test_pools_without_a_bound_are_refused_by_name(head, shape, words):
    with pytest.raises(UnsupportedModuleError, match=words):
        certify(head, p=1, q=1, input_shape=shape)


def test_unpooling_is_refused_where_positions_of_maxima_are_made():
    class Unpooled(nn.Module):
        def forward(self, x):
            values, indices = nn.functional.max_pool2d(x, 2, return_indices=True)
            return nn.functional.max_unpool2d(values, indices, 2)

    with pytest.raises(UnsupportedModuleError, match="max_pool2d_with_indices"):
        certify(Unpooled(), p=1, q=1, input_shape=(1, 4, 4))


def test_a_head_that_returns_indices_is_refused():
    """Positions of maxima jump."""
    head = Function(lambda x: nn.functional.max_pool2d(x, 2, return_indices=True)[1] * 1.0)
    with pytest.raises(UnsupportedModuleError):
        certify(head, p=1, q=1, input_shape=(1, 4, 4))


def test_largest_and_least_over_one_dimension_are_maxima_over_disjoint_windows():
    for head in (Function(lambda x: x.max(2).values), Function(lambda x: x.min(dim=-1, keepdim=True)[0])):
        assert operator_norm(head, p=1, q=1, input_shape=(2, 5)) == 1.0
        assert operator_norm(head, p=math.inf, q=1, input_shape=(2, 5)) == 2.0


@pytest.mark.parametrize(
    ("pool", "shape"),
    [(nn.MaxPool1d(2, padding=1, dilation=2), (1, 1)), (nn.MaxPool2d(2, padding=1, dilation=3), (1, 2, 2))],
    ids=str,
)
def test_a_maximum_over_padding_alone_is_refused(pool, shape):
    """Its output is −∞, whose differences are no numbers. Mutation caught: a bound of 0.0."""
    assert bool(pool(torch.zeros(1, *shape)).isinf().any())
    with pytest.raises(UnsupportedModuleError, match="padding alone"):
        certify(pool, p=2, q=2, input_shape=shape)


MAXIMUM_POOLS = [
    (nn.MaxPool1d(3, 2, padding=1), (2, 9)),
    (nn.MaxPool1d(4, 3, ceil_mode=True), (1, 9)),
    (nn.MaxPool1d(2, 3, dilation=3), (2, 9)),
    (nn.MaxPool2d(2), (3, 4, 6)),
    (nn.MaxPool2d((3, 2), (1, 2), padding=(1, 0)), (2, 5, 7)),
    (nn.MaxPool2d((2, 3), 1, dilation=(3, 2), padding=(1, 1)), (2, 6, 7)),
    (nn.MaxPool2d(3, 2, padding=1, ceil_mode=True), (2, 6, 5)),
    (nn.MaxPool3d((2, 1, 3), (1, 2, 2), padding=(1, 0, 1)), (2, 3, 4, 5)),
    (nn.MaxPool3d(2, 1, dilation=(1, 2, 1), ceil_mode=True), (1, 3, 4, 3)),
    (nn.AdaptiveMaxPool1d(4), (2, 9)),
    (nn.AdaptiveMaxPool2d((3, 1)), (2, 7, 5)),
    (nn.AdaptiveMaxPool3d((2, 3, 2)), (2, 3, 4, 5)),
    (Function(lambda x: x.amax((1, 3))), (2, 3, 4)),
    (Function(lambda x: x.amax((3, 1), keepdim=True)), (2, 3, 4)),
    (Function(lambda x: x.amin(-1)), (2, 3, 4)),
    (Function(lambda x: x.max(2).values), (2, 3, 4)),
    (Function(lambda x: x.min(dim=1, keepdim=True)[0]), (2, 3, 4)),
]


@pytest.mark.parametrize(("layer", "shape"), MAXIMUM_POOLS, ids=str)
def test_the_pattern_of_a_maximum_is_what_each_entry_can_move(layer, shape):
    """Oracle: an entry far ahead of all others is the maximum of just the windows that hold it (the minimum, for min).

    Mutations caught: padding counted as an entry, dilation or stride of the other axis, channels that mix, ceil_mode.
    """
    recording = record(layer, input_shape=shape, dtype=torch.float64)
    node = next(node for node in recording.nodes if node.op in MAXIMA)
    pattern = maximum_pattern(node, recording.nodes[node.parents[0]])
    size = math.prod(shape)
    base = -torch.arange(1.0, size + 1.0, dtype=torch.float64)
    flip = -1.0 if node.op in ("amin", "min") else 1.0
    ahead = (base.repeat(size, 1) + 1e6 * torch.eye(size, dtype=torch.float64)) * flip
    moved = (layer(ahead.reshape(size, *shape)) * flip).reshape(size, -1) > 1e5
    assert pattern.shape == (moved.shape[1], size)
    assert np.array_equal(pattern.toarray(), moved.T.double().numpy())
    assert pattern.nnz == int(moved.sum())


@pytest.mark.parametrize(("layer", "shape"), MAXIMUM_POOLS, ids=str)
def test_gradients_of_a_maximum_choose_one_entry_of_its_window(layer, shape):
    """Autograd as a second oracle: each row of a Jacobian is one 1 inside the pattern."""
    recording = record(layer, input_shape=shape, dtype=torch.float64)
    node = next(node for node in recording.nodes if node.op in MAXIMA)
    pattern = maximum_pattern(node, recording.nodes[node.parents[0]]).toarray()
    for seed in range(3):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        J = torch.autograd.functional.jacobian(lambda r: layer(r[None]).reshape(-1), x).reshape(-1, x.numel()).numpy()
        assert np.array_equal(J.sum(axis=1), np.ones(len(J)))
        assert (pattern >= J).all()
