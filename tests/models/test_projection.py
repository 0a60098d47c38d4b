"""A projection head is two layers more and a classifier made anew; all else stays."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from asfl_privacy.models import NETS, add_projection, block_names, build_model, split_model
from sensitivity import certify


def network(last, *, features=6):
    return nn.Sequential(OrderedDict(body=nn.Sequential(nn.Flatten(), nn.Linear(4, features), nn.ReLU()), out=last))


@pytest.mark.parametrize("name", ["small-cnn", "lenet", "federations:tiny_net"])
def test_a_name_with_a_projection_is_that_network_with_two_layers_more(digits, name):
    """Its other blocks begin with the same weights: a comparison with and without differs in the projection alone."""
    plain, grown = build_model(name, data=digits, seed=3), build_model(f"{name}+projection:256", data=digits, seed=3)
    *body, last = block_names(plain)
    assert block_names(grown) == (*body, "projection", last)
    for block in body:
        kept, same = plain.get_submodule(block).state_dict(), grown.get_submodule(block).state_dict()
        assert list(kept) == list(same)
        assert all(torch.equal(value, same[entry]) for entry, value in kept.items())
    features = plain.get_submodule(last).in_features
    layers = [(m.in_features, m.out_features) for m in grown.get_submodule("projection") if type(m) is nn.Linear]
    assert layers == [(features, features), (features, 256)]
    assert (grown.get_submodule(last).in_features, grown.get_submodule(last).out_features) == (256, 10)
    inputs = digits.train_inputs[:5]
    expected = grown.get_submodule("projection")(plain[:-1](inputs))
    assert torch.equal(grown(inputs), grown.get_submodule(last)(expected))
    assert all(parameter.requires_grad for parameter in grown.parameters())


def test_the_projection_is_seeded_as_the_rest_is(digits):
    """And torch's global generator is left alone. Catches layers that are made outside the seed."""
    before = torch.random.get_rng_state()
    first, second, other = (build_model("small-cnn+projection:8", data=digits, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    for name in ("projection.1.weight", "projection.3.weight", "classifier.weight"):
        assert torch.equal(first.get_parameter(name), second.get_parameter(name))
        assert not torch.equal(first.get_parameter(name), other.get_parameter(name))


def test_the_network_that_was_given_is_left_as_it_is():
    last = nn.Sequential(nn.Flatten(), nn.Linear(6, 3), nn.LogSoftmax(1))
    model = network(last)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    grown = add_projection(model, 5)
    assert block_names(model) == ("body", "out")
    assert model.out is last
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert grown.body is model.body
    assert [type(layer) for layer in grown.out] == [nn.Flatten, nn.Linear, nn.LogSoftmax]
    assert grown.out[2] is last[2]
    assert grown(torch.zeros(2, 4)).shape == (2, 3)


def test_unflattened_features_are_flattened_first():
    model = nn.Sequential(
        OrderedDict(body=nn.Conv2d(1, 2, 3), out=nn.Sequential(nn.Dropout(0.5), nn.Flatten(), nn.Linear(2 * 16, 3)))
    )
    grown = add_projection(model, 7)
    assert grown.projection(torch.zeros(5, 2, 4, 4)).shape == (5, 7)
    assert grown(torch.zeros(5, 1, 6, 6)).shape == (5, 3)


def test_what_the_classifier_was_it_stays():
    """Bias, type, mode and whether it trains. Catches a frozen classifier that begins to train."""
    linear = nn.Linear(6, 3, bias=False).double().eval().requires_grad_(requires_grad=False)
    grown = add_projection(network(linear).double(), 5)
    assert grown.out.bias is None
    assert grown.out.weight.dtype == grown.projection[1].weight.dtype == torch.float64
    assert not grown.out.training
    assert not grown.out.weight.requires_grad
    assert grown.projection[3].weight.requires_grad


def test_a_head_that_ends_with_the_projection_has_a_certificate(digits):
    """Its layers are of kinds that are bounded; the exchange may lie after it."""
    model = build_model("federations:tiny_net+projection:5", data=digits, seed=0).eval()
    head = split_model(model, "projection").head
    bound = certify(head, p=2, q=2, input_shape=digits.input_shape)
    x, y = digits.train_inputs[:50].double(), digits.train_inputs[50:100].double()
    moved = (head.double()(x) - head(y)).norm(dim=1) / (x - y).flatten(1).norm(dim=1)
    assert 0 < float(moved.detach().max()) <= bound.value


def hooked():
    linear = nn.Linear(6, 3)
    linear.register_forward_pre_hook(lambda module, inputs: None)
    return network(linear)


def tied():
    model = network(nn.Linear(6, 6))
    model.body.append(nn.Linear(6, 6))
    model.body[3].weight = model.out.weight
    return model


def normed():
    return network(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)))


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (hooked(), "block 'out' takes no projection before it: .* end the network with such a block"),
        (tied(), "block 'out' takes no projection before it: .* shares no parameter"),
        (normed(), "block 'out' takes no projection before it: .* plain nn.Linear"),
        (network(nn.Sequential(nn.ReLU(), nn.Linear(6, 3))), "block 'out' takes no projection"),
        (network(nn.Sequential(nn.Flatten())), "block 'out' takes no projection"),
        (network(nn.Identity()), "block 'out' takes no projection"),
        (nn.Sequential(OrderedDict(out=nn.Linear(6, 3))), "blocks out take no projection: .* two blocks or more"),
        (nn.Sequential(OrderedDict(projection=nn.Flatten(), out=nn.Linear(4, 3))), "rename or split a block"),
    ],
)
def test_what_would_lose_something_is_refused(model, line):
    """A hook, a tie or a parametrisation that the new classifier would lack."""
    with pytest.raises(ValueError, match=line):
        add_projection(model, 4)


@pytest.mark.parametrize("width", [0, -1, 2.5, True, None])
def test_a_width_that_is_no_size_is_refused(width):
    with pytest.raises(ValueError, match=r"projection width .* must be a whole number from 1 on; give for example 256"):
        add_projection(network(nn.Linear(6, 3)), width)


@pytest.mark.parametrize(
    "name", ["small-cnn+projection", "small-cnn+projection:0", "lenet+projection:x", "+projection:3"]
)
def test_a_name_without_a_width_is_refused(digits, name):
    with pytest.raises(ValueError, match=r"names a projection of no width; give NAME\+projection:WIDTH"):
        build_model(name, data=digits, seed=0)


def test_a_refusal_names_the_model(digits, monkeypatch):
    monkeypatch.setitem(
        NETS, "pooled", lambda **_: nn.Sequential(nn.Flatten(), nn.Sequential(nn.ReLU(), nn.Linear(64, 10)))
    )
    with pytest.raises(ValueError, match=r"model 'pooled\+projection:4': block '1' takes no projection before it"):
        build_model("pooled+projection:4", data=digits, seed=0)
    with pytest.raises(ValueError, match="model 'resnet' is unknown"):
        build_model("resnet+projection:4", data=digits, seed=0)
