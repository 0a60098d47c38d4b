"""Guards look at every value, in one pass where that is enough."""

import math

import pytest
import torch

from asfl_privacy.mechanisms.guards import is_finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 7, 4099])
def test_one_bad_value_is_found_wherever_it_is(bad, dtype, count):
    """Catches a sum in which infinities of both signs, or values far away, cover it."""
    for at in {0, count // 2, count - 1}:
        values = torch.full((count,), -3.0, dtype=dtype)
        values[at] = bad
        assert not is_finite(values)
        values[-1 - at] = -math.inf
        assert not is_finite(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_whose_sum_overflows_are_finite(dtype):
    """Catches a sum that is believed when it is not finite."""
    assert is_finite(torch.full((5,), torch.finfo(dtype).max, dtype=dtype, requires_grad=True))
