"""All nine norms of convolutions and transposed convolutions over one to three axes against their dense matrices."""

import math

import numpy as np
import pytest
import torch
from dense_oracle import EXACT_PAIRS, dense_matrix, dense_norm
from nine_norms import largest_over_signs
from torch import nn

from sensitivity.capturing.capture import record
from sensitivity.norms import NORMS
from sensitivity.operators.conv_rules import conv_matrix_of
from sensitivity.operators.operator import Effort
from sensitivity.operators.rules import operator_of

KINDS = {
    (1, False): nn.Conv1d,
    (2, False): nn.Conv2d,
    (3, False): nn.Conv3d,
    (1, True): nn.ConvTranspose1d,
    (2, True): nn.ConvTranspose2d,
    (3, True): nn.ConvTranspose3d,
}
EFFORTS = [
    Effort(dense_entries=0, symbol_flops=2e6, flops=0.0),
    Effort(dense_entries=10**6, symbol_flops=2e6, flops=2e10),
    Effort(dense_entries=0, symbol_flops=2e6, flops=2e10),
]
HOW = [{"symbol", "row and column sums"}, {"dense Cholesky", "row and column sums"}, None]


def random_layer(seed):
    """A layer and an input shape: axes, transposed or not, groups, kernel, stride, padding, dilation, output_padding."""
    random = np.random.default_rng(seed)
    num_axes, transposed = 1 + seed % 3, (seed // 3) % 2 == 1
    draw = lambda low, high: tuple(int(n) for n in random.integers(low, high, size=num_axes))  # noqa: E731
    groups = int(random.choice([1, 1, 2]))
    c_in, c_out = groups * int(random.integers(1, 3)), groups * int(random.integers(1, 3))
    kernel, stride, dilation = draw(1, 4), draw(1, 4), draw(1, 3)
    padding = draw(0, 3)
    size = draw(1, 9 if num_axes == 1 else 4 if num_axes == 2 else 3)
    named = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "bias": bool(seed % 2)}
    if transposed:
        named["output_padding"] = tuple(
            int(random.integers(0, max(s, d))) for s, d in zip(stride, dilation, strict=True)
        )
        size = tuple(
            max(n, 1 + math.ceil((2 * p - d * (k - 1) - o) / s))
            for n, p, d, k, s, o in zip(size, padding, dilation, kernel, stride, named["output_padding"], strict=True)
        )
    else:
        size = tuple(
            max(n, d * (k - 1) + 1 - 2 * p) for n, p, d, k in zip(size, padding, dilation, kernel, strict=True)
        )
    torch.manual_seed(seed)
    return KINDS[num_axes, transposed](c_in, c_out, kernel, **named), (c_in, *size)


def recorded(layer, input_shape):
    recording = record(layer, input_shape=input_shape, dtype=torch.float32)
    (node,) = [node for node in recording.nodes if node.op == "convolution"]
    return node, recording.nodes[node.parents[0]]


def hard_norms(W):
    """2→1, ∞→1 and ∞→2 from brute force, as far as 12 signs go."""
    found = {}
    for (i, j), A, q in (((1, 0), W.T, 2), ((2, 0), W, 1), ((2, 1), W, 2)):
        if A.shape[1] <= 12:
            found[i, j] = largest_over_signs(A, q)
    return found


@pytest.mark.parametrize("block", range(21))
def test_no_norm_of_1050_random_convolutions_is_above_its_table(block):
    """Mutations caught: no transposition of the table, output_padding ignored, the third axis treated like the second,
    groups added where the largest counts, a Gram matrix without borders."""
    for seed in range(50 * block, 50 * block + 50):
        layer, shape = random_layer(seed)
        node, source = recorded(layer, shape)
        W = dense_matrix(layer, shape)
        assert np.array_equal(conv_matrix_of(node, source).toarray(), W), seed
        effort = EFFORTS[(seed // 6) % 3]
        operator = operator_of(node, source=source, effort=effort)
        table = operator.table
        for p, q in EXACT_PAIRS:
            bound, truth = table[NORMS.index(p)][NORMS.index(q)], dense_norm(W, p, q)
            assert truth * (1 - 1e-15) <= bound <= truth * (1 + 1e-12), (seed, p, q)
        truth = dense_norm(W, 2, 2)
        assert table[1][1] >= truth * (1 - 1e-14), seed
        if effort.flops > 0.0:
            assert table[1][1] <= truth * (1 + 1e-6), (seed, operator.how)
        if effort is EFFORTS[2] and truth > 0.0:
            assert operator.how in ("banded Cholesky", "symbol", "row and column sums"), operator.how
        for (i, j), truth in hard_norms(W).items():
            assert truth * (1 - 1e-14) <= table[i][j], (seed, i, j)
            if effort is EFFORTS[1]:
                assert table[i][j] <= 1.27 * truth + 1e-300, (seed, i, j)  # √(π/2), the worst case of ∞→2, rounded up


@pytest.mark.parametrize("transposed", [False, True])
def test_the_matrix_rows_are_sorted_so_that_no_entry_is_stored_twice(transposed):
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    node, source = recorded(kind(4, 6, 3, stride=2, padding=1, groups=2), (4, 7, 6))
    assert conv_matrix_of(node, source).has_canonical_format
    made = conv_matrix_of(node, source)
    copy = made.copy()
    copy.has_sorted_indices = copy.has_canonical_format = False
    copy.sum_duplicates()
    assert np.array_equal(made.indices, copy.indices)
    assert np.array_equal(made.data, copy.data)


def test_a_convolution_on_a_large_activation_is_bounded_without_its_matrix():
    """64 channels of 64×64 to as many: 150 M entries unrolled. Hand work: 1→1 of all ones is 64·9, ∞→1 the sum of all."""
    layer = nn.Conv2d(64, 64, 3, padding=1, bias=False)
    nn.init.ones_(layer.weight)
    node, source = recorded(layer, (64, 64, 64))
    operator = operator_of(node, source=source, effort=Effort(dense_entries=600_000, symbol_flops=2e8, flops=2e10))
    assert operator.how in ("symbol", "row and column sums")
    assert operator.table[0][0] == pytest.approx(576.0, rel=1e-12)
    assert operator.table[2][0] == pytest.approx(64.0 * 64.0 * (3 * 64 - 2) ** 2, rel=1e-9)
    assert 0.98 * 576.0 < operator.table[1][1] <= 576.0 * (1 + 1e-12)  # Schur's test; borders take a little off


def test_three_axes_on_a_large_activation():
    layer = nn.Conv3d(4, 8, 3, padding=1, bias=False)
    nn.init.ones_(layer.weight)
    node, source = recorded(layer, (4, 40, 40, 40))
    operator = operator_of(node, source=source, effort=Effort(dense_entries=600_000, symbol_flops=2e8, flops=2e10))
    assert operator.kind == "conv3d"
    assert operator.table[0][0] == pytest.approx(8 * 27.0, rel=1e-12)
    assert operator.table[2][2] == pytest.approx(4 * 27.0, rel=1e-12)


def test_depthwise_groups_share_the_work_and_the_largest_decides():
    layer = nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False)
    torch.manual_seed(1)
    nn.init.normal_(layer.weight)
    node, source = recorded(layer, (32, 16, 16))
    operator = operator_of(node, source=source, effort=Effort(dense_entries=0, symbol_flops=2e8, flops=4e11))
    truth = max(dense_norm(dense_matrix(single(layer.weight[g : g + 1]), (1, 16, 16)), 2, 2) for g in range(32))
    assert operator.how == "banded Cholesky"
    assert truth * (1 - 1e-14) <= operator.table[1][1] <= truth * (1 + 1e-6)


def single(weight):
    layer = nn.Conv2d(1, 1, 3, padding=1, bias=False)
    layer.weight.data.copy_(weight.detach())
    return layer
