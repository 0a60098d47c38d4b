"""Validation records come from the training records, the same ones always, and leave the test records alone."""

import numpy as np
import pytest
import torch

from asfl_privacy.data import hold_out, load_dataset, make_dataset


def rows(inputs):
    return {row.numpy().tobytes() for row in inputs}


def test_what_is_held_out_neither_trains_nor_was_a_test_record(digits):
    """Catches: validation on test records, and on records that train too."""
    held = hold_out(digits)
    counts = torch.bincount(digits.train_labels)
    assert torch.equal(torch.bincount(held.test_labels), counts // 6)
    assert held.num_records + len(held.test_labels) == digits.num_records
    assert rows(held.train_inputs) | rows(held.test_inputs) == rows(digits.train_inputs)
    assert not rows(held.test_inputs) & (rows(held.train_inputs) | rows(digits.test_inputs))


def test_the_same_records_are_held_out_each_time(digits):
    again = hold_out(digits)
    assert torch.equal(again.test_inputs, hold_out(digits).test_inputs)
    assert torch.equal(hold_out(load_dataset("digits", root=None)).test_inputs, again.test_inputs)


def test_each_label_stays_with_its_record():
    labels = np.arange(60) % 3
    inputs = np.broadcast_to((labels / 4.0)[:, None, None, None], (60, 1, 2, 2))
    held = hold_out(make_dataset("mine", train=(inputs, labels), test=(inputs, labels)))
    for x, y in ((held.train_inputs, held.train_labels), (held.test_inputs, held.test_labels)):
        assert torch.equal(x[:, 0, 0, 0], y / 4.0)


def test_classes_too_small_to_hold_anything_out_are_refused():
    x, y = np.zeros((10, 1, 2, 2)), np.arange(10) % 2
    with pytest.raises(ValueError, match="data mine: no class has 6 training records"):
        hold_out(make_dataset("mine", train=(x, y), test=(x, y)))
