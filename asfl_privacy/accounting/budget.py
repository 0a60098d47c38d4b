"""A budget per record, fixed beforehand, and the total that it promises whatever is chosen later.

Legend: B = budget of Σ 1/z² (Gaussian, μ²), E = budget of Σ 1/z (pure ε; Laplace and randomised response), Ē and τ̄ =
budgets of Σ epsilon_excess and Σ tail_probability (errors of the noise sampler).

Claim: let every release's mechanism and multiplier be chosen from what was released before, as long as one record's
charges stay within the budget. Then all that is released about this record is, for either of two neighbours,
post-processing of ONE Gaussian with μ² = B beside ONE binary randomised response with pure ε = E.
Proof by induction over the releases that are still to come. After a first Gaussian with μ² = b the rest is, for each
outcome, post-processing of the pair with (B − b, E); a Gaussian with b beside one with B − b is one with B. After a first
release with pure ε = e the rest is that of (B, E − e); randomised responses with e and E − e are together E-private,
hence post-processing of one with E.
Sampler errors: along every path the drawn densities exceed the ideal ones by a factor of at most e^(Ē/2), and the ideal
ones exceed the drawn ones by e^(Ē/2) but for outcomes of probability ≤ τ̄; so an ideal (ε, δ) becomes
(ε + Ē, e^(Ē/2)(δ + e^ε τ̄)), adaptively too.

Source: Smith & Thakurta (2022), "Fully adaptive composition for Gaussian differential privacy", and Koskela, Tobaben &
Honkela (2023), "Individual privacy accounting with Gaussian differential privacy", for B; Rogers, Roth, Ullman & Vadhan
(2016), "Privacy odometers and filters", for E (a pure filter stops at Σ ε); Kairouz, Oh & Viswanath (2015), §3,
that an ε-private pair is post-processing of randomised response, for the pair; Feldman & Zrnic (2021),
"Individual privacy accounting via a Rényi filter", for budgets per record.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from asfl_privacy.accounting.checks import (
    SMALLEST_DELTA,
    check_choice,
    check_delta,
    check_epsilon,
    check_integer,
    check_real,
)
from asfl_privacy.accounting.gaussian import composed_gaussian_epsilon, gaussian_delta
from asfl_privacy.accounting.rationals import fraction_up, sqrt_bounds

TOLERANCE = Fraction(1, 2**40)
"""What may be spent beyond a budget, in parts of it: room for the rounding of charges; every total includes it."""

UNITS = 2**60
"""A budget in fixed-point units; a charge is rounded up to whole units."""

BUDGET_OF = {"gaussian": "gaussian_budget", "laplace": "pure_budget", "randomized-response": "pure_budget"}
"""Which budget a mechanism draws on."""

_ULP = 2.0**-52


@dataclass(frozen=True, kw_only=True)
class RecordBudget:
    """What may be spent of one record.

    Args:
        gaussian_budget: B ≥ 0, the sum of 1/z² over its Gaussian releases.
        pure_budget: E ≥ 0, the sum of 1/z over its Laplace and randomised-response releases.
        excess_budget: Ē ≥ 0, the sum of ``epsilon_excess`` over all its releases; 0 for ideal arithmetic.
        tail_budget: τ̄ ≥ 0, the sum of ``tail_probability`` over all its releases; 0 for ideal arithmetic.

    Raises:
        ValueError: if a budget is negative, NaN or infinite.

    Example:
        >>> round(RecordBudget(gaussian_budget=1.0).total(delta=1e-5), 3)
        4.377
    """

    gaussian_budget: Fraction | float = Fraction(0)
    pure_budget: Fraction | float = Fraction(0)
    excess_budget: Fraction | float = Fraction(0)
    tail_budget: Fraction | float = Fraction(0)

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not isinstance(value, Fraction):
                value = check_real(name, value, minimum=0.0, exclusive=False, fix=f"pass e.g. {name}=1.0")
            if value < 0:
                raise ValueError(f"{name} is {value}: a budget is ≥ 0; pass e.g. {name}=1.0")
            object.__setattr__(self, name, Fraction(value))

    @classmethod
    def of_total(
        cls,
        epsilon: float,
        *,
        delta: float,
        pure_budget: Fraction | float = 0.0,
        excess_budget: Fraction | float = 0.0,
        tail_budget: Fraction | float = 0.0,
    ) -> "RecordBudget":
        """The largest budget whose total is at most (ε, δ), the tolerance taken off beforehand.

        Args:
            epsilon: ε > 0 for everything released of a record.
            delta: δ in (0, 1): the Gaussian budget is made as large as fits beside ``pure_budget``; 0: all of ε but
                ``excess_budget`` becomes the pure budget, and ``pure_budget`` must be 0.
            pure_budget: E, for the Laplace and randomised-response releases.
            excess_budget: Ē.
            tail_budget: τ̄.

        Raises:
            ValueError: if a value is out of range, or nothing is left for the budget that is asked for.

        Guarantee:
            ``total(delta=delta)`` never exceeds ``epsilon``.

        Example:
            >>> budget = RecordBudget.of_total(1.0, delta=1e-5)
            >>> budget.total(delta=1e-5) <= 1.0, round(1 / float(budget.gaussian_budget) ** 0.5, 4)
            (True, 3.7306)
        """
        epsilon, delta = check_epsilon(epsilon), check_delta(delta, zero_allowed=True)
        fixed = cls(pure_budget=pure_budget, excess_budget=excess_budget, tail_budget=tail_budget)
        spare = Fraction(epsilon) - _upper(fixed.excess_budget)
        if delta == 0.0:
            if fixed.pure_budget or fixed.tail_budget or spare <= 0:
                raise ValueError(
                    f"epsilon {epsilon!r} at delta 0.0 leaves no pure budget beside pure_budget {float(pure_budget)!r}, "
                    f"excess_budget {float(excess_budget)!r} and tail_budget {float(tail_budget)!r}: at delta 0 the pure "
                    "budget is what epsilon leaves, and no tail fits; pass a delta > 0 or a larger epsilon"
                )
            return cls(pure_budget=spare / (1 + TOLERANCE), excess_budget=excess_budget)

        def with_gaussian(budget: float) -> RecordBudget:
            return cls(
                gaussian_budget=budget,
                pure_budget=pure_budget,
                excess_budget=excess_budget,
                tail_budget=tail_budget,
            )

        def holds(budget: float) -> bool:
            return with_gaussian(budget).total(delta=delta) <= epsilon

        fits = 1.0
        while not holds(fits):
            fits /= 2.0
            if fits < 1e-30:
                raise ValueError(
                    f"epsilon is {epsilon!r}: at delta {delta!r} the other budgets leave nothing to Gaussian releases "
                    f"(pure_budget is {float(pure_budget)!r}); pass a larger epsilon or smaller budgets"
                )
        fails = 2.0 * fits
        while holds(fails):
            fits, fails = fails, 2.0 * fails
        while fails - fits > 2.0**-48 * fits:
            middle = 0.5 * (fits + fails)
            fits, fails = (middle, fails) if holds(middle) else (fits, middle)
        return with_gaussian(fits)

    def total(self, *, delta: float, distance: float = 1.0) -> float:
        """The preset total: the ε at ``delta`` of all that can ever be released of one record, rounded up.

        Args:
            delta: δ in (0, 1); 0 is allowed where gaussian_budget and tail_budget are 0.
            distance: k ≥ 1, the distance of the two records in multiples of the radius.

        Returns:
            ε ≥ 0, ``TOLERANCE`` included; inf where the tails are too likely for any ε at ``delta``.

        Raises:
            ValueError: if a value is out of range.

        Guarantee:
            Holds for adaptively chosen mechanisms and multipliers (the module's claim). δ of the pair is
            p·δ_B(ε − E) + (1 − p)·δ_B(ε + E) with p = e^E/(1 + e^E), δ_B that of one Gaussian with μ² = B and
            δ_B(−a) = 1 − e^(−a)(1 − δ_B(a)). Sampler errors make of (ε, δ): (ε + Ē, e^(Ē/2)(δ + e^ε τ̄)). At distance
            kR: k²B and kE.
        """
        delta = check_delta(delta, zero_allowed=True)
        distance = check_real("distance", distance, minimum=1.0, exclusive=False, fix="pass e.g. distance=1")
        square = _upper(self.gaussian_budget) * Fraction(distance) ** 2
        pure_exact = _upper(self.pure_budget) * Fraction(distance)
        excess_exact, tail = _upper(self.excess_budget), fraction_up(_upper(self.tail_budget))
        if delta == 0.0:
            if square or tail:
                raise ValueError(
                    "delta is 0.0: Gaussian releases and sampler tails have no finite epsilon at delta 0; pass "
                    "0 < delta < 1, e.g. delta=1e-5"
                )
            return fraction_up(pure_exact + excess_exact)
        if not (pure_exact or excess_exact or tail):
            return composed_gaussian_epsilon(square, delta=delta).high
        pure, excess = fraction_up(pure_exact), fraction_up(excess_exact)
        noise_multiplier = sqrt_bounds(1 / square)[0] if square else math.inf
        if noise_multiplier == 0.0 or not math.isfinite(pure + excess):
            return math.inf
        spread = math.exp(min(excess, 1400.0) / 2.0) * (1.0 + 4 * _ULP)  # e^700 already exceeds every δ

        def holds(epsilon: float) -> bool:
            tails = 0.0 if tail == 0.0 else math.exp(epsilon) * tail if epsilon < 700.0 else math.inf
            found = _pair_delta(epsilon, noise_multiplier=noise_multiplier, pure=pure) + tails
            return spread * found * (1.0 + 8 * _ULP) <= delta

        # e^ε·τ̄ grows with ε, so a large ε may fail where a smaller one holds: start where the Gaussian takes part of δ
        shares = (1.0 - 2.0**-20, 0.9, 0.5, 0.1, 1e-3)
        deltas = [delta / spread * share for share in shares if delta / spread * share >= SMALLEST_DELTA]
        starts = [composed_gaussian_epsilon(square, delta=part).high + pure for part in deltas]
        high = min((start for start in starts if math.isfinite(start) and holds(start)), default=math.inf)
        low = 0.0
        if holds(low):
            high = low
        while math.isfinite(high) and high - low > 2 * _ULP * high and low < (middle := 0.5 * (low + high)) < high:
            low, high = (low, middle) if holds(middle) else (middle, high)
        return fraction_up(Fraction(high) + excess_exact) if math.isfinite(high) else math.inf

    def noise_multiplier(self, mechanism: str, *, num_releases: int) -> float:
        """The least noise multiplier with which ``num_releases`` equal releases fit without touching the tolerance.

        Args:
            mechanism: "gaussian", "laplace" or "randomized-response" (there 1/ε0).
            num_releases: T in 1…2**40.

        Raises:
            ValueError: if a value is out of range, or the budget of the mechanism is 0.

        Guarantee:
            A fresh filter admits every record ``num_releases`` times, as far as sampler errors are within their budgets.

        Example:
            >>> RecordBudget(pure_budget=1.0).noise_multiplier("laplace", num_releases=4)
            4.0
        """
        name = BUDGET_OF[check_choice("mechanism", mechanism, tuple(BUDGET_OF))]
        count = check_integer("num_releases", num_releases, minimum=1)
        budget = Fraction(getattr(self, name))
        if budget == 0 or count > 2**40:
            raise ValueError(
                f"num_releases is {count} and {name} is {float(budget)!r}: up to 2**40 releases share a budget > 0; "
                f"pass fewer releases or a larger {name}"
            )
        charge = Fraction(UNITS // count, UNITS) * budget
        return sqrt_bounds(1 / charge)[1] if mechanism == "gaussian" else fraction_up(1 / charge)


def _upper(budget: Fraction | float) -> Fraction:
    return Fraction(budget) * (1 + TOLERANCE)


def _pair_delta(epsilon: float, *, noise_multiplier: float, pure: float) -> float:
    """δ(ε), from above, of one Gaussian (none where z is inf) beside one binary randomised response."""

    def of_gaussian(shifted: float) -> float:
        tail = 0.0 if math.isinf(noise_multiplier) else gaussian_delta(abs(shifted), noise_multiplier=noise_multiplier)
        return tail if shifted >= 0.0 else -math.expm1(shifted) + math.exp(shifted) * tail

    # epsilon ± pure is rounded: towards smaller ε, where δ is larger
    near, far = math.nextafter(epsilon - pure, -math.inf), math.nextafter(epsilon + pure, 0.0)
    odds = math.exp(-pure)
    return (of_gaussian(near) + odds * of_gaussian(far)) / (1.0 + odds) * (1.0 + 8 * _ULP)
