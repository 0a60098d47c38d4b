"""cap_sensitivity: the certificate after a projection is never above the cap, and training goes on."""

import math

import pytest
import torch
from control_heads import Residual, make_head, train
from dense_oracle import dense_matrix, dense_norm
from torch import nn

from sensitivity import UnsupportedModuleError, certify
from sensitivity.control.projection import cap_sensitivity

SHAPE = (1, 8, 8)


def weights_of(head):
    return [parameter.detach().clone() for parameter in head.parameters()]


@pytest.mark.parametrize(
    ("kind", "p", "q", "cap"), [("conv", 2, 2, 2.0), ("linear", 1, 2, 0.5), ("residual", math.inf, math.inf, 3.0)]
)
def test_no_step_of_training_leaves_a_certificate_above_the_cap(kind, p, q, cap):
    """Catches a projection that aims at the cap and lands above it by rounding, and one that stops learning."""
    head = make_head(kind)
    num_scaled = 0

    def project(head):
        nonlocal num_scaled
        before = weights_of(head)
        certificate = cap_sensitivity(head, p=p, q=q, input_shape=SHAPE, cap=cap)
        num_scaled += any(not torch.equal(old, new) for old, new in zip(before, weights_of(head), strict=True))
        assert certificate.value <= cap
        if num_scaled % 10 == 1:
            certificate.check(head)  # it belongs to the weights as they now stand
            assert certify(head, p=p, q=q, input_shape=SHAPE, method="fast").value == certificate.value

    project(head)
    losses = train(head, num_steps=30, after_step=project)
    assert num_scaled >= 10  # the cap was really at work
    assert sum(losses[-6:]) < 0.8 * sum(losses[:6])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("p", "q"), [(1, 1), (1, 2), (2, 2), (2, math.inf), (math.inf, math.inf)])
def test_a_single_layer_meets_the_cap_in_dense_truth_and_uses_it(p, q, dtype):
    torch.manual_seed(2)
    layer = nn.Linear(30, 20, dtype=dtype)
    cap_sensitivity(layer, p=p, q=q, input_shape=30, cap=0.37)
    truth = dense_norm(dense_matrix(layer, (30,)), p, q)
    assert 0.37 * (1 - 1e-5) < truth <= 0.37


def test_a_power_iteration_projection_exceeds_the_cap_where_this_one_does_not():
    """The mutant divides by the reshaped kernel's norm; sensitivity.md §6: it leaves 2.764 where it claims 1."""
    layer = nn.Conv2d(1, 1, 3, padding=1, bias=False)
    nn.init.ones_(layer.weight)
    mutant = nn.Conv2d(1, 1, 3, padding=1, bias=False)
    mutant.weight.data = layer.weight.data / float(torch.linalg.matrix_norm(layer.weight.data.reshape(1, 9), 2))
    assert dense_norm(dense_matrix(mutant, SHAPE), 2, 2) == pytest.approx(2.764, abs=1e-3)
    certificate = cap_sensitivity(layer, p=2, q=2, input_shape=SHAPE, cap=1.0, method="auto")
    assert dense_norm(dense_matrix(layer, SHAPE), 2, 2) <= certificate.value <= 1.0


def test_a_head_inside_the_cap_is_left_bit_for_bit():
    head = make_head("conv")
    before = weights_of(head)
    value = certify(head, p=2, q=2, input_shape=SHAPE, method="fast").value
    certificate = cap_sensitivity(head, p=2, q=2, input_shape=SHAPE, cap=value)
    assert certificate.value == value
    assert all(torch.equal(old, new) for old, new in zip(before, weights_of(head), strict=True))


def test_a_skip_connection_is_counted_and_the_cap_still_used():
    """A residual head has 1 from its skip: the branches get what is left of the cap, not nothing."""
    torch.manual_seed(0)
    head = Residual(2)
    with torch.no_grad():
        head.first.weight.mul_(4.0)
    certificate = cap_sensitivity(head, p=2, q=2, input_shape=(2, 8, 8), cap=1.25)
    assert 1.2375 <= certificate.value <= 1.25
    assert 1.0005 < cap_sensitivity(head, p=2, q=2, input_shape=(2, 8, 8), cap=1.001).value <= 1.001


@pytest.mark.parametrize("cap", [0.5, 1.0])
def test_a_cap_that_scaling_cannot_meet_is_refused_and_the_weights_are_as_before(cap):
    head = Residual(2)
    before = weights_of(head)
    with pytest.raises(ValueError, match=r"cap=.* cannot be met: .* still 1\.0.* raise the cap"):
        cap_sensitivity(head, p=2, q=2, input_shape=(2, 8, 8), cap=cap)
    assert all(torch.equal(old, new) for old, new in zip(before, weights_of(head), strict=True))


def test_frozen_weights_biases_and_gains_stay_and_are_counted():
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5).eval(), nn.Linear(5, 4))
    head[0].requires_grad_(False)
    before = {name: value.detach().clone() for name, value in head.named_parameters()}
    assert cap_sensitivity(head, p=2, q=2, input_shape=6, cap=0.1).value <= 0.1
    changed = {name for name, value in head.named_parameters() if not torch.equal(value, before[name])}
    assert changed == {"2.weight"}


def test_a_tied_weight_and_a_reused_layer_are_scaled_once():
    torch.manual_seed(0)
    first, second = nn.Linear(5, 5), nn.Linear(5, 5)
    second.weight = first.weight
    head = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), first)
    ratio_before = first.weight.detach().clone()
    certificate = cap_sensitivity(head, p=1, q=1, input_shape=5, cap=0.1)
    assert 0.099 <= certificate.value <= 0.1
    factors = first.weight.detach() / ratio_before
    assert float(factors.max() - factors.min()) < 1e-5
    assert second.weight is first.weight


def test_norms_with_p_above_q_are_capped_too():
    head = make_head("linear")
    assert cap_sensitivity(head, p=math.inf, q=1, input_shape=SHAPE, cap=10.0).value <= 10.0


def test_with_a_radius_the_slack_is_inside_the_cap():
    """Softplus jumps at its threshold; catches noise fixed from cap·R that leaves the slack out."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(8, 8), nn.Softplus(threshold=2.0))
    value = cap_sensitivity(head, p=2, q=2, input_shape=8, cap=0.5)
    assert value.map(0.01) > 0.5 * 0.01
    slack = value.slack
    cap = 0.5 + slack / 0.01
    certificate = cap_sensitivity(head, p=2, q=2, input_shape=8, cap=cap, radius=0.01)
    assert certificate.map(0.01) <= cap * 0.01
    with pytest.raises(ValueError, match="cannot be met"):
        cap_sensitivity(head, p=2, q=2, input_shape=8, cap=0.9 * slack / 0.01, radius=0.01)


@pytest.mark.parametrize("cap", [0, -1.0, math.nan, math.inf, True, "1", None])
def test_a_cap_that_is_no_positive_number_is_refused(cap):
    with pytest.raises(ValueError, match="is no cap"):
        cap_sensitivity(nn.Linear(2, 2), p=2, q=2, input_shape=2, cap=cap)


@pytest.mark.parametrize("radius", [0.0, -1.0, math.nan, math.inf])
def test_a_radius_that_is_no_distance_is_refused(radius):
    with pytest.raises(ValueError, match="is no distance"):
        cap_sensitivity(nn.Linear(2, 2), p=2, q=2, input_shape=2, cap=1.0, radius=radius)


def test_weights_that_scaling_would_not_scale_are_refused_by_name():
    """spectral_norm divides its stored weight by its norm, so that scaling what is stored changes nothing."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(4, 4), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))).eval()
    with pytest.raises(UnsupportedModuleError, match=r"'1'.*parametrised by _SpectralNorm"):
        cap_sensitivity(head, p=2, q=2, input_shape=4, cap=1e-3)


@pytest.mark.parametrize(
    ("head", "match"),
    [(nn.ReLU(), "nothing can be scaled"), (nn.Linear(2, 2).requires_grad_(False), "nothing can be scaled")],
)
def test_a_head_without_trainable_layers_is_refused(head, match):
    with pytest.raises(ValueError, match=match):
        cap_sensitivity(head, p=2, q=2, input_shape=2, cap=1e-3)


def test_weights_that_diverged_are_refused_and_not_scaled():
    head = nn.Linear(2, 2)
    head.weight.data[0, 0] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        cap_sensitivity(head, p=2, q=2, input_shape=2, cap=1.0)
    assert math.isnan(head.weight[0, 0].item())


def test_huge_weights_are_brought_back():
    head = make_head("linear")
    with torch.no_grad():
        head[1].weight.mul_(1e12)
    assert 0.99 <= cap_sensitivity(head, p=2, q=2, input_shape=SHAPE, cap=1.0).value <= 1.0
