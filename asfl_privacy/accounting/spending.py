"""From totals to ε: the bracket of the worst record or client, sampler error included."""

import math
from collections.abc import Callable, Iterable
from fractions import Fraction

from asfl_privacy.accounting.bracket import EpsilonBracket
from asfl_privacy.accounting.checks import check_delta, check_real
from asfl_privacy.accounting.event import EventClass, multiplier_at
from asfl_privacy.accounting.front import Candidate, worst_candidates
from asfl_privacy.accounting.gaussian import composed_gaussian_epsilon
from asfl_privacy.accounting.laplace import laplace_epsilon
from asfl_privacy.accounting.pld import LossEvent, compose
from asfl_privacy.accounting.rationals import fraction_down, fraction_up, sqrt_bounds
from asfl_privacy.accounting.sampler_error import charged_epsilon, discounted_epsilon, escape_probability
from asfl_privacy.accounting.totals import PureClass, Tally


def spent_epsilon(tally: Tally, *, delta: float) -> EpsilonBracket:
    """ε of the worst unit of a tally.

    Args:
        tally: what every unit has spent.
        delta: δ in (0, 1); 0 is allowed without Gaussian releases and without tail probability.

    Returns:
        The bracket. Gaussian alone: the closed form, both ends agree up to rounding. Otherwise as ``compose`` has it for
        the worst unit; where ``high`` is no better than a sum of pure ε, it is that sum and ``bracket.delta`` is 0.

    Guarantee:
        low ≤ the largest ε over units ≤ high, sampler error charged as in sampler_error.py with E and τ the largest sums
        of any unit, so that no unit is charged less than its own.
    """
    excess, tail, escape = (fraction_up(total.bounds()[1]) for total in (tally.excess, tally.tail, tally.escape))
    square_low, square_high = tally.squares.bounds()
    if not tally.classes:
        return _with_sampler(
            lambda rest: composed_gaussian_epsilon(square_high, delta=rest).high,
            lambda raised: composed_gaussian_epsilon(square_low, delta=raised).low,
            delta=delta,
            excess=excess,
            tail=tail,
            escape=escape,
        )
    pure_low, pure_high = tally.pure.bounds()
    basic = _with_sampler(
        lambda _: fraction_up(pure_high), lambda _: fraction_down(pure_low), delta=0.0, excess=excess, tail=0.0
    )
    if delta == 0.0:
        return basic
    classes, candidates = tally.classes, worst_candidates(tally.squares.upper(), tally.counts, classes=tally.classes)
    real = [candidate for candidate in candidates if candidate.is_real]
    worst = max(real, key=lambda candidate: _high(candidate, classes, delta)) if len(real) > 1 else real[0]
    found = _with_sampler(
        lambda rest: max(_high(candidate, classes, rest) for candidate in candidates),
        lambda raised: _low(worst, classes, raised),
        delta=delta,
        excess=excess,
        tail=tail,
        escape=escape,
    )
    if tally.squares.is_empty and tail == 0.0 and basic.high <= found.high:
        return EpsilonBracket(low=min(found.low, basic.high), high=basic.high, delta=0.0)
    return found


def _with_sampler(
    upper: Callable[[float], float],
    lower: Callable[[float], float],
    *,
    delta: float,
    excess: float,
    tail: float,
    escape: float = 1.0,
) -> EpsilonBracket:
    """The bracket of the drawn noise from both ends of the ideal ε, as functions of δ."""
    high = charged_epsilon(upper, delta=delta, excess=excess, tail=tail, escape=escape)
    low = discounted_epsilon(lower, delta=delta, excess=excess, tail=tail)
    return EpsilonBracket(low=min(low, high), high=high, delta=delta)


def check_spending_delta(delta: float, events: Iterable[EventClass]) -> float:
    """Return a δ in [0, 1) at which these events have a finite ε, or raise ValueError."""
    delta = check_delta(delta, zero_allowed=True)
    if delta == 0.0:
        events = tuple(events)
        if any(event.mechanism == "gaussian" for event in events):
            raise ValueError(
                "delta is 0.0: Gaussian releases have no finite epsilon at delta 0; pass 0 < delta < 1, e.g. delta=1e-5"
            )
        if any(event.tail_probability for event in events):
            raise ValueError(
                "delta is 0.0: the sampler of some release has a tail probability, which only a delta can cover; pass "
                "0 < delta < 1, e.g. delta=1e-5"
            )
    return delta


def check_distance(distance: float) -> float:
    """Return a distance ≥ 1 in multiples of the radius, inf included, or raise ValueError."""
    if isinstance(distance, float) and math.isinf(distance) and distance > 0.0:
        return distance
    fix = "pass distance=1 for the radius itself, or math.inf for any two records"
    return check_real("distance", distance, minimum=1.0, exclusive=False, fix=fix)


def release_epsilon(events: Iterable[EventClass], *, delta: float, distance: float) -> float:
    """ε at ``delta`` of the strongest single release, sampler error included, rounded up.

    Args:
        events: event classes with at least one release.
        delta: δ in (0, 1); 0 is allowed without Gaussian releases and without tail probability.
        distance: k ≥ 1 in multiples of the radius; inf for any two records.

    Returns:
        ε ≥ 0; 0 without events; inf where a multiplier at ``distance`` is not known. A release that is not Gaussian is
        taken at δ=0.
    """
    strongest: dict[tuple[bool, float, float], Fraction] = {}
    for event in events:
        multiplier = multiplier_at(event, distance)
        if multiplier is None:
            return math.inf
        key = (event.mechanism == "gaussian", event.epsilon_excess, event.tail_probability)
        strongest[key] = min(multiplier, strongest.get(key, multiplier))
    highest = 0.0
    for (is_gaussian, excess, tail), multiplier in strongest.items():

        def ideal(rest: float, multiplier: Fraction = multiplier, is_gaussian: bool = is_gaussian) -> float:
            if is_gaussian:
                return composed_gaussian_epsilon(1 / multiplier**2, delta=rest).high
            return fraction_up(1 / multiplier)

        escape = escape_probability(tail, multiplier=multiplier) if is_gaussian else 1.0
        highest = max(highest, charged_epsilon(ideal, delta=delta, excess=excess, tail=tail, escape=escape))
    return highest


def _high(candidate: Candidate, classes: tuple[PureClass, ...], delta: float) -> float:
    """An upper bound of ε: every pure release at its class's strongest multiplier, μ² rounded up."""
    if math.isinf(candidate.square):
        return math.inf
    pure = [(group, count) for group, count in zip(classes, candidate.counts, strict=True) if count]
    if candidate.square == 0.0 and [(group.mechanism, count) for group, count in pure] == [("laplace", 1)]:
        return laplace_epsilon(
            delta, noise_multiplier=fraction_down(pure[0][0].strongest)
        )  # exact, where pld.py rounds
    events = [_loss(group, group.strongest, count) for group, count in pure]
    if candidate.square > 0.0:
        mu = sqrt_bounds(Fraction(candidate.square))[1]
        events.append(LossEvent(mechanism="gaussian", noise_multiplier=1 / Fraction(mu), count=1))
    return compose(events, delta=delta).high


def _low(candidate: Candidate, classes: tuple[PureClass, ...], delta: float) -> float:
    """A lower bound of ε of a real unit: every pure release at its class's weakest multiplier, μ² rounded down."""
    events = [
        _loss(group, group.weakest, count) for group, count in zip(classes, candidate.counts, strict=True) if count
    ]
    if 0.0 < candidate.square < math.inf:
        square = Fraction(candidate.square) * (1 - Fraction(1, 2**30))  # ``square`` is above the unit's own by far less
        if mu := sqrt_bounds(square)[0]:
            events.append(LossEvent(mechanism="gaussian", noise_multiplier=1 / Fraction(mu), count=1))
    return compose(events, delta=delta).low


def _loss(group: PureClass, multiplier: Fraction, count: int) -> LossEvent:
    return LossEvent(mechanism=group.mechanism, noise_multiplier=multiplier, count=count, num_classes=group.num_classes)
