"""Lattice noise: a mechanism family, its scale and the spacing of the lattice, chosen together."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from asfl_privacy.accounting.checks import check_choice, check_integer, check_multiplier
from asfl_privacy.accounting.rationals import fraction_down, fraction_up, sqrt_bounds
from asfl_privacy.mechanisms.lattice.alias import Integers
from asfl_privacy.mechanisms.lattice.blocks import MAX_SCALE_CELLS, BlockSampler
from asfl_privacy.mechanisms.lattice.rounded_gaussian import rounded_gaussian
from asfl_privacy.mechanisms.lattice.rounded_laplace import rounded_laplace
from asfl_privacy.mechanisms.lattice.rounding import LARGEST_CELL, check_integers, spacing_exponent
from asfl_privacy.mechanisms.lattice.source import WordSource

FAMILIES = ("gaussian", "laplace")
MIN_CELLS = 32  # per scale: the least that keeps rounding fine, since the payload grows with every further bit
TRUNCATION_SHARE = Fraction(1, 1 << 10)  # of Δ, what truncation may add to it
SCALE_BITS = 10  # significant bits a scale in cells is rounded up to, so that rounds share tables; costs ≤ 2^-9
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-900, 2.0**900


@dataclass(frozen=True, kw_only=True)
class LatticeNoise:
    """Integer noise for lattice inputs, by family, scale and spacing.

    Args:
        family: "gaussian" or "laplace".
        scale: σ or b > 0, in the units of what is noised.
        spacing: g, a power of two with 4 ≤ scale/g ≤ 2^40.
        sensitivity: Δ of the lattice input (truncation included) in the family's norm, ℓ2 or ℓ1; same units.

    Raises:
        ValueError: where an argument is out of range.

    Guarantee:
        ``release`` of lattice input x is post-processing of x·g + N(0, σ²) (or Laplace b) on each coordinate, up to the
        sampler's error: with ideal accounts (ε, δ), n values are (ε + e, e^{e/2}(δ + e^ε·τ))-private for
        e = ``epsilon_excess(n)`` and τ = ``tail_probability(n)``.
    """

    family: str
    scale: float
    spacing: float
    sensitivity: float
    sampler: BlockSampler = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_choice("family", self.family, FAMILIES)
        spacing_exponent(self.spacing)
        check_multiplier(self.scale, name="scale")
        check_multiplier(self.sensitivity, name="sensitivity")
        cells = Fraction(self.scale) / Fraction(self.spacing)
        object.__setattr__(
            self, "sampler", rounded_gaussian(cells) if self.family == "gaussian" else rounded_laplace(cells)
        )

    @property
    def noise_multiplier(self) -> float:
        """scale/Δ, rounded down."""
        return fraction_down(Fraction(self.scale) / Fraction(self.sensitivity))

    def draw(self, shape: tuple[int, ...], source: WordSource) -> Integers:
        """Independent noise in lattice cells, int64 of this shape; see ``BlockSampler.draw``."""
        return self.sampler.draw(math.prod(shape), source).reshape(shape)

    def release(self, integers: Integers, source: WordSource) -> Integers:
        """Lattice input plus fresh noise.

        Args:
            integers: int64, in cells, |x| ≤ 2^61, not empty.
            source: of uniform words.

        Returns:
            int64 of the same shape, within ±2^61.

        Raises:
            ValueError: for another type, an empty array, or larger integers.

        Guarantee:
            The sum is cut at ±2^61, which is post-processing: noise that was cut at ±2^62 takes every |x| ≤ 2^61 past
            ±2^61 anyway, so the result is that of uncut noise.
        """
        check_integers(integers)
        if integers.size == 0:
            raise ValueError(f"integers have shape {integers.shape}: a release needs a record; skip empty batches")
        noised = self.draw(integers.shape, source)
        np.add(noised, integers, out=noised)
        return np.clip(noised, -LARGEST_CELL, LARGEST_CELL, out=noised)

    def epsilon_excess(self, num_values: int) -> float:
        """The excess e of one release of n values: n times that of one draw, rounded up."""
        count = check_integer("num_values", num_values, minimum=1)
        return fraction_up(count * Fraction(self.sampler.epsilon_excess_per_draw))

    def tail_probability(self, num_values: int) -> float:
        """The tail τ of one release of n values: n times that of one draw, rounded up; 0 for Laplace."""
        count = check_integer("num_values", num_values, minimum=1)
        return fraction_up(count * Fraction(self.sampler.tail_probability_per_draw))


def plan_lattice(
    family: str, *, sensitivity: float, noise_multiplier: float, num_values: int, clip_only: bool
) -> LatticeNoise:
    """Choose spacing and scale for a noise multiplier.

    Args:
        family: "gaussian" or "laplace".
        sensitivity: Δ > 0 before truncation, in the family's norm: 2C for clipped rows, or L·R for a metric claim.
        noise_multiplier: z > 0, which the accountant charges.
        num_values: d, coordinates of one record, for truncation's share.
        clip_only: whether Δ rests only on every truncated row having norm ≤ C. Truncation toward zero keeps that, so
            nothing is added and 32 ≤ scale/g < 64. Else two rows at distance Δ may be g·√d (ℓ2) or g·d (ℓ1) further
            apart, since each coordinate moves by less than g: g is made so small that this is at most 2^-10·Δ, unless
            that took more than 2^40 cells per scale.

    Returns:
        The noise; its ``sensitivity`` includes truncation and is rounded up.

    Raises:
        ValueError: where an argument is out of range.

    Guarantee:
        scale/sensitivity ≥ z exactly, so that charging z is never too little.

    Example:
        >>> noise = plan_lattice("gaussian", sensitivity=2.0, noise_multiplier=4.0, num_values=100, clip_only=True)
        >>> noise.spacing, noise.sensitivity, noise.scale
        (0.25, 2.0, 8.0)
        >>> noise = plan_lattice("laplace", sensitivity=1.0, noise_multiplier=2.0, num_values=64, clip_only=False)
        >>> noise.spacing == 2.0**-16, noise.sensitivity == 1 + 2.0**-10, noise.noise_multiplier >= 2.0
        (True, True, True)
    """
    check_choice("family", family, FAMILIES)
    delta, z = Fraction(check_multiplier(sensitivity, name="sensitivity")), Fraction(check_multiplier(noise_multiplier))
    num_values = check_integer("num_values", num_values, minimum=1)
    if not SMALLEST_SCALE <= delta * z <= LARGEST_SCALE:
        raise ValueError(
            f"the noise scale is {float(z):g} × {sensitivity:g}: a lattice holds scales within [2^-900, 2^900]; rescale the "
            "activations"
        )
    spacing = _power_of_two_down(delta * z / MIN_CELLS)
    if not clip_only:
        steps = Fraction(num_values if family == "laplace" else sqrt_bounds(Fraction(num_values))[1])
        wanted = _power_of_two_down(delta * TRUNCATION_SHARE / steps)
        least = _power_of_two_down(delta * z * 4 / MAX_SCALE_CELLS)  # 4: room for the scale to grow below
        spacing = min(spacing, max(wanted, least))
        delta += spacing * steps
    inflated = fraction_up(delta)
    scale = round_scale_up(fraction_up(Fraction(inflated) * z))
    if clip_only and Fraction(scale) >= 2 * MIN_CELLS * spacing:
        spacing *= 2  # rounding up reached the next power of two
    return LatticeNoise(family=family, scale=scale, spacing=float(spacing), sensitivity=inflated)


def round_scale_up(scale: float) -> float:
    """The least scale at or above the given one that has 10 significant bits, hence few different tables.

    Args:
        scale: σ or b > 0.

    Returns:
        At most 2^-9 relative more than asked; on a lattice where it is 32 to 64 cells, a multiple of g/16.

    Raises:
        ValueError: where it is ≤ 0, NaN or infinite.

    Guarantee:
        Never below ``scale``: accounting the scale asked for is safe.

    Example:
        >>> round_scale_up(33.01), round_scale_up(33.0)
        (33.0625, 33.0)
    """
    exact = Fraction(check_multiplier(scale, name="scale"))
    unit = _power_of_two_down(exact) / (1 << (SCALE_BITS - 1))
    return fraction_up(math.ceil(exact / unit) * unit)


def _power_of_two_down(number: Fraction) -> Fraction:
    """The largest power of two at or below a rational > 0."""
    exponent = number.numerator.bit_length() - number.denominator.bit_length()
    power = Fraction(2) ** exponent
    return power if power <= number else power / 2
