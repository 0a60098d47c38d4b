"""The claim: what a noise layer is said to add, and the (ε, δ) that is said to follow. Data only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from asfl_privacy.accounting import gaussian_epsilon, laplace_epsilon
from asfl_privacy.accounting.checks import check_choice, check_delta, check_epsilon, check_multiplier
from asfl_privacy.accounting.rationals import fraction_down

FAMILIES = ("gaussian", "laplace")
UNITS = ("any", "metric")
DEFAULT_DELTA = 1e-5


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What is claimed of one release of one record.

    Args:
        family: "gaussian" or "laplace".
        scale: σ or b of the noise on each coordinate, in the units of what is noised.
        input_shape: shape of one record where it enters the layer, no batch.
        unit: "metric" (inputs whose noised values lie within Δ of each other) or "any" (any two records).
        sensitivity: Δ in the family's norm (ℓ2 Gaussian, ℓ1 Laplace), or None.
        clip: C, the norm that what is noised is said never to exceed, or None.
        spacing: g of the lattice on which every output is said to lie, or None.
        epsilon: ε of one release; None takes it from the noise multiplier.
        delta: δ of one release; None means 1e-5 for Gaussian and 0 for Laplace noise.
        noise_multiplier: z = scale/Δ as claimed; None takes it from scale and Δ.

    Raises:
        ValueError: for values out of range, or ``unit="any"`` with neither clip nor sensitivity.

    Guarantee:
        Nothing is corrected: a claim may contradict itself (scale/C where scale/2C is due), and the audit says so. Where
        ε is not given, it is the accountant's upper value for the claimed noise multiplier.

    Example:
        >>> claim = Claim(family="gaussian", scale=7.4613, clip=1.0, unit="any", input_shape=(64,))
        >>> claim.worst_distance, round(claim.epsilon, 3)
        (2.0, 1.0)
    """

    family: str
    scale: float
    input_shape: tuple[int, ...]
    unit: str = "metric"
    sensitivity: float | None = None
    clip: float | None = None
    spacing: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        check_choice("family", self.family, FAMILIES)
        check_choice("unit", self.unit, UNITS)
        for name in ("scale", "sensitivity", "clip", "spacing", "noise_multiplier"):
            if name == "scale" or getattr(self, name) is not None:
                object.__setattr__(self, name, check_multiplier(getattr(self, name), name=name))
        shape = tuple(self.input_shape)
        if not shape or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in shape):
            raise ValueError(
                f"input_shape is {shape!r}: it must hold positive integers, no batch; pass e.g. (32, 14, 14)"
            )
        object.__setattr__(self, "input_shape", shape)
        if self.unit == "any" and self.clip is None and self.sensitivity is None:
            raise ValueError(
                'unit is "any" without clip or sensitivity: any two records may then be any distance apart; pass clip=C, '
                "or sensitivity= if it bounds any two records"
            )
        delta = (DEFAULT_DELTA if self.family == "gaussian" else 0.0) if self.delta is None else self.delta
        object.__setattr__(self, "delta", check_delta(delta, zero_allowed=self.family == "laplace"))
        object.__setattr__(self, "epsilon", self._claimed_epsilon())

    def _claimed_epsilon(self) -> float | None:
        if self.epsilon is not None:
            return check_epsilon(self.epsilon)
        multiplier, distance = self.noise_multiplier, self.sensitivity or self.worst_distance
        if multiplier is None and distance is None:
            return None
        if multiplier is None and distance is not None:
            multiplier = fraction_down(Fraction(self.scale) / Fraction(distance))
        assert multiplier is not None and self.delta is not None  # noqa: PT018  (for the type checker)
        if self.family == "gaussian":
            return gaussian_epsilon(self.delta, noise_multiplier=multiplier)
        return laplace_epsilon(self.delta, noise_multiplier=multiplier)

    @property
    def norm(self) -> int:
        """q: 2 for Gaussian, 1 for Laplace."""
        return 2 if self.family == "gaussian" else 1

    @property
    def size(self) -> int:
        """Coordinates of one record."""
        return math.prod(self.input_shape)

    @property
    def worst_distance(self) -> float | None:
        """The largest distance of the noised values of two neighbours: 2C for any two records, else min(Δ, 2C)."""
        if self.clip is None:
            return self.sensitivity
        if self.unit == "any" or self.sensitivity is None:
            return 2.0 * self.clip
        return min(self.sensitivity, 2.0 * self.clip)


def claim_of(
    layer: object, *, input_shape: tuple[int, ...], delta: float | None = None, spacing: float | None = None
) -> Claim:
    """The claim that a layer makes of itself through ``layer.mechanism`` (family, scale, sensitivity).

    A layer that has ``lattice_for`` and no generator adds its noise on a lattice: scale, spacing and sensitivity are then
    those of ``layer.lattice_for(size)``, truncation included.

    Args:
        layer: anything with a ``mechanism`` that names its family, its scale and its sensitivity (or None).
        input_shape: shape of one record at the layer, no batch.
        delta: δ of one release; see Claim.
        spacing: g of the lattice; None reads ``mechanism.spacing`` where there is one.

    Returns:
        A metric claim: inputs within the mechanism's sensitivity of each other.

    Raises:
        ValueError: if the layer has no such mechanism, or its facts are out of range.

    Example:
        >>> from types import SimpleNamespace
        >>> mechanism = SimpleNamespace(family="laplace", scale=2.0, sensitivity=1.0)
        >>> claim_of(SimpleNamespace(mechanism=mechanism), input_shape=(3,)).epsilon
        0.5
    """
    mechanism = getattr(layer, "mechanism", None)
    if mechanism is None or not all(hasattr(mechanism, name) for name in ("family", "scale", "sensitivity")):
        raise ValueError(
            f"layer is a {type(layer).__name__}: it has no mechanism with family, scale and sensitivity; write the "
            'claim out, e.g. Claim(family="gaussian", scale=1.0, sensitivity=1.0, input_shape=(64,))'
        )
    scale, sensitivity = mechanism.scale, mechanism.sensitivity
    spacing = getattr(mechanism, "spacing", None) if spacing is None else spacing
    lattice_for = getattr(layer, "lattice_for", None)
    if lattice_for is not None and getattr(layer, "generator", None) is None:
        lattice = lattice_for(math.prod(input_shape))
        scale, spacing = lattice.scale, lattice.spacing
        sensitivity = None if sensitivity is None else lattice.sensitivity
    return Claim(
        family=mechanism.family,
        scale=scale,
        sensitivity=sensitivity,
        input_shape=input_shape,
        delta=delta,
        spacing=spacing,
    )
