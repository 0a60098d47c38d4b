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


def random_pool(kind, dims, seed):
    random = np.random.default_rng(seed)
    kernel = tuple(int(n) for n in random.integers(1, 4, size=dims))
    options = {
        "stride": tuple(int(n) for n in random.integers(1, 4, size=dims)),
        "padding": tuple(int(random.integers(0, k // 2 + 1)) for k in kernel),
        "ceil_mode": bool(random.integers(2)),
    }
    if kind == "Max":
        options["dilation"] = tuple(int(n) for n in random.integers(1, 3, size=dims))
    else:
        options["count_include_pad"] = bool(random.integers(2))
        if dims > 1:
            options["divisor_override"] = [None, 3][int(random.integers(2))]
    layer = getattr(nn, f"{kind}Pool{dims}d")(kernel, **options)
    return layer, (2, *(int(n) for n in random.integers(5, 8, size=dims)))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dims", [1, 3])
def test_no_pool_of_one_or_three_axes_moves_more_than_its_bound(dims, seed):
    """Averages against dense matrices, maxima against spikes on a flat record, which attain every 1→q."""
    layer, shape = random_pool("Max", dims, seed)
    size = math.prod(shape)
    moved = layer(torch.eye(size, dtype=torch.float64).reshape(size, *shape)).reshape(size, -1).numpy()
    for q in (1, 2, math.inf):
        truth = float(np.linalg.norm(moved, ord=q, axis=1).max())
        assert truth <= operator_norm(layer, p=1, q=q, input_shape=shape) <= truth * (1 + 1e-12)
    assert operator_norm(layer, p=2, q=2, input_shape=shape) == operator_norm(layer, p=1, q=2, input_shape=shape)
    layer, shape = random_pool("Avg", dims, seed)
    require_all_nine_norms(layer, shape)


def require_all_nine_norms(layer, shape):
    """Every norm of a matrix of entries of at least 0 is known in closed form."""
    W = dense_matrix(layer, shape)
    truths = {(p, q): dense_norm(W, p, q) for p, q in [*EXACT_PAIRS, (2, 2)]}
    truths[2, 1] = np.linalg.norm(W.sum(0))
    truths[math.inf, 2] = np.linalg.norm(W.sum(1))
    truths[math.inf, 1] = W.sum()
    for (p, q), truth in truths.items():
        assert truth * (1 - 1e-14) <= operator_norm(layer, p=p, q=q, input_shape=shape) <= truth * (1 + 1e-12), (p, q)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.AvgPool2d(2), (2, 4, 4)),
        (nn.AvgPool2d(3, 2, padding=1, count_include_pad=False), (2, 5, 6)),
        (nn.AdaptiveAvgPool1d(3), (2, 7)),
        (nn.AdaptiveAvgPool2d((2, 5)), (2, 3, 4)),
        (nn.AdaptiveAvgPool3d((2, 3, 1)), (2, 4, 5, 3)),
        (nn.AdaptiveAvgPool3d(1), (2, 2, 3, 2)),
        (Reduced("mean", (1, 3), keepdim=False), (2, 3, 4)),
        (Reduced("sum", (2,), keepdim=True), (2, 3, 4)),
    ],
    ids=str,
)
def test_averages_have_all_nine_norms_of_their_matrices(layer, shape):
    require_all_nine_norms(layer, shape)


@pytest.mark.parametrize("output", [1, 2, 3, 5])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_adaptive_max_pools_count_their_windows(dims, output):
    """Spikes attain every 1→q. Mutation caught: taking windows for disjoint where they share pixels."""
    layer, shape = getattr(nn, f"AdaptiveMaxPool{dims}d")(output), (1, 4, 5, 3)[: dims + 1]
    size = math.prod(shape)
    moved = layer(torch.eye(size, dtype=torch.float64).reshape(size, *shape)).reshape(size, -1).numpy()
    for q in (1, 2, math.inf):
        truth = float(np.linalg.norm(moved, ord=q, axis=1).max())
        assert truth <= operator_norm(layer, p=1, q=q, input_shape=shape) <= truth * (1 + 1e-12)


@pytest.mark.parametrize("layer", [nn.MaxPool1d(3), nn.MaxPool2d(2), nn.MaxPool3d(2), nn.MaxPool2d((2, 3), (3, 3))])
def test_max_pools_whose_windows_do_not_overlap_have_norm_1(layer):
    shape = (2, *[6] * (int(type(layer).__name__[-2])))
    for p, q in ((1, 1), (1, 2), (2, 2), (2, math.inf), (math.inf, math.inf)):
        assert operator_norm(layer, p=p, q=q, input_shape=shape) == 1.0


@pytest.mark.parametrize("name", ["amax", "amin"])
@pytest.mark.parametrize("dims", [(2, 3), (1,)])
def test_extremes_over_dimensions_are_max_pools(name, dims):
    head = Reduced(name, dims, keepdim=False)
    num_out = math.prod(n for axis, n in enumerate((2, 3, 4), start=1) if axis not in dims)
    assert operator_norm(head, p=1, q=1, input_shape=(2, 3, 4)) == 1.0
    assert operator_norm(head, p=math.inf, q=1, input_shape=(2, 3, 4)) == num_out
    assert operator_norm(head, p=2, q=1, input_shape=(2, 3, 4)) == pytest.approx(math.sqrt(num_out), rel=1e-15)
