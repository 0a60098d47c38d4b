"""The membership guess: two candidate records are known, one of them was released; which?

The recipient holds records a and b, at distance ≤ R or any two, and one release of one of them. It guesses by the
likelihood ratio of the noise. Its advantage is P(guess a | a released) − P(guess a | b released): 0 for a coin, 1 for
certainty. If the release is (ε, δ)-private for a and b, no test whatever has an advantage above `membership_bound`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from asfl_privacy.accounting.checks import check_box, check_choice, check_delta, check_integer, check_norm, check_real
from asfl_privacy.attacks.guards import check_batch, check_confidence, check_rows, check_settled
from asfl_privacy.attacks.intervals import rate_interval
from asfl_privacy.attacks.view import MECHANISMS

SEARCHES = 4
"""Random starts of the search for a worst neighbour."""


@dataclass(frozen=True, kw_only=True)
class MembershipGuess:
    """How well the candidates are told apart.

    Attributes:
        advantage: Share of right guesses among releases of a, less that of wrong ones among releases of b.
        low: Lower end of its confidence interval.
        high: Upper end.
        confidence: Coverage of the interval.
        bound: What (ε, δ) allows at most; None where no ε is claimed.
        num_trials: Releases of each of the two candidates.
    """

    advantage: float
    low: float
    high: float
    confidence: float
    bound: float | None
    num_trials: int


def membership_bound(epsilon: float, *, delta: float) -> float:
    """The largest advantage of any test between two records whose releases are (ε, δ)-indistinguishable, rounded up.

    Args:
        epsilon: ε ≥ 0; inf promises nothing.
        delta: δ in [0, 1).

    Returns:
        (e^ε − 1 + 2δ)/(e^ε + 1), at most 1.

    Raises:
        ValueError: NaN or values out of range.

    Guarantee:
        Never below the exact value. Tight: a mechanism that reaches it exists.

    Source:
        Kairouz, Oh & Viswanath 2015, theorem 2.1 (the region of test errors), at its corner of equal errors
        (1 − δ)/(1 + e^ε); written as tanh(ε/2) + 2δ/(e^ε + 1).

    Example:
        >>> f"{membership_bound(1.0, delta=0.0):.6f}", membership_bound(0.0, delta=0.25)
        ('0.462117', 0.2500000000000002)
    """
    delta = check_delta(delta, zero_allowed=True)
    if epsilon == math.inf:
        return 1.0
    epsilon = check_real("epsilon", epsilon, minimum=0.0, exclusive=False, fix="pass e.g. epsilon=1.0")
    if epsilon == 0.0 and delta == 0.0:
        return 0.0
    rest = 2.0 / (math.exp(min(epsilon, 700.0)) + 1.0)  # smaller beyond 700, so this rounds up
    return min(1.0, (math.tanh(epsilon / 2.0) + delta * rest) * (1.0 + 2.0**-50))  # each function errs by an ulp or two


def guess_membership(
    released_first: Tensor,
    released_second: Tensor,
    *,
    expected_first: Tensor,
    expected_second: Tensor,
    mechanism: str = "gaussian",
    bound: float | None = None,
    confidence: float = 0.95,
) -> MembershipGuess:
    """Guess by likelihood ratio which candidate each row comes from, and count.

    Args:
        released_first: rows noised from the first candidates, shape (trials, ...); the noise is the last thing done.
        released_second: rows noised from the second candidates, same shape, drawn independently.
        expected_first: what the first candidates give without noise, same shape; or one row for all.
        expected_second: what the second candidates give without noise.
        mechanism: "gaussian": the nearer candidate in ℓ2 is likelier, whatever σ; "laplace": the nearer in ℓ1.
        bound: what (ε, δ) allows, shown beside it.
        confidence: coverage of the interval.

    Returns:
        The advantage at equal prior odds, where the test is optimal for this noise.

    Raises:
        ValueError: shapes that differ, NaN, inf, or values out of range.

    Guarantee:
        The interval covers the test's true advantage with at least the asked confidence: each of the two rates has a
        Clopper–Pearson interval that fails with half of what is left.

    Source:
        Neyman & Pearson 1933. For Gaussian noise the exact value is Φ(μ/2) − Φ(−μ/2), μ = ‖difference‖₂/σ.

    Example:
        >>> first, second = torch.zeros(1, 2), torch.ones(1, 2)
        >>> guess = guess_membership(
        ...     first.expand(50, 2), second.expand(50, 2), expected_first=first, expected_second=second
        ... )
        >>> guess.advantage, guess.low > 0.8
        (1.0, True)
    """
    check_choice("mechanism", mechanism, MECHANISMS)
    released_first = check_batch(released_first, what="released_first")
    shape = tuple(released_first.shape[1:])
    released_second = check_batch(released_second, what="released_second", shape=shape)
    confidence = check_confidence(confidence)
    expected = [
        check_batch(expected_first, what="expected_first", shape=shape),
        check_batch(expected_second, what="expected_second", shape=shape),
    ]
    trials = len(released_first)
    if len(released_second) != trials or any(len(rows) not in (1, trials) for rows in expected):
        raise ValueError(
            f"{trials} releases of the first candidates against {len(released_second)} of the second, with "
            f"{len(expected[0])} and {len(expected[1])} expected rows: one each is due; match the batches"
        )
    order = 2 if mechanism == "gaussian" else 1
    hits, false_hits = (
        int((_distances(rows, expected[0], order) < _distances(rows, expected[1], order)).sum())
        for rows in (released_first, released_second)
    )
    half = 1.0 - (1.0 - confidence) / 2.0
    true_low, true_high = rate_interval(hits, trials=trials, confidence=half)
    false_low, false_high = rate_interval(false_hits, trials=trials, confidence=half)
    return MembershipGuess(
        advantage=float(Fraction(hits - false_hits, trials)),
        low=true_low - false_high,
        high=true_high - false_low,
        confidence=confidence,
        bound=bound,
        num_trials=trials,
    )


def farthest_neighbours(
    function: Callable[[Tensor], Tensor],
    records: Tensor,
    *,
    radius: float,
    p: float,
    q: float,
    input_box: tuple[float, float],
    steps: int = 30,
    generator: torch.Generator,
) -> Tensor:
    """For each record, a record at p-distance ≤ radius whose image under `function` is as far off as a search finds.

    Args:
        function: differentiable; what is noised.
        records: shape (batch, *input_shape), in the box.
        radius: R > 0.
        p: norm of the distance between records: 1, 2 or inf.
        q: norm of the distance between images: 1 or 2.
        input_box: (low, high) that every record lies in.
        steps: ascent steps of each search.
        generator: for the random first steps.

    Returns:
        Shape (batch, *input_shape), in the box, without gradient.

    Raises:
        ValueError: values out of range, records outside the box.

    Guarantee:
        Every distance is at most `radius` and every record in the box, rounding included; that none is farther is not
        claimed.

    Source:
        Journée, Nesterov, Richtárik & Sepulchre 2010, algorithm 1 (ascent of a convex function by its linearisation).

    Example:
        >>> far = farthest_neighbours(
        ...     lambda x: x * torch.tensor([1.0, 3.0]), torch.full((1, 2), 0.5), radius=0.25, p=2, q=2,
        ...     input_box=(0, 1), generator=torch.Generator().manual_seed(0),
        ... )
        >>> [round(abs(step), 3) for step in (far - 0.5)[0].tolist()]
        [0.0, 0.25]
    """
    records = check_batch(records, what="records")
    low, high = check_box(input_box)
    radius = check_real("radius", radius, minimum=0.0, exclusive=True, fix="pass e.g. radius=0.1")
    p, q = check_norm(p), check_norm(q, name="q")
    steps = check_integer("steps", steps, minimum=1)
    check_settled(function, what="function")
    if float(records.min()) < low or float(records.max()) > high:
        raise ValueError(f"records leave the box [{low:g}, {high:g}]: neighbours are looked for inside it; widen it")
    reach = radius * (1.0 - 1e-5)  # room for float32 rounding, so that no distance exceeds the radius
    with torch.no_grad():
        image = check_rows(function(records), what="function", count=len(records))
    centres = records.repeat(SEARCHES, *(1,) * (records.dim() - 1))
    images = image.repeat(SEARCHES, *(1,) * (image.dim() - 1))
    direction = torch.randn(centres.shape, generator=generator, dtype=torch.float64).to(centres)
    best, best_distances = centres, torch.full((len(centres),), -1.0, dtype=centres.dtype, device=centres.device)
    for _ in range(steps):
        point = _farthest_along(direction, centres, reach=reach, p=p, box=(low, high)).requires_grad_(True)
        with torch.enable_grad():
            distances = torch.linalg.vector_norm((function(point) - images).flatten(1), ord=q, dim=1)
            (direction,) = torch.autograd.grad(distances.sum(), point)
        better = distances.detach() > best_distances
        best = torch.where(better.reshape(-1, *(1,) * (records.dim() - 1)), point.detach(), best)
        best_distances = torch.where(better, distances.detach().to(best_distances), best_distances)
    chosen = best_distances.reshape(SEARCHES, -1).argmax(0)
    return best.reshape(SEARCHES, *records.shape)[chosen, torch.arange(len(records), device=records.device)]


def _distances(rows: Tensor, expected: Tensor, order: int) -> Tensor:
    distances: Tensor = torch.linalg.vector_norm((rows.double() - expected.double()).flatten(1), ord=order, dim=1)
    return distances


def _farthest_along(gradient: Tensor, centres: Tensor, *, reach: float, p: float, box: tuple[float, float]) -> Tensor:
    """The point of the p-ball farthest along a gradient, by coordinates with room in the box, clamped into it.

    Clamping towards a centre inside the box only shrinks coordinates, so the point stays in the ball.
    """
    low, high = box
    rows, middle = gradient.flatten(1), centres.flatten(1)
    room = torch.where(rows > 0.0, high - middle, middle - low).clamp_max(reach)
    if p == math.inf:
        step = rows.sign()
    elif p == 2.0:
        free = rows * (room > 0.0)
        step = free / torch.linalg.vector_norm(free, dim=1, keepdim=True).clamp_min(1e-30)
    else:
        largest = (rows.abs() * room).argmax(1, keepdim=True)
        step = torch.zeros_like(rows).scatter(1, largest, rows.gather(1, largest).sign())
    point: Tensor = (middle + reach * step).clamp(low, high).reshape(centres.shape).detach()
    return point
