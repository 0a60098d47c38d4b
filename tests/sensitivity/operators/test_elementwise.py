import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from dense_oracle import EXACT_PAIRS, dense_matrix, dense_norm
from torch import nn

from sensitivity import UnsupportedModuleError, certify, operator_norm
from sensitivity.operators.elementwise import batch_norm_multipliers, constant_multipliers


class Normalize(nn.Module):
    def __init__(self, mean, std):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).reshape(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).reshape(-1, 1, 1))

    def forward(self, x):
        return (x - self.mean) / self.std


class Arithmetic(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_normalisation_divides_by_the_smallest_deviation():
    head = Normalize([0.1, 0.2, 0.3], [0.5, 0.25, 0.4])
    for p, q in ((1, 1), (1, 2), (2, 2)):
        assert operator_norm(head, p=p, q=q, input_shape=(3, 4, 4)) == 4.0


@pytest.mark.parametrize("std", [0.3, 0.3081, 0.2023, 1e-3])
def test_the_reciprocal_of_a_float32_deviation_is_rounded_up(std):
    bound = operator_norm(Normalize([0.0], [std]), p=2, q=2, input_shape=(1, 2, 2))
    exact = 1 / Fraction(float(torch.tensor(std).double()))
    assert exact <= Fraction(bound) <= exact * (1 + Fraction(1, 10**15))


@pytest.mark.parametrize("seed", range(30))
def test_no_norm_of_a_random_batch_norm_is_above_its_bound(seed):
    torch.manual_seed(seed)
    layer = nn.BatchNorm2d(3, affine=bool(seed % 4)).eval() if seed % 2 else nn.BatchNorm1d(3).eval()
    shape = (3, 2, 2) if seed % 2 else (3,) if seed % 3 else (3, 5)
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.01, 3.0)
    if layer.affine:
        nn.init.normal_(layer.weight)
    W = dense_matrix(layer, shape)
    for p, q in [*EXACT_PAIRS, (2, 2)]:
        truth = dense_norm(W, p, q)
        assert truth * (1 - 1e-15) <= operator_norm(layer.double(), p=p, q=q, input_shape=shape) <= truth * (1 + 1e-12)


@pytest.mark.parametrize(
    ("function", "norm"),
    [
        (lambda x: 3 * x - 1, 3.0),
        (lambda x: 1 - x, 1.0),
        (lambda x: x / -4, 0.25),
        (lambda x: torch.tensor(5.0) * x, 5.0),
        (lambda x: x - torch.tensor([1.0, 2.0]), 1.0),
        (lambda x: x * torch.tensor([[1.0, -2.0]]), 2.0),
        (lambda x: torch.add(x, x, alpha=2), 3.0),
        (lambda x: torch.sub(x, x, alpha=-0.5), 1.5),
        (lambda x: torch.rsub(x, 1.0, alpha=3), 3.0),
        (lambda x: -x, 1.0),
        (lambda x: x.abs(), 1.0),
        (lambda x: x * 0.0, 0.0),
        (lambda x: x.mul_(2).add_(1), 2.0),
    ],
)
def test_arithmetic_with_constants_scales_by_the_constant(function, norm):
    for p, q in ((1, 1), (1, 2), (2, 2)):
        assert certify(Arithmetic(function), p=p, q=q, input_shape=(2,)).value == norm


@pytest.mark.parametrize("scalar", [0.1, 3.3, 1e-3])
def test_a_python_scalar_counts_as_itself_and_as_its_float32_cast(scalar):
    """Mutation caught: taking only the float64 value, which is below what a float32 kernel multiplies by half the
    time."""
    larger = max(scalar, float(np.float32(scalar)))
    smaller = min(scalar, float(np.float32(scalar)))
    assert certify(Arithmetic(lambda x: x * scalar), p=1, q=1, input_shape=(2,)).value == larger
    quotient = certify(Arithmetic(lambda x: x / scalar), p=1, q=1, input_shape=(2,)).value
    assert 1 / Fraction(smaller) <= Fraction(quotient) <= (1 / Fraction(smaller)) * (1 + Fraction(1, 10**15))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x / 0.0, "divides by zero"),
        (lambda x: x / torch.tensor([1.0, 0.0]), "divides by zero"),
        (lambda x: x * math.nan, "not finite"),
        (lambda x: x + math.inf, "not finite"),
        (lambda x: x * torch.tensor([1.0, math.inf]), "NaN or infinity"),
        (lambda x: x + torch.tensor([1.0, math.nan]), "NaN or infinity"),
        (lambda x: x * x, "unbounded"),
        (lambda x: x * torch.relu(x), "unbounded"),
        (lambda x: x / (1 + torch.relu(x)), "unbounded"),
        (lambda x: 1 / x, "slope grows without bound"),
        (lambda x: x.unsqueeze(1) * torch.ones(3, 2), "record's own shape"),
        (lambda x: torch.div(x, 2.0, rounding_mode="floor"), "rounding the quotient"),
        (lambda x: x.unsqueeze(1) + torch.zeros(3, 2), "values of one shape"),
        (lambda x: x * torch.ones(2, dtype=torch.float64).reshape(1, 2) * (1 + 0j), "changes torch.float32"),
    ],
)
def test_arithmetic_without_a_bound_is_refused(function, words):
    with pytest.raises(UnsupportedModuleError, match=words):
        certify(Arithmetic(function), p=1, q=1, input_shape=(2,))


@pytest.mark.parametrize("variance", [0.0, -1.0])
def test_a_variance_that_is_not_positive_is_refused(variance):
    with pytest.raises(ValueError, match="not positive"):
        batch_norm_multipliers(None, variance=np.array([variance]), epsilon=0.0)


def test_multipliers_of_batch_norm_are_at_or_above_the_rational_ones():
    random = np.random.default_rng(0)
    gain, variance = random.normal(size=200), random.uniform(1e-6, 10.0, size=200)
    d = batch_norm_multipliers(gain, variance=variance, epsilon=1e-5)
    for got, g, v in zip(d.tolist(), gain.tolist(), variance.tolist(), strict=True):
        assert Fraction(got) ** 2 * (Fraction(v) + Fraction(1e-5)) >= Fraction(g) ** 2
        assert got <= abs(g) / math.sqrt(v + 1e-5) * (1 + 1e-14)


def test_multipliers_by_powers_of_two_are_exact():
    assert constant_multipliers(0.25, dtype=torch.float32, divide=True).tolist() == [4.0]


def test_a_multiplier_that_underflows_is_not_zero():
    """Mutation caught: testing the rounded quotient, not γ, for 0."""
    d = batch_norm_multipliers(np.array([1e-200, 0.0]), variance=np.array([1e300, 1.0]), epsilon=0.0)
    assert d[0] > 0.0
    assert d[1] == 0.0


def test_the_epsilon_of_a_float32_batch_norm_counts_as_its_cast():
    """PyTorch's kernel casts eps to float32, which is below 1e-5. Mutation caught: using the float64 eps."""
    layer = nn.BatchNorm1d(1).eval()
    layer.running_var.zero_()
    truth = 1 / math.sqrt(float(np.float32(1e-5)))
    assert truth <= operator_norm(layer, p=1, q=1, input_shape=(1,)) <= truth * (1 + 1e-12)


def test_integers_that_float64_cannot_hold_are_refused():
    """Mutation caught: rounding 2^53 + 1 down to 2^53."""
    with pytest.raises(UnsupportedModuleError, match="pass it as a float"):
        certify(Arithmetic(lambda x: x * (2**53 + 1)), p=1, q=1, input_shape=(2,))
    with pytest.raises(ValueError, match=r"exceed 2\^53"):
        operator_norm(torch.tensor([[2**53 + 1]]), p=1, q=1)
