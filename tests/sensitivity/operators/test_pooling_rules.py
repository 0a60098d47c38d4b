import math

import numpy as np
import pytest
import torch
from dense_oracle import dense_matrix
from torch import nn

from sensitivity import UnsupportedModuleError, certify, operator_norm
from sensitivity.capturing.capture import record
from sensitivity.operators.pooling_rules import AVERAGES, average_matrix


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
