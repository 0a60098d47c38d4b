"""Cases that must come out right (sensitivity.md §6), through the public face, where no other test asks it."""

import math

import numpy as np
import pytest
import torch
from dense_oracle import dense_matrix, dense_norm
from random_operators import NINE, Function, true_norm
from torch import nn

from sensitivity import UnsupportedModuleError, certify, lower_bound, operator_norm


def test_three_ones_of_stride_2_and_dilation_2_reach_2_998_on_a_long_input():
    """Golden. Mutation caught: a symbol that ignores dilation says 2.236."""
    layer = nn.Conv1d(1, 1, 3, stride=2, dilation=2, bias=False)
    nn.init.ones_(layer.weight)
    truth = dense_norm(dense_matrix(layer, (1, 199)), 2, 2)
    assert truth == pytest.approx(2.998, abs=2e-3)
    for method in ("auto", "fast"):
        bound = certify(layer, p=2, q=2, input_shape=(1, 199), method=method).value
        assert truth * (1 - 1e-14) <= bound <= 3.0 * (1 + 1e-12)
    assert operator_norm(layer, p=2, q=2, input_shape=(1, 199)) > 2.9


def test_unit_rows_are_not_a_unit_singular_value():
    """Golden. Mutation caught: bounding 2→2 by the largest row norm, which is 1 for all three."""
    row = np.array([0.6, 0.8])
    for W, truth in (
        (np.stack([row, row]), math.sqrt(2.0)),
        (np.stack([row] * 9), 3.0),
        (np.array([[1.0, 0.0], [0.6, 0.8]]), math.sqrt(1.6)),
    ):
        layer = nn.Linear(2, len(W), bias=False).double()
        layer.weight.data = torch.from_numpy(W)
        assert np.allclose(np.linalg.norm(W, axis=1), 1.0)
        for bound in (operator_norm(W, p=2, q=2), certify(layer, p=2, q=2, input_shape=2).value):
            assert truth * (1 - 1e-15) <= bound <= truth * (1 + 1e-12)


def test_a_narrow_then_a_square_layer_of_eighths_have_1_2_norm_8_and_not_1():
    """Golden. Also with a kink between, which changes nothing for a positive input."""
    layers = [nn.Linear(1, 64, bias=False), nn.Linear(64, 64, bias=False)]
    for layer in layers:
        nn.init.constant_(layer.weight, 1 / 8)
    for head in (nn.Sequential(*layers), nn.Sequential(layers[0], nn.ReLU(), layers[1])):
        assert certify(head, p=1, q=2, input_shape=1).value == pytest.approx(8.0, rel=1e-12)


@pytest.mark.parametrize(("p", "q"), NINE)
def test_an_asymmetric_box_bounds_what_moves_inside_it(p, q):
    """Hand work: of y = relu(W x) over the box, entries with low = high do not move, and a unit that is off stays off.

    Mutations caught: one side's sign, low and high swapped, the largest magnitude on both sides.
    """
    W = torch.tensor([[1.0, 2.0, 0.0], [-3.0, 0.0, 1.0], [0.0, 1.0, 5.0]], dtype=torch.float64)
    head = nn.Sequential(nn.Linear(3, 3, bias=False).double(), nn.ReLU())
    head[0].weight.data = W
    low = torch.tensor([1.0, -0.25, 0.0], dtype=torch.float64)
    high = torch.tensor([2.0, 3.0, 0.5], dtype=torch.float64)  # rows: [½, 8] on; [−6, −2½] off; [−¼, 5½] mixed
    active = np.array([[1.0, 2.0, 0.0], [0.0, 1.0, 5.0]])
    truth = true_norm(active, p, q)
    certificate = certify(head, p=p, q=q, input_shape=3, input_box=(low, high))
    free = certify(head, p=p, q=q, input_shape=3).value
    assert truth * (1 - 1e-13) <= certificate.value <= 1.26 * truth
    found = lower_bound(head, p=p, q=q, input_shape=3, input_box=(low, high), num_steps=100)
    assert 0.99 * truth <= found.value <= certificate.value * (1 + 1e-12)
    assert certificate.value <= free * (1 + 1e-12)
    spans = np.array([7.5, 0.0, 5.5])
    diameter = float(np.linalg.norm(spans, ord=q))
    assert diameter * (1 - 1e-12) <= certificate.diameter <= diameter * (1 + 1e-9)
    assert certificate.map(1e9) <= diameter * (1 + 1e-6)


@pytest.mark.parametrize("point", [0.0, 0.25, -3.0])
def test_a_lower_bound_equal_to_the_upper_lets_nothing_move(point):
    head = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
    certificate = certify(head, p=2, q=2, input_shape=3, input_box=(point, point))
    assert certificate.map(1.0) <= 1e-4  # rounding of two float32 passes alone
    assert math.isfinite(certificate.value)
    with pytest.raises(ValueError, match="single point"):
        lower_bound(head, p=2, q=2, input_shape=3, input_box=(point, point))


def test_an_entry_whose_sides_are_equal_still_counts_for_the_value_or_not_at_all():
    """A fixed entry may be left out or kept; the others must not be lost with it."""
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data = torch.tensor([[100.0, 3.0]])
    low, high = torch.tensor([1.0, -1.0]), torch.tensor([1.0, 2.0])
    assert certify(layer, p=1, q=1, input_shape=2, input_box=(low, high)).value >= 3.0


@pytest.mark.parametrize(
    ("head", "shape"),
    [
        (nn.Flatten(0), (3,)),
        (nn.Unflatten(0, (13, 1)), (3,)),
        (Function(lambda _, x: x.sum(0)), (4,)),
        (Function(lambda _, x: x.mean()), (4,)),
        (Function(lambda _, x: x[0]), (4, 2)),
        (nn.Conv2d(1, 1, 1), (4, 4)),  # torch reads (batch, 4, 4) as one image
        (nn.Conv1d(1, 1, 1), (4,)),
        (nn.MaxPool2d(1), (4, 4)),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_absent_batch_dimension_is_a_clear_error(head, shape):
    with pytest.raises(UnsupportedModuleError) as refusal:
        certify(head, p=1, q=1, input_shape=shape)
    assert "\n" not in str(refusal.value)
    assert any(word in str(refusal.value) for word in ("batch", "record"))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose", "AvgPool", "MaxPool", "BatchNorm", "AdaptiveAvgPool"])
def test_one_pixel_and_one_channel_have_the_norm_of_their_one_entry(kind, dims):
    torch.manual_seed(0)
    arguments = {"Conv": (1, 1, 3, 1, 1), "ConvTranspose": (1, 1, 3, 1, 1), "BatchNorm": (1,)}.get(kind, (1,))
    layer = getattr(nn, f"{kind}{dims}d")(*arguments).eval()
    truth = abs(float(dense_matrix(layer, (1,) * (dims + 1)).item()))
    for p, q in NINE:
        bound = certify(layer, p=p, q=q, input_shape=(1,) * (dims + 1)).value
        assert truth * (1 - 1e-13) <= bound <= truth * (1 + 1e-6), (p, q)


@pytest.mark.parametrize("height", [1.0, 100.0, 1e4])
def test_a_steep_kink_behind_a_layer_that_sampling_misses_is_covered(height):
    """Golden idea: a unit of slope 100 that is on over a thousandth of the line. The pair across it is the proof."""
    first, last = nn.Linear(1, 2).double(), nn.Linear(2, 1, bias=False).double()
    first.weight.data = torch.ones(2, 1, dtype=torch.float64)
    first.bias.data = torch.tensor([-5.0, -5.001], dtype=torch.float64)
    last.weight.data = torch.tensor([[height, -height]], dtype=torch.float64)
    head = nn.Sequential(first, nn.ReLU(), last)
    samples = torch.randn(2000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert float(head(samples).detach().abs().max()) == 0.0
    pair = torch.tensor([[5.0], [5.001]], dtype=torch.float64)
    ratio = float((head(pair)[1] - head(pair)[0]).abs().detach()) / 0.001
    assert ratio == pytest.approx(height, rel=1e-9)
    for p, q in NINE:
        assert certify(head, p=p, q=q, input_shape=1).value >= height * (1 - 1e-12)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.Threshold(0.1, 20), "discontinuous"),
        (nn.Hardshrink(), "discontinuous"),
        (nn.BatchNorm1d(4), "train mode"),
        (nn.BatchNorm1d(4, track_running_stats=False).eval(), "."),
        (nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4))), "train mode"),
        (nn.SyncBatchNorm(4), "."),
    ],
    ids=lambda value: str(value).replace("\n", "")[:40],
)
@pytest.mark.parametrize("method", ["auto", "fast", "product"])
def test_what_jumps_or_mixes_records_is_refused_by_every_method(layer, words, method):
    with pytest.raises(UnsupportedModuleError, match=words):
        certify(layer, p=2, q=2, input_shape=4, method=method)


def test_layer_norm_of_256_is_above_the_pair_that_search_reached():
    """Golden: 1108, where 2(1 − 1/n)/√ε = 630 is unsound."""
    layer = nn.LayerNorm(256)
    for method in ("auto", "fast"):
        assert 1108.0 <= certify(layer, p=1, q=1, input_shape=256, method=method).value <= 1419.0
