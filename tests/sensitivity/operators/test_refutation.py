import math

import numpy as np
import pytest
import torch

from sensitivity.capturing.recording import Node, Ref
from sensitivity.norms import lipschitz_table
from sensitivity.operators import refutation
from sensitivity.operators.linear import matrix_table
from sensitivity.operators.refutation import refute


def multiplication(W):
    """x·Wᵀ of 13 records, as recorded, and the node that it reads."""
    source = Node(op="input", shape=(13, W.shape[1]))
    weight = torch.from_numpy(W).float()
    return Node(op="linear", overload="default", args=(Ref(0), weight), parents=(0,), shape=(13, W.shape[0])), source


def hidden_direction(size):
    """A matrix that is much longer in one direction than in those that chance or single coordinates find."""
    random = np.random.default_rng(1)
    u, v = random.normal(size=(2, size))
    return np.outer(u, v) / np.linalg.norm(u) / np.linalg.norm(v) + 0.02 * random.normal(size=(size, size)) / size


@pytest.mark.parametrize(("r", "s"), [(1, 1), (1, 2), (2, 2)])
def test_gradients_find_what_chance_does_not(r, s, monkeypatch):
    """Mutation caught: a check of random and single-coordinate pairs alone."""
    W = hidden_direction(60)
    node, source = multiplication(W)
    exact = matrix_table(W.astype(np.float32).astype(np.float64))
    assert refute(node, source=source, table=exact) is None
    beaten = [list(row) for row in exact]
    beaten[r][s] /= 1.25
    table = tuple(map(tuple, beaten))
    assert "it reaches" in refute(node, source=source, table=table)
    monkeypatch.setattr(refutation, "CLIMBS", 0)
    assert refute(node, source=source, table=table) is None


def test_single_coordinates_find_a_heavy_column_without_gradients(monkeypatch):
    """Mutation caught: dense directions alone, which spread their ℓ1 norm over all columns."""
    W = np.full((8, 60), 0.01)
    W[:, 41] = 1.0
    node, source = multiplication(W)
    exact = matrix_table(W.astype(np.float32).astype(np.float64))
    monkeypatch.setattr(refutation, "CLIMBS", 0)
    assert refute(node, source=source, table=exact) is None
    first = (exact[0][0] / 1.25, *exact[0][1:])
    assert "from norm 1 to norm 1 it reaches" in refute(node, source=source, table=(first, *exact[1:]))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_exact_tables_stand_at_every_scale(scale):
    """Mutation caught: an absolute allowance for rounding, or none."""
    W = np.random.default_rng(0).normal(size=(4, 5)) * scale
    node, source = multiplication(W)
    table = matrix_table(W.astype(np.float32).astype(np.float64))
    assert refute(node, source=source, table=table) is None
    smaller = tuple(tuple(value / 1.25 for value in row) for row in table)
    assert refute(node, source=source, table=smaller) is not None


@pytest.mark.parametrize(("op", "slope"), [("tanh", 1.0), ("gelu", 1.1289041451851551), ("sigmoid", 0.25)])
def test_slopes_of_curves_stand_and_smaller_ones_fall(op, slope):
    """The steepest point is found by climbing from random records."""
    source = Node(op="input", shape=(13, 3))
    node = Node(op=op, overload="default", args=(Ref(0),), parents=(0,), shape=(13, 3))
    assert refute(node, source=source, table=lipschitz_table(slope, size=3)) is None
    assert refute(node, source=source, table=lipschitz_table(slope / 1.25, size=3)) is not None


def test_unknown_operators_are_refused():
    source = Node(op="input", shape=(13, 3))
    node = Node(op="nowhere::nothing", overload="default", args=(Ref(0),), parents=(0,), shape=(13, 3))
    with pytest.raises(ValueError, match=r"torch\.ops"):
        refute(node, source=source, table=lipschitz_table(math.pi, size=3))
