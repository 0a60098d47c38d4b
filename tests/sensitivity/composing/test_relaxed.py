"""Certificates of whole heads against every activation pattern, and where the relaxation must step aside."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from sensitivity import UnsupportedModuleError, certify
from sensitivity.capturing.capture import record
from sensitivity.composing.boxes import boxes_of, local_slopes
from sensitivity.composing.linear_map import Work
from sensitivity.composing.network import Network, build_network, with_slopes
from sensitivity.composing.norm_dp import compose
from sensitivity.composing.relaxed import program_of, relaxed
from sensitivity.operators.operator import Effort

SIX = [(1.0, 1.0), (1.0, 2.0), (2.0, 1.0), (2.0, 2.0), (math.inf, 1.0), (math.inf, 2.0)]
NINE = [*SIX, (1.0, math.inf), (2.0, math.inf), (math.inf, math.inf)]
EFFORT = Effort(dense_entries=600_000, symbol_flops=2e7)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def network_of(head: nn.Module, shape: tuple[int, ...], box: tuple[float, float] | None = None) -> Network:
    recording = record(head, input_shape=shape, dtype=torch.float64)
    composed = compose(recording, p=2, q=2, effort=EFFORT, same_norm=False)
    slopes = {}
    if box is not None:
        low, high = (np.full(math.prod(shape), side) for side in box)
        slopes = local_slopes(recording, boxes_of(recording, tables=composed.tables, low=low, high=high))
    network = build_network(recording, tables=composed.tables, joint=composed.joint, work=Work(flops=1e10))
    return with_slopes(network, slopes)


def own_bound(network: Network, p: float, q: float) -> float | None:
    """What the relaxation alone proves, from poor bounds on the columns."""
    bounds = np.full(network.num_in, 1e6) if p == 1.0 else None
    return relaxed(network, p=p, q=q, bounds=bounds, work=Work(flops=1e11))


def norm(J: np.ndarray, p: float, q: float) -> float:
    if p == 1.0:
        return float(np.linalg.norm(J, ord=q, axis=0).max())
    if q == math.inf:
        return float(np.linalg.norm(J, ord=2 if p == 2.0 else 1, axis=1).max())
    if p == q == 2.0:
        return float(np.linalg.norm(J, 2))
    J, q = (J.T, 2.0) if p == 2.0 else (J, q)
    signs = np.array(list(itertools.product([1.0, -1.0], repeat=J.shape[1]))).T
    return float(np.linalg.norm(J @ signs, ord=q, axis=0).max())


def largest(weights: list[np.ndarray], slopes: list[tuple[np.ndarray, np.ndarray]], *, skip: bool = False) -> dict:
    """The largest norm of W_n·D·…·D·W_1 (+ I) over every choice of ends of the slopes D: the exact supremum."""
    best = dict.fromkeys(NINE, 0.0)
    ends = [sorted({a, b}) for low, high in slopes for a, b in zip(low, high, strict=True)]
    for chosen in itertools.product(*ends):
        J, start = weights[0], 0
        for W in weights[1:]:
            d = np.array(chosen[start : start + J.shape[0]])
            J, start = W @ (d[:, None] * J), start + J.shape[0]
        if start < len(chosen):
            J = np.array(chosen[start:])[:, None] * J
        J = J + np.eye(J.shape[0]) if skip else J
        for pair in NINE:
            best[pair] = max(best[pair], norm(J, *pair))
    return best


def weights_of(head: nn.Module) -> list[np.ndarray]:
    return [module.weight.detach().double().numpy() for module in head.modules() if isinstance(module, nn.Linear)]


def mlp(
    *widths: int, seed: int, activation: nn.Module, last: bool = False, dtype: torch.dtype = torch.float32
) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after, dtype=dtype), activation]
    return nn.Sequential(*(layers if last else layers[:-1]))


@pytest.mark.parametrize(
    ("widths", "dtype"),
    [((4, 6, 3), torch.float32), ((3, 4, 4, 3), torch.float64), ((4, 3, 3, 2, 3), torch.float32)],
    ids=str,
)
def test_relu_chains_are_bounded_within_a_few_percent(widths: tuple[int, ...], dtype: torch.dtype) -> None:
    """Exact suprema over all patterns: at or above for all nine norms, and at most 15 % above for 1→2 and 2→2,
    25 % for the others. Mutants: a stray too few, the wrong norms of the stray, a
    knot's slopes for another's.
    """
    head = mlp(*widths, seed=len(widths), activation=nn.ReLU(), dtype=dtype)
    slopes = [(np.zeros(n), np.ones(n)) for n in widths[1:-1]]
    truth, network = largest(weights_of(head), slopes), network_of(head, (widths[0],))
    for p, q in NINE:
        value = certify(head, p=p, q=q, input_shape=(widths[0],), budget_s=1.0).value
        assert truth[p, q] * (1 - 1e-13) <= value
        if (p, q) != (1.0, math.inf):  # which columns alone bound
            assert value <= truth[p, q] * (1.15 if (p, q) in ((1.0, 2.0), (2.0, 2.0)) else 1.25)
        if q != math.inf:
            own = own_bound(network, p, q)
            assert own is not None
            assert truth[p, q] * (1 - 1e-13) <= own <= truth[p, q] * 1.25


@pytest.mark.parametrize(
    ("activation", "low", "high"),
    [(nn.LeakyReLU(-0.7), -0.7, 1.0), (nn.LeakyReLU(2.0), 1.0, 2.0), (nn.LeakyReLU(0.999), 0.999, 1.0)],
    ids=str,
)
def test_slopes_of_any_sign_are_bounded_from_above(activation: nn.Module, low: float, high: float) -> None:
    """Mixed signs, both above 0, almost linear; with a skip, whose identity is read beside a knot."""
    head = Residual(mlp(3, 5, 3, seed=1, activation=activation, dtype=torch.float64))
    truth = largest(weights_of(head), [(np.full(5, low), np.full(5, high))], skip=True)
    network = network_of(head, (3,))
    for p, q in SIX:
        own = own_bound(network, p, q)
        assert own is not None
        assert truth[p, q] * (1 - 1e-12) <= own <= truth[p, q] * 1.25
        assert truth[p, q] * (1 - 1e-12) <= certify(head, p=p, q=q, input_shape=(3,), budget_s=0.5).value


@pytest.mark.parametrize("p_q", [(1.0, 1.0), (1.0, 2.0), (2.0, math.inf), (math.inf, math.inf)], ids=str)
def test_wide_skips_are_bounded_by_columns_and_rows(p_q: tuple[float, float]) -> None:
    """A skip of 16 entries: groups of columns, with a sparse identity beside dense weights."""
    head = Residual(mlp(16, 6, 16, seed=0, activation=nn.ReLU()))
    certificate = certify(head, p=p_q[0], q=p_q[1], input_shape=(16,), budget_s=1.0)
    W, V = weights_of(head)
    patterns = np.array(list(itertools.product([0.0, 1.0], repeat=6)))
    truth = max(norm(np.eye(16) + (V * d) @ W, *p_q) for d in patterns)
    assert truth * (1 - 1e-13) <= certificate.value <= 1.15 * truth


@pytest.mark.parametrize(
    ("activation", "seed"),
    [(nn.ReLU(), 0), (nn.ReLU(), 1), (nn.ReLU(), 2), (nn.Tanh(), 1), (nn.Tanh(), 2), (nn.LeakyReLU(-0.4), 3)],
    ids=str,
)
def test_boxes_have_slopes_of_their_own(activation: nn.Module, seed: int) -> None:
    """Over a box some units stay on or off; the bound is that of the local slopes, over all their ends."""
    head = mlp(3, 5, 4, seed=seed, activation=activation, last=bool(seed % 2), dtype=torch.float64)
    head[0].bias.data.add_(torch.linspace(-1.0, 1.0, 5, dtype=torch.float64))
    network = network_of(head, (3,), box=(-0.3, 0.4))
    slopes = [(knot.low, knot.high) for knot in network.knots]
    truth = largest(weights_of(head), slopes)
    everywhere = own_bound(network_of(head, (3,)), 2.0, 2.0)
    for p, q in SIX:
        own = own_bound(network, p, q)
        if (p, q) in SIX[seed % 2 :: 2]:
            certificate = certify(head, p=p, q=q, input_shape=(3,), input_box=(-0.3, 0.4), budget_s=0.5)
            assert truth[p, q] * (1 - 1e-12) <= certificate.value
        assert own is None or truth[p, q] * (1 - 1e-12) <= own <= truth[p, q] * 1.3
    own = own_bound(network, 2.0, 2.0)
    assert own is None or everywhere is None or own <= everywhere * (1 + 1e-3)


@pytest.mark.parametrize(
    "steepest",
    [[1.0, 1.0, 1.0], [0.25, 3.0, 0.7], [1e-5, 1.9, 0.0], [7.0, 7.0, 1e-20], [0.0, 0.5, 0.5], [0.0, 0.0, 0.0]],
    ids=str,
)
def test_a_last_activation_counts_by_its_steepest_slopes(steepest: list[float]) -> None:
    """PReLU's negative slopes per channel, steeper or less steep than 1; the true factor per entry is max(|a|, |b|).

    Mutants: shares rounded down, the factor forgotten, the identity taken for any map.
    """
    head = mlp(3, 4, 3, seed=2, activation=nn.ReLU(), dtype=torch.float64)
    head.append(nn.PReLU(3, dtype=torch.float64))
    head[-1].weight.data = torch.tensor(steepest, dtype=torch.float64)
    ends = (np.minimum(steepest, 1.0), np.maximum(steepest, 1.0))
    truth = largest(weights_of(head), [(np.zeros(4), np.ones(4)), ends])
    network = network_of(head, (3,))
    for p, q in SIX:
        own = own_bound(network, p, q)
        assert own is not None
        assert truth[p, q] * (1 - 1e-13) <= own <= 2.0 * 1.25 * truth[p, q]
    box_truth = largest(
        weights_of(head), [(knot.low, knot.high) for knot in network_of(head, (3,), box=(-1.0, 1.0)).knots]
    )
    for p, q in SIX:
        certificate = certify(head, p=p, q=q, input_shape=(3,), input_box=(-1.0, 1.0), budget_s=0.3)
        assert box_truth[p, q] * (1 - 1e-13) <= certificate.value


def test_the_program_holds_the_network_times_its_factor() -> None:
    """Shares are powers of two, so exact, never below slope/factor and below twice that."""
    head = nn.Sequential(
        nn.Linear(2, 6, dtype=torch.float64), nn.ReLU(), nn.Linear(6, 6, dtype=torch.float64), nn.PReLU(6)
    )
    values = torch.tensor([0.0, -3.0, 2.99, 1.5, 1.0, 1e-9], dtype=torch.float64)
    head[-1] = nn.PReLU(6, dtype=torch.float64)
    head[-1].weight.data = values
    program, grids, factor = program_of(network_of(head, (2,)))
    assert factor == 3.0
    last = program.reads[-1][1]
    last = last if isinstance(last, np.ndarray) else last.toarray()
    shares = last[:, 0] / weights_of(head)[1][:, 0]
    wanted = np.maximum(np.abs(values.numpy()), 1.0)
    assert (np.log2(shares) % 1.0 == 0.0).all()
    assert (shares * factor >= wanted).all()
    assert (shares * factor < 2.0 * wanted).all()
    assert (grids.x, grids.u, grids.z) == ((2,), ((6,), (6,)), ((6,),))


def sampled(head: nn.Module, shape: tuple[int, ...], *, seed: int, scale: float = 1.0) -> np.ndarray:
    """Jacobians at random records."""
    random = torch.Generator().manual_seed(seed)
    records = scale * torch.randn(16, *shape, generator=random, dtype=torch.float64)
    batch = torch.func.vmap(torch.func.jacrev(lambda x: head(x[None])[0].reshape(-1)))(records)
    return batch.detach().reshape(16, -1, math.prod(shape)).numpy()


@pytest.mark.parametrize(
    ("tail", "shape"),
    [
        (nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.MaxPool1d(2)), (1, 8)),
        (
            nn.Sequential(nn.Conv1d(1, 1, 3), nn.ReLU(), nn.MaxPool1d(3, 1, padding=1), nn.Flatten(), nn.Linear(6, 3)),
            (1, 8),
        ),
        (nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5, eps=0.1)), (4,)),
        (nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5, eps=0.1), nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 3)), (4,)),
        (nn.Sequential(nn.Linear(4, 5), nn.Softmax(dim=1), nn.Linear(5, 3)), (4,)),
        (nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.LayerNorm(5, eps=0.1), nn.ReLU()), (4,)),
    ],
    ids=str,
)
def test_heads_with_maxima_and_normalisations_are_not_exceeded(tail: nn.Module, shape: tuple[int, ...]) -> None:
    head = tail.double()
    network = network_of(head, shape)
    Js = np.concatenate([sampled(head, shape, seed=s, scale=scale) for s, scale in enumerate((0.1, 1.0, 5.0))])
    for p, q in SIX:
        truth = max(norm(J, p, q) for J in Js)
        own = own_bound(network, p, q)
        assert own is None or own >= truth * (1 - 1e-12)
        if p == q or p == 1.0:
            assert certify(head, p=p, q=q, input_shape=shape, budget_s=0.05).value >= truth * (1 - 1e-12)


def test_a_maximum_pool_is_bounded_closely() -> None:
    """One window over all: y = max, so 2→2 is the largest row of the layer below, 1→2 its largest entry."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(3, 6, dtype=torch.float64), nn.Unflatten(1, (1, 6)), nn.MaxPool1d(6))
    W, network = weights_of(head)[0], network_of(head, (3,))
    for (p, q), truth in (((2.0, 2.0), np.linalg.norm(W, axis=1).max()), ((1.0, 2.0), np.abs(W).max())):
        own = own_bound(network, p, q)
        assert own is not None
        assert truth * (1 - 1e-13) <= own <= 2.0 * truth


@pytest.mark.parametrize("scale", [1e-20, 1e-10, 1e10, 1e20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_extreme_weights_are_bounded_or_left_to_other_methods(scale: float, dtype: torch.dtype) -> None:
    head = mlp(2, 3, 2, seed=3, activation=nn.ReLU(), dtype=dtype)
    for module in (head[0], head[2]):
        module.weight.data *= scale
    truth = largest(weights_of(head), [(np.zeros(3), np.ones(3))])
    network = network_of(head, (2,))
    for p, q in SIX:
        bounds = np.full(2, 1e3 * scale**2) if p == 1.0 else None
        own = relaxed(network, p=p, q=q, bounds=bounds, work=Work(flops=1e11))
        assert own is None or truth[p, q] * (1 - 1e-13) <= own
        if q == 2.0:
            assert truth[p, q] * (1 - 1e-13) <= certify(head, p=p, q=q, input_shape=(2,), budget_s=0.2).value


@pytest.mark.parametrize("gain", [1e75, 1e100, 1e-100])
def test_gains_whose_squares_leave_float64_raise_nothing(gain: float) -> None:
    """Values of 1e160 square to infinity inside a factorisation; the head still has its composed bound."""
    head = mlp(2, 2, 2, seed=0, activation=nn.ReLU(), dtype=torch.float64)
    for module in (head[0], head[2]):
        module.weight.data *= gain
    for p, q in NINE:
        certificate = certify(head, p=p, q=q, input_shape=(2,), budget_s=0.2)
        assert certificate.value > 0.0
        assert math.isfinite(certificate.value)


def line(factor: float, bias: float = 0.0) -> nn.Linear:
    layer = nn.Linear(1, 1, dtype=torch.float64)
    layer.weight.data.fill_(factor)
    layer.bias.data.fill_(bias)
    return layer


def test_slopes_whose_product_underflows_do_not_make_a_bound_too_small() -> None:
    """Slope 1.7e-162 between gains of 1e70: the truth is 1.7e-22, and a·b = 2.9e-324 has no float64 of its own."""
    before, behind = [line(1e14) for _ in range(4)], [line(1e14) for _ in range(5)]
    head = nn.Sequential(*before, line(1e14, -10.0), nn.LeakyReLU(1.7e-162), *behind, line(-1.0), nn.ReLU(), line(1.0))
    for p, q in SIX[::2]:
        value = certify(head, p=p, q=q, input_shape=(1,), input_box=(-1e-73, 1e-73), budget_s=1.0).value
        assert value >= 1.7e-22 * (1 - 1e-12)


@pytest.mark.parametrize("zero", ["first", "middle", "last", "norm", "branch", "unit"])
def test_zero_weights_and_dead_units_are_no_trouble(zero: str) -> None:
    """Layers, gains or units of zeros: right bounds and no warnings (which are errors here)."""
    head: nn.Module = mlp(3, 3, 3, 3, seed=4, activation=nn.ReLU(), dtype=torch.float64)
    truth = None
    if zero in ("first", "middle", "last"):
        head[{"first": 0, "middle": 2, "last": 4}[zero]].weight.data.zero_()
        truth = dict.fromkeys(NINE, 0.0)
    elif zero == "norm":
        norm_layer = nn.LayerNorm(3, dtype=torch.float64)
        norm_layer.weight.data.zero_()
        head = nn.Sequential(line_of(3), norm_layer, line_of(3), nn.ReLU(), line_of(3))
        truth = dict.fromkeys(NINE, 0.0)
    elif zero == "branch":
        head[4].weight.data.zero_()
        head = Residual(head)
        truth = {pair: norm(np.eye(3), *pair) for pair in NINE}
    else:
        head[0].weight.data[1] = 0.0
        head[2].weight.data[:, 2] = 0.0
        head[4].weight.data[0] = 0.0
        truth = largest(weights_of(head), [(np.zeros(3), np.ones(3))] * 2)
    for p, q in NINE:
        value = certify(head, p=p, q=q, input_shape=(3,), budget_s=0.5).value
        assert truth[p, q] * (1 - 1e-13) <= value <= truth[p, q] * (1.25 if q != math.inf else 2.0) + 1e-30


@pytest.mark.parametrize("p_q", [(1.0, 1.0), (2.0, 2.0), (math.inf, 1.0)], ids=str)
def test_matrices_without_entries_are_no_trouble(p_q: tuple[float, float]) -> None:
    """A convolution that sees padding alone, and a layer of zeros over records of two axes: they move nothing."""
    blind = nn.Sequential(nn.Conv1d(2, 1, 1, stride=3), nn.ReLU(), nn.Conv1d(1, 1, 1, stride=3, padding=1, dilation=2))
    zero = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    zero[2].weight.data.zero_()
    for head, shape in ((blind, (2, 6)), (zero, (2, 3))):
        assert 0.0 <= certify(head, p=p_q[0], q=p_q[1], input_shape=shape).value < 1e-30


def line_of(width: int) -> nn.Linear:
    torch.manual_seed(width)
    return nn.Linear(width, width, dtype=torch.float64)


def test_a_column_that_passes_by_a_normalisation_is_bounded() -> None:
    """x₀ and x₁ reach y beside the LayerNorm that reads the rest, and theirs are the largest columns."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.rest = nn.Linear(2, 3), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([1e6 * torch.relu(self.first(x[:, :2])), self.rest(x[:, 2:])], dim=1)

    head = Beside()
    W = 1e6 * head.first.weight.detach().double().numpy()
    for q in (1.0, 2.0):
        truth = np.linalg.norm(W, ord=q, axis=0).max()
        assert truth * (1 - 1e-6) <= certify(head, p=1, q=q, input_shape=(6,)).value <= truth * 1.1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_refused_as_before(bad: float) -> None:
    head = mlp(3, 4, 3, seed=0, activation=nn.ReLU())
    head[2].weight.data[1, 1] = bad
    for p, q in NINE:
        with pytest.raises(UnsupportedModuleError, match="NaN or infinity"):
            certify(head, p=p, q=q, input_shape=(3,))


def test_batch_norms_are_bounded_with_the_errors_of_their_factors() -> None:
    """Stored maps are off by casts of ε; against the exact factors of both readings of ε, in all nine norms."""
    torch.manual_seed(1)
    batch_norm = nn.BatchNorm1d(4, eps=1e-3, dtype=torch.float64)
    batch_norm.running_var.data = torch.tensor([1e-3, 1.0, 5.0, 0.1], dtype=torch.float64)
    head = nn.Sequential(
        nn.Linear(3, 4, dtype=torch.float64), batch_norm, nn.ReLU(), nn.Linear(4, 3, dtype=torch.float64)
    ).eval()
    W, V = weights_of(head)
    for eps in (1e-3, float(np.float32(1e-3))):
        scaled = W / np.sqrt(batch_norm.running_var.numpy() + eps)[:, None]
        truth = largest([scaled, V], [(np.zeros(4), np.ones(4))])
        for p, q in NINE:
            assert truth[p, q] * (1 - 1e-13) <= certify(head, p=p, q=q, input_shape=(3,), budget_s=0.3).value


def test_without_work_there_is_no_bound() -> None:
    network = network_of(mlp(4, 6, 4, seed=0, activation=nn.ReLU()), (4,))
    assert relaxed(network, p=2.0, q=2.0, bounds=None, work=Work(flops=0.0)) is None
    assert relaxed(network, p=1.0, q=1.0, bounds=np.full(4, 9.0), work=Work(flops=0.0)) == pytest.approx(9.0, rel=1e-12)


@pytest.mark.parametrize(("p", "q"), [(1, 1), (1, 2), (2, 2), (math.inf, 2), (math.inf, math.inf)])
def test_a_normalisation_whose_gain_is_zero_has_norm_zero(p: float, q: float) -> None:
    """Its ball is a point, which no multiplier describes; other methods say 0."""
    norm = nn.LayerNorm(4)
    norm.weight.data.zero_()
    head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), norm, nn.Linear(4, 3))
    assert certify(head, p=p, q=q, input_shape=4).value == 0.0
