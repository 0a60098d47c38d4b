import itertools
import math

import mpmath
import numpy as np
import pytest
import torch

from sensitivity.operators.activations import activation_slope
from sensitivity.operators.curves import curve_of
from sensitivity.operators.slopes import slope_range, slope_range_on, value_range_on

PRELU = torch.tensor([[[0.25], [-1.5], [2.0]]])  # as its kernel gets it, for records of shape (3, k)
ACTIVATIONS = [
    ("relu", (), {}),
    ("abs", (), {}),
    ("neg", (), {}),
    ("leaky_relu", (), {}),
    ("leaky_relu", (0.2,), {}),
    ("leaky_relu", (-0.7,), {}),
    ("leaky_relu", (3.0,), {}),
    ("_prelu_kernel", (PRELU,), {}),
    ("hardtanh", (-1.0, 2.0), {}),
    ("hardtanh", (0.0, 6.0), {}),
    ("clamp", (-0.3, 0.7), {}),
    ("clamp", (None, 0.4), {}),
    ("clamp", (2.0, 1.0), {}),
    ("clamp_min", (0.1,), {}),
    ("clamp_max", (0.1,), {}),
    ("hardsigmoid", (), {}),
    ("hardswish", (), {}),
    ("softshrink", (), {}),
    ("softshrink", (0.3,), {}),
    ("threshold", (0.1, 0.1), {}),
    ("tanh", (), {}),
    ("sigmoid", (), {}),
    ("log_sigmoid_forward", (), {}),
    ("atan", (), {}),
    ("asinh", (), {}),
    ("erf", (), {}),
    ("sin", (), {}),
    ("cos", (), {}),
    ("silu", (), {}),
    ("mish", (), {}),
    ("gelu", (), {}),
    ("gelu", (), {"approximate": "tanh"}),
    ("elu", (1.0,), {}),
    ("elu", (2.5,), {}),
    ("elu", (1.6732632423543772, 1.0507009873554805), {}),
    ("elu", (-0.5, 1.0, 2.0), {}),
    ("elu", (1.0, -1.2, 0.0), {}),
    ("celu", (0.7,), {}),
    ("softplus", (1.0, 20.0), {}),
    ("softplus", (2.0, 3.0), {}),
    ("softplus", (-1.5, 1.0), {}),
]
IDS = [f"{op}{args if op != '_prelu_kernel' else ''}{kwargs or ''}" for op, args, kwargs in ACTIVATIONS]


def evaluate(op, args, kwargs, points):
    args = [arg.double() if isinstance(arg, torch.Tensor) else arg for arg in args]
    made = getattr(torch.ops.aten, op)(points, *args, **kwargs)
    return made if isinstance(made, torch.Tensor) else made[0]


def intervals(seed):
    """Intervals of every length around every kink and turn, of shape (3, 80)."""
    random = np.random.default_rng(seed)
    centre = random.choice([0.0, 0.1, 0.5, 1.0, -1.0, 2.0, -3.0, 3.0, 6.0, -1.3, 1.49, 2.4, -2.3], size=(3, 80))
    centre = centre + random.normal(size=(3, 80)) * random.choice([0.0, 1e-7, 0.1, 3.0], size=(3, 80))
    radius = random.choice([0.0, 1e-9, 1e-3, 0.3, 2.0, 9.0], size=(3, 80))
    return centre - radius, centre + radius


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("op", "args", "kwargs"), ACTIVATIONS, ids=IDS)
def test_no_derivative_or_value_inside_an_interval_leaves_its_range(op, args, kwargs, dtype):
    """Dense sampling with derivatives by autograd. Mutations caught: a turn or valley that is left out, ends swapped
    for falling activations, the other branch's slope."""
    low, high = intervals(0)
    facts = {"args": args, "kwargs": kwargs, "dtype": dtype}
    a, b = slope_range_on(op, low=low, high=high, **facts)
    bottom, top = value_range_on(op, low=low, high=high, **facts)
    whole_a, whole_b = slope_range(op, **facts)
    assert a.shape == b.shape == bottom.shape == top.shape == low.shape
    assert (a <= b).all()
    assert (bottom <= top).all()
    tolerance = 1e-7 if op in ("hardsigmoid", "celu") else 1e-13  # torch's backward of these casts to float32
    for share in np.linspace(0.0, 1.0, 101):
        points = torch.from_numpy(low + share * (high - low)).clamp(torch.from_numpy(low), torch.from_numpy(high))
        batch = points[None].clone().requires_grad_(True)
        values = evaluate(op, args, kwargs, batch)
        (slopes,) = torch.autograd.grad(values.sum(), batch)
        values, slopes = values.detach()[0].numpy(), slopes[0].numpy()
        inside = (points.numpy() > low) & (points.numpy() < high)  # at a kink autograd picks a side
        assert (slopes >= a - tolerance)[inside].all()
        assert (slopes <= b + tolerance)[inside].all()
        assert (values >= bottom).all()
        assert (values <= top).all()
    assert (a >= whole_a.reshape(-1, 1) - 1e-15).all()
    assert (b <= whole_b.reshape(-1, 1) + 1e-15).all()


@pytest.mark.parametrize(("op", "args", "kwargs"), [known for known in ACTIVATIONS if known[0] not in ("sin", "cos")])
def test_ranges_over_short_intervals_are_tight(op, args, kwargs):
    """Mutation caught: returning the global range everywhere, as sin and cos do."""
    low = np.linspace(-7.0, 7.0, 3 * 200).reshape(3, 200) + 0.0037
    high = low + 1e-4
    facts = {"args": args, "kwargs": kwargs, "dtype": torch.float64}
    a, b = slope_range_on(op, low=low, high=high, **facts)
    bottom, top = value_range_on(op, low=low, high=high, **facts)
    assert np.median(b - a) <= 1e-4
    jump = activation_slope(op, **facts).jump
    assert np.median(top - bottom) <= 4e-4 + 2.5 * jump


@pytest.mark.parametrize(("op", "args", "kwargs"), ACTIVATIONS, ids=IDS)
def test_infinite_ends_and_nan_are_the_whole_line(op, args, kwargs):
    facts = {"args": args, "kwargs": kwargs, "dtype": torch.float32}
    whole = np.full((3, 2), np.inf)
    for low, high in ((-whole, whole), (whole * np.nan, whole * np.nan)):
        a, b = slope_range_on(op, low=low, high=high, **facts)
        expected = slope_range(op, **facts)
        assert (a == expected[0].reshape(-1, 1)).all()
        assert (b == expected[1].reshape(-1, 1)).all()
        bottom, top = value_range_on(op, low=low, high=high, **facts)
        points = torch.linspace(-60.0, 60.0, 3001, dtype=torch.float64).expand(1, 3, -1)
        values = evaluate(op, args, kwargs, points).numpy()[0]
        assert (values.min(1) >= bottom[:, 0]).all()
        assert (values.max(1) <= top[:, 0]).all()
        assert not np.isnan([a, b, bottom, top]).any()


@pytest.mark.parametrize(
    ("op", "ends"),
    [("tanh", (-1, 1)), ("sigmoid", (0, 1)), ("erf", (-1, 1)), ("relu", (0, math.inf)), ("hardsigmoid", (0, 1))],
)
def test_bounded_activations_have_their_bounds_on_the_whole_line(op, ends):
    low, high = value_range_on(
        op, args=(), kwargs={}, dtype=torch.float32, low=np.array([-np.inf]), high=np.array([np.inf])
    )
    assert (low[0], high[0]) == pytest.approx(ends, abs=1e-12)


GOLDEN = [
    ("relu", (), {}, (0.0, 1.0)),
    ("gelu", (), {}, (-0.12890414518515480, 1.1289041451851548)),
    ("gelu", (), {"approximate": "tanh"}, (-0.12899306865877177, 1.1289930686587718)),
    ("silu", (), {}, (-0.0998393201288669, 1.0998393201288669)),
    ("mish", (), {}, (-0.1125261223894626, 1.0884981612517279)),
    ("hardswish", (), {}, (-0.5, 1.5)),
    ("abs", (), {}, (-1.0, 1.0)),
    ("neg", (), {}, (-1.0, -1.0)),
    ("leaky_relu", (0.5,), {}, (0.5, 1.0)),
    ("leaky_relu", (-2.0,), {}, (-2.0, 1.0)),
    ("sigmoid", (), {}, (0.0, 0.25)),
    ("tanh", (), {}, (0.0, 1.0)),
    ("elu", (2.5,), {}, (0.0, 2.5)),
    ("celu", (0.7,), {}, (0.0, 1.0)),
    ("softplus", (1.0, 20.0), {}, (0.0, 1.0)),
    ("hardtanh", (-1.0, 1.0), {}, (0.0, 1.0)),
]


@pytest.mark.parametrize(("op", "args", "kwargs", "golden"), GOLDEN)
def test_slopes_over_the_reals_are_those_of_the_table(op, args, kwargs, golden):
    """Golden (sensitivity.md §2), rounded outward. Mutation caught: a least slope rounded toward 0."""
    a, b = slope_range(op, args=args, kwargs=kwargs, dtype=torch.float64)
    assert (a[0], b[0]) == pytest.approx(golden, rel=1e-15, abs=1e-15)


CURVES = {
    "silu": lambda x: x / (1 + mpmath.exp(-x)),
    "mish": lambda x: x * mpmath.tanh(mpmath.log(1 + mpmath.exp(x))),
    "gelu": lambda x: x * mpmath.ncdf(x),
    "tanh-gelu": lambda x: x / 2 * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3))),
}


@pytest.mark.parametrize("name", CURVES)
def test_turns_and_valleys_are_roots_of_derivatives_and_there_are_no_others(name):
    """The second method: mpmath to 40 digits, and signs of the second derivative on a grid."""
    curve = curve_of(name.removeprefix("tanh-"), {"approximate": "tanh"} if "-" in name else {})
    function = CURVES[name]
    with mpmath.workdps(40):
        for place, extreme in curve.turns:
            root = mpmath.findroot(lambda x: mpmath.diff(function, x, 2), place)
            truth = mpmath.diff(function, root)
            assert abs(root - place) < 1e-10
            assert abs(extreme) >= abs(truth) >= abs(extreme) * (1 - mpmath.mpf("1e-14"))
        place, least = curve.valley
        root = mpmath.findroot(lambda x: mpmath.diff(function, x), place)
        assert abs(root - place) < 1e-10
        assert function(root) >= least >= function(root) * (1 + mpmath.mpf("1e-14"))
        grid = [mpmath.mpf(k) / 8 for k in range(-56, 57)]
        signs = [mpmath.sign(mpmath.diff(function, x, 2)) for x in grid]
    assert sum(left != right for left, right in itertools.pairwise(signs)) == len(curve.turns)


@pytest.mark.parametrize("name", CURVES)
def test_derivatives_are_within_their_margin_of_the_true_ones(name):
    curve = curve_of(name.removeprefix("tanh-"), {"approximate": "tanh"} if "-" in name else {})
    points = np.concatenate([np.linspace(-40.0, 40.0, 161), [-1e300, -800.0, 800.0, 1e300]])
    with np.errstate(over="ignore"):
        found = curve.derivative(points)
    with mpmath.workdps(60):
        for x, value in zip(points[:161], found[:161], strict=True):
            assert abs(mpmath.diff(CURVES[name], mpmath.mpf(float(x))) - mpmath.mpf(float(value))) < 2.0**-44
    assert found[161:] == pytest.approx([0.0, 0.0, 1.0, 1.0], abs=1e-15)


def test_prelu_has_its_own_slope_in_every_channel():
    """Mutation caught: channels taken along the last dimension."""
    facts = {"args": (PRELU,), "kwargs": {}, "dtype": torch.float32}
    low, high = np.full((3, 2), -2.0), np.full((3, 2), -1.0)
    a, b = slope_range_on("_prelu_kernel", low=low, high=high, **facts)
    assert a.tolist() == b.tolist() == [[0.25, 0.25], [-1.5, -1.5], [2.0, 2.0]]
    bottom, top = value_range_on("_prelu_kernel", low=low, high=high, **facts)
    assert bottom[:, 0].tolist() == [-0.5, 1.5, -4.0]
    assert top[:, 0].tolist() == [-0.25, 3.0, -2.0]


def test_other_operators_have_no_slopes():
    for function in (slope_range_on, value_range_on):
        assert function("cumsum", args=(), kwargs={}, dtype=torch.float32, low=np.zeros(1), high=np.zeros(1)) is None


def test_an_interval_turned_around_is_refused():
    with pytest.raises(ValueError, match="low > high"):
        slope_range_on("relu", args=(), kwargs={}, dtype=torch.float32, low=np.ones(2), high=np.zeros(2))
