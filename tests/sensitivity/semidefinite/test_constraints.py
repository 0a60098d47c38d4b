"""Each constraint against pairs of records of real modules, and its lifted form against its quadratic form."""

import math

import numpy as np
import pytest
import torch
from scipy import sparse
from torch import nn

from sensitivity.capturing.capture import record
from sensitivity.operators.pooling_rules import MAXIMA, maximum_pattern
from sensitivity.operators.slopes import slope_range
from sensitivity.semidefinite.constraints import LEAST_RADIUS, Constraint, Form, Slopes, WholeNorm, Windows


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def value_of(form: Form, u: np.ndarray, z: np.ndarray) -> tuple[float, float]:
    """The form, term by term, and the sum of its terms' sizes; u and z hold one vector per column."""
    terms = [form.own[:, None] * z * z]
    if form.cross is not None:
        terms.append(2.0 * form.cross[:, None] * z * (u if form.C is None else form.C.toarray() @ u))
    for B, weights in form.products:
        terms.append(weights[:, None] * (u if B is None else B.toarray() @ u) ** 2)
    return sum(float(term.sum()) for term in terms), sum(float(np.abs(term).sum()) for term in terms)


def assert_allowed(constraint: Constraint, u: np.ndarray, z: np.ndarray, *, seed: int) -> None:
    """No multipliers make the form positive: single ones, equal ones, and random ones over many sizes."""
    random = np.random.default_rng(seed)
    n = constraint.size
    single = np.eye(n)[random.permutation(n)[:4]] + 1e-30
    for multipliers in (np.ones(n), 10.0 ** random.uniform(-6, 6, n), *single):
        value, size = value_of(constraint.form(multipliers), u[:, None], z[:, None])
        assert value <= 1e-13 * size


ACTIVATIONS = [
    *(
        nn.ReLU(),
        nn.GELU(),
        nn.GELU("tanh"),
        nn.SiLU(),
        nn.Mish(),
        nn.SELU(),
        nn.ELU(1.7),
        nn.CELU(0.6),
        nn.Hardswish(),
    ),
    *(
        nn.Hardsigmoid(),
        nn.Sigmoid(),
        nn.Tanh(),
        nn.LeakyReLU(-0.4),
        nn.LeakyReLU(2.0),
        nn.Softsign(),
        nn.Softshrink(0.4),
    ),
    *(nn.LogSigmoid(), nn.Tanhshrink(), nn.ReLU6(), nn.Hardtanh(-0.3, 2.0), nn.Softplus()),
]


@pytest.mark.parametrize("layer", ACTIVATIONS, ids=str)
def test_no_pair_of_an_activation_breaks_its_slopes(layer: nn.Module) -> None:
    """Mutants: the mixed term without a sign or without ½, a·b for |a·b|."""
    nodes = record(layer, input_shape=(7,), dtype=torch.float64).nodes
    node = next(node for node in nodes if slope_range_of(node) is not None)
    low, high = (np.full(400, float(side[0])) for side in slope_range_of(node))
    random = torch.Generator().manual_seed(3)
    x = torch.randn(400, generator=random, dtype=torch.float64) * torch.logspace(-2, 1, 400, dtype=torch.float64)
    other = x + torch.randn(400, generator=random, dtype=torch.float64) * torch.logspace(
        1, -3, 400, dtype=torch.float64
    )
    u, z = (x - other).numpy(), (layer(x[None])[0] - layer(other[None])[0]).detach().numpy()
    constraint = Slopes(low=low, high=high).widened()
    assert_allowed(constraint, u, z, seed=1)
    beyond = np.where(np.arange(400) % 2, high + 0.05, low - 0.05) * u
    values = [
        value_of(constraint.form(np.eye(400)[o] + 1e-40), u[:, None], beyond[:, None])[0] for o in range(0, 400, 37)
    ]
    assert min(values) > 0.0  # and slopes outside do break them


def slope_range_of(node):
    try:
        return slope_range(node.op, args=node.args[1:], kwargs=node.kwargs, dtype=torch.float64)
    except (ValueError, IndexError):
        return None


MAXIMUM_HEADS = [
    (nn.MaxPool1d(3, 2, padding=1), (2, 9)),
    (nn.MaxPool1d(2, 3, ceil_mode=True), (1, 7)),
    (nn.MaxPool2d(3, 1), (1, 4, 5)),
    (nn.MaxPool2d((2, 3), (1, 2), padding=(1, 0), dilation=(2, 1)), (2, 5, 6)),
    (nn.MaxPool3d(2, 1, dilation=(1, 2, 1)), (1, 3, 4, 3)),
    (nn.AdaptiveMaxPool2d((2, 3)), (1, 5, 4)),
    (Function(lambda x: x.amax((1, 3))), (2, 3, 4)),
    (Function(lambda x: x.amin(2, keepdim=True)), (2, 3, 4)),
    (Function(lambda x: x.max(1).values), (3, 4)),
    (nn.MaxPool1d(1), (1, 4)),
]


def windows_of(head: nn.Module, shape: tuple[int, ...]) -> Windows:
    recording = record(head, input_shape=shape, dtype=torch.float64)
    node = next(node for node in recording.nodes if node.op in MAXIMA)
    pattern = maximum_pattern(node, recording.nodes[node.parents[0]])
    return Windows(pattern=pattern, counts=np.diff(pattern.indptr).astype(np.float64))


def pairs(shape: tuple[int, ...], *, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Far and near, equal but for one entry, opposite, and tied."""
    random = torch.Generator().manual_seed(seed)
    made = []
    for kind in range(15):
        x = torch.randn(1, *shape, generator=random, dtype=torch.float64)
        step = torch.randn(1, *shape, generator=random, dtype=torch.float64)
        if kind % 5 == 0:
            step = step * (torch.rand(1, *shape, generator=random) < 0.2)
        elif kind % 5 == 1:
            step = step * 1e-3
        elif kind % 5 == 2:
            x, step = torch.round(x), torch.round(step)
        elif kind % 5 == 3:
            step = -2.0 * x
        made.append((x, x + step))
    return made


@pytest.mark.parametrize(("head", "shape"), MAXIMUM_HEADS, ids=str)
def test_no_pair_of_a_maximum_breaks_its_windows(head: nn.Module, shape: tuple[int, ...]) -> None:
    """Mutants: a count off by one, k·ū² for ū², 1/k for 1 − 1/k."""
    constraint = windows_of(head, shape)
    for seed, (x, other) in enumerate(pairs(shape, seed=5)):
        u, z = ((a - b).reshape(-1).numpy() for a, b in ((x, other), (head(x), head(other))))
        assert_allowed(constraint, u, z, seed=seed)


@pytest.mark.parametrize(("head", "shape"), MAXIMUM_HEADS[:6], ids=str)
def test_windows_cut_to_what_moved_still_allow_every_pair(head: nn.Module, shape: tuple[int, ...]) -> None:
    """Entries that do not move stay in the mean. Mutants: a cut window counted anew, `reached` that misses a window."""
    constraint = windows_of(head, shape)
    random = np.random.default_rng(2)
    for seed, (x, other) in enumerate(pairs(shape, seed=6)):
        read = np.flatnonzero(random.random(constraint.num_read) < 0.3)
        moved = x.reshape(-1).clone()
        moved[read] = other.reshape(-1)[read]
        u = (x.reshape(-1) - moved).numpy()
        z = (head(x) - head(moved.reshape(x.shape))).reshape(-1).numpy()
        written = constraint.reached(read)
        assert not z[np.setdiff1d(np.arange(constraint.size), written)].any()
        if written.size:
            assert_allowed(constraint.restricted(written, read), u[read], z[written], seed=seed)


def test_a_mean_outside_the_simplex_breaks_its_window() -> None:
    """The margin of 1e-10 is all that the window gives away: 1.001 times a vertex is outside where others stand still."""
    constraint = Windows(pattern=sparse.csr_array(np.ones((1, 4))), counts=np.array([4.0]))
    u = np.array([[1.0], [0.0], [0.0], [0.0]])
    assert value_of(constraint.form(np.ones(1)), u, np.array([[1.0]]))[0] <= 0.0
    assert value_of(constraint.form(np.ones(1)), u, np.array([[1.0 + 1e-9]]))[0] > 0.0
    assert value_of(constraint.form(np.ones(1)), u, np.array([[-0.5 - 1e-9]]))[0] > 0.0  # 1/4 − 3/4


@pytest.mark.parametrize(
    ("head", "shape"),
    [(nn.LayerNorm(5), (5,)), (nn.GroupNorm(2, 4), (4, 3)), (nn.Softmax(dim=1), (6,))],
    ids=str,
)
def test_no_pair_of_a_normalisation_breaks_its_norm(head: nn.Module, shape: tuple[int, ...]) -> None:
    """Factors by hand: 1/√ε, and ½ for softmax."""
    head, size = head.double(), math.prod(shape)
    factor = 0.5 if isinstance(head, nn.Softmax) else 1.0 / math.sqrt(head.eps)
    constraint = WholeNorm(factor=factor, size=size, num_read=size)
    for scale in (1e-4, 1.0, 30.0):
        for x, other in pairs(shape, seed=7):
            u, z = (
                (a - b).detach().reshape(-1, 1).numpy() for a, b in ((x, other), (head(scale * x), head(scale * other)))
            )
            for m in (1e-9, 1.0, 1e9):
                value, of = value_of(constraint.form(np.full(size, m)), scale * u, z)
                assert value <= 1e-14 * of
    u = np.ones((size, 1))
    assert value_of(constraint.form(np.ones(size)), u, 1.0001 * factor * u)[0] > 0.0


def some_constraints(seed: int) -> list[Constraint]:
    random = np.random.default_rng(seed)
    low = random.normal(size=5)
    pattern = random.random((4, 6)) < 0.6
    pattern[:, 0] |= ~pattern.any(axis=1)
    return [
        Slopes(low=low, high=low + np.array([0.0, 1e-9, 0.5, 1.0, 3.0])).widened(),
        Windows(pattern=sparse.csr_array(pattern * 1.0), counts=pattern.sum(axis=1) + np.array([0.0, 0.0, 1.0, 2.0])),
        WholeNorm(factor=1.7, size=3, num_read=5),
    ]


@pytest.mark.parametrize("seed", range(4))
def test_the_form_is_the_constraint_of_the_text(seed: int) -> None:
    """Naive twin, term by term as the module's text has it."""
    random = np.random.default_rng(seed)
    slopes, windows, whole = some_constraints(seed)
    for constraint in (slopes, windows, whole):
        m = 10.0 ** random.uniform(-2, 2, constraint.size)
        u, z = random.normal(size=constraint.num_read), random.normal(size=constraint.size)
        if isinstance(constraint, Slopes):
            naive = sum(m * (z - constraint.low * u) * (z - constraint.high * u))
        elif isinstance(constraint, Windows):
            naive = 0.0
            for o, row in enumerate(constraint.pattern.toarray()):
                k = int(constraint.counts[o])
                entries = np.concatenate([u[row > 0.0], np.zeros(k - int(row.sum()))])
                mean = entries.mean()
                naive += m[o] * ((z[o] - mean) ** 2 - (1.0 - 1.0 / k) * ((entries - mean) ** 2).sum())
                naive -= m[o] * LEAST_RADIUS * (entries**2).sum()
        else:
            m = np.full(constraint.size, m[0])
            naive = m[0] * (z @ z - 1.7**2 * (u @ u))
        value, size = value_of(constraint.form(m), u[:, None], z[:, None])
        assert abs(value - naive) <= 1e-11 * size


def test_a_whole_norm_takes_the_least_of_unequal_multipliers() -> None:
    """‖z‖² ≤ L²·‖u‖² has one multiplier. Mutant: weights of z that differ, which no norm allows."""
    form = WholeNorm(factor=2.0, size=2, num_read=2).form(np.array([1.0, 9.0]))
    u = np.array([[1.0], [0.0]])
    for angle in np.linspace(0.0, math.pi, 9):
        z = 2.0 * np.array([[math.cos(angle)], [math.sin(angle)]])
        assert value_of(form, u, z)[0] <= 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_lifted_points_lie_on_the_ball(seed: int) -> None:
    """In unit directions the constraint is met with equality, as `lifting` supposes: its sum over lifted entries is 0."""
    random = np.random.default_rng(seed)
    for constraint in some_constraints(seed):
        U, D = random.normal(size=(constraint.num_read, 4)), random.normal(size=(constraint.size, 4))
        D /= np.linalg.norm(D, axis=1, keepdims=True)
        Z = constraint.lifted(U, D)
        for m in (
            np.ones(constraint.size),
            *([] if isinstance(constraint, WholeNorm) else np.eye(constraint.size) + 1e-30),
        ):
            value, size = value_of(constraint.form(m), U, Z)
            assert abs(value) <= 1e-9 * size


@pytest.mark.parametrize("seed", range(4))
def test_pulled_back_is_the_gradient_of_the_best_point(seed: int) -> None:
    """Finite differences of max ⟨G, z⟩ over the ball. Mutants: ρ's gradient without 1 − 1/k, without half, or of the mean."""
    random = np.random.default_rng(seed)
    for constraint in some_constraints(seed):
        U, G = random.normal(size=(constraint.num_read, 4)), random.normal(size=(constraint.size, 4))
        directions, back, multipliers = constraint.pulled_back(U, G)

        def best(
            V: np.ndarray, constraint: Constraint = constraint, G: np.ndarray = G, D: np.ndarray = directions
        ) -> float:
            return float((G * constraint.lifted(V, D)).sum())

        for _ in range(20):
            other = random.normal(size=G.shape)
            unit = other / np.linalg.norm(other, axis=1, keepdims=True)
            assert (G * constraint.lifted(U, unit)).sum() <= best(U) * (1 + 1e-12)
            step = random.normal(size=U.shape)
            slope = (best(U + 1e-5 * step) - best(U - 1e-5 * step)) / 2e-5
            assert slope == pytest.approx((back * step).sum(), rel=1e-4, abs=1e-5)  # windows of one entry: ρ = 1e-5·|u|
        # The Lagrangian ⟨G, z⟩ − form is stationary: in z it vanishes, in u it is `back`.
        Z = constraint.lifted(U, directions)
        for (V, W), wanted in (((U, Z), "z"), ((U, Z), "u")):
            step_u = random.normal(size=V.shape) if wanted == "u" else np.zeros_like(V)
            step_z = random.normal(size=W.shape) if wanted == "z" else np.zeros_like(W)
            form = constraint.form(multipliers)
            ahead, behind = (value_of(form, V + s * step_u, W + s * step_z)[0] for s in (1e-4, -1e-4))
            slope = (ahead - behind) / 2e-4
            truth = (G * step_z).sum() if wanted == "z" else -(back * step_u).sum()
            size = np.abs(multipliers).max() * 30.0
            assert abs(slope - truth) <= 1e-6 * size


@pytest.mark.parametrize("zero", ["u", "g", "both"])
def test_nothing_moves_and_nothing_pulls_without_warnings(zero: str) -> None:
    """Entries that stand still, or that no output hangs on, have finite directions and gradients."""
    for constraint in some_constraints(0):
        U = np.zeros((constraint.num_read, 3)) if zero != "g" else np.ones((constraint.num_read, 3))
        G = np.zeros((constraint.size, 3)) if zero != "u" else np.ones((constraint.size, 3))
        directions, back, multipliers = constraint.pulled_back(U, G)
        assert np.isfinite(directions).all()
        assert np.isfinite(back).all()
        assert not np.isnan(multipliers).any()
        assert np.isfinite(constraint.lifted(U, directions)).all()


def test_widened_slopes_hold_those_given_and_keep_their_distance() -> None:
    random = np.random.default_rng(0)
    low = np.concatenate([random.normal(size=200) * 10.0 ** random.uniform(-300, 100, 200), np.zeros(8), np.ones(8)])
    width = np.abs(low) * 10.0 ** random.uniform(-20, 1, low.size) * (random.random(low.size) < 0.7)
    given = Slopes(low=low, high=low + width)
    wide = given.widened()
    assert (wide.low <= given.low).all()
    assert (wide.high >= given.high).all()
    assert (wide.high > wide.low).all()
    ends = np.abs(np.stack([wide.low, wide.high]))
    assert (ends[ends > 0.0] > 1e-36).all()  # no product of two ends underflows
    growth = (wide.high - wide.low) - (given.high - given.low)
    assert (growth <= 3e-5 * np.maximum(np.abs(low), np.abs(given.high)).max() + 2e-30).all()  # and hardly wider


def test_which_constraints_allow_that_nothing_moves() -> None:
    """Border columns follow inner ones only where entries may stay 0."""
    assert Slopes(low=np.array([-0.1, 0.0]), high=np.array([0.0, 1.0])).may_vanish
    assert not Slopes(low=np.array([0.1, 0.0]), high=np.array([1.0, 1.0])).may_vanish
    assert not Slopes(low=np.array([-2.0, -1.0]), high=np.array([-1.0, 1.0])).may_vanish
    _, windows, whole = some_constraints(0)
    assert not windows.may_vanish
    assert whole.may_vanish


def test_restricted_constraints_are_those_of_the_entries_kept() -> None:
    slopes, windows, whole = some_constraints(1)
    kept = np.array([1, 3])
    some = slopes.restricted(kept, kept)
    assert (some.low == slopes.low[kept]).all()
    assert (some.high == slopes.high[kept]).all()
    some = windows.restricted(kept, np.array([0, 2, 5]))
    assert (some.pattern.toarray() == windows.pattern.toarray()[kept][:, [0, 2, 5]]).all()
    assert (some.counts == windows.counts[kept]).all()
    some = whole.restricted(np.array([0]), np.array([0, 4]))
    assert (some.factor, some.size, some.num_read) == (1.7, 1, 2)


def test_what_an_entry_reaches() -> None:
    slopes, windows, whole = some_constraints(2)
    for read in ([], [0], [1, 4]):
        entries = np.array(read, dtype=np.int64)
        assert slopes.reached(entries).tolist() == read
        naive = [o for o, row in enumerate(windows.pattern.toarray()) if row[entries].any()]
        assert windows.reached(entries).tolist() == naive
        assert whole.reached(entries).tolist() == ([0, 1, 2] if read else [])


@pytest.mark.parametrize("padding", [0, 1])
def test_vanishing_windows_hold_every_maximum_and_zero(padding: int) -> None:
    """Windows of one size with a zero to spare: differences of real maxima and z = 0 both stay inside."""
    random = torch.Generator().manual_seed(0)
    first, second = (torch.randn(1, 1, 6, generator=random, dtype=torch.float64) for _ in range(2))
    pool = torch.nn.MaxPool1d(3, stride=2, padding=padding)
    z = (pool(first) - pool(second)).numpy().reshape(-1)
    u = (first - second).numpy().reshape(-1)
    places = np.arange(z.size)[:, None] * 2 - padding + np.arange(3)
    pattern = np.zeros((z.size, 6))
    for row, taps in enumerate(places):
        pattern[row, taps[(taps >= 0) & (taps < 6)]] = 1.0
    windows = Windows(pattern=sparse.csr_array(pattern), counts=pattern.sum(axis=1)).vanishing()
    assert windows.may_vanish
    assert np.ptp(windows.counts) == 0.0
    for point in (z, np.zeros_like(z)):
        for row in range(z.size):
            form = windows.form((np.arange(z.size) == row).astype(np.float64))
            value = form.own @ point**2 + 2.0 * (form.cross * point) @ (form.C @ u)
            value += sum(weights @ (u if B is None else B @ u) ** 2 for B, weights in form.products)
            assert value <= 1e-12
