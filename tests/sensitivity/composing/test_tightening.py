"""Every tightening method against Jacobians and pairs that it must not fall below, on random heads of mixed operators."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from sensitivity import certify
from sensitivity.capturing.capture import record
from sensitivity.composing import tightening
from sensitivity.composing.boxes import boxes_of
from sensitivity.composing.columns import Columns
from sensitivity.composing.linear_map import Work
from sensitivity.composing.linearised import linearise, strays
from sensitivity.composing.loop_transform import loop_transformed
from sensitivity.composing.network import Network, build_network, transposed, with_slopes
from sensitivity.composing.norm_dp import HeadBound, compose
from sensitivity.operators.operator import Effort

NORMS = (1, 2, math.inf)
EFFORT = Effort(dense_entries=600_000, symbol_flops=2e7)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Branches(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.first(x), self.second(x)], dim=1) - 0.5


def random_head(seed: int) -> tuple[nn.Module, tuple[int, ...]]:
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    activation = [nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU, lambda: nn.LeakyReLU(2.0), nn.Softsign, nn.ELU][
        random.integers(7)
    ]
    if seed % 2:
        layers: list[nn.Module] = []
        width = int(random.integers(2, 7))
        shape: tuple[int, ...] = (width,)
        for _ in range(int(random.integers(1, 4))):
            kind = random.integers(3)
            if kind == 0:
                layers += [Residual(nn.Sequential(nn.Linear(width, 5), activation(), nn.Linear(5, width)))]
            elif kind == 1:
                layers += [Branches(nn.Linear(width, 3), nn.Sequential(nn.Linear(width, 4), activation()))]
                width = 7
            else:
                layers += [nn.Linear(width, width + 1), activation()]
                width += 1
        return nn.Sequential(*layers).eval(), shape
    channels = int(random.integers(1, 3))
    norm = nn.BatchNorm2d(3)
    norm.running_var.uniform_(0.2, 2.0)
    norm.weight.data.normal_()
    layers = [nn.Conv2d(channels, 3, 3, padding=1, stride=int(random.integers(1, 3))), norm, activation()]
    extra = random.integers(4)
    if extra == 0:
        layers += [nn.MaxPool2d(2, stride=1), nn.Conv2d(3, 2, 2)]
    elif extra == 1:
        layers += [nn.AvgPool2d(2, stride=1), nn.Conv2d(3, 2, 2), activation()]
    elif extra == 2:
        layers += [Residual(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), activation())), nn.Flatten()]
    return nn.Sequential(*layers).eval(), (channels, 6, 7)


def largest_jacobian_norms(head: nn.Module, shape: tuple[int, ...], low: float, high: float, seed: int) -> np.ndarray:
    """Largest norms (p, q), p ≤ q, over the Jacobians at random records: what no bound may fall below."""
    net = head.double()
    random = torch.Generator().manual_seed(seed)
    records = low + (high - low) * torch.rand((40, *shape), generator=random, dtype=torch.float64)
    best = np.zeros((3, 3))
    for x in records:
        J = torch.autograd.functional.jacobian(lambda r: net(r[None]).reshape(-1), x).reshape(-1, x.numel()).numpy()
        for s, q in enumerate(NORMS):
            best[0, s] = max(best[0, s], np.linalg.norm(J, ord=q, axis=0).max())
        best[1, 1] = max(best[1, 1], np.linalg.norm(J, 2))
        best[1, 2] = max(best[1, 2], np.linalg.norm(J, axis=1).max())
        best[2, 2] = max(best[2, 2], np.abs(J).sum(axis=1).max())
        for r, s in ((1, 0), (2, 0), (2, 1)):  # attained by sign vectors, or by the lower norms
            signs = np.sign(np.random.default_rng(seed).standard_normal((60, J.shape[1])))
            units = signs / (1.0 if r == 2 else np.linalg.norm(signs, axis=1, keepdims=True))
            best[r, s] = max(best[r, s], np.linalg.norm(J @ units.T, ord=NORMS[s], axis=0).max())
    head.float()
    return best


def network_of(head: nn.Module, shape: tuple[int, ...]) -> tuple[Network, HeadBound]:
    recording = record(head, input_shape=shape, dtype=torch.float32)
    composed = compose(recording, p=2, q=2, effort=EFFORT, same_norm=False)
    network = build_network(recording, tables=composed.tables, joint=composed.joint, work=Work(flops=1e10))
    return network, composed


@pytest.mark.parametrize("seed", range(40))
def test_no_jacobian_exceeds_any_method(seed: int) -> None:
    """Catches: a dropped half width, centre slopes taken as 1/2 for slopes outside [0, 1], a lost branch or sign."""
    head, shape = random_head(seed)
    truth = largest_jacobian_norms(head, shape, -3.0, 3.0, seed)
    network, _ = network_of(head, shape)
    maps = linearise(network, work=Work(flops=1e10))
    for r, p in enumerate(NORMS):
        row = loop_transformed(network, maps, p=p)
        for s in range(3):
            assert row[s] >= truth[r, s] * (1 - 1e-12)
    columns = Columns(network, maps, work=Work(flops=1e9))
    for s in range(3):
        assert columns.bounds(s).max() >= truth[0, s] * (1 - 1e-12)
    turned = transposed(network)
    if turned is not None:
        rows = Columns(turned, linearise(turned, work=Work(flops=1e10)), work=Work(flops=1e9))
        for s, r in ((0, 2), (1, 1), (2, 0)):
            assert rows.bounds(s).max() >= truth[r, 2] * (1 - 1e-12)
    assert max(off for off in strays(network).values() if math.isfinite(off)) < 1e-6


@pytest.mark.parametrize("seed", range(8))
def test_no_jacobian_of_a_box_exceeds_the_certificate(seed: int) -> None:
    head, shape = random_head(seed + 500)
    truth = largest_jacobian_norms(head, shape, -0.2, 0.3, seed)
    for r, p in enumerate(NORMS):
        for s, q in enumerate(NORMS):
            everywhere = certify(head, p=p, q=q, input_shape=shape, budget_s=0.1)
            boxed = certify(head, p=p, q=q, input_shape=shape, input_box=(-0.2, 0.3), budget_s=0.1)
            assert truth[r, s] * (1 - 1e-12) <= boxed.value <= everywhere.value * (1 + 1e-12)
            assert boxed.value <= certify(head, p=p, q=q, input_shape=shape, method="fast").value * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_every_value_lies_in_its_box_and_float32_errs_less_than_its_bound(seed: int) -> None:
    head, shape = random_head(seed + 900)
    recording = record(head, input_shape=shape, dtype=torch.float32)
    composed = compose(recording, p=2, q=2, effort=EFFORT, same_norm=False)
    size = math.prod(shape)
    boxes = boxes_of(recording, tables=composed.tables, low=np.full(size, -1.0), high=np.full(size, 2.0))
    random = torch.Generator().manual_seed(seed)
    records = 3.0 * torch.rand((200, *shape), generator=random) - 1.0
    with torch.no_grad():
        rounded = head(records).double().reshape(200, -1).numpy()
        exact = head.double()(records.double()).reshape(200, -1).numpy()
    box = boxes[recording.output]
    if np.isfinite(box.low).all():
        assert (box.low <= exact.min(axis=0) + 1e-12).all()
        assert (box.high >= exact.max(axis=0) - 1e-12).all()
        wide = (box.high - box.low).max()
        assert wide < 1e4
    assert (np.abs(rounded - exact).max(axis=0) <= box.error).all()


def test_the_map_never_exceeds_the_diameter_of_a_bounded_output() -> None:
    """tanh outputs lie in [−1, 1]: 5 of them are at most 2·√5 apart, however far the inputs."""
    head = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
    certificate = certify(head, p=2, q=2, input_shape=(4,))
    assert 2 * math.sqrt(5) <= certificate.map(1e6) <= 2 * math.sqrt(5) * (1 + 1e-9)
    assert certificate.map(1e-3) == pytest.approx(certificate.value * 1e-3)


def test_identity_gelu_identity_is_not_taken_for_one() -> None:
    """The naive loop transform says 1.0 (sensitivity of GELU is 1.12890)."""
    head = nn.Sequential(nn.Identity(), nn.GELU())
    for p in NORMS:
        assert 1.1289 < certify(head, p=p, q=p, input_shape=(3,)).value < 1.13


def test_a_relu_that_the_box_never_switches_is_linear() -> None:
    """W₂W₁ = [1 −1]·[1; 1] = 0 where both ReLUs are on: |x| ≤ 1 and bias 2 keep them on."""
    head = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    head[0].weight.data.fill_(1.0)
    head[0].bias.data.fill_(2.0)
    head[2].weight.data.copy_(torch.tensor([[1.0, -1.0]]))
    assert certify(head, p=2, q=2, input_shape=(1,)).value >= 1.0
    assert certify(head, p=2, q=2, input_shape=(1,), input_box=(-1.0, 1.0)).value < 1e-9


def test_equal_heads_and_budgets_give_equal_certificates() -> None:
    head, shape = random_head(7)
    first, second = (certify(head, p=1, q=1, input_shape=shape) for _ in range(2))
    assert (first.value, first.method) == (second.value, second.method)


@pytest.mark.parametrize(
    ("layer", "truth"),
    [
        (nn.Softmax(dim=1), math.sqrt(2.0)),  # between two corners of the simplex
        (nn.LayerNorm(4), 2.0 * math.sqrt(4.0)),  # between opposite records of norm √n
    ],
    ids=["softmax", "layer norm"],
)
def test_bounded_heads_have_a_diameter_at_or_above_the_truth(layer: nn.Module, truth: float) -> None:
    certificate = certify(nn.Sequential(nn.Linear(4, 4), layer), p=2, q=2, input_shape=(4,))
    assert truth * (1 - 1e-9) <= certificate.diameter < 4.0 * truth
    assert certificate.map(1e9) <= certificate.diameter * (1 + 1e-12)


@pytest.mark.parametrize("kind", ["none", "tanh"])
def test_cancellation_inside_gelu_counts_as_rounding(kind: str) -> None:
    """GELU near −5 is tiny but computed from terms of size 5: its float32 error is that of the terms."""
    head = nn.GELU(kind)
    certificate = certify(head, p=2, q=2, input_shape=(1,), input_box=(-6.0, -5.5))
    x = torch.linspace(-6.0, -5.5, 4001).reshape(-1, 1)[1:-1]
    error = (head(x).double() - head(x.double())).abs().max()
    assert certificate.rounding is not None
    assert 2.0 * float(error) <= certificate.rounding


def test_results_that_underflow_or_overflow_in_float32_are_no_small_rounding() -> None:
    def scaling(factor: float) -> nn.Linear:
        layer = nn.Linear(1, 1, bias=False)
        layer.weight.data.fill_(factor)
        return layer

    sinking = nn.Sequential(*[scaling(factor) for factor in (1e-20, 1e-24, 1e24, 1e20)])
    certificate = certify(sinking, p=2, q=2, input_shape=(1,), input_box=(0.0, 1.0))
    outputs = sinking(torch.tensor([[0.63040757], [0.63065767]])).detach()
    assert float((outputs[1] - outputs[0]).abs()) <= certificate.map(2.6e-4)
    bursting = nn.Sequential(*[scaling(factor) for factor in (1e20, 1e20, 1e-20, 1e-20)])
    assert certify(bursting, p=2, q=2, input_shape=(1,), input_box=(0.0, 1.0)).rounding is None


def test_a_factor_that_is_one_up_to_its_cast_keeps_its_error() -> None:
    """Catches: shortcuts past the identity that forget how far it may be from the truth."""
    variance = float(np.float32(3 * 2.0**-26))
    norms = [nn.BatchNorm1d(1, eps=1.0 - variance) for _ in range(200)]
    for norm in norms:
        norm.running_var.fill_(variance)
    cast = 200 * abs(float(np.float32(1.0 - variance)) - (1.0 - variance)) / 2.0
    assert certify(nn.Sequential(*norms).eval(), p=2, q=2, input_shape=(1,)).value >= 1.0 + 0.9 * cast


def test_adding_a_bias_is_rounded_even_where_the_weights_are_ones() -> None:
    """Catches: taking a linear layer for exact because each of its rows holds a single 1."""
    head = nn.Linear(1, 1)
    head.weight.data.fill_(1.0)
    head.bias.data.fill_(1e4)
    certificate = certify(head, p=2, q=2, input_shape=(1,), input_box=(0.0, 1.0))
    outputs = head(torch.tensor([[4.8e-4], [5.0e-4]])).detach()  # on both sides of half a unit in the last place
    assert certificate.rounding is not None
    assert 9e-4 < float((outputs[1] - outputs[0]).abs()) <= certificate.map(2.1e-5)


def test_stray_maps_are_followed_through_every_knot() -> None:
    """An opaque knot passes errors on by its 2→2 norm."""
    head = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Softmax(dim=1), nn.Linear(4, 4))
    network, _ = network_of(head, (4,))
    off = strays(network)
    assert max(off.values()) < 1e-12
    moved = replace(network.knots[1].reads[1], error=1e-3)
    knots = (network.knots[0], replace(network.knots[1], reads={1: moved}), *network.knots[2:])
    farther = strays(replace(network, knots=knots))
    first, last = network.knots[0].reads[0].matrix.toarray(), network.output[2].matrix.toarray()
    # Attained by a rank-one error of norm 1e-3, slopes 1 and half the identity in softmax's place.
    assert farther[3] >= 0.5 * 1e-3 * np.linalg.norm(last, 2) * np.linalg.norm(first, 2)


@pytest.mark.parametrize(("box", "is_same"), [((-1.0, 1.0), True), ((0.0, 1.0), False)])
def test_a_box_that_changes_no_slope_costs_no_second_run_and_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, box: tuple[float, float], is_same: bool
) -> None:
    """Catches: a second run left out where a slope differs; the first taken for another one."""
    torch.manual_seed(3)
    head = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 2)).eval()
    head[0].weight.data.abs_()
    head[0].bias.data.fill_(0.01)  # the first ReLU is open over inputs from 0 on, and not over others
    runs: list[Network] = []
    honest = tightening._of_network

    def counted(network: Network, *args: object, **named: object) -> list[tuple[str, float]]:
        runs.append(network)
        return honest(network, *args, **named)

    monkeypatch.setattr(tightening, "_of_network", counted)
    boxed = certify(head, p=2, q=2, input_shape=(4,), input_box=box)
    assert len(runs) == (1 if is_same else 2)
    everywhere = certify(head, p=2, q=2, input_shape=(4,))
    assert boxed.value == everywhere.value if is_same else boxed.value < everywhere.value
    equal = replace(runs[0], knots=tuple(replace(knot, low=knot.low.copy()) for knot in runs[0].knots))
    assert with_slopes(runs[0], {knot.index: (knot.low, knot.high) for knot in equal.knots}) is runs[0]
    composed = compose(record(head, input_shape=(4,), dtype=torch.float32), p=2, q=2, effort=EFFORT, same_norm=False)
    found = [honest(network, composed, p=2.0, q=2.0, work=Work(flops=1e8)) for network in (runs[0], equal)]
    assert found[0] == found[1]  # what the second run of an equal network would have given
