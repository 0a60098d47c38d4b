"""Data sets are checked before anything is trained on them."""

import numpy as np
import pytest

from asfl_privacy.data import data_digest, make_dataset


def arrays(n=20, shape=(1, 4, 4), classes=3):
    rng = np.random.default_rng(0)
    return rng.random((n, *shape)), np.arange(n) % classes


def test_arrays_become_float32_inputs_and_int64_labels():
    data = make_dataset("mine", train=arrays(), test=arrays(7))
    assert str(data.train_inputs.dtype) == "torch.float32"
    assert str(data.train_labels.dtype) == "torch.int64"
    assert data.num_classes == 3
    assert data.num_records == 20
    assert data.input_shape == (1, 4, 4)


def test_the_default_constants_are_the_box_and_not_the_data():
    """A mean computed from private records would leak them."""
    data = make_dataset("mine", train=arrays(), test=arrays(), input_box=(-1.0, 3.0))
    assert data.mean == (1.0,)
    assert data.std == (2.0,)


@pytest.mark.parametrize("value", [np.nan, np.inf, -0.001, 1.001])
def test_inputs_outside_the_box_are_refused(value):
    inputs, labels = arrays()
    inputs[3, 0, 1, 2] = value
    with pytest.raises(ValueError, match=r"inside the input box \[0, 1\]"):
        make_dataset("mine", train=(inputs, labels), test=arrays())
    with pytest.raises(ValueError, match="test inputs"):
        make_dataset("mine", train=arrays(), test=(inputs, labels))


@pytest.mark.parametrize(
    ("train", "match"),
    [
        ((np.zeros((0, 1, 4, 4)), np.zeros(0)), "n ≥ 1"),
        ((np.zeros((3, 1, 4, 4)), np.zeros(2)), "n ≥ 1"),
        ((np.zeros((3, 1, 4, 4)), np.array([0.5, 1, 0])), "whole numbers"),
        ((np.zeros((3, 1, 4, 4)), np.array([-1, 1, 0])), "run from -1"),
        ((np.array([["a"]]), np.array([1])), "not numeric"),
    ],
)
def test_malformed_records_are_refused_in_one_line(train, match):
    with pytest.raises(ValueError, match=match) as caught:
        make_dataset("mine", train=train, test=arrays())
    assert "\n" not in str(caught.value)


def test_a_test_label_that_no_training_record_has_is_refused():
    with pytest.raises(ValueError, match="test labels run from 0 to 2, but must lie in 0 to 1"):
        make_dataset("mine", train=arrays(classes=2), test=arrays(classes=3))


def test_training_and_test_records_must_have_one_shape():
    with pytest.raises(ValueError, match="give both the same shape"):
        make_dataset("mine", train=arrays(), test=arrays(shape=(1, 5, 5)))


def test_groups_are_kept_as_int64():
    groups = np.arange(20, dtype=np.uint8) // 7
    data = make_dataset("mine", train=arrays(), test=arrays(), train_groups=groups)
    assert str(data.train_groups.dtype) == "torch.int64"
    assert data.train_groups.tolist() == groups.tolist()
    assert make_dataset("mine", train=arrays(), test=arrays()).train_groups is None


@pytest.mark.parametrize("groups", [np.arange(19), np.zeros((20, 1), dtype=int), np.arange(20) - 1, np.zeros(20), "ab"])
def test_groups_that_are_not_one_whole_number_a_record_are_refused(groups):
    with pytest.raises(ValueError, match="must be whole numbers from 0, one for each of 20 training records") as caught:
        make_dataset("mine", train=arrays(), test=arrays(), train_groups=groups)
    assert "\n" not in str(caught.value)


def test_whose_the_records_are_does_not_change_the_digest():
    """One data set has one account of what was released, whatever its partition."""
    plain, grouped = (
        make_dataset("mine", train=arrays(), test=arrays(), train_groups=groups) for groups in (None, [0] * 20)
    )
    assert data_digest(plain) == data_digest(grouped)
