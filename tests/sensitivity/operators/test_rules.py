import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from sensitivity import UnsupportedModuleError, certify
from sensitivity.capturing.recording import Node, Ref
from sensitivity.norms import lipschitz_table
from sensitivity.operators import rules
from sensitivity.operators.activations import activation_slope
from sensitivity.operators.operator import Effort
from sensitivity.operators.structure import INDEXING

EFFORT = Effort(dense_entries=0, symbol_flops=1.0, flops=0.0)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_no_two_families_claim_one_operator():
    """Mutation caught: a family that silently replaces the rule of another."""
    claimed = [name for family in rules._FAMILIES for name in family.RULES]
    assert sorted(claimed) == sorted(set(claimed)) == sorted(rules.RULES)
    assert not [name for name in claimed if name in ("relu", "gelu", "clamp")]


def test_every_index_operator_has_a_rule():
    assert set(rules.RULES) >= INDEXING


REFUSED = {
    "Hardshrink": (nn.Hardshrink(), "hardshrink", "use Softshrink"),
    "Threshold": (nn.Threshold(0.1, 20.0), "threshold", "use ReLU or Hardtanh"),
    "GLU": (nn.GLU(), "glu", "use one of"),
    "sort": (Function(lambda x: x.sort().values), "sort", "use one of"),
    "bilinear": (Function(lambda x: F.bilinear(x, x, torch.ones(2, 4, 4))), "_trilinear", "."),
    "product of two values": (Function(lambda x: x * torch.relu(x)), "mul", "multiply by constants only"),
    "batch product": (Function(lambda x: x.unsqueeze(1) @ torch.ones(13, 4, 2)), "bmm", "constant weights"),
    "cumprod": (Function(lambda x: x.cumprod(1)), "cumprod", "use one of"),
    "running sum over the batch": (Function(lambda x: x.cumsum(0)), "cumsum", "along another dimension"),
    "maximum": (Function(lambda x: torch.maximum(x, 2 * x)), "maximum", "use one of"),
    "quotient": (Function(lambda x: 1.0 / x), "reciprocal", "use one of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_bound_is_refused_with_its_name_place_and_a_fix(name):
    layer, op, fix = REFUSED[name]
    head = nn.Sequential(nn.Identity(), layer)
    with pytest.raises(UnsupportedModuleError) as refusal:
        certify(head, p=1, q=1, input_shape=(4,))
    message = str(refusal.value)
    assert "\n" not in message
    assert message.startswith(f"head layer '1' ({type(layer).__name__}) ")
    assert re.search(rf"\b{op}\b", message), message
    assert re.search(fix, message), message


SOURCE = Node(op="input", shape=(13, 4))


def node(op, **changed):
    facts = {"args": (Ref(0),), "parents": (0,), "shape": (13, 4), "path": "a", "module": "A", **changed}
    return Node(op=op, overload="default", **facts)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"shape": (4, 13)}, "records mix or the batch dimension moves"),
        ({"shape": ()}, "records mix or the batch dimension moves"),
        ({"dtype": torch.float64}, "changes torch.float32 into torch.float64"),
        ({"parents": (0, 1)}, "combines several values"),
        ({"shape": (13, 5)}, "depend on the input or change its shape"),
        ({"args": (torch.ones(4),)}, "depend on the input or change its shape"),
    ],
)
def test_an_operator_that_is_not_applied_record_by_record_is_refused(changed, words):
    """One check each; without the change, the same operator has a bound."""
    assert rules.operator_of(node("relu"), source=SOURCE, effort=EFFORT).table == lipschitz_table(1.0, size=4)
    with pytest.raises(UnsupportedModuleError, match=words):
        rules.operator_of(node("relu", **changed), source=SOURCE, effort=EFFORT)


@pytest.mark.parametrize("constant", [torch.tensor([1.0, float("nan")]), torch.ones(2, dtype=torch.float16)])
def test_constants_that_no_bound_can_be_computed_from_are_refused(constant):
    with pytest.raises(UnsupportedModuleError, match=r"head layer 'a' \(A\) uses mul"):
        rules.operator_of(node("mul", args=(Ref(0), constant)), source=SOURCE, effort=EFFORT)


def test_no_activation_is_also_a_rule():
    for name in rules.RULES:
        try:
            slope = activation_slope(name, args=(), kwargs={}, dtype=torch.float32)
        except (ValueError, IndexError):
            continue
        assert slope is None, name
