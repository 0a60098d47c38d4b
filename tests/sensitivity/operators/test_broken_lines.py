import numpy as np
import pytest
import torch

from sensitivity.operators.broken_lines import piece_slopes, prelu_weights


def slopes(op, args, low, high, dtype=torch.float32):
    a, b = piece_slopes(op, args=args, kwargs={}, dtype=dtype, low=np.array([low]), high=np.array([high]))
    return float(a[0]), float(b[0])


@pytest.mark.parametrize(
    ("op", "args", "low", "high", "truth"),
    [
        ("relu", (), -1.0, 0.0, (0.0, 0.0)),
        ("relu", (), 0.0, 1.0, (1.0, 1.0)),
        ("relu", (), 0.0, 0.0, (0.0, 1.0)),
        ("relu", (), -1e-300, 1e-300, (0.0, 1.0)),
        ("abs", (), -2.0, -1.0, (-1.0, -1.0)),
        ("leaky_relu", (0.5,), -2.0, 3.0, (0.5, 1.0)),
        ("hardtanh", (-1.0, 1.0), -1.0, 1.0, (1.0, 1.0)),
        ("hardtanh", (-1.0, 1.0), 0.5, 1.5, (0.0, 1.0)),
        ("hardtanh", (-1.0, 1.0), 1.0, 9.0, (0.0, 0.0)),
        ("clamp", (None, 4.0), 5.0, 9.0, (0.0, 0.0)),
        ("clamp_max", (4.0,), 1.0, 3.0, (1.0, 1.0)),
        ("softshrink", (0.5,), -0.25, 0.25, (0.0, 0.0)),
        ("softshrink", (0.5,), 0.75, 1.0, (1.0, 1.0)),
        ("hardswish", (), -9.0, -3.0, (0.0, 0.0)),
        ("hardswish", (), 3.0, 9.0, (1.0, 1.0)),
        ("hardswish", (), -9.0, 9.0, (-0.5, 1.5)),
    ],
)
def test_slopes_are_those_of_the_pieces_that_the_interval_meets(op, args, low, high, truth):
    """Hand work. Mutation caught: counting a piece that the interval only touches."""
    assert slopes(op, args, low, high) == truth


def test_a_limit_that_may_act_as_its_cast_counts_on_both_sides():
    """0.1 in float32 lies above 0.1: between the two, either slope may be the true one. Mutation caught: the float64
    limit alone."""
    cast = float(np.float32(0.1))
    assert cast > 0.1
    middle = (0.1 + cast) / 2
    assert slopes("clamp_min", (0.1,), middle, middle) == (0.0, 1.0)
    assert slopes("clamp_min", (0.1,), middle, middle, dtype=torch.float64) == (1.0, 1.0)


def test_weights_of_prelu_are_those_of_its_channels():
    weight = torch.tensor([[1.0, 2.0]])
    assert prelu_weights((weight,), shape=(2,)).tolist() == [1.0, 2.0]
    assert prelu_weights((torch.tensor([[[3.0]]]),), shape=(2, 2)).tolist() == [[3.0, 3.0], [3.0, 3.0]]
