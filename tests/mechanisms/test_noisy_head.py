"""NoisyHead and insert_noise: noise at its place, and refusals wherever the certificate no longer speaks of the head."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

from asfl_privacy.mechanisms import Gaussian, NoiseLayer, NoisyHead, insert_noise
from sensitivity import StaleCertificateError, certify


@pytest.fixture
def head():
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()),
            conv2=nn.Sequential(nn.Conv2d(4, 2, 3), nn.ReLU()),
        )
    ).eval()


def certified(head, *, input_shape, prefix=None):
    certificate = certify(head if prefix is None else prefix, p=2, q=2, input_shape=input_shape)
    return Gaussian.calibrate(epsilon=1.0, delta=1e-5, sensitivity=certificate.map(0.1), certificate=certificate)


def test_a_noise_layer_adds_nothing_to_the_state_dict(head):
    noisy = insert_noise(head, Gaussian(noise_stddev=1.0), placement="after:conv1")
    assert list(noisy.state_dict()) == list(head.state_dict())
    noisy.load_state_dict(head.state_dict())
    assert len(list(noisy.parameters())) == len(list(head.parameters()))


@pytest.mark.parametrize(
    ("placement", "names"),
    [
        ("input", ["noise", "conv1", "conv2"]),
        ("after:conv1", ["conv1", "noise", "conv2"]),
        ("after:conv2", ["conv1", "conv2", "noise"]),
        ("exchange", ["conv1", "conv2", "noise"]),
    ],
)
def test_placements(head, placement, names):
    """Catches: noise one block too early or too late, and modules copied instead of shared."""
    noisy = insert_noise(head, Gaussian(noise_stddev=1e-3), placement=placement)
    assert list(noisy._modules) == names
    assert noisy.conv1 is head.conv1
    assert not noisy.training
    assert list(head._modules) == ["conv1", "conv2"]
    x = torch.rand(2, 1, 8, 8)
    assert 0.0 < float((noisy(x) - head(x)).detach().abs().max()) < 0.1


def test_unknown_placements_list_the_valid_ones(head):
    for placement in ("auto", "after:conv3", "conv1", ""):
        with pytest.raises(ValueError, match="input, after:conv1, after:conv2, exchange"):
            insert_noise(head, Gaussian(noise_stddev=1.0), placement=placement)
    with pytest.raises(ValueError, match=r"nn\.Sequential"):
        insert_noise(nn.Linear(2, 2), Gaussian(noise_stddev=1.0), placement="input")
    with pytest.raises(ValueError, match=r"nn\.Sequential"):
        insert_noise(nn.Sequential(), Gaussian(noise_stddev=1.0), placement="input")


def test_a_stale_certificate_is_refused(head):
    """Catches: calibrating once and training on; also in a deep copy, whose weights are its own."""
    certificate = certify(head, p=2, q=2, input_shape=(1, 8, 8))
    mechanism = Gaussian.calibrate(epsilon=1.0, delta=1e-5, sensitivity=certificate.map(0.1), certificate=certificate)
    noisy = insert_noise(head, mechanism, placement="exchange")
    x = torch.rand(2, 1, 8, 8)
    noisy(x)
    twin = copy.deepcopy(noisy)
    twin(x)
    with torch.no_grad():
        twin.conv1[0].weight *= 2.0
    with pytest.raises(StaleCertificateError):
        twin(x)
    noisy(x)
    with torch.no_grad():
        head.conv2[0].bias += 1.0
    with pytest.raises(StaleCertificateError):
        noisy(x)
    with pytest.raises(StaleCertificateError):
        insert_noise(head, mechanism, placement="exchange")


def test_a_certificate_for_another_prefix_is_refused(head):
    certificate = certify(head.conv1, p=2, q=2, input_shape=(1, 8, 8))
    mechanism = Gaussian(noise_stddev=1.0, certificate=certificate)
    with pytest.raises(StaleCertificateError):
        insert_noise(head, mechanism, placement="exchange")


def test_raw_inputs_of_another_shape_are_refused():
    """Catches: checking weights only. The bound grows with the image: 0.93 at 4×4 and 1.38 at 40×40 for one kernel."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = nn.Sequential(OrderedDict(conv=nn.Conv2d(1, 2, 3), relu=nn.ReLU())).eval()
    small, large = (certify(head, p=2, q=2, input_shape=(1, size, size)).value for size in (4, 40))
    assert small < large
    noisy = insert_noise(head, certified(head, input_shape=(1, 4, 4)), placement="exchange")
    for module in (noisy, copy.deepcopy(noisy)):
        assert module(torch.rand(2, 1, 4, 4)).shape == (2, 2, 2, 2)
        for shape in ((2, 1, 40, 40), (1, 4, 4), (2, 1, 4, 5)):
            with pytest.raises(StaleCertificateError, match="input shape"):
                module(torch.rand(*shape))


@pytest.mark.parametrize("placement", ["after:pool", "exchange"])
def test_the_shape_is_that_of_the_inputs_not_of_the_activations(placement):
    """Catches: comparing activations, which are 1×1 for inputs of 3×3 and of 4×4 alike."""
    head = nn.Sequential(
        OrderedDict(conv=nn.Conv2d(1, 2, 2), pool=nn.MaxPool2d(2), flat=nn.Flatten(), relu=nn.ReLU())
    ).eval()
    assert head(torch.rand(2, 1, 3, 3)).shape == head(torch.rand(2, 1, 4, 4)).shape
    prefix = head[:2].eval() if placement == "after:pool" else head
    noisy = insert_noise(head, certified(head, prefix=prefix, input_shape=(1, 3, 3)), placement=placement)
    noisy(torch.rand(2, 1, 3, 3))
    with pytest.raises(StaleCertificateError, match="input shape"):
        noisy(torch.rand(2, 1, 4, 4))


def test_what_runs_before_the_noise_is_what_is_checked(head):
    """Catches: a check of a prefix kept aside, which no change of the noisy head itself reaches."""
    x = torch.rand(2, 1, 8, 8)

    def noisy():
        return insert_noise(head, certified(head, input_shape=(1, 8, 8)), placement="exchange")

    def replace(module):
        module.conv2 = nn.Sequential(nn.Conv2d(4, 2, 3), nn.ReLU()).eval()

    def scale_first(module):
        module.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 100.0,))

    def drop(module):
        del module.conv2

    for change in (replace, scale_first, drop, lambda module: module.train()):
        module = noisy()
        module(x)
        change(module)
        with pytest.raises(StaleCertificateError):
            module(x)


def test_blocks_after_the_noise_may_change(head):
    mechanism = certified(head, prefix=head[:1].eval(), input_shape=(1, 8, 8))
    noisy = insert_noise(head, mechanism, placement="after:conv1")
    noisy.conv2 = nn.Flatten()
    assert noisy(torch.rand(2, 1, 8, 8)).shape == (2, 144)


def test_a_head_that_lost_its_noise_is_refused(head):
    """Catches: a slice, or a replaced layer, that hands out clean activations under the noisy head's name."""
    noisy = insert_noise(head, certified(head, input_shape=(1, 8, 8)), placement="exchange")
    x = torch.rand(2, 1, 8, 8)
    assert isinstance(noisy, NoisyHead)
    assert isinstance(noisy[-1], NoiseLayer)
    with pytest.raises(StaleCertificateError):
        noisy[1:](torch.rand(2, 4, 6, 6))
    with pytest.raises(ValueError, match="without noise") as caught:
        noisy[:2](x)
    assert "\n" not in str(caught.value)
    noisy.noise = nn.Identity()
    with pytest.raises(ValueError, match="without noise"):
        noisy(x)
