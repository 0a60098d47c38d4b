"""What every noise mechanism is: a frozen fact that knows its norm, its scale and how to draw its noise."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar

import torch

from asfl_privacy.accounting.checks import check_multiplier
from asfl_privacy.accounting.rationals import fraction_down, fraction_up
from sensitivity import Certificate


@dataclass(frozen=True, kw_only=True)
class Mechanism(ABC):
    """Additive noise, independent over calls, rows and coordinates.

    Args:
        sensitivity: Δ in the mechanism's own norm, in the units of what is noised; None where it is not known.
        certificate: the certificate Δ came from, if any; its q must be the mechanism's norm.
    """

    family: ClassVar[str]
    norm: ClassVar[int]

    sensitivity: float | None = None
    certificate: Certificate | None = None

    def __post_init__(self) -> None:
        if self.sensitivity is not None:
            object.__setattr__(self, "sensitivity", check_multiplier(self.sensitivity, name="sensitivity"))
        if self.certificate is not None and float(self.certificate.q) != self.norm:
            raise ValueError(
                f"the certificate has q={self.certificate.q:g}: {self.family} noise needs the sensitivity in its own "
                f"norm; certify with q={self.norm}"
            )

    if (
        TYPE_CHECKING
    ):  # one is a field and the other derived, which differs by family; fields cannot override properties

        @property
        def scale(self) -> float:
            """σ (Gaussian) or b (Laplace), in the units of what is noised."""

        @property
        def noise_stddev(self) -> float:
            """Standard deviation of each coordinate: σ (Gaussian) or √2·b (Laplace)."""

    @property
    def noise_multiplier(self) -> float:
        """scale/Δ, rounded down.

        Raises:
            ValueError: where no sensitivity is attached.
        """
        if self.sensitivity is None:
            raise ValueError(
                f"this {self.family} mechanism has no sensitivity: a noise multiplier is scale/Δ; "
                "make it with calibrate(), or pass sensitivity="
            )
        return fraction_down(Fraction(self.scale) / Fraction(self.sensitivity))

    @abstractmethod
    def sample_like(self, tensor: torch.Tensor, *, generator: torch.Generator | None) -> torch.Tensor:
        """Draw fresh noise in the shape, type and device of ``tensor``.

        Args:
            tensor: float32 or float64.
            generator: advanced by the call; None draws from the operating system. A known seed voids privacy.

        Raises:
            ValueError: for half precision, integers, an empty tensor, NaN or inf.
        """


def scale_for(noise_multiplier: float, *, sensitivity: float) -> float:
    """The least float at or above noise_multiplier·Δ.

    Args:
        noise_multiplier: z > 0.
        sensitivity: Δ > 0.

    Returns:
        The scale, never below the exact product.

    Raises:
        ValueError: if an argument is NaN, infinite or ≤ 0, or the product overflows.
    """
    z = check_multiplier(noise_multiplier)
    delta = check_multiplier(sensitivity, name="sensitivity")
    return check_multiplier(fraction_up(Fraction(z) * Fraction(delta)), name="noise scale")
