import math

import numpy as np
import pytest
import torch
from dense_oracle import EXACT_PAIRS, dense_matrix, dense_norm
from torch import nn

from sensitivity import certify, operator_norm
from sensitivity.operators.pooling import average_table, average_windows, windows_over_a_pixel


def random_average_pool(seed):
    random = np.random.default_rng(seed)
    kernel = tuple(int(n) for n in random.integers(1, 4, size=2))
    return nn.AvgPool2d(
        kernel,
        stride=tuple(int(n) for n in random.integers(1, 4, size=2)),
        padding=tuple(int(random.integers(0, k // 2 + 1)) for k in kernel),
        ceil_mode=bool(random.integers(2)),
        count_include_pad=bool(random.integers(2)),
        divisor_override=[None, None, 3][int(random.integers(3))],
    ), (int(random.integers(1, 3)), *(int(n) for n in random.integers(4, 9, size=2)))


@pytest.mark.parametrize("seed", range(40))
def test_no_norm_of_a_random_average_pool_is_above_its_bound(seed):
    """Mutations caught: ignoring count_include_pad, ceil_mode or divisor_override, or overlapping windows."""
    layer, shape = random_average_pool(seed)
    W = dense_matrix(layer, shape)
    for p, q in [*EXACT_PAIRS, (2, 2)]:
        truth = dense_norm(W, p, q)
        bound = operator_norm(layer, p=p, q=q, input_shape=shape)
        assert truth * (1 - 1e-15) <= bound <= truth * (1 + 1e-12), (p, q)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.AvgPool1d(3, 2, padding=1), (2, 9)),
        (nn.AvgPool1d(3, 2, ceil_mode=True, count_include_pad=False), (2, 8)),
        (nn.AdaptiveAvgPool2d((3, 2)), (2, 7, 5)),
        (nn.AdaptiveAvgPool2d(1), (2, 7, 5)),
        (nn.AdaptiveAvgPool1d(4), (2, 9)),
        (nn.AdaptiveAvgPool2d(9), (1, 4, 4)),
    ],
    ids=str,
)
def test_other_average_pools_have_the_norms_of_their_matrices(layer, shape):
    W = dense_matrix(layer, shape)
    for p, q in [*EXACT_PAIRS, (2, 2)]:
        truth = dense_norm(W, p, q)
        assert truth * (1 - 1e-15) <= operator_norm(layer, p=p, q=q, input_shape=shape) <= truth * (1 + 1e-12), (p, q)


class Reduced(nn.Module):
    def __init__(self, name, dims, keepdim):
        super().__init__()
        self.name, self.dims, self.keepdim = name, dims, keepdim

    def forward(self, x):
        return getattr(x, self.name)(self.dims, keepdim=self.keepdim)


@pytest.mark.parametrize("name", ["mean", "sum"])
@pytest.mark.parametrize("dims", [(2, 3), (1,), (-1,), (1, 2, 3)])
def test_means_and_sums_within_a_record_have_the_norms_of_their_matrices(name, dims):
    head = Reduced(name, dims, keepdim=len(dims) < 3)
    W = dense_matrix(head, (2, 3, 4))
    for p, q in [*EXACT_PAIRS, (2, 2)]:
        truth = dense_norm(W, p, q)
        assert truth * (1 - 1e-15) <= operator_norm(head, p=p, q=q, input_shape=(2, 3, 4)) <= truth * (1 + 1e-12)


def test_a_3x3_max_pool_of_stride_2_has_norms_4_and_2():
    """Golden (sensitivity.md §2)."""
    layer = nn.MaxPool2d(3, 2)
    assert operator_norm(layer, p=1, q=1, input_shape=(1, 9, 9)) == 4.0
    assert operator_norm(layer, p=2, q=2, input_shape=(1, 9, 9)) == 2.0


def test_a_dilated_max_pool_has_2_2_norm_2():
    """Golden (sensitivity.md §6): MaxPool2d(2, 2, dilation=2). Mutation caught: comparing kernel with stride says 1."""
    assert operator_norm(nn.MaxPool2d(2, 2, dilation=2), p=2, q=2, input_shape=(1, 8, 8)) == 2.0


@pytest.mark.parametrize("seed", range(40))
def test_no_max_pool_moves_more_than_its_bound(seed):
    """The bound is attained by a spike on a flat image, so every 1→q value is also reached (brute force over
    pixels)."""
    random = np.random.default_rng(seed)
    kernel = tuple(int(n) for n in random.integers(1, 4, size=2))
    layer = nn.MaxPool2d(
        kernel,
        stride=tuple(int(n) for n in random.integers(1, 4, size=2)),
        padding=tuple(int(random.integers(0, k // 2 + 1)) for k in kernel),
        dilation=tuple(int(n) for n in random.integers(1, 3, size=2)),
        ceil_mode=bool(random.integers(2)),
    )
    shape = (1, *(int(n) for n in random.integers(6, 9, size=2)))
    size = math.prod(shape)
    spikes = torch.eye(size, dtype=torch.float64).reshape(size, *shape)
    moved = layer(spikes).reshape(size, -1).numpy()
    for q in (1, 2, math.inf):
        truth = float(np.linalg.norm(moved, ord=q, axis=1).max())
        assert truth <= operator_norm(layer, p=1, q=q, input_shape=shape) <= truth * (1 + 1e-12)
    pairs = torch.from_numpy(random.normal(size=(2, 300, *shape)))
    for p, q in ((2, 2), (2, math.inf), (math.inf, math.inf)):
        out = (layer(pairs[0]) - layer(pairs[1])).reshape(300, -1).numpy()
        into = (pairs[0] - pairs[1]).reshape(300, -1).numpy()
        ratios = np.linalg.norm(out, ord=q, axis=1) / np.linalg.norm(into, ord=p, axis=1)
        assert ratios.max() <= operator_norm(layer, p=p, q=q, input_shape=shape)


def test_max_pool_1d_counts_its_windows():
    assert operator_norm(nn.MaxPool1d(4, 1), p=1, q=1, input_shape=(2, 9)) == 4.0
    assert windows_over_a_pixel(9, 6, kernel=4, stride=1, padding=0, dilation=1) == 4


def test_pooling_over_a_head_of_bare_pixels_is_refused():
    with pytest.raises(ValueError, match="give each record channels and pixels"):
        certify(nn.MaxPool2d(2), p=1, q=1, input_shape=(8, 8))


def test_a_global_mean_over_the_batch_is_refused():
    with pytest.raises(ValueError, match="records mix"):
        certify(Reduced("mean", (0, 1), keepdim=True), p=1, q=1, input_shape=(4,))


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "include"), [(4, 4, 0, True), (3, 2, 1, False), (5, 2, 2, True)]
)
def test_bounds_of_long_axes_are_above_the_exact_ones(kernel, stride, padding, include, monkeypatch):
    """The dense route is the slow twin. Mutation caught: forgetting that windows overlap."""
    arguments = {"kernel": kernel, "stride": stride, "padding": padding, "count_include_pad": include, "divisor": None}
    axis = average_windows(41, (41 + 2 * padding - kernel) // stride + 1, **arguments)
    exact = average_table(axis, axis, channels=2)
    monkeypatch.setattr("sensitivity.operators.pooling.DENSE_WEIGHTS", 0)
    bound = average_table(axis, axis, channels=2)
    for r in range(3):
        for s in range(3):
            assert exact[r][s] * (1 - 1e-12) <= bound[r][s] <= 4.0 * exact[r][s]


def test_long_signals_are_pooled_without_a_dense_matrix():
    """Hand work: disjoint windows of 4 give 1/4 from 1 to 1 and 1/2 from 2 to 2."""
    for p, truth in ((1, 0.25), (2, 0.5), (math.inf, 1.0)):
        assert operator_norm(nn.AvgPool1d(4), p=p, q=p, input_shape=(1, 40_000)) == pytest.approx(truth, rel=1e-12)
