"""Networks fit their data, or say in one line why not."""

from pathlib import Path

import pytest
import torch

from asfl_privacy.data import load_dataset, make_dataset
from asfl_privacy.models import NETS, block_names, build_model

LEAST = {"small-cnn": 4, "lenet": 4, "resnet20": 5, "resnet20-bn": 5, "vgg11": 17, "vgg11-bn": 17}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (name, shape)
        for name in sorted(NETS)
        for shape in [(1, 8, 8), (1, 28, 28), (3, 32, 32), (1, 5, 9), (2, LEAST[name], LEAST[name])]
        if min(shape[1:]) >= LEAST[name]
    ],
)
def test_built_in_networks_fit_images_of_many_sizes(name, shape):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand((6, *shape), generator=generator).numpy()
    data = make_dataset("images", train=(inputs, range(6)), test=(inputs, range(6)))
    model = build_model(name, data=data, seed=0)
    assert model(data.train_inputs).shape == (6, 6)
    assert block_names(model)[0] == "normalize"


def test_normalisation_is_the_first_block_so_that_radii_stay_in_pixels(digits):
    model = build_model("small-cnn", data=digits, seed=0)
    pixels = digits.train_inputs[:5]
    assert torch.allclose(model.get_submodule("normalize")(pixels), (pixels - 0.305) / 0.376)


def test_one_seed_one_network_and_the_global_generator_is_left_alone(digits):
    before = torch.random.get_rng_state()
    first, second, other = (build_model("lenet", data=digits, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    pairs = list(zip(first.parameters(), second.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)


OWN = """
import torch
from collections import OrderedDict
from torch import nn

def good(*, input_shape, num_classes):
    return nn.Sequential(OrderedDict(body=nn.Flatten(), out=nn.Linear(64, num_classes)))

def too_wide(*, input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, num_classes))

def wrong_classes(*, input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

def not_sequential(*, input_shape, num_classes):
    return nn.Linear(64, num_classes)

def infinite(*, input_shape, num_classes):
    model = good(input_shape=input_shape, num_classes=num_classes)
    nn.init.constant_(model.out.bias, float("inf"))
    return model

def half(*, input_shape, num_classes):
    return good(input_shape=input_shape, num_classes=num_classes).double()

def no_arguments():
    return None

number = 3
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_model_module.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("own_module")
def test_own_model_by_module_and_factory():
    data = load_dataset("digits", root=Path("data"))
    assert block_names(build_model("own_model_module:good", data=data, seed=0)) == ("body", "out")


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("own_model_module:too_wide", "does not fit data digits"),
        ("own_model_module:wrong_classes", r"logits of shape \(2, 10\) are due"),
        ("own_model_module:not_sequential", "must be an nn.Sequential"),
        ("own_model_module:infinite", "not finite"),
        ("own_model_module:half", "does not fit|must be float32"),
        ("own_model_module:no_arguments", "the factory failed"),
        ("own_model_module:number", "must be a function"),
        ("resnet", "use one of lenet, resnet20, resnet20-bn, small-cnn, vgg11, vgg11-bn"),
    ],
)
def test_a_model_that_does_not_fit_gets_one_line(name, match, digits):
    with pytest.raises(ValueError, match=match) as caught:
        build_model(name, data=digits, seed=0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(NETS))
def test_records_that_are_no_images_or_too_small_are_refused_by_the_built_in_networks(name):
    least = LEAST[name]
    for shape in [(64,), (1, least - 1, 99), (1, 99, least - 1)]:
        inputs = torch.rand((4, *shape)).numpy()
        data = make_dataset("flat", train=(inputs, range(4)), test=(inputs, range(4)))
        with pytest.raises(ValueError, match=f"do not fit the built-in network .*from {least}×{least} on") as caught:
            build_model(name, data=data, seed=0)
        assert "\n" not in str(caught.value)
