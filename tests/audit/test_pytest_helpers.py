"""assert_private."""

import pytest
from audit.mutants import GAUSSIAN, honest, scaled

from asfl_privacy.audit.pytest_helpers import assert_private


def test_an_honest_layer_returns_its_report():
    layer = honest(GAUSSIAN)
    assert assert_private(layer, GAUSSIAN, 1e-6, tap=layer.tap).passed


def test_a_breach_is_an_assertion_error_that_says_what():
    with pytest.raises(AssertionError, match="breach of scale"):
        assert_private(scaled(0.9)(), GAUSSIAN, parts=("scale",))
