import math

import numpy as np
import pytest
import torch
from dense_oracle import dense_matrix, dense_norm
from scipy.sparse.linalg import eigsh
from torch import nn

from sensitivity.operators.conv import ConvGeometry, conv_matrix, pixels_read, reached_taps
from sensitivity.spectra import conv_gram
from sensitivity.spectra.conv_gram import _negated_band, _sides, conv_singular_value_up
from sensitivity.spectra.symbol import symbol_bound

ENOUGH = 1e12


def random_geometry(seed):
    random = np.random.default_rng(seed)
    num_axes = 1 + seed % 3
    draw = lambda low, high: tuple(int(n) for n in random.integers(low, high, size=num_axes))  # noqa: E731
    kernel, stride, dilation, padding = draw(1, 5), draw(1, 4), draw(1, 4), draw(0, 4)
    size = tuple(
        max(int(n), d * (k - 1) + 1 - 2 * p)
        for n, k, d, p in zip(draw(1, 12 if num_axes == 1 else 6), kernel, dilation, padding, strict=True)
    )
    size_out = tuple(
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(size, padding, dilation, kernel, stride, strict=True)
    )
    geometry = ConvGeometry(
        size_in=size, size_out=size_out, stride=stride, padding=padding, dilation=dilation, groups=1
    )
    W = random.normal(size=(int(random.integers(1, 4)), int(random.integers(1, 4)), *kernel))
    return reached_taps(W, geometry=geometry), geometry


def reads_of(W, geometry):
    return [pixels_read(geometry, axis, num_taps) for axis, num_taps in enumerate(W.shape[2:])]


@pytest.mark.parametrize("seed", range(60))
def test_the_band_is_the_gram_matrix_of_the_unrolled_convolution(seed):
    """Both sides, every entry. Mutations caught: borders that let a pair of taps meet outside the image, a kernel not
    transposed, an axis order that differs between blocks and columns."""
    W, geometry = random_geometry(seed)
    A = conv_matrix(W, geometry=geometry).toarray()
    sides = _sides(W, reads_of(W, geometry), size_in=geometry.size_in, size_out=geometry.size_out)
    for side, exact in zip(sides, (A @ A.T, A.T @ A), strict=True):
        channels = side.kernels.shape[1]
        pixels = np.arange(math.prod(side.kept)).reshape(side.kept).transpose(side.axes).reshape(-1)
        order = (np.arange(channels)[None, :] * pixels.size + pixels[:, None]).reshape(-1)
        expected = exact[np.ix_(order, order)]
        band = -_negated_band(side)
        full = np.zeros_like(expected)
        for r in range(side.band + 1):
            columns = np.arange(side.side - r)
            full[columns + r, columns] = band[r, : side.side - r]
        assert np.allclose(full, np.tril(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("block", range(4))
def test_no_norm_of_240_random_convolutions_is_above_its_certificate(block):
    for seed in range(60 * block, 60 * block + 60):
        W, geometry = random_geometry(seed)
        truth = dense_norm(conv_matrix(W, geometry=geometry).toarray(), 2, 2)
        found = conv_singular_value_up(
            W, reads=reads_of(W, geometry), size_in=geometry.size_in, size_out=geometry.size_out, flops=ENOUGH
        )
        assert found is not None
        assert truth * (1 - 1e-14) <= found[0] <= truth * (1 + 1e-6) + 1e-300, seed


@pytest.mark.parametrize(
    ("c_in", "c_out", "kernel", "size", "stride"),
    [(1, 32, 5, 28, 1), (1, 32, 5, 28, 2), (3, 32, 3, 32, 1), (3, 32, 3, 32, 2)],
)
def test_the_first_rows_of_the_table_are_within_1e_5_of_the_true_norm(c_in, c_out, kernel, size, stride):
    """sensitivity.md §2: the symbol exceeds these by .3–3.3 %. The truth is ARPACK's, run to the end."""
    torch.manual_seed(0)
    layer = nn.Conv2d(c_in, c_out, kernel, stride=stride, padding=kernel // 2, bias=False)
    W = layer.weight.detach().double().numpy()
    out = (size - 1) // stride + 1
    pads, strides = (kernel // 2,) * 2, (stride,) * 2
    geometry = ConvGeometry(
        size_in=(size, size), size_out=(out, out), stride=strides, padding=pads, dilation=(1, 1), groups=1
    )
    found = conv_singular_value_up(
        W, reads=reads_of(W, geometry), size_in=geometry.size_in, size_out=geometry.size_out, flops=2e10
    )
    assert found is not None
    value, how = found
    assert how == "banded Cholesky"
    A = conv_matrix(W, geometry=geometry)
    start = np.random.default_rng(0).normal(size=A.shape[1])
    truth = math.sqrt(eigsh(A.T @ A, k=1, v0=start, tol=0.0, return_eigenvectors=False)[0])
    assert truth * (1 - 1e-12) <= value <= truth * (1 + 1e-5)
    assert value < symbol_bound(W, stride=strides, dilation=(1, 1))


def test_too_little_work_gives_nothing_and_a_wrong_guess_no_lower_bound(monkeypatch):
    W, geometry = random_geometry(1)
    named = {"reads": reads_of(W, geometry), "size_in": geometry.size_in, "size_out": geometry.size_out}
    truth = dense_norm(conv_matrix(W, geometry=geometry).toarray(), 2, 2)
    assert conv_singular_value_up(W, flops=1e3, **named) is None
    honest = conv_gram._gram_of

    def misleading(side):
        negated, product = honest(side)
        return negated, lambda v: 0.999 * product(v)

    monkeypatch.setattr(conv_gram, "_gram_of", misleading)
    found = conv_singular_value_up(W, flops=ENOUGH, **named)
    assert found is None or found[0] >= truth


def test_extreme_scales_and_zero_kernels():
    layer = nn.Conv1d(2, 2, 3, padding=1, bias=False)
    truth = dense_norm(dense_matrix(layer, (2, 9)), 2, 2)
    geometry = ConvGeometry(size_in=(9,), size_out=(9,), stride=(1,), padding=(1,), dilation=(1,), groups=1)
    W = layer.weight.detach().double().numpy()
    named = {"reads": reads_of(W, geometry), "size_in": (9,), "size_out": (9,), "flops": ENOUGH}
    for exponent in (-900, 0, 900):
        found = conv_singular_value_up(np.ldexp(W, exponent), **named)
        assert found is not None
        assert truth * (1 - 1e-14) <= math.ldexp(found[0], -exponent) <= truth * (1 + 1e-6)
    assert conv_singular_value_up(0.0 * W, **named) == (0.0, "zero kernel")
    with pytest.raises(ValueError, match="NaN or infinity"):
        conv_singular_value_up(np.full_like(W, math.nan), **named)
