import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asfl_privacy.reporting.numerals import bound, exact, nearest, spread


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_a_bound_is_never_shown_below_its_value(value):
    # Catches: rounding to nearest, which shows 4.3774 as 4.377.
    shown = Fraction(bound(value))
    assert shown >= Fraction(value) * (1 - Fraction(1, 10**9))
    assert shown <= Fraction(value) * (1 + Fraction(1, 1000))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (4.3771, "4.378"),
        (91.82, "91.82"),
        (633.91, "634"),
        (1.0000000000003, "1"),
        (1.0001, "1.001"),
        (0.0, "0"),
        (math.inf, "∞"),
        (1e-5, "1e-5"),
        (0.01, "1e-2"),
        (0.1, "0.1"),
        (123456.0, "123500"),
        (1e7, "1e7"),
        (None, "—"),
    ],
)
def test_bounds_by_hand(value, text):
    assert bound(value) == text


@pytest.mark.parametrize("value", [math.nan, -1.0])
def test_no_text_for_what_is_no_figure(value):
    with pytest.raises(ValueError, match="at least 0"):
        bound(value)


def test_measured_numbers_round_to_nearest():
    assert [nearest(x) for x in (0.058284, 3.73062, 0.6002, 1724.26)] == ["0.05828", "3.731", "0.6002", "1724"]


def test_settings_show_as_given():
    assert [exact(x) for x in (0.05, 1e-7, 28, 0.1 + 0.2, "shards:2")] == ["0.05", "1e-7", "28", "0.3", "shards:2"]


def test_spread_by_hand():
    assert spread(-0.04, 0.26) == "0.0 ± 0.3"
    assert spread(-1.26, 0.0) == "−1.3 ± 0.0"
