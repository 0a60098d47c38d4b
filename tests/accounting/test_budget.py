"""Preset budgets: the total is an upper bound for every adaptive choice, and calibration never exceeds what is asked."""

import itertools
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from asfl_privacy.accounting.budget import TOLERANCE, RecordBudget
from asfl_privacy.accounting.filter import RecordFilter
from asfl_privacy.accounting.gaussian import composed_gaussian_epsilon


def exact_delta(epsilon: float, *, mu: float, pure: float) -> mpmath.mpf:
    """δ of a Gaussian beside a binary randomised response, as the expectation of (1 − e^(ε − L))₊ at 40 digits.

    The loss L is N(μ²/2, μ²) plus ±E; integrated numerically, with no formula shared with the code.
    """
    with mpmath.workdps(40):
        chance = mpmath.e**pure / (1 + mpmath.e**pure)

        def part(shift):
            if mu == 0:
                return max(mpmath.mpf(0), 1 - mpmath.e ** (epsilon - shift))
            mean, width = mpmath.mpf(mu) ** 2 / 2, mpmath.mpf(mu)
            start = mpmath.mpf(epsilon) - shift
            points = [start] + [start + width * k for k in (1, 2, 4, 8, 16, 32)] + [max(start, mean) + 60 * width]
            points = sorted({*points, *(p for p in (mean, mean + width, mean - width) if p > start)})
            return mpmath.quad(lambda loss: (1 - mpmath.e ** (start - loss)) * mpmath.npdf(loss, mean, width), points)

        return chance * part(mpmath.mpf(pure)) + (1 - chance) * part(-mpmath.mpf(pure))


def gaussian_delta_of(epsilon: float, mu: float) -> float:
    """Balle & Wang (2018), Theorem 8, for either sign of ε."""
    return float(norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2))


@pytest.mark.parametrize(
    ("mu", "pure", "delta"),
    [(1.0, 1.0, 1e-5), (0.1, 3.0, 1e-6), (3.0, 0.5, 1e-10), (0.5, 0.01, 1e-2), (1.0, 8.0, 1e-5), (0.02, 1.0, 1e-12)],
)
def test_the_total_is_the_integrated_truth_from_above(mu, pure, delta):
    """Catches: forgetting a branch of the randomised response, adding e^−E twice, rounding ε down."""
    budget = RecordBudget(gaussian_budget=Fraction(mu) ** 2, pure_budget=pure)
    total = budget.total(delta=delta)
    assert exact_delta(total, mu=mu, pure=pure) <= delta
    assert exact_delta(total * (1 - 1e-9), mu=mu, pure=pure) > delta


@pytest.mark.parametrize(("num_releases", "written"), [(100, "4.377"), (1000, "17.86")])
def test_golden_totals(num_releases, written, agrees):
    """Shared page, §3: z=10, δ=1e-5."""
    assert agrees(RecordBudget(gaussian_budget=num_releases / Fraction(100)).total(delta=1e-5), written)


def test_a_pure_budget_costs_less_than_its_sum_and_no_less_than_ten_classes():
    """Shared page, §3: beside 4.377 a remembered 10-way label at ε=1 gives 5.03, the sum 5.38; any pure mechanism lies
    between. Catches: adding ε, or taking the many-class randomised response for the worst pure mechanism."""
    assert 5.03 < RecordBudget(gaussian_budget=1.0, pure_budget=1.0).total(delta=1e-5) < 5.377


def test_a_pure_budget_is_its_own_total_at_delta_zero():
    assert 2.0 < RecordBudget(pure_budget=2.0).total(delta=0.0) <= 2.0 * (1 + float(TOLERANCE)) * (1 + 2**-52)
    assert RecordBudget(pure_budget=2.0).total(delta=1e-5) < 2.0
    assert RecordBudget().total(delta=0.0) == RecordBudget().total(delta=1e-5) == 0.0


def test_an_adaptive_choice_never_exceeds_the_total():
    """A protocol that answers a bad Gaussian outcome with randomised response, and a good one with more Gaussian noise.

    Its exact δ is integrated over the first outcome. Catches: a total for fixed multipliers of smaller budgets, e.g. one
    that takes Laplace in place of randomised response for the pure part.
    """
    square_first, square_rest, pure = 0.3, 0.7, 1.2
    mu_first, mu_rest = math.sqrt(square_first), math.sqrt(square_rest)
    chance = math.exp(pure) / (1 + math.exp(pure))

    def rest_delta(epsilon, policy):
        """δ of the rest: what the policy picks, then whatever is left of the budgets (0, 1 or both parts)."""
        gaussian = policy in ("gaussian", "both")
        if policy == "gaussian":
            return gaussian_delta_of(epsilon, mu_rest)
        shifts = ((chance, pure), (1 - chance, -pure))
        if gaussian:
            return sum(weight * gaussian_delta_of(epsilon - shift, mu_rest) for weight, shift in shifts)
        return sum(weight * max(0.0, 1 - math.exp(epsilon - shift)) for weight, shift in shifts)

    budget = RecordBudget(gaussian_budget=square_first + square_rest, pure_budget=pure)
    for delta in (1e-2, 1e-4):
        total = budget.total(delta=delta)
        for policies in [("pure", "gaussian"), ("gaussian", "pure"), ("both", "pure"), ("both", "both")]:

            def integrand(loss, policies=policies, total=total):
                policy = policies[0] if loss > square_first else policies[1]
                return norm.pdf(loss, square_first / 2, mu_first) * rest_delta(total - loss, policy)

            parts = [-8.0, -2.0, square_first, 1.0, 2.0, 4.0, 9.0]
            spent = sum(quad(integrand, a, b, epsabs=1e-12, limit=200)[0] for a, b in itertools.pairwise(parts))
            assert spent <= delta * (1 + 1e-6)
            if policies == ("both", "both"):
                assert spent >= delta * (1 - 1e-6)  # the budget can be spent to the last bit


def test_sampler_errors_cost_what_the_contract_says():
    """(ε + Ē, e^(Ē/2)(δ + e^ε τ̄)), solved by brute force over ε. Catches: dropping e^ε, or Ē in ε alone."""
    square, excess, tail, delta = Fraction(1), 0.01, 1e-8, 1e-5
    budget = RecordBudget(gaussian_budget=square, excess_budget=excess, tail_budget=tail)
    ideal = np.linspace(4.0, 6.0, 2001)
    holds = [
        epsilon
        for epsilon in ideal
        if math.exp(excess / 2) * (gaussian_delta_of(epsilon, 1.0) + math.exp(epsilon) * tail) <= delta
    ]
    assert holds[0] + excess - 0.001 <= budget.total(delta=delta) <= holds[0] + excess + 1e-9
    assert budget.total(delta=delta) > composed_gaussian_epsilon(square, delta=delta).high + excess


def test_a_tail_that_delta_cannot_carry_gives_no_epsilon():
    """Catches: a finite ε although e^ε·τ̄ exceeds δ for every ε that the Gaussian allows."""
    assert RecordBudget(gaussian_budget=1.0, tail_budget=1e-5).total(delta=1e-5) == math.inf
    assert RecordBudget(gaussian_budget=1.0, excess_budget=1e6).total(delta=1e-5) == math.inf
    with pytest.raises(ValueError, match="at delta 0"):
        RecordBudget(pure_budget=1.0, tail_budget=1e-9).total(delta=0.0)


def test_the_total_at_a_distance_is_that_of_larger_budgets():
    """Shared page, §4: (1, 1e-5) at R is 2.15 at 2R and 14.4 at 10R."""
    budget = RecordBudget.of_total(1.0, delta=1e-5)
    assert [round(budget.total(delta=1e-5, distance=k), 2) for k in (2, 5)] == [2.15, 6.17]
    assert round(budget.total(delta=1e-5, distance=10), 1) == 14.4
    assert RecordBudget(pure_budget=1.0).total(delta=0.0, distance=3) == pytest.approx(3.0, rel=1e-11)


@pytest.mark.parametrize(("epsilon", "delta"), [(1e-3, 1e-5), (1.0, 1e-5), (8.0, 1e-5), (50.0, 1e-12), (1.0, 0.0)])
def test_calibration_takes_the_tolerance_off_beforehand(epsilon, delta):
    """Catches: a budget whose upper end exceeds what is asked."""
    budget = RecordBudget.of_total(epsilon, delta=delta)
    assert epsilon * (1 - 1e-9) <= budget.total(delta=delta) <= epsilon


def test_calibration_beside_other_budgets():
    beside = {"pure_budget": 1.0, "excess_budget": 1e-6, "tail_budget": 1e-12}
    budget = RecordBudget.of_total(5.0, delta=1e-5, **beside)
    assert 5.0 * (1 - 1e-9) <= budget.total(delta=1e-5) <= 5.0


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace", "randomized-response"])
@pytest.mark.parametrize("num_releases", [1, 3, 10, 997])
def test_the_planned_number_of_releases_fits_and_one_more_does_not(mechanism, num_releases):
    """Catches: a multiplier rounded down, a tolerance that is used up by the plan."""
    for total in (1.0, 0.1 + 0.2, 7.77):
        budget = RecordBudget(gaussian_budget=total, pure_budget=total)
        z = budget.noise_multiplier(mechanism, num_releases=num_releases)
        power = 2 if mechanism == "gaussian" else 1
        assert num_releases / Fraction(z) ** power <= Fraction(total)
        guard = RecordFilter.within(budget, num_records=1)
        for _ in range(num_releases):
            guard.charge([0], mechanism=mechanism, noise_multiplier=z)
        assert not guard.admit([0], mechanism=mechanism, noise_multiplier=z)[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"gaussian_budget": -1.0}, "gaussian_budget is -1.0"),
        ({"pure_budget": math.nan}, "pure_budget is nan"),
        ({"excess_budget": math.inf}, "excess_budget is inf"),
        ({"tail_budget": Fraction(-1, 3)}, "tail_budget is -1/3"),
        ({"pure_budget": True}, "pure_budget is True"),
    ],
)
def test_bad_budgets_are_refused_in_one_line(arguments, words):
    with pytest.raises(ValueError, match=words) as caught:
        RecordBudget(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"epsilon": 1.0, "delta": 1e-5, "pure_budget": 2.0}, "leave nothing to Gaussian releases"),
        ({"epsilon": 1.0, "delta": 0.0, "pure_budget": 0.5}, "leaves no pure budget"),
        ({"epsilon": 1.0, "delta": 0.0, "excess_budget": 1.0}, "leaves no pure budget"),
        ({"epsilon": math.nan, "delta": 1e-5}, "epsilon is nan"),
        ({"epsilon": 1.0, "delta": 1.0}, "delta is 1.0"),
    ],
)
def test_totals_that_leave_nothing_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        RecordBudget.of_total(**arguments)


def test_a_budget_of_zero_has_no_multiplier_and_distances_start_at_one():
    with pytest.raises(ValueError, match="gaussian_budget is 0"):
        RecordBudget(pure_budget=1.0).noise_multiplier("gaussian", num_releases=1)
    with pytest.raises(ValueError, match=r"distance is 0\.5"):
        RecordBudget(pure_budget=1.0).total(delta=0.0, distance=0.5)
    with pytest.raises(ValueError, match=r"delta is 0\.0"):
        RecordBudget(gaussian_budget=1.0).total(delta=0.0)
