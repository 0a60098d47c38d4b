import math

import numpy as np
import pytest
import torch
from dense_oracle import EXACT_PAIRS, dense_matrix, dense_norm
from torch import nn

from sensitivity import operator_norm
from sensitivity.capturing.capture import record
from sensitivity.norms import NORMS
from sensitivity.operators.conv import ConvGeometry, conv_matrix
from sensitivity.operators.operator import Effort
from sensitivity.operators.rules import operator_of

SYMBOL_ONLY = Effort(dense_entries=0, symbol_flops=2e8)
DENSE = Effort(dense_entries=10**7, symbol_flops=2e8)


def random_convolution(seed):
    """A convolution and an input shape, over strides, paddings, dilations and groups, one axis or two."""
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    num_axes = 1 + seed % 2
    groups = int(random.choice([1, 1, 2]))
    c_in, c_out = groups * int(random.integers(1, 3)), groups * int(random.integers(1, 4))
    draw = lambda low, high: tuple(int(n) for n in random.integers(low, high, size=num_axes))  # noqa: E731
    kernel, stride, dilation = draw(1, 5), draw(1, 4), draw(1, 4)
    padding = draw(0, 4)
    size = tuple(
        max(int(random.integers(1, 10)), d * (k - 1) + 1 - 2 * p)
        for k, d, p in zip(kernel, dilation, padding, strict=True)
    )
    kind = nn.Conv1d if num_axes == 1 else nn.Conv2d
    layer = kind(
        c_in,
        c_out,
        kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=bool(seed % 3),
    )
    return layer, (c_in, *size)


def table_of(layer, input_shape, effort):
    recording = record(layer, input_shape=input_shape, dtype=torch.float32)
    (node,) = [node for node in recording.nodes if node.op == "convolution"]
    return operator_of(node, source=recording.nodes[node.parents[0]], effort=effort).table


@pytest.mark.parametrize("block", range(22))
def test_no_norm_of_220_random_convolutions_is_above_its_table(block):
    """Mutations caught: ignoring stride, padding, dilation or groups, and swapping rows with columns."""
    for seed in range(10 * block, 10 * block + 10):
        layer, shape = random_convolution(seed)
        W = dense_matrix(layer, shape)
        table = table_of(layer, shape, SYMBOL_ONLY)
        for p, q in EXACT_PAIRS:
            bound, truth = table[NORMS.index(p)][NORMS.index(q)], dense_norm(W, p, q)
            assert truth * (1 - 1e-15) <= bound <= truth * (1 + 1e-12), (seed, p, q)
        truth = dense_norm(W, 2, 2)
        assert table[1][1] >= truth * (1 - 1e-15), seed
        exact = table_of(layer, shape, DENSE)
        allowance = 1e-12 + 2.0 * min(W.shape) ** 2 * 2.0**-53  # the certificate's own: about k² units of roundoff
        assert truth * (1 - 1e-15) <= exact[1][1] <= truth * (1 + allowance), seed
        for r, s in ((1, 0), (2, 0), (2, 1)):
            assert table[r][s] >= reached_by_signs(W, r, s) * (1 - 1e-12), seed


def reached_by_signs(W, r, s):
    """A value that ∞→1, ∞→2 or 2→1 (as ∞→2 of the transpose) reaches on random sign vectors."""
    A = W.T if (r, s) == (1, 0) else W
    random = np.random.default_rng(0)
    signs = random.choice([-1.0, 1.0], size=(A.shape[1], 256))
    return np.linalg.norm(A @ signs, ord=1 if (r, s) == (2, 0) else 2, axis=0).max()


@pytest.mark.parametrize("seed", range(12))
def test_the_symbol_bound_is_close_on_wide_inputs(seed):
    """The excess is that of borders and of the grid; 12 % leaves room for both on 24 pixels, PixelDP's bound has 34–96
    %."""
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    stride, dilation, groups = int(random.integers(1, 3)), int(random.integers(1, 3)), int(random.integers(1, 3))
    layer = nn.Conv1d(2 * groups, 2 * groups, 3, stride=stride, dilation=dilation, padding=1, groups=groups)
    truth = dense_norm(dense_matrix(layer, (2 * groups, 48)), 2, 2)
    bound = table_of(layer, (2 * groups, 48), SYMBOL_ONLY)[1][1]
    assert truth <= bound <= 1.04 * truth


def test_the_unrolled_matrix_is_the_matrix_of_the_layer():
    layer = nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), bias=False)
    W = layer.weight.detach().double().numpy()
    geometry = ConvGeometry(size_in=(6, 5), size_out=(3, 7), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=1)
    assert np.array_equal(conv_matrix(W, geometry=geometry).toarray(), dense_matrix(layer, (2, 6, 5)))


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("kernel", [(3, 3), (5, 3)])
def test_named_paddings_are_those_of_torch(padding, kernel):
    layer = nn.Conv2d(1, 2, kernel, padding=padding)
    W = dense_matrix(layer, (1, 7, 6))
    for p, q in EXACT_PAIRS:
        assert operator_norm(layer, p=p, q=q, input_shape=(1, 7, 6)) == pytest.approx(dense_norm(W, p, q), rel=1e-12)


def test_asymmetric_same_padding_is_bounded():
    layer = nn.Conv1d(1, 1, 3, padding="same", dilation=1)
    even = nn.Sequential(nn.ConstantPad1d((0, 1), 0.0), nn.Conv1d(1, 1, 2))
    for module in (layer, even):
        W = dense_matrix(module, (1, 9))
        for p, q in [*EXACT_PAIRS, (2, 2)]:
            assert operator_norm(module, p=p, q=q, input_shape=(1, 9)) >= dense_norm(W, p, q) * (1 - 1e-15)


def test_a_convolution_that_sees_only_padding_in_some_taps_counts_the_others_only():
    """A 5x5 kernel with padding 2 on one pixel: only its centre touches a real pixel."""
    layer = nn.Conv2d(1, 1, 5, padding=2, bias=False)
    centre = abs(float(layer.weight.detach()[0, 0, 2, 2].double()))
    layer.weight.data[0, 0, 0, 0] = 100.0
    for p, q in [*EXACT_PAIRS, (2, 2)]:
        assert operator_norm(layer, p=p, q=q, input_shape=(1, 1, 1)) == pytest.approx(centre, rel=1e-12)


def test_all_ones_with_padding_after_spectral_norm_has_norm_2_764():
    """Golden (sensitivity.md §6): 3x3 all ones, padding 1, 8x8. torch's spectral_norm says 1 for the reshaped weight.

    Mutation caught: taking the reshaped weight's norm.
    """
    conv = nn.Conv2d(1, 1, 3, padding=1, bias=False)
    nn.init.ones_(conv.weight)
    torch.manual_seed(0)
    head = nn.utils.parametrizations.spectral_norm(conv, n_power_iterations=50).eval()
    reshaped = float(torch.linalg.matrix_norm(head.weight.detach().reshape(1, -1), 2))
    assert reshaped == pytest.approx(1.0, abs=1e-6)
    bound = operator_norm(head, p=2, q=2, input_shape=(1, 8, 8))
    assert bound == pytest.approx(2.764, abs=5e-4)
    assert bound >= dense_norm(dense_matrix(head, (1, 8, 8)), 2, 2) * (1 - 1e-7)


def test_power_iteration_is_no_bound():
    """Mutation caught: estimating 2→2 by a few steps of power iteration, which stays below the truth."""
    layer = nn.Conv2d(1, 1, 3, padding=1, bias=False)
    W = dense_matrix(layer, (1, 6, 6))
    v = np.random.default_rng(0).normal(size=36)
    for _ in range(5):
        v = W.T @ (W @ v)
        v /= np.linalg.norm(v)
    truth = dense_norm(W, 2, 2)
    assert np.linalg.norm(W @ v) < truth * (1 - 1e-6)
    for effort in (SYMBOL_ONLY, DENSE):
        assert table_of(layer, (1, 6, 6), effort)[1][1] >= truth


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_kernels_that_are_not_finite_are_refused(value):
    layer = nn.Conv2d(1, 1, 3)
    layer.weight.data[0, 0, 0, 0] = value
    with pytest.raises(ValueError, match="'weight' holds NaN or infinity"):
        operator_norm(layer, p=1, q=1, input_shape=(1, 8, 8))


def test_a_zero_kernel_has_norm_zero():
    layer = nn.Conv2d(2, 2, 3)
    nn.init.zeros_(layer.weight)
    for p, q in [*EXACT_PAIRS, (2, 2)]:
        assert operator_norm(layer, p=p, q=q, input_shape=(2, 8, 8)) == 0.0


@pytest.mark.parametrize("outer", [1.0, 1e300])
@pytest.mark.parametrize(("p", "q"), [(1, 1), (1, 2), (2, 2), (1, math.inf), (2, math.inf), (math.inf, math.inf)])
def test_taps_that_touch_padding_alone_count_for_nothing(p, q, outer):
    """Hand work: on one pixel only the centre tap is left. Mutation caught: scaling by a tap outside the operator, so
    that the centre underflows to 0."""
    layer = nn.Conv2d(1, 1, 3, padding=1, bias=False).double()
    layer.weight.data.fill_(outer)
    layer.weight.data[0, 0, 1, 1] = 1e-200
    assert 1e-200 <= operator_norm(layer, p=p, q=q, input_shape=(1, 1, 1)) <= 1e-200 * (1 + 1e-12)


def test_long_signals_need_no_quadratic_memory():
    """Hand work: all-ones taps give column sums of c_out·k. Mutation caught: a taps × outputs × inputs table (17 GiB)."""
    layer = nn.Conv1d(1, 8, 9)
    nn.init.ones_(layer.weight)
    assert operator_norm(layer, p=1, q=1, input_shape=(1, 16_000)) == pytest.approx(72.0, rel=1e-12)
    wide = nn.Conv1d(1, 1, 1001, padding=500)
    nn.init.ones_(wide.weight)
    assert operator_norm(wide, p=1, q=1, input_shape=(1, 700)) == pytest.approx(700.0, rel=1e-12)
