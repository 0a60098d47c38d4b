import copy

import numpy as np
import pytest
import torch
from torch import nn

from sensitivity.fingerprint import take_fingerprint


class Configured(nn.Module):
    table = None

    def __init__(self):
        super().__init__()
        self._scale = 2.0
        self.options = {"steps": [1, 2], "gain": np.ones(2)}
        self.lines = (torch.ones(2), "a")
        self.rule = lambda x: x + 1.0

    def forward(self, x):
        return self.rule(x) * self._scale


def changes(before, after, shape=(2,)):
    return take_fingerprint(before, input_shape=shape).changes(take_fingerprint(after, input_shape=shape))


def test_a_copy_has_the_same_fingerprint():
    head = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU())
    assert changes(head, copy.deepcopy(head)) == []


@pytest.mark.parametrize(
    "edit",
    [
        lambda head: setattr(head, "_scale", 3.0),
        lambda head: head.options["steps"].append(3),
        lambda head: head.options["gain"].fill(5.0),
        lambda head: head.lines[0].mul_(2.0),
        lambda head: setattr(head, "rule", lambda x: x + 2.0),
        lambda head: setattr(head, "rule", None),
        lambda head: setattr(head, "forward", lambda x: x),
    ],
)
def test_simple_attributes_containers_and_code_are_part_of_it(edit):
    """Mutation caught: digesting parameters and buffers only."""
    head = Configured()
    before = take_fingerprint(head, input_shape=(2,))
    edit(head)
    assert before.changes(take_fingerprint(head, input_shape=(2,))) == ["modules"]


def test_closures_and_globals_that_hold_numbers_are_part_of_it():
    def make(scale):
        head = nn.ReLU()
        head.rule = lambda x: x * scale
        return head

    assert changes(make(1.0), make(1.0)) == []
    assert changes(make(1.0), make(2.0)) == ["modules"]


def test_a_one_bit_change_of_a_weight_is_seen():
    head = nn.Linear(3, 3)
    other = copy.deepcopy(head)
    other.weight.data[0, 0] = torch.nextafter(other.weight.data[0, 0], torch.tensor(9.0))
    assert changes(head, other) == ["parameters of 'weight'"]


def test_the_same_values_in_another_shape_or_type_differ():
    a, b = nn.Module(), nn.Module()
    a.register_buffer("t", torch.zeros(2, 3))
    b.register_buffer("t", torch.zeros(3, 2))
    assert changes(a, b) == ["buffers of 't'"]
    b.register_buffer("t", torch.zeros(2, 3, dtype=torch.float64))
    assert changes(a, b) == ["dtype of 't' (torch.float32 → torch.float64)", "buffers of 't'"]


def test_views_and_contiguous_copies_agree():
    a, b = nn.Module(), nn.Module()
    base = torch.arange(6.0).reshape(2, 3)
    a.register_buffer("t", base.t())
    b.register_buffer("t", base.t().contiguous())
    assert changes(a, b) == []
