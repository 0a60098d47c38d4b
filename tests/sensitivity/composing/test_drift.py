"""Recertification from an old bound: never below the truth, close to it after a small step, silent where not covered."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from sensitivity import certify, lower_bound


def head_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    norm = nn.BatchNorm2d(4)
    norm.running_var.uniform_(0.5, 2.0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        norm,
        nn.GELU(),
        nn.Conv2d(4, 3, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12, 5),
    ).eval()


def moved(head: nn.Module, step: float, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    other = copy.deepcopy(head)
    with torch.no_grad():
        for tensor in (*other.parameters(), other[1].running_var):
            tensor.mul_(1.0 + step * torch.rand_like(tensor))
    return other


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("p", "q"), [(1, 1), (1, 2), (2, 2), ("inf", "inf")])
def test_drift_stays_above_every_pair_and_near_a_fresh_certificate(seed: int, p: object, q: object) -> None:
    """Catches: the drift left out. The weights grow, so the old bound alone is beaten by the new head's own."""
    head = head_of(seed)
    old = certify(head, p=p, q=q, input_shape=(1, 6, 6))
    small, large = moved(head, 1e-3, seed), moved(head, 0.8, seed)
    near = certify(small, p=p, q=q, input_shape=(1, 6, 6), method="fast", previous=old)
    assert near.method == "drift"
    fresh = certify(small, p=p, q=q, input_shape=(1, 6, 6))
    assert fresh.value <= near.value * (1 + 1e-9)
    assert near.value <= 1.1 * fresh.value
    far = certify(large, p=p, q=q, input_shape=(1, 6, 6), method="fast", previous=old)
    assert far.value >= lower_bound(large, p=p, q=q, input_shape=(1, 6, 6)).value
    near.check(small)


def test_a_linear_head_that_grows_by_a_factor_drifts_by_just_that() -> None:
    """‖2A − A‖ = ‖A‖: the drifted bound is the true one, 2‖A‖."""
    head = nn.Linear(4, 3, bias=False)
    old = certify(head, p=2, q=2, input_shape=(4,))
    head.weight.data.mul_(2.0)
    now = certify(head, p=2, q=2, input_shape=(4,), method="fast", previous=old)
    assert now.value == pytest.approx(2.0 * np.linalg.norm(head.weight.detach().numpy() / 2.0, 2), rel=1e-6)


@pytest.mark.parametrize(
    "other",
    [
        nn.Sequential(nn.Linear(3, 3), nn.Tanh()),
        nn.Sequential(nn.Linear(3, 4), nn.ReLU()),
        nn.Sequential(nn.Linear(3, 3), nn.LeakyReLU(0.5)),
    ],
)
def test_another_head_starts_afresh(other: nn.Module) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        other[0].weight.mul_(100.0)
    old = certify(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), p=2, q=2, input_shape=(3,))
    now = certify(other, p=2, q=2, input_shape=(3,), method="fast", previous=old)
    assert now.method != "drift"
    assert now.value >= lower_bound(other, p=2, q=2, input_shape=(3,)).value


def test_other_norms_start_afresh_and_other_types_are_refused() -> None:
    head = head_of(0)
    old = certify(head, p=1, q=1, input_shape=(1, 6, 6))
    assert certify(head, p=2, q=2, input_shape=(1, 6, 6), method="fast", previous=old).method != "drift"
    with pytest.raises(ValueError, match="Certificate or None"):
        certify(head, p=2, q=2, input_shape=(1, 6, 6), previous=3.0)


def test_a_prelu_whose_slope_moved_starts_afresh() -> None:
    """Both heads must share their secants; a slope that changed is no weight of a linear operator."""
    head = nn.Sequential(nn.Linear(2, 2), nn.PReLU())
    old = certify(head, p=2, q=2, input_shape=(2,))
    head[1].weight.data.fill_(7.0)
    assert certify(head, p=2, q=2, input_shape=(2,), method="fast", previous=old).method != "drift"
