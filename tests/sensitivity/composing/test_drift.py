"""Recertification from an old bound: never below the truth, close to it after a small step, silent where not covered."""

import copy

import numpy as np
import pytest
import torch
from dense_oracle import dense_matrix, dense_norm
from torch import nn

from sensitivity import certify, lower_bound
from sensitivity.composing.drift import sandwich_table


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


def trained(head: nn.Module, shape: tuple[int, ...], *, steps: int, lr: float, seed: int) -> list[nn.Module]:
    """Copies of a head after each of several steps of gradient descent, whose differences are large and coherent."""
    torch.manual_seed(seed)
    optimiser = torch.optim.SGD(head.parameters(), lr=lr, momentum=0.9)
    found = []
    for _ in range(steps):
        optimiser.zero_grad()
        head(torch.randn(16, *shape)).pow(2).mean().backward()
        optimiser.step()
        found.append(copy.deepcopy(head))
    return found


def small_head(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    stride, padding = int(random.integers(1, 3)), int(random.integers(0, 3))
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=stride, padding=padding),
        [nn.ReLU(), nn.LeakyReLU(-0.5), nn.GELU(), nn.LeakyReLU(2.0)][seed % 4],
        nn.Conv2d(4, 5, int(random.integers(1, 4)), stride=int(random.integers(1, 3)), padding=1),
        nn.ReLU(),
        nn.Conv2d(5, 3, 2, dilation=int(random.integers(1, 3)), padding=1),
    )


def jacobian(head: nn.Module, x: torch.Tensor) -> np.ndarray:
    made = torch.autograd.functional.jacobian(lambda v: head(v[None])[0].flatten(), x)
    return made.reshape(made.shape[0], -1).numpy()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("p", "q"), [(1, 1), (1, 2), (2, 2), (2, "inf"), ("inf", "inf")])
def test_no_jacobian_on_the_way_exceeds_a_chain_of_drifts(seed: int, p: object, q: object) -> None:
    """Exact norms of Jacobians, float64, after every step. Catches: a drift taken to the last head instead of the first.

    Weights grow by 40 % a step, so the old bound alone falls below the truth.
    """
    head, norms = small_head(seed).double(), [float(norm) for norm in (p, q)]
    certificate = certify(head, p=p, q=q, input_shape=(1, 7, 7), budget_s=0.1)
    for step in range(3):
        torch.manual_seed(step)
        with torch.no_grad():
            for layer in head[::2]:
                layer.weight.mul_(1.2 + 0.2 * torch.rand_like(layer.weight))
        certificate = certify(head, p=p, q=q, input_shape=(1, 7, 7), method="fast", previous=certificate)
        points = 3.0 * torch.randn(6, 1, 7, 7, dtype=torch.float64)
        assert max(dense_norm(jacobian(head, x), *norms) for x in points) <= certificate.value
        certificate.check(head)


@pytest.mark.parametrize(("p", "q"), [(1, 1), (1, 2), (2, 2)])
def test_training_steps_with_momentum_stay_near_a_fresh_certificate(p: object, q: object) -> None:
    """A second method: the certificate without an anchor, for each step; its value is proven on its own."""
    head, shape = small_head(4), (1, 7, 7)
    certificate = certify(head, p=p, q=q, input_shape=shape, budget_s=1.0)
    for now in trained(head, shape, steps=2, lr=0.02, seed=4):
        certificate = certify(now, p=p, q=q, input_shape=shape, method="fast", previous=certificate)
        assert certificate.value <= 1.25 * certify(now, p=p, q=q, input_shape=shape, budget_s=1.0).value
        assert certificate.value >= lower_bound(now, p=p, q=q, input_shape=shape).value


def test_layers_stay_bounds_of_the_layers_where_patches_bound_them() -> None:
    """Dense comparison of each 2→2 entry. The second kernel is too large for a symbol within the work of a drift."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.Conv2d(1, 32, 3, stride=2), nn.ReLU(), nn.Conv2d(32, 32, 5, padding=2))
    old = certify(head, p=2, q=2, input_shape=(1, 11, 11), method="fast")
    with torch.no_grad():
        head[2].weight.mul_(1.01)
    now = certify(head, p=2, q=2, input_shape=(1, 11, 11), method="fast", previous=old)
    found = {layer.name: layer for layer in now.layers if layer.p == layer.q == 2}
    assert found["2"].how == "patches"
    assert dense_norm(dense_matrix(head[2], (32, 5, 5)), 2, 2) <= found["2"].value
    assert dense_norm(dense_matrix(head[0], (1, 11, 11)), 2, 2) <= found["0"].value


@pytest.mark.parametrize("seed", range(24))
def test_no_secants_between_two_convolutions_exceed_their_table(seed: int) -> None:
    """Dense products for random and for the worst secants. Mutations caught: P and N exchanged; a stride left out."""
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    sizes = random.integers(1, 4, size=8)
    inner = nn.Conv1d(2, 3, int(sizes[0]), stride=int(sizes[1]), dilation=int(sizes[2]), padding=int(sizes[3]) - 1)
    outer = nn.Conv1d(3, 2, int(sizes[4]), stride=int(sizes[5]), dilation=int(sizes[6]), padding=int(sizes[7]) - 1)
    for layer in (inner, outer):
        nn.init.normal_(layer.weight)
        nn.init.zeros_(layer.bias)
    size = 48
    between = inner(torch.zeros(1, 2, size)).shape[1:]
    A, B = dense_matrix(outer, tuple(between)), dense_matrix(inner, (2, size))
    low, high = [(0.0, 1.0), (-0.5, 1.0), (0.25, 2.0), (-3.0, 1.0)][seed % 4]
    table = sandwich_table(
        outer.weight.detach().double().numpy(),
        inner.weight.detach().double().numpy(),
        strides=(outer.stride, inner.stride),
        dilations=(outer.dilation, inner.dilation),
        slopes=(low, high),
    )
    choices = [random.choice([low, high], size=A.shape[1]) for _ in range(20)]
    for _ in range(40):
        row, column = int(random.integers(A.shape[0])), int(random.integers(B.shape[1]))
        products = A[row] * B[:, column]
        choices += [np.where(products > 0.0, high, low), np.where(products > 0.0, low, high)]
    for D in choices:
        made = (A * D) @ B
        for r, first in enumerate((1, 2, np.inf)):
            for s, second in enumerate((1, 2, np.inf)):
                if (first, second) not in ((2, 1), (np.inf, 1), (np.inf, 2)):
                    assert dense_norm(made, first, second) <= table[r][s] * (1 + 1e-13)
    if low <= 0.0:
        ends = [
            A[row] * B[:, column] @ np.where((A[row] * B[:, column] > 0.0) == up, high, low)
            for row in range(A.shape[0])
            for column in range(B.shape[1])
            for up in (True, False)
        ]
        assert max(np.abs(ends)) == pytest.approx(table[0][2], rel=1e-12)


@pytest.mark.parametrize("strides", [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2)])
def test_kernels_without_negative_entries_attain_their_sandwich(strides: tuple[int, int]) -> None:
    """Dense comparison: with D = 1 the product is its own bound. Mutation caught: only one of the strides in phases."""
    torch.manual_seed(0)
    inner, outer = nn.Conv1d(2, 3, 4, stride=strides[1]), nn.Conv1d(3, 2, 3, stride=strides[0])
    for layer in (inner, outer):
        nn.init.uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
    B = dense_matrix(inner, (2, 90))
    made = dense_matrix(outer, (3, B.shape[0] // 3)) @ B
    A, inner_kernel = (layer.weight.detach().double().numpy() for layer in (outer, inner))
    each = {"strides": (outer.stride, inner.stride), "dilations": ((1,), (1,))}
    table = sandwich_table(A, inner_kernel, slopes=(0.0, 1.0), **each)
    for r, s, p, q in ((0, 0, 1, 1), (0, 1, 1, 2), (1, 2, 2, np.inf), (2, 2, np.inf, np.inf)):
        assert table[r][s] == pytest.approx(dense_norm(made, p, q), rel=1e-9)
    assert dense_norm(made, 2, 2) <= table[1][1] <= 1.05 * dense_norm(made, 2, 2)


def test_a_coherent_change_behind_a_relu_costs_half_of_what_norms_say() -> None:
    """By hand: ΔA = t·1ᵀ on v = (1, −1): secants in [0, 1] let at most one of the two entries pass, norms see both."""
    head = nn.Sequential(nn.Conv1d(1, 2, 1, bias=False), nn.ReLU(), nn.Conv1d(2, 1, 1, bias=False))
    head[0].weight.data = torch.tensor([1.0, -1.0]).reshape(2, 1, 1)
    head[2].weight.data = torch.tensor([1.0, 0.0]).reshape(1, 2, 1)
    old = certify(head, p=1, q=1, input_shape=(1, 3))
    head[2].weight.data += 0.25
    now = certify(head, p=1, q=1, input_shape=(1, 3), method="fast", previous=old)
    assert old.value == pytest.approx(1.0, rel=1e-9)
    assert now.value == pytest.approx(1.25, rel=1e-6)


@pytest.mark.parametrize("scale", [1e-200, 1e-100, 1e100])
def test_sandwiches_of_extreme_scale_scale_their_table(scale: float) -> None:
    """Mutation caught: squares that underflow to 0."""
    random = np.random.default_rng(0)
    A, B = random.normal(size=(2, 3, 3)), random.normal(size=(3, 2, 2))
    shape = {"strides": ((1,), (1,)), "dilations": ((1,), (1,)), "slopes": (0.0, 1.0)}
    unit, scaled = sandwich_table(A, B, **shape), sandwich_table(scale * A, B, **shape)
    for r, s in ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)):
        assert scaled[r][s] == pytest.approx(scale * unit[r][s], rel=1e-9)
    A[:, 1:], B[:1] = 0.0, B[:1] * 1e-250  # the largest entries never meet
    tiny = sandwich_table(A, B, **shape)
    assert 0.0 < tiny[0][0] < 1e-240
    assert tiny[0][1] >= np.linalg.norm(A[:, 0, 0]) * np.abs(B[0]).min() / 2.0


def test_the_anchor_says_how_much_has_been_added_even_where_norms_have_won() -> None:
    """Catches: a new anchor at a loose bound, after which value / anchor.value is near 1 again."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
    first = certify(head, p=2, q=2, input_shape=(3,))
    with torch.no_grad():
        head[2].weight.mul_(-1.0)
    second = certify(head, p=2, q=2, input_shape=(3,), method="fast", previous=first)
    assert second.method == "norm-dp"
    third = certify(head, p=2, q=2, input_shape=(3,), method="fast", previous=second)
    assert third.anchor.value == second.anchor.value == first.value < third.value
