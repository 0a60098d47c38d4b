import math

import numpy as np
import pytest
import torch
from nine_norms import NINE, nine_norms
from torch import nn

from sensitivity import UnsupportedModuleError, certify, operator_norm
from sensitivity.capturing.capture import record
from sensitivity.operators.softmax import log_softmax_table, output_range, softmax_table


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def jacobian(s, *, log):
    return np.eye(len(s)) - s[None, :] if log else np.diag(s) - np.outer(s, s)


def mass_distributions(n, random):
    """Vertices, halves on two classes, and random points of the simplex."""
    yield from np.eye(n)
    for i in range(n):
        for j in range(i):
            yield (np.eye(n)[i] + np.eye(n)[j]) / 2
    yield from random.dirichlet(np.ones(n), size=60)
    yield from random.dirichlet(np.full(n, 0.1), size=60)


@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log-softmax"])
@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_the_table_is_the_largest_of_the_nine_norms_over_the_simplex(n, log):
    """Exact in all nine pairs. Golden (sensitivity.md §2): ½, √2/4, ¼."""
    table = np.array(log_softmax_table(n) if log else softmax_table(n))
    reached = np.zeros((3, 3))
    for s in mass_distributions(n, np.random.default_rng(n)):
        reached = np.maximum(reached, nine_norms(jacobian(s, log=log)))
    assert (reached <= table * (1 + 1e-12)).all()
    assert (reached >= table * (1 - 1e-12)).all()
    if not log:
        assert np.allclose(table[0], [0.5, math.sqrt(2) / 4, 0.25], rtol=1e-15)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Softmax(dim=1), (4,)),
        (nn.Softmax(dim=-1), (2, 3)),
        (nn.Softmax(dim=1), (3, 2)),
        (nn.Softmin(dim=1), (4,)),
        (nn.LogSoftmax(dim=1), (3, 2)),
        (nn.Softmax2d(), (3, 2, 1)),
        (Function(lambda x: x.logsumexp(1)), (3, 2)),
        (Function(lambda x: x.logsumexp((1, 2), keepdim=True)), (3, 2)),
    ],
    ids=str,
)
def test_no_jacobian_of_a_module_exceeds_its_nine_bounds(layer, shape):
    """Mutation caught: the groups taken along the wrong dimension, or forgotten."""
    bounds = np.array([operator_norm(layer, p=p, q=q, input_shape=shape) for p, q in NINE]).reshape(3, 3)
    size = math.prod(shape)
    random = np.random.default_rng(0)
    reached = np.zeros((3, 3))
    for scale in (0.0, 1.0, 5.0, 50.0):
        for _ in range(15):
            x = torch.from_numpy(random.normal(size=(1, *shape)) * scale)
            reached = np.maximum(reached, nine_norms(torch.func.jacrev(layer)(x).reshape(-1, size).numpy()))
    for first in range(2):  # two equal classes and one far ahead, in every group at once
        x = torch.full((1, *shape), -60.0, dtype=torch.float64)
        dim = 1 if shape[0] > 2 else len(shape)
        x.movedim(dim, 0)[: 2 - first] = 0.0
        reached = np.maximum(reached, nine_norms(torch.func.jacrev(layer)(x).reshape(-1, size).numpy()))
    assert (reached <= bounds * (1 + 1e-9)).all()
    assert (reached >= 0.7 * bounds).all()


@pytest.mark.parametrize("function", [lambda x: x.softmax(0), lambda x: x.log_softmax(-2), lambda x: x.logsumexp(0)])
def test_normalising_over_the_batch_is_refused(function):
    with pytest.raises(UnsupportedModuleError, match=r"records mix|batch"):
        certify(Function(function), p=1, q=1, input_shape=(4,))


def test_one_class_moves_nothing():
    assert operator_norm(nn.Softmax(dim=1), p=1, q=1, input_shape=(1, 3)) == 0.0
    assert operator_norm(nn.LogSoftmax(dim=1), p=1, q=1, input_shape=(1, 3)) == 0.0


@pytest.mark.parametrize(("layer", "ends"), [(nn.Softmax(1), (0.0, 1.0)), (nn.LogSoftmax(1), (-math.inf, 0.0))])
def test_outputs_stay_in_their_range(layer, ends):
    recording = record(layer, input_shape=(3, 2), dtype=torch.float32)
    low, high = output_range(recording.nodes[1], recording.nodes[0])
    assert (low.min(), high.max()) == ends
    assert low.shape == (3, 2)
    values = layer(torch.randn(100, 3, 2, dtype=torch.float64) * 50).numpy()
    assert (values >= low).all()
    assert (values <= high).all()


def test_attention_is_refused():
    layer = nn.MultiheadAttention(4, 2, batch_first=True).eval()
    with pytest.raises(UnsupportedModuleError):
        certify(Function(lambda x: layer(x, x, x)[0]), p=2, q=2, input_shape=(3, 4))
