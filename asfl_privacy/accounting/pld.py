"""Joint ε of Gaussian, Laplace and randomised-response releases, from both sides.

Gaussian releases of all multipliers are one Gaussian with μ² = Σ n/z². The privacy loss of the others is added to it by
Fourier inversion of the exact characteristic function (see fourier.py): no loss is put on a grid, so any mix of
multipliers, counts and scales costs the same, and the tilt by e^{θL} keeps relative precision at every δ accepted.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from asfl_privacy.accounting.bracket import EpsilonBracket
from asfl_privacy.accounting.checks import check_choice, check_delta, check_integer, check_multiplier
from asfl_privacy.accounting.fourier import (
    Contour,
    best_theta,
    chernoff_gap,
    log_delta_lower,
    log_delta_upper,
    make_contour,
)
from asfl_privacy.accounting.gaussian import composed_gaussian_epsilon
from asfl_privacy.accounting.losses import Losses
from asfl_privacy.accounting.rationals import fraction_down, fraction_up

LOSS_MECHANISMS = ("gaussian", "laplace", "randomized-response")

_ULP = 2.0**-52
_PASSES = 6
_SMOOTHING = 1e-3  # relative change of δ that the smoothing may cause at first
_CLOSE = 1e-12  # where the closed forms are this close, they are the answer
_WIDTH = 1e-3  # relative width of ε that is good enough
_LARGEST_PURE = 1e12  # beyond it floats cannot hold ε and its distance from the pure sum
_MOST_RELEASES = 10**10  # beyond it rounding in the powers leaves nothing proven
_EXACT_TERMS = 16
_LARGEST_INTEGER = 2**53
_SUM_BITS = 256

Key = tuple[str, Fraction, int]


@dataclass(frozen=True, kw_only=True)
class LossEvent:
    """Releases with one privacy loss.

    Args:
        mechanism: "gaussian", "laplace" (continuous, any dimension) or "randomized-response".
        noise_multiplier: z > 0, taken exactly: σ/Δ (Δ in ℓ2) for Gaussian; b/Δ (Δ in ℓ1) for Laplace; 1/ε0 for
            randomised response, ε0 being the pure ε of one draw.
        count: number of releases, 1 to 2^53.
        num_classes: k from 2 to 2^53, required for randomised response and refused elsewhere.

    Raises:
        ValueError: if a value is out of range.

    Example:
        >>> LossEvent(mechanism="laplace", noise_multiplier=10.0, count=100).count
        100
    """

    mechanism: str
    noise_multiplier: float | Fraction
    count: int
    num_classes: int | None = None

    def __post_init__(self) -> None:
        check_choice("mechanism", self.mechanism, LOSS_MECHANISMS)
        check_multiplier(self.noise_multiplier)
        check_integer("count", self.count, minimum=1)
        if self.mechanism == "randomized-response":
            check_integer("num_classes", self.num_classes, minimum=2)
        elif self.num_classes is not None:
            raise ValueError(
                f"num_classes is {self.num_classes!r}: only randomized-response has classes, not {self.mechanism}; "
                "pass num_classes=None"
            )
        for name, value in (("count", self.count), ("num_classes", self.num_classes or 0)):
            if value > _LARGEST_INTEGER:
                raise ValueError(f"{name} is {value}: it must be at most 2**53, what floats count exactly; check it")


def compose(events: Iterable[LossEvent], *, delta: float) -> EpsilonBracket:
    """ε of all releases together.

    Args:
        events: the releases; order and adaptivity do not matter, multipliers are fixed beforehand.
        delta: δ in (0, 1) for all together; 0 where there is no Gaussian.

    Returns:
        The bracket; at most 1 % wide for δ from 1e-10 to .99 and up to 1e6 releases where ε > .01; ε = 0 without events.

    Raises:
        ValueError: if δ is out of range, or 0 with a Gaussian.

    Guarantee:
        low ≤ ε ≤ high, with ε the exact value of the dominating pairs in ideal arithmetic: ``high`` holds for the
        mechanisms in any dimension and for both directions of adjacency (the pairs are symmetric, see losses.py), and
        ``low`` is attained where the declared sensitivity is. ``high`` never exceeds the sum of the pure ε and the
        Gaussian closed form; ``low`` is never below the closed form of the Gaussian part or of any other release.
        There is no floor on δ. Where rounding or size forbids inversion (pure ε above 1e12, more than about 1e9
        releases), these closed forms are returned: valid, but wide.

    Edge cases:
        Continuous Laplace noise only: the discrete Laplace loses more. Never negative.

    Source:
        Zhu, Dong & Wang (2022), Theorem 10: dominating pairs compose; Dong, Roth & Su (2022), Corollary 3.3.

    Example:
        >>> bracket = compose([LossEvent(mechanism="laplace", noise_multiplier=10.0, count=100)], delta=1e-5)
        >>> round(bracket.low, 2), round(bracket.high, 2)
        (4.22, 4.22)
    """
    delta = check_delta(delta, zero_allowed=True)
    counts: Counter[Key] = Counter()
    for event in events:
        counts[event.mechanism, Fraction(event.noise_multiplier), event.num_classes or 0] += event.count
    return _compose(tuple(sorted(counts.items())), delta)


@lru_cache(maxsize=4096)
def _compose(items: tuple[tuple[Key, int], ...], delta: float) -> EpsilonBracket:
    mu_squared = _sum_bounds([n / z**2 for (mechanism, z, _), n in items if mechanism == "gaussian"])
    others = [(z, k, n) for (mechanism, z, k), n in items if mechanism != "gaussian"]
    pure = _sum_bounds([n / z for z, _, n in others])
    if mu_squared[1] > 0:
        delta = check_delta(delta)
        low = composed_gaussian_epsilon(mu_squared[0], delta=delta).low
        from_gaussian = composed_gaussian_epsilon(mu_squared[1], delta=delta).high
    else:
        low = from_gaussian = 0.0
    if not others:
        return EpsilonBracket(low=low, high=from_gaussian, delta=delta)
    if delta == 0.0:
        return EpsilonBracket(low=fraction_down(pure[0]), high=fraction_up(pure[1]), delta=delta)
    high = math.inf if math.isinf(from_gaussian) else fraction_up(pure[1] + Fraction(from_gaussian))
    low = max(low, *(_one_release_low(z, k, delta) for z, k, _ in others))
    low = min(high, max(low, _all_largest_low(others, pure=pure[0], delta=delta)))
    if low >= high * (1.0 - _CLOSE):
        return EpsilonBracket(low=low, high=high, delta=delta)
    if max(pure[1], mu_squared[1]) <= _LARGEST_PURE and sum(n for _, _, n in others) <= _MOST_RELEASES:
        low_inverted, high_inverted = _invert(others, mu_squared=mu_squared, pure=pure, delta=delta)
        low, high = max(low, low_inverted), min(high, high_inverted)
    return EpsilonBracket(low=min(low, high), high=high, delta=delta)


def _invert(
    others: list[tuple[Fraction, int, int]],
    *,
    mu_squared: tuple[Fraction, Fraction],
    pure: tuple[Fraction, Fraction],
    delta: float,
) -> tuple[float, float]:
    """(low, high) by inversion; (0, inf) where nothing is proven. The search runs over gap = pure − ε."""
    ordered = sorted(others, key=lambda other: -other[2] / other[0] ** 2)  # largest first: the nodes die out sooner
    losses = Losses(
        epsilons=np.array([float(1 / z) for z, _, _ in ordered]),
        counts=np.array([float(n) for _, _, n in ordered]),
        num_classes=np.array([float(k) for _, k, _ in ordered]),
    )
    variance, largest_gap = fraction_up(mu_squared[1]), fraction_up(pure[1])
    log_delta = math.log(delta)
    down, up = log_delta * (1.0 + 2 * _ULP), log_delta * (1.0 - 2 * _ULP)
    low, high, smoothing = 0.0, math.inf, _SMOOTHING
    gap = min(chernoff_gap(losses, variance, log_delta), largest_gap)
    for _ in range(_PASSES):
        theta = best_theta(losses, variance, gap)
        contour = make_contour(losses, mu_squared=mu_squared, theta=theta, gap=gap, smoothing=smoothing)
        safe = _largest_safe_gap(contour, start=gap, largest=largest_gap, log_delta=down)
        start = safe if math.isfinite(safe) else gap
        unavoidable = _least_unavoidable_gap(contour, start=start, largest=largest_gap, log_delta=up)
        if math.isfinite(safe):
            high = min(high, fraction_up(max(Fraction(0), pure[1] - Fraction(safe))))
        if math.isfinite(unavoidable):
            low = max(low, fraction_down(max(Fraction(0), pure[0] - Fraction(unavoidable))))
        if abs(start - gap) * theta < 0.5:  # the contour was made for the gap found
            if high - low <= _WIDTH * high:
                break
            smoothing /= 30.0
        gap = start
    return low, high


def _largest_safe_gap(contour: Contour, *, start: float, largest: float, log_delta: float) -> float:
    """About the largest gap at which δ is proven to be small enough; −inf where none is found."""

    def safe(gap: float) -> bool:
        return log_delta_upper(contour, gap) <= log_delta

    unit = 1.0 / contour.theta
    if safe(start):
        good, step = start, unit
        while good < largest:
            tried = min(largest, good + step)
            if not safe(tried):
                return _bisect(safe, good=good, bad=tried, tolerance=1e-5 * unit)
            good, step = tried, 2.0 * step
        return good
    bad, step = start, unit
    for _ in range(64):
        tried = bad - step
        if safe(tried):
            return _bisect(safe, good=tried, bad=bad, tolerance=1e-5 * unit)
        bad, step = tried, 2.0 * step
    return -math.inf


def _least_unavoidable_gap(contour: Contour, *, start: float, largest: float, log_delta: float) -> float:
    """About the least gap at which δ is proven to be too large; inf where none is found."""

    def unavoidable(gap: float) -> bool:
        return log_delta_lower(contour, gap) >= log_delta

    unit = 1.0 / contour.theta
    bad, step = start, 1e-3 * unit
    while bad < largest:
        tried = bad + step
        if unavoidable(tried):
            return _bisect(unavoidable, good=tried, bad=bad, tolerance=1e-5 * unit)
        bad, step = tried, 2.0 * step
    return math.inf


def _bisect(holds: Callable[[float], bool], *, good: float, bad: float, tolerance: float) -> float:
    """A gap that holds, within the tolerance of one that does not."""
    while abs(good - bad) > tolerance and (middle := 0.5 * (good + bad)) not in (good, bad):
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good


def _one_release_low(z: Fraction, num_classes: int, delta: float) -> float:
    """A lower bound of the closed-form ε of one release: Laplace ε0 + 2 ln(1 − δ), else ε0 + ln(1 − δ/p)."""
    pure = fraction_down(1 / z)
    likely = 1.0 / (1.0 + (num_classes - 1.0) * math.exp(-pure)) * (1.0 - 16 * _ULP) if num_classes else 1.0
    if delta >= likely or not math.isfinite(pure):
        return 0.0
    drop = (1.0 if num_classes else 2.0) * -math.log1p(-delta / likely)
    return max(0.0, pure - drop - 16 * _ULP * (pure + drop / (1.0 - delta / likely)))


def _all_largest_low(others: list[tuple[Fraction, int, int]], *, pure: Fraction, delta: float) -> float:
    """A lower bound of ε from the outcome that every loss is its largest: δ ≥ Π p·(1 − e^{ε − Σ n·ε0})."""
    log_likely = -sum(
        n * (math.log1p((k - 1.0) * math.exp(-fraction_down(1 / z))) if k else math.log(2.0)) for z, k, n in others
    )
    log_share = math.log(delta) - log_likely * (1.0 + 1e-12) + 1e-12
    if log_share >= -1e-6:
        return 0.0
    drop = -math.log1p(-math.exp(log_share)) * (1.0 + 1e-9)
    return fraction_down(max(Fraction(0), pure - Fraction(drop)))


def _sum_bounds(terms: list[Fraction]) -> tuple[Fraction, Fraction]:
    """Bounds of the exact sum of terms > 0, equal for up to 16 terms and within a factor 1 ± 2^-240 otherwise.

    The exact sum of a thousand fractions without a common denominator has a hundred thousand digits.
    """
    if len(terms) <= _EXACT_TERMS:
        exact = sum(terms, Fraction(0))
        return exact, exact
    largest = max(terms)
    shift = _SUM_BITS + largest.denominator.bit_length() - largest.numerator.bit_length()
    scale = Fraction(2) ** shift
    low = sum(math.floor(term * scale) for term in terms)
    return low / scale, (low + len(terms)) / scale
