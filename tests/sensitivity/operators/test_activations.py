import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from torch import nn

from sensitivity import certify, operator_norm
from sensitivity.operators.activations import GELU_SLOPE, MISH_SLOPE, SILU_SLOPE, TANH_GELU_SLOPE


def largest_slope(function, start):
    """A second method: the root of the second derivative, to 40 digits."""
    with mpmath.workdps(40):
        at = mpmath.findroot(lambda x: mpmath.diff(function, x, 2), start)
        return mpmath.diff(function, at)


def tanh_gelu(x):
    return x / 2 * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3)))


@pytest.mark.parametrize(
    ("stored", "function", "start", "golden"),
    [
        (GELU_SLOPE, lambda x: x * mpmath.ncdf(x), 1.4, 1.128904145185155),
        (TANH_GELU_SLOPE, tanh_gelu, 1.4, 1.128993068658772),
        (SILU_SLOPE, lambda x: x / (1 + mpmath.exp(-x)), 2.4, 1.099839320128867),
        (MISH_SLOPE, lambda x: x * mpmath.tanh(mpmath.log(1 + mpmath.exp(x))), 1.5, 1.088498161251728),
    ],
    ids=["gelu", "tanh-gelu", "silu", "mish"],
)
def test_stored_slopes_are_the_true_ones_rounded_up(stored, function, start, golden):
    with mpmath.workdps(40):
        truth = largest_slope(function, start)
        assert truth <= mpmath.mpf(stored) <= truth * (1 + mpmath.mpf("1e-15"))
    assert stored == pytest.approx(golden, abs=2e-15)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


GOLDEN = [
    (nn.GELU(), 1.128904145185155),
    (nn.GELU(approximate="tanh"), 1.128993068658772),
    (nn.SiLU(), 1.099839320128867),
    (nn.Mish(), 1.088498161251728),
    (nn.SELU(), 1.758099340847377),
    (nn.Hardswish(), 1.5),
    (nn.Hardsigmoid(), 1 / 6),
    (nn.Sigmoid(), 0.25),
    (nn.ELU(), 1.0),
    (nn.ELU(2.5), 2.5),
    (nn.CELU(0.7), 1.0),
    (nn.LeakyReLU(2), 2.0),
    (nn.LeakyReLU(-3.0), 3.0),
    (nn.LeakyReLU(), 1.0),
    (nn.PReLU(init=-1.5), 1.5),
    (nn.ReLU(), 1.0),
    (nn.ReLU(inplace=True), 1.0),
    (nn.ReLU6(), 1.0),
    (nn.Hardtanh(-2, 3), 1.0),
    (nn.Tanh(), 1.0),
    (nn.Softsign(), 1.0),
    (nn.Softshrink(), 1.0),
    (nn.LogSigmoid(), 1.0),
    (nn.Tanhshrink(), 1.0),
    (nn.Identity(), 1.0),
    (nn.Hardswish(inplace=True), 1.5),
    (nn.SELU(inplace=True), 1.758099340847377),
    (nn.PReLU(3, init=-2.0), 2.0),
    (nn.Threshold(0.5, 0.5), 1.0),
    (Function(torch.sin), 1.0),
    (Function(torch.cos), 1.0),
    (Function(torch.atan), 1.0),
    (Function(torch.asinh), 1.0),
    (Function(torch.erf), 2 / math.sqrt(math.pi)),
]


@pytest.mark.parametrize(("layer", "golden"), GOLDEN, ids=lambda value: str(value))
def test_slopes_are_those_of_the_table(layer, golden):
    """Golden (sensitivity.md §2); 1e-7 is the cast of a Python parameter to float32, rounded up."""
    for p, q in ((1, 1), (1, 2), (2, 2), (math.inf, math.inf)):
        bound = operator_norm(layer, p=p, q=q, input_shape=(3,))
        assert golden * (1 - 1e-15) <= bound <= golden * (1 + 1e-7)


@pytest.mark.parametrize("layer", [layer for layer, _ in GOLDEN], ids=str)
def test_no_two_points_are_steeper_than_the_slope(layer):
    points = torch.cat([torch.linspace(-12, 12, 48001, dtype=torch.float64), torch.tensor([-3.0, 0.0, 3.0, 6.0])])
    points = points.double().sort().values.unique()
    channels = layer.num_parameters if isinstance(layer, nn.PReLU) else 1
    values = layer.double()(points.repeat_interleave(channels).reshape(-1, channels)).detach()[:, 0]
    layer.float()
    ratios = ((values[1:] - values[:-1]).abs() - 4e-15) / (points[1:] - points[:-1])
    assert float(ratios.max()) <= operator_norm(layer, p=1, q=1, input_shape=(channels,)) * (1 + 1e-9)


@pytest.mark.parametrize(("beta", "threshold"), [(1.0, 20.0), (2.0, 3.0), (0.5, 0.0), (1.0, -2.0)])
def test_softplus_jumps_by_no_more_than_its_slack(beta, threshold):
    """Mutation caught: slack 0. Just below the threshold the output is log(1 + e^t)/β, just above it is t/β."""
    head = nn.Softplus(beta=beta, threshold=threshold)
    certificate = certify(head, p=2, q=2, input_shape=(1,))
    at = threshold / beta
    pair = torch.tensor([[at], [math.nextafter(at, math.inf) if at else 1e-300]], dtype=torch.float64)
    with mpmath.workdps(30):
        jump = mpmath.log(1 + mpmath.exp(-mpmath.mpf(threshold))) / beta
        assert Fraction(certificate.slack) >= Fraction(str(jump))
        assert certificate.slack <= float(jump) * (1 + 1e-9)
    moved = float((head(pair)[1] - head(pair)[0]).abs())
    assert moved > 0.5 * float(jump)
    assert certificate.value == 1.0


def test_slack_grows_with_the_output_norm_and_passes_through_later_layers():
    last = nn.Linear(4, 1, bias=False)
    last.weight.data = torch.tensor([[1.0, 1.0, 1.0, 1.0]])
    head = nn.Sequential(nn.Softplus(threshold=3.0), last)
    jump = math.log1p(math.exp(-3.0))
    assert certify(nn.Softplus(threshold=3.0), p=1, q=1, input_shape=(4,)).slack == pytest.approx(4 * jump)
    assert certify(nn.Softplus(threshold=3.0), p=1, q=2, input_shape=(4,)).slack == pytest.approx(2 * jump)
    certificate = certify(head, p=2, q=2, input_shape=(4,))
    assert certificate.slack == pytest.approx(4 * jump)
    assert certificate.map(0.5) >= certificate.value * 0.5 + certificate.slack
    below = torch.full((1, 4), 3.0, dtype=torch.float64)
    above = torch.full((1, 4), math.nextafter(3.0, 4.0), dtype=torch.float64)
    moved = float((head.double()(above) - head(below)).detach().abs())
    assert moved == pytest.approx(4 * jump, rel=1e-6)
    assert moved <= certificate.map(float((above - below).norm()))


def test_a_kink_of_slope_100_that_sampling_misses_is_covered():
    """Golden idea (sensitivity.md §6): sampled ratios see slope 1, the certificate sees 101."""

    class Kink(nn.Module):
        def forward(self, x):
            return x + 100 * (torch.relu(x - 5.0) - torch.relu(x - 5.001))

    samples = torch.from_numpy(np.random.default_rng(0).normal(size=(1000, 2)))
    values = Kink()(samples)
    sampled = float(((values[:, 0] - values[:, 1]).abs() / (samples[:, 0] - samples[:, 1]).abs()).max())
    assert sampled < 2.0
    assert certify(Kink(), p=2, q=2, input_shape=(1,)).value >= 101.0


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.Hardshrink(), "discontinuous"),
        (nn.Threshold(0.1, 20), "discontinuous"),
        (nn.Threshold(0.5, 0.4), "discontinuous"),
        (nn.LPPool1d(2, 2), "LPPool"),
        (nn.GLU(), "no bound is known"),
        (nn.Softplus(beta=0.0), "beta 0"),
        (nn.Softplus(threshold=-800.0), "threshold"),
        (nn.CELU(-1.0), "positive alpha"),
    ],
    ids=str,
)
def test_activations_without_a_bound_are_refused_by_name(layer, words):
    with pytest.raises(ValueError, match=words) as refusal:
        certify(nn.Sequential(nn.Identity(), layer), p=1, q=1, input_shape=(2, 4))
    assert f"'1' ({type(layer).__name__})" in str(refusal.value)


@pytest.mark.parametrize("limits", [(math.nan, 1.0), (-1.0, math.nan)])
def test_nan_limits_are_refused(limits):
    class Clamped(nn.Module):
        def forward(self, x):
            return x.clamp(*limits)

    with pytest.raises(ValueError, match="NaN"):
        certify(Clamped(), p=1, q=1, input_shape=(4,))
