import copy
import dataclasses
import math
from fractions import Fraction

import pytest
import torch
from torch import nn

from sensitivity import StaleCertificateError, certify


def head_and_certificate():
    torch.manual_seed(0)
    head = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU()).eval()
    return head, certify(head, p=1, q=2, input_shape=(1, 8, 8))


def with_hook(head):
    head[2].register_forward_hook(lambda module, args, output: output)


def with_double(head):
    head.double()


def nudge(tensor):
    with torch.no_grad():
        tensor.view(-1)[0] += 1e-3


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda head: nudge(head[0].weight), "parameters of '0.weight'"),
        (lambda head: nudge(head[0].bias), "parameters of '0.bias'"),
        (lambda head: nudge(head[1].running_var), "buffers of '1.running_var'"),
        (lambda head: head.train(), r"mode of '1' \(eval → train\)"),
        (lambda head: head[2].train(), r"mode of '2' \(eval → train\)"),
        (with_hook, "hooks of '2'"),
        (with_double, "dtype of '0.weight'"),
        (lambda head: setattr(head[0], "stride", (2, 2)), "modules of '0'"),
        (lambda head: head.__setitem__(2, nn.Sigmoid().eval()), "modules of '2'"),
        (lambda head: head.append(nn.ReLU()), "modules of '3'"),
        (lambda head: head[0].register_parameter("bias", None), "parameters of '0.bias'"),
        (lambda head: setattr(head[1], "eps", 1e-9), "modules of '1'"),
    ],
)
def test_every_change_of_the_head_makes_the_certificate_stale_and_is_named(edit, named):
    """Mutation caught: leaving any one part out of the fingerprint."""
    head, certificate = head_and_certificate()
    certificate.check(head)
    edit(head)
    with pytest.raises(StaleCertificateError, match=named) as stale:
        certificate.check(head)
    assert "\n" not in str(stale.value)


def test_another_input_shape_makes_the_certificate_stale():
    head, certificate = head_and_certificate()
    certificate.check(head, input_shape=(1, 8, 8))
    with pytest.raises(StaleCertificateError, match=r"input shape \(\(1, 8, 8\) → \(1, 9, 9\)\)"):
        certificate.check(head, input_shape=(1, 9, 9))


def test_a_copy_of_the_head_and_a_restored_head_are_not_stale():
    head, certificate = head_and_certificate()
    certificate.check(copy.deepcopy(head))
    state = copy.deepcopy(head.state_dict())
    nudge(head[0].weight)
    head.load_state_dict(state)
    certificate.check(head)


def test_running_the_head_and_computing_gradients_does_not_make_it_stale():
    head, certificate = head_and_certificate()
    head(torch.zeros(3, 1, 8, 8)).sum().backward()
    certificate.check(head)


def test_a_swap_of_two_equal_modules_is_no_change_but_a_swap_of_weights_is():
    head = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    certificate = certify(head, p=1, q=1, input_shape=(2,))
    first, second = head[0], head[1]
    head[0], head[1] = second, first
    with pytest.raises(StaleCertificateError, match=r"parameters of '0.weight'"):
        certificate.check(head)


def test_mapping_a_radius_rounds_up():
    certificate = dataclasses.replace(certify(nn.ReLU(), p=2, q=2, input_shape=(3,)), value=1 / 3, slack=1e-9)
    for radius in (0.1, 1e-9, 7.0, 3):
        exact = Fraction(1 / 3) * Fraction(radius) + Fraction(1e-9)
        assert exact <= Fraction(certificate.map(radius)) <= exact * (1 + Fraction(1, 2**50))


@pytest.mark.parametrize("radius", [0, -1.0, math.nan, math.inf, True, "1", None, 10**400])
def test_what_is_no_radius_is_refused(radius):
    _, certificate = head_and_certificate()
    with pytest.raises(ValueError, match="positive finite number"):
        certificate.map(radius)


def test_a_sensitivity_that_overflows_is_refused():
    certificate = dataclasses.replace(certify(nn.ReLU(), p=2, q=2, input_shape=(3,)), value=1e300)
    with pytest.raises(ValueError, match="overflows"):
        certificate.map(1e300)


def test_a_certificate_cannot_be_edited():
    _, certificate = head_and_certificate()
    with pytest.raises(dataclasses.FrozenInstanceError):
        certificate.value = 0.0


def test_only_modules_can_be_checked():
    _, certificate = head_and_certificate()
    with pytest.raises(ValueError, match=r"only a torch.nn.Module"):
        certificate.check(torch.eye(3))
