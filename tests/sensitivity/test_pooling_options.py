"""Every option of every pooling layer through `certify`: the dense matrix, spikes and Jacobians; or a refusal."""

import itertools
import math

import numpy as np
import pytest
import torch
from dense_oracle import EXACT_PAIRS, dense_matrix, dense_norm
from random_operators import NINE, Function, jacobians, true_norm
from torch import nn
from torch.nn import functional as F  # noqa: N812

from sensitivity import UnsupportedModuleError, certify

SHAPES = {1: (2, 6), 2: (2, 6, 3), 3: (1, 4, 3, 4)}
SIX = [*EXACT_PAIRS, (2, 2)]


def nonnegative_norms(W):
    """All nine norms of a matrix without negative entries, in closed form: the cube's worst corner is all ones."""
    known = {(p, q): dense_norm(W, p, q) for p, q in SIX}
    return known | {
        (2, 1): float(np.linalg.norm(W.sum(0))),
        (math.inf, 1): float(W.sum()),
        (math.inf, 2): float(np.linalg.norm(W.sum(1))),
    }


def average_options():
    for dims, ceil, include, divisor in itertools.product((1, 2, 3), (False, True), (False, True), (None, 5)):
        if divisor is None or dims > 1:
            named = {"ceil_mode": ceil, "count_include_pad": include}
            yield dims, named | ({"divisor_override": divisor} if dims > 1 else {})


@pytest.mark.parametrize(("dims", "options"), list(average_options()), ids=str)
def test_every_option_of_average_pools_has_the_norms_of_its_matrix(dims, options):
    """Mutations caught: the divisor of a window cut off by the border or by ceil_mode; the override ignored."""
    layer = getattr(nn, f"AvgPool{dims}d")(3, 2, padding=1, **options)
    truths = nonnegative_norms(dense_matrix(layer, SHAPES[dims]))
    for p, q in NINE[int(options["ceil_mode"]) :: 2]:
        bound = certify(layer, p=p, q=q, input_shape=SHAPES[dims]).value
        assert truths[p, q] * (1 - 1e-13) <= bound <= truths[p, q] * (1 + 1e-9), (p, q)


def test_ceil_mode_adds_windows_and_changes_norms_here():
    """Else the options above would be compared on shapes where they do nothing."""
    for dims, shape in SHAPES.items():
        layers = [getattr(nn, f"AvgPool{dims}d")(3, 2, padding=1, ceil_mode=ceil) for ceil in (False, True)]
        assert layers[0](torch.zeros(1, *shape)).shape != layers[1](torch.zeros(1, *shape)).shape
        assert len({certify(layer, p=math.inf, q=1, input_shape=shape).value for layer in layers}) == 2


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_every_option_of_max_pools_moves_no_more_than_its_bound(dims, padding, dilation, ceil):
    """A spike on a flat record attains 1→q; Jacobians, which pick one pixel a window, stay below all nine.

    Mutation caught: windows over a pixel counted as kernel over stride.
    """
    layer = getattr(nn, f"MaxPool{dims}d")(2, 1, padding=padding, dilation=dilation, ceil_mode=ceil)
    shape = SHAPES[dims]
    size = math.prod(shape)
    moved = layer(torch.eye(size, dtype=torch.float64).reshape(size, *shape)).reshape(size, -1).numpy()
    found = jacobians(layer, shape, seed=0)
    for p, q in NINE[int(ceil) :: 2]:
        bound = certify(layer, p=p, q=q, input_shape=shape).value
        if p == 1:
            truth = float(np.linalg.norm(moved, ord=q, axis=1).max())
            assert truth <= bound <= truth * (1 + 1e-12), q
        assert bound >= max(true_norm(J, p, q) for J in found) * (1 - 1e-12), (p, q)


ADAPTIVE = {
    1: [(1,), (3,), (4,), (5,), (9,), (None,)],
    2: [(1, 1), (4, 2), (5, 3), (None, 2), (7, None)],
    3: [(1, 1, 1), (3, 2, 3), (None, 2, 5)],
}


@pytest.mark.parametrize(("dims", "output"), [(dims, output) for dims in ADAPTIVE for output in ADAPTIVE[dims]])
def test_adaptive_pools_of_sizes_that_do_not_divide_or_exceed_their_input(dims, output):
    """Mutation caught: windows of n // m pixels, which neither overlap nor differ in length."""
    shape = SHAPES[dims]
    sizes = output if dims > 1 else output[0] or shape[1]
    average, maximum = (getattr(nn, f"Adaptive{kind}Pool{dims}d")(sizes) for kind in ("Avg", "Max"))
    truths = nonnegative_norms(dense_matrix(average, shape))
    size = math.prod(shape)
    moved = maximum(torch.eye(size, dtype=torch.float64).reshape(size, *shape)).reshape(size, -1).numpy()
    for p, q in NINE[len(str(output)) % 2 :: 2]:
        bound = certify(average, p=p, q=q, input_shape=shape).value
        assert truths[p, q] * (1 - 1e-13) <= bound <= truths[p, q] * (1 + 1e-9), (p, q)
    for q in (1, 2, math.inf):
        truth = float(np.linalg.norm(moved, ord=q, axis=1).max())
        assert truth <= certify(maximum, p=1, q=q, input_shape=shape).value <= truth * (1 + 1e-12)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kind", ["MaxPool", "AdaptiveMaxPool"])
def test_positions_of_maxima_are_no_output_and_their_values_are(kind, dims):
    layer = getattr(nn, f"{kind}{dims}d")(2, return_indices=True)
    plain = getattr(nn, f"{kind}{dims}d")(2)
    with pytest.raises(UnsupportedModuleError, match="returns a tuple"):
        certify(layer, p=1, q=1, input_shape=SHAPES[dims])
    with pytest.raises(UnsupportedModuleError):
        certify(Function(lambda net, x: net.pool(x)[1] * 1.0, pool=layer), p=1, q=1, input_shape=SHAPES[dims])
    values = Function(lambda net, x: net.pool(x)[0], pool=layer)
    for p, q in ((1, 1), (2, 2), (math.inf, 1)):
        expected = certify(plain, p=p, q=q, input_shape=SHAPES[dims]).value
        assert certify(values, p=p, q=q, input_shape=SHAPES[dims]).value == expected


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_max_unpooling_is_refused(dims):
    pool, back = getattr(nn, f"MaxPool{dims}d")(2, return_indices=True), getattr(nn, f"MaxUnpool{dims}d")(2)
    shape = (1, *[4] * dims)
    head = Function(lambda net, x: net.back(*net.pool(x)), pool=pool, back=back)
    assert head(torch.zeros(2, *shape)).shape == (2, *shape)
    with pytest.raises(UnsupportedModuleError, match=r"MaxPool|MaxUnpool|max_unpool"):
        certify(head, p=1, q=1, input_shape=shape)
    fixed = torch.zeros(2 ** (dims - 1) * 2, dtype=torch.long).reshape(1, *[2] * dims)
    constant = Function(lambda net, x: net.back(x, fixed.expand(x.shape)), back=back)
    with pytest.raises(UnsupportedModuleError):
        certify(constant, p=1, q=1, input_shape=(1, *[2] * dims))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.LPPool1d(2, 2), SHAPES[1]),
        (nn.LPPool2d(1.5, 2, ceil_mode=True), SHAPES[2]),
        (nn.LPPool3d(2, 2), SHAPES[3]),
        (nn.FractionalMaxPool2d(2, output_size=2), SHAPES[2]),
        (nn.FractionalMaxPool2d(2, output_ratio=0.5), SHAPES[2]),
        (nn.FractionalMaxPool3d(2, output_size=2), SHAPES[3]),
        (Function(lambda _, x: F.lp_pool2d(x, 2.0, 2)), SHAPES[2]),
    ],
    ids=str,
)
@pytest.mark.parametrize("train", [False, True])
def test_pools_without_a_bound_are_refused_in_either_mode(layer, shape, train):
    with pytest.raises(UnsupportedModuleError) as refusal:
        certify(layer.train(train), p=2, q=2, input_shape=shape)
    assert type(layer).__name__ in str(refusal.value)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_lp_pools_of_order_infinity_are_max_pools_of_magnitudes(dims):
    """torch takes no powers there, and neither does the recording."""
    layer, twin = getattr(nn, f"LPPool{dims}d")(math.inf, 2), getattr(nn, f"MaxPool{dims}d")(2)
    x = torch.randn(3, *SHAPES[dims])
    assert torch.equal(layer(x), twin(x.abs()))
    for p, q in ((1, 1), (2, 2), (math.inf, 1)):
        assert certify(layer, p=p, q=q, input_shape=SHAPES[dims]).value == (
            certify(twin, p=p, q=q, input_shape=SHAPES[dims]).value
        )


def test_records_without_channels_are_refused_where_torch_would_take_the_batch_for_channels():
    """torch pools (13, 6) as one record of 13 channels; the batch must not be read as channels silently."""
    for layer in (nn.MaxPool1d(2), nn.AvgPool1d(2), nn.AdaptiveAvgPool1d(2), nn.AdaptiveMaxPool1d(2)):
        with pytest.raises(UnsupportedModuleError):
            certify(layer, p=1, q=1, input_shape=(6,))
    for layer in (nn.MaxPool3d(2), nn.AvgPool3d(2), nn.AdaptiveAvgPool3d(2), nn.AdaptiveMaxPool3d(2)):
        with pytest.raises(UnsupportedModuleError):
            certify(layer, p=1, q=1, input_shape=(4, 4, 4))
