"""The joint bracket against exact sums, mpmath integrals, a grid twin and dp-accounting."""

import math
import random
from fractions import Fraction

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asfl_privacy.accounting.gaussian import composed_gaussian_epsilon
from asfl_privacy.accounting.pld import LossEvent, compose

DELTAS = [0.5, 1e-2, 1e-5, 1e-10, 1e-12, 1e-14]


def gaussian(z, n=1):
    return LossEvent(mechanism="gaussian", noise_multiplier=z, count=n)


def laplace(z, n=1):
    return LossEvent(mechanism="laplace", noise_multiplier=z, count=n)


def response(z, n=1, k=10):
    return LossEvent(mechanism="randomized-response", noise_multiplier=z, count=n, num_classes=k)


def gaussian_delta(epsilon, mu):
    return mp.ncdf(mu / 2 - epsilon / mu) - mp.exp(epsilon) * mp.ncdf(-mu / 2 - epsilon / mu)


def response_losses(z, n, k):
    """Exact distribution of the summed loss: (loss, probability) of the trinomial, by multinomial coefficients."""
    eps = 1 / mp.mpf(z)
    total = mp.exp(eps) + k - 1
    top, bottom, middle = mp.exp(eps) / total, 1 / total, mp.mpf(k - 2) / total
    mass = [mp.mpf(0)] * (2 * n + 1)
    for a in range(n + 1):
        for b in range(n + 1 - a):
            mass[a - b + n] += math.comb(n, a) * math.comb(n - a, b) * top**a * bottom**b * middle ** (n - a - b)
    return [((index - n) * eps, w) for index, w in enumerate(mass)]


def delta_over(losses, epsilon, mu=0):
    epsilon = mp.mpf(epsilon)
    if mu:
        return mp.fsum(w * gaussian_delta(epsilon - loss, mu) for loss, w in losses)
    return mp.fsum(w * (1 - mp.exp(epsilon - loss)) for loss, w in losses if loss > epsilon)


def laplace_delta(epsilon, z, n):
    """n Laplace releases, exactly: a losses are ε0, b are −ε0, and j lie between with density e^{(l − ε0)/2}/4.

    The sum of j losses between has density 4^{−j}·e^{−j·ε0/2}·e^{x/2} times the volume of its cube slice, which is
    Irwin and Hall's piecewise polynomial.
    """
    eps, epsilon = 1 / mp.mpf(z), mp.mpf(epsilon)
    total = mp.mpf(0)
    for a in range(n + 1):
        for b in range(n + 1 - a):
            j = n - a - b
            ways = math.comb(n, a) * math.comb(n - a, b) * mp.mpf(2) ** -(a + b) * mp.exp(-b * eps)
            rest = epsilon - (a - b) * eps
            if j == 0:
                total += ways * max(mp.mpf(0), 1 - mp.exp(rest))
                continue

            def density(x, j=j):
                y = (x + j * eps) / (2 * eps)  # Irwin–Hall of j uniforms on [0, 1]
                volume = mp.fsum(
                    (-1) ** i * mp.binomial(j, i) * (y - i) ** (j - 1) for i in range(int(mp.floor(y)) + 1) if y > i
                ) / mp.factorial(j - 1)
                return volume * (2 * eps) ** (j - 1) * mp.mpf(4) ** -j * mp.exp((x - j * eps) / 2)

            knots = [(2 * i - j) * eps for i in range(j + 1)]
            inside = [max(rest, knots[0])] + [knot for knot in knots if knot > max(rest, knots[0])]
            if len(inside) > 1:
                total += ways * mp.quad(lambda x, d=density, r=rest: d(x) * (1 - mp.exp(r - x)), inside)
    return total


def assert_truth_inside(bracket, delta, exact_delta):
    """``exact_delta(ε)`` decreases: high is safe where it is ≤ δ there, low unavoidable where it is ≥ δ."""
    assert 0.0 <= bracket.low <= bracket.high < math.inf
    assert exact_delta(bracket.high) <= delta
    assert bracket.low == 0.0 or exact_delta(bracket.low) >= delta


def assert_narrow(bracket):
    assert bracket.high - bracket.low <= 0.01 * bracket.high


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize(("z", "n", "k"), [(1.0, 1, 10), (1.0, 40, 10), (0.3, 25, 2), (5.0, 30, 1000), (0.001, 4, 7)])
def test_randomised_response_alone_and_with_a_gaussian(z, n, k, delta):
    """Catches: k − 1 for k − 2, ε0 and −ε0 exchanged, low and high exchanged, one draw charged for n."""
    with mp.workdps(60):
        losses = response_losses(z, n, k)
        for mu in (0, mp.mpf(1) / 2):
            events = [response(z, n, k)] + ([gaussian(2.0)] if mu else [])
            bracket = compose(events, delta=delta)
            assert_truth_inside(bracket, delta, lambda epsilon, mu=mu: delta_over(losses, epsilon, mu))
            assert_narrow(bracket)


@pytest.mark.parametrize("delta", [0.3, 1e-3, 1e-5, 1e-10, 1e-13])
@pytest.mark.parametrize(("z", "n"), [(1.0, 1), (0.2, 2), (1.0, 3), (4.0, 4)])
def test_few_laplace_releases_against_the_exact_sum(z, n, delta):
    """Catches: rounding the losses the wrong way, a Laplace accounted by its discrete cousin."""
    bracket = compose([laplace(z, n)], delta=delta)
    with mp.workdps(30):
        assert_truth_inside(bracket, delta, lambda epsilon: laplace_delta(epsilon, z, n))
    assert_narrow(bracket)


@pytest.mark.parametrize("delta", [1e-5, 1e-13])
@pytest.mark.parametrize(("z", "zg"), [(1.0, 2.0), (0.1, 0.5), (10.0, 1.0), (2.0, 1000.0), (1e4, 1.0), (1.0, 1e-3)])
def test_one_laplace_with_one_gaussian_against_the_integral(z, zg, delta):
    """Catches: adding ε of the parts, and scales that differ by 10^4 lost to a common grid."""
    eps, mu = 1 / mp.mpf(z), 1 / mp.mpf(zg)

    def exact(epsilon):
        epsilon = mp.mpf(epsilon)
        atoms = (gaussian_delta(epsilon - eps, mu) + mp.exp(-eps) * gaussian_delta(epsilon + eps, mu)) / 2
        kink = [x for x in (epsilon - 9 * mu, epsilon, epsilon + 9 * mu) if -eps < x < eps]
        points = [-eps, *kink, eps]
        return atoms + mp.quad(lambda x: mp.exp((x - eps) / 2) / 4 * gaussian_delta(epsilon - x, mu), points)

    bracket = compose([laplace(z), gaussian(zg)], delta=delta)
    with mp.workdps(32):
        assert_truth_inside(bracket, delta, exact)
    assert_narrow(bracket)


def grid_bracket(z, n, delta, step):
    """The slow, obvious twin: one Laplace loss rounded to a grid, up or down, convolved n times, ε read off."""
    eps = 1.0 / z
    edges = np.arange(math.floor(-eps / step), math.ceil(eps / step) + 1) * step
    below = np.where(edges < -eps, 0.0, 0.5 * np.exp((np.minimum(edges, eps) - eps) / 2.0))  # P(loss ≤ edge)
    below[edges >= eps] = 1.0
    cells = np.diff(below, prepend=0.0)
    ends = []
    for shift in (0.0, -1.0):  # mass of (edge − step, edge] at its upper or its lower edge
        mass = np.array([1.0])
        for _ in range(n):
            mass = np.convolve(mass, cells)
        losses = (np.arange(len(mass)) + n * (edges[0] / step + shift)) * step
        low, high = 0.0, n * eps + n * step
        for _ in range(60):
            middle = 0.5 * (low + high)
            value = float(np.sum(mass * -np.expm1(np.minimum(0.0, middle - losses))))
            low, high = (low, middle) if value <= delta else (middle, high)
        ends.append(high)
    return ends[1], ends[0]


@pytest.mark.parametrize(("z", "n"), [(10.0, 40), (1.0, 30), (0.2, 15)])
@pytest.mark.parametrize("delta", [0.1, 1e-5, 1e-8])
def test_the_grid_twin_encloses_the_bracket(z, n, delta):
    low, high = grid_bracket(z, n, delta, step=1.0 / z / 150)
    bracket = compose([laplace(z, n)], delta=delta)
    assert low <= bracket.low * (1.0 + 1e-6)
    assert bracket.high <= high * (1.0 + 1e-6)


def random_ledgers(number):
    draw = random.Random(20)
    for _ in range(number):
        log = lambda low, high: math.exp(draw.uniform(math.log(low), math.log(high)))  # noqa: E731
        events = [gaussian(log(1.5, 40.0), draw.randint(1, 60)) for _ in range(draw.randint(0, 2))]
        events += [laplace(log(1.0, 30.0), draw.randint(1, 60)) for _ in range(draw.randint(0, 2))]
        events += [
            response(log(0.4, 4.0), draw.randint(1, 8), draw.choice([2, 10, 50])) for _ in range(draw.randint(0, 2))
        ]
        yield events or [laplace(2.0)], 10.0 ** draw.uniform(-9.0, -1.0)


def library_epsilon(events, delta, *, pessimistic):
    pld = pytest.importorskip(
        "dp_accounting.pld.privacy_loss_distribution", reason="dp-accounting is not installed: no second accountant"
    )
    common = {"value_discretization_interval": 2e-3, "pessimistic_estimate": pessimistic}
    total = None
    for event in events:
        z = event.noise_multiplier
        if event.mechanism == "gaussian":
            one = pld.from_gaussian_mechanism(z, use_connect_dots=False, **common)
        elif event.mechanism == "laplace":
            one = pld.from_laplace_mechanism(z, use_connect_dots=False, **common)
        else:
            k = event.num_classes
            noise = k / (math.exp(1.0 / z) + k - 1.0)  # a uniform output with this probability, else the input
            one = pld.from_randomized_response(noise, k, **common)
        one = one.self_compose(event.count) if event.count > 1 else one
        total = one if total is None else total.compose(one)
    return total.get_epsilon_for_delta(delta)


def test_dp_accounting_overlaps_on_random_ledgers():
    """52 mixed ledgers: its pessimistic value is ≥ our low end, its optimistic one ≤ our high end, and we are narrow."""
    narrower = 0
    for events, delta in random_ledgers(52):
        bracket = compose(events, delta=delta)
        above = library_epsilon(events, delta, pessimistic=True)
        below = library_epsilon(events, delta, pessimistic=False)
        assert above >= bracket.low - 1e-9, (events, delta)
        assert below <= bracket.high + 1e-9, (events, delta)
        assert bracket.high - bracket.low <= max(0.01 * bracket.high, 1e-4), (events, delta)
        narrower += bracket.high - bracket.low <= above - below
    assert narrower >= 45


EVENTS = st.one_of(
    st.builds(gaussian, st.floats(0.05, 1e4), st.integers(1, 1000)),
    st.builds(laplace, st.floats(0.01, 1e4), st.integers(1, 1000)),
    st.builds(response, st.floats(0.05, 100.0), st.integers(1, 100), st.sampled_from([2, 3, 10, 1000])),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(EVENTS, min_size=1, max_size=4), EVENTS, st.floats(-14.0, -0.01))
def test_order_parts_and_growth(events, more, log_delta):
    """Catches: an event lost in the merge; high above the sum of the parts; low below a part's own."""
    delta = 10.0**log_delta
    bracket = compose(events, delta=delta)
    assert bracket == compose(reversed(events), delta=delta)
    assert 0.0 <= bracket.low <= bracket.high
    square = sum(
        (e.count / Fraction(e.noise_multiplier) ** 2 for e in events if e.mechanism == "gaussian"), Fraction(0)
    )
    pure = sum((e.count / Fraction(e.noise_multiplier) for e in events if e.mechanism != "gaussian"), Fraction(0))
    closed = composed_gaussian_epsilon(square, delta=delta)
    assert bracket.high <= (float(pure) + closed.high) * (1 + 1e-12)
    assert bracket.low >= closed.low
    assert compose([*events, more], delta=delta).high >= bracket.low
    assert bracket.high >= compose(events, delta=min(0.999, 3.0 * delta)).low


def test_halves_of_a_count_are_the_whole():
    whole = compose([laplace(3.0, 100), gaussian(7.0, 50)], delta=1e-6)
    assert whole == compose([laplace(3.0, 60), gaussian(7.0, 50), laplace(3.0, 40)], delta=1e-6)
    assert whole == compose([laplace(Fraction(3), 100), gaussian(7.0, 20), gaussian(7.0, 30)], delta=1e-6)


def test_gaussians_of_all_multipliers_are_the_closed_form():
    """Catches: a Gaussian put through the inversion, or Σ 1/z for Σ 1/z²."""
    bracket = compose([gaussian(1.0, 100), gaussian(100.0, 1)], delta=1e-5)
    assert bracket == composed_gaussian_epsilon(100 + Fraction(1, 10**4), delta=1e-5)
    assert bracket.high >= 91.8


def test_a_thousand_different_rounds_stay_narrow():
    """Also the sum of a thousand unlike fractions, rounded outward: it must enclose that of the exact closed form."""
    draw = random.Random(3)
    zs = [draw.uniform(5.0, 20.0) for _ in range(1000)]
    bracket = compose([laplace(z) for z in zs], delta=1e-10)
    assert_narrow(bracket)
    all_least, all_most = (compose([laplace(z, 1000)], delta=1e-10) for z in (max(zs), min(zs)))
    assert all_least.high < bracket.low
    assert bracket.high < all_most.low
    exact = sum(1 / Fraction(z) ** 2 for z in zs[:40])
    got, expected = compose([gaussian(z) for z in zs[:40]], delta=1e-5), composed_gaussian_epsilon(exact, delta=1e-5)
    assert got.low <= expected.high
    assert expected.low <= got.high
    assert got.high - got.low <= 1e-9


@pytest.mark.parametrize("delta", [1e-5, 1e-10, 1e-14, 1e-100, 1e-250])
@pytest.mark.parametrize(
    "events",
    [
        [laplace(10.0, 1000)],
        [laplace(1.0, 10**6)],
        [laplace(1e4, 10**6), response(0.2)],
        [gaussian(1e4), laplace(1e-3, 100)],
        [gaussian(1e-3), laplace(1e4)],
        [response(1.0, 10**5, 2), response(1e3, 10**6, 1000)],
        [laplace(100.0, 10**5), gaussian(1.0), laplace(0.1), response(0.01, 1, 3)],
    ],
)
def test_extremes_stay_narrow_and_need_no_floor(events, delta):
    assert_narrow(compose(events, delta=delta))


@pytest.mark.parametrize("delta", [0.9, 0.99, 0.9999, 1.0 - 1e-12])
def test_a_large_delta_gives_zero_or_a_valid_bracket(delta):
    """Catches: a negative ε (μ=1, δ=.9)."""
    for events in (
        [gaussian(1.0)],
        [laplace(1.0)],
        [laplace(1.0, 100)],
        [response(0.1, 5)],
        [laplace(1.0), gaussian(1.0)],
    ):
        bracket = compose(events, delta=delta)
        assert 0.0 <= bracket.low <= bracket.high
    assert compose([gaussian(1.0)], delta=delta).high == 0.0
    assert compose([laplace(1.0)], delta=delta).high == 0.0


def test_zero_delta_is_the_pure_sum():
    bracket = compose([laplace(10.0, 100), response(2.0, 3, 4)], delta=0.0)
    assert bracket.low <= Fraction(100) / Fraction(10) + Fraction(3, 2) <= bracket.high
    with pytest.raises(ValueError, match="delta is"):
        compose([laplace(10.0), gaussian(1.0)], delta=0.0)


def test_nothing_costs_nothing():
    assert (compose([], delta=1e-5).low, compose([], delta=1e-5).high) == (0.0, 0.0)


@pytest.mark.parametrize(
    "events", [[laplace(1e-300)], [laplace(5e-324)], [laplace(1.0, 2**53)], [gaussian(1e-200), laplace(1.0)]]
)
def test_what_cannot_be_inverted_keeps_its_closed_forms(events):
    """Catches: an overflow that slips through as NaN, or a count beyond floats."""
    bracket = compose(events, delta=1e-5)
    assert 0.0 <= bracket.low <= bracket.high
    assert compose([*events, laplace(1e300, 2**53)], delta=1e-5).high >= bracket.low


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, True, "1", None])
def test_bad_multipliers_are_refused(bad):
    with pytest.raises(ValueError, match="noise_multiplier is") as caught:
        laplace(bad)
    assert "\n" not in str(caught.value)


def test_bad_events_are_refused():
    with pytest.raises(ValueError, match="mechanism is 'uniform'"):
        LossEvent(mechanism="uniform", noise_multiplier=1.0, count=1)
    for count in (0, -1, 1.5, True, None, 2**53 + 1):
        with pytest.raises(ValueError, match="count is"):
            laplace(1.0, count)
    for k in (None, 1, 2.5, 10**400):
        with pytest.raises(ValueError, match="num_classes is"):
            response(1.0, 1, k)
    with pytest.raises(ValueError, match="only randomized-response"):
        LossEvent(mechanism="laplace", noise_multiplier=1.0, count=1, num_classes=3)
    for delta in (-1e-5, 1.0, math.nan, 1e-300):
        with pytest.raises(ValueError, match="delta is"):
            compose([laplace(1.0)], delta=delta)
