"""Splitting a head at the noise."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from asfl_privacy.mechanisms import split_head, valid_placements


def head():
    relu = nn.ReLU()
    return nn.Sequential(OrderedDict(one=nn.Linear(4, 4), act=relu, two=nn.Linear(4, 2), act2=relu)).eval()


@pytest.mark.parametrize("placement", ["input", "after:one", "after:act", "after:two", "after:act2", "exchange"])
def test_prefix_and_rest_make_up_the_head(placement):
    """Catches: a block lost at the cut; a module used twice counted once."""
    whole = head()
    prefix, rest = split_head(whole, placement)
    x = torch.rand(3, 4)
    assert torch.equal(rest(prefix(x)), whole(x))
    assert [*prefix._modules, *rest._modules] == ["one", "act", "two", "act2"]
    assert not prefix.training
    assert not rest.training
    assert len(prefix) == {"input": 0, "after:one": 1, "after:act": 2, "after:two": 3}.get(placement, 4)


def test_the_valid_placements_are_listed():
    assert valid_placements(head()) == ("input", "after:one", "after:act", "after:two", "after:act2", "exchange")


def test_a_subclass_of_sequential_is_refused():
    class Scaled(nn.Sequential):
        def forward(self, x):
            return 2.0 * super().forward(x)

    with pytest.raises(ValueError, match=r"nn\.Sequential"):
        split_head(Scaled(nn.Linear(4, 4)), "exchange")
