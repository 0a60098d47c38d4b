import math

import pytest
import torch

from sensitivity.shapes import parse_input_box, parse_input_shape, require_budget


@pytest.mark.parametrize("shape", [(), (0,), (3, -1), (3, 2.0), "33", None, True, (True, 2), 3.0])
def test_what_is_no_shape_is_refused(shape):
    with pytest.raises(ValueError, match="batch dimension excluded"):
        parse_input_shape(shape)


def test_shapes_may_be_an_int_a_list_or_a_torch_size():
    assert parse_input_shape(3) == (3,)
    assert parse_input_shape([1, 2]) == parse_input_shape(torch.Size([1, 2])) == (1, 2)


@pytest.mark.parametrize(
    "box",
    [
        (1.0, 0.0),
        (math.nan, 1.0),
        (0.0, math.nan),
        (torch.tensor([0.0, 2.0]), 1.0),
        (0.0,),
        0.0,
        (torch.zeros(3), 1.0),
        ("a", 1.0),
    ],
)
def test_what_is_no_box_is_refused(box):
    with pytest.raises(ValueError, match="input_box"):
        parse_input_box(box, input_shape=(2,))


def test_asymmetric_boxes_points_and_half_spaces_are_boxes():
    low, high = parse_input_box((-1, torch.tensor([5.0, -1.0])), input_shape=(2,))
    assert low.tolist() == [-1.0, -1.0]
    assert high.tolist() == [5.0, -1.0]
    assert parse_input_box((2.0, 2.0), input_shape=(2,)) is not None
    assert parse_input_box((-math.inf, math.inf), input_shape=(2,)) is not None
    assert parse_input_box(None, input_shape=(2,)) is None


@pytest.mark.parametrize("budget", [0, -1.0, math.nan, math.inf, True, "10", None])
def test_what_is_no_budget_is_refused(budget):
    with pytest.raises(ValueError, match="budget_s"):
        require_budget(budget)
