import math

import numpy as np
import pytest
import torch
from dense_oracle import dense_matrix, dense_norm
from torch import nn

from sensitivity.spectra.symbol import _grid_factor, grid_sizes, patch_bound, polyphase, symbol_bound


def test_three_ones_with_stride_2_and_dilation_2_reach_2_998():
    """Golden (sensitivity.md §6). Mutation caught: a symbol that ignores dilation says 2.236."""
    layer = nn.Conv1d(1, 1, 3, stride=2, dilation=2, bias=False)
    nn.init.ones_(layer.weight)
    truth = dense_norm(dense_matrix(layer, (1, 199)), 2, 2)
    assert 2.998 <= truth < 3.0
    ones = np.ones((1, 1, 1, 3))
    assert truth <= symbol_bound(ones, stride=(1, 2), dilation=(1, 2)) <= 3.01
    assert symbol_bound(ones, stride=(1, 2), dilation=(1, 1)) == pytest.approx(math.sqrt(5), abs=1e-2)


@pytest.mark.parametrize("seed", range(40))
def test_no_dilated_strided_kernel_exceeds_its_symbol_bound(seed):
    random = np.random.default_rng(seed)
    k, s, d = int(random.integers(1, 6)), int(random.integers(1, 5)), int(random.integers(1, 7))
    layer = nn.Conv1d(2, 2, k, stride=s, dilation=d, padding=int(random.integers(0, 4)), bias=False)
    torch.manual_seed(seed)
    nn.init.normal_(layer.weight)
    size = d * (k - 1) + 1 + 3 * s * d
    truth = dense_norm(dense_matrix(layer, (2, size)), 2, 2)
    kernel = layer.weight.detach().double().numpy()[:, :, None, :]
    bound = symbol_bound(kernel, stride=(1, s), dilation=(1, d))
    assert truth * (1 - 1e-14) <= bound


@pytest.mark.parametrize("seed", range(40))
def test_no_dilated_strided_kernel_exceeds_its_patch_bound(seed):
    """Dense comparison; odd seeds have equal taps, where the bound is nearly attained, so a smaller one would fail."""
    random = np.random.default_rng(seed)
    k, s, d = int(random.integers(1, 6)), int(random.integers(1, 4)), int(random.integers(1, 5))
    channels = random.integers(1, 5, size=2)
    layer = nn.Conv1d(int(channels[0]), int(channels[1]), k, stride=s, dilation=d, padding=1, bias=False)
    torch.manual_seed(seed)
    nn.init.normal_(layer.weight)
    if seed % 2:
        layer.weight.data[:] = layer.weight.data[:, :, :1]
    truth = dense_norm(dense_matrix(layer, (int(channels[0]), d * (k - 1) + 1 + 6 * s * d)), 2, 2)
    kernel = layer.weight.detach().double().numpy()
    bound = patch_bound(kernel, stride=(s,), dilation=(d,))
    assert truth <= bound * (1 + 1e-14)
    assert bound <= math.sqrt(k) * symbol_bound(kernel, stride=(s,), dilation=(d,), flops=1e8)


def test_equal_taps_attain_the_patch_bound():
    """By hand: k ones of stride 1 on a long input approach k; the Gram matrix of one patch is k, in k patches."""
    layer = nn.Conv1d(1, 1, 5, bias=False)
    nn.init.ones_(layer.weight)
    truth = dense_norm(dense_matrix(layer, (1, 400)), 2, 2)
    bound = patch_bound(np.ones((1, 1, 5)), stride=(1,), dilation=(1,))
    assert truth <= bound == pytest.approx(5.0, rel=1e-12)
    assert truth >= 0.999 * bound


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_the_grid_factor_covers_what_falls_between_grid_points(m, extra):
    """A second method: a 4,096-point search of random trigonometric polynomials, even and odd numbers of taps."""
    grid = 4 * max(m - 1, 1) + extra
    random = np.random.default_rng(m)
    theta = 2 * np.pi * np.arange(4096) / 4096
    for _ in range(50):
        taps = random.normal(size=m) + 1j * random.normal(size=m)
        values = np.abs(np.exp(1j * np.outer(theta, np.arange(m))) @ taps)
        coarse = np.abs(np.exp(2j * np.pi * np.outer(np.arange(grid) + 0.0, np.arange(m)) / grid) @ taps)
        assert values.max() <= coarse.max() * _grid_factor(m, grid) * (1 + 1e-12)


def test_the_grid_factor_is_nearly_attained_so_no_smaller_one_would_do():
    """Worst case by hand: |1 + e^{iθ}| peaks at 2; a grid offset by half a step sees 2·cos(π/(2N)), m = 2."""
    grid = 8
    off = np.abs(1 + np.exp(1j * (2 * np.pi * np.arange(grid) / grid + np.pi / grid))).max()
    assert off * _grid_factor(2, grid) == pytest.approx(2.0, rel=1e-12)


def test_polyphase_keeps_every_tap_once():
    kernel = np.arange(1.0, 1 + 2 * 3 * 5 * 4).reshape(2, 3, 5, 4)
    phases = polyphase(kernel, steps=(2, 3))
    assert phases.shape == (2, 18, 3, 2)
    assert sorted(phases[phases != 0]) == sorted(kernel.ravel())


def test_a_smaller_budget_gives_a_coarser_grid_and_still_a_bound():
    layer = nn.Conv2d(3, 4, 3, padding=1, bias=False)
    kernel = layer.weight.detach().double().numpy()
    truth = dense_norm(dense_matrix(layer, (3, 8, 8)), 2, 2)
    coarse = symbol_bound(kernel, stride=(1, 1), dilation=(1, 1), flops=1.0)
    fine = symbol_bound(kernel, stride=(1, 1), dilation=(1, 1), flops=1e9)
    assert grid_sizes((3, 3), sides=(4, 3), flops=1.0) == (8, 8)
    assert truth <= fine <= coarse * (1 + 1e-12)
