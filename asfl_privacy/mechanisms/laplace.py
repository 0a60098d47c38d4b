"""Laplace noise: adds Laplace(0, zΔ) to each coordinate, Δ the ℓ1 sensitivity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from asfl_privacy.accounting import calibrate
from asfl_privacy.accounting.checks import check_multiplier
from asfl_privacy.mechanisms.guards import check_activations
from asfl_privacy.mechanisms.mechanism import Mechanism, scale_for
from asfl_privacy.mechanisms.sampling import noise_stream, to_tensor_like
from sensitivity import Certificate


@dataclass(frozen=True, kw_only=True)
class Laplace(Mechanism):
    """Density exp(−|x|/b)/(2b) on each coordinate.

    Args:
        scale: b > 0, in the units of what is noised.
        sensitivity: ℓ1 sensitivity Δ, or None where it is not known.
        certificate: the certificate Δ came from, if any (q must be 1).

    Raises:
        ValueError: if b or Δ is ≤ 0, NaN or infinite, or the certificate has another q.

    Guarantee:
        In ideal arithmetic, (Δ/b, 0)-private per release.

    Source:
        Dwork, McSherry, Nissim & Smith (2006), Theorem 1.

    Example:
        >>> Laplace.calibrate(epsilon=0.5, sensitivity=2.0).scale
        4.0
    """

    family: ClassVar[str] = "laplace"
    norm: ClassVar[int] = 1

    scale: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "scale", check_multiplier(self.scale, name="scale"))

    @property
    def noise_stddev(self) -> float:
        """√2·b."""
        return math.sqrt(2.0) * self.scale

    @classmethod
    def calibrate(
        cls,
        *,
        epsilon: float,
        sensitivity: float,
        delta: float = 0.0,
        releases: float = 1,
        certificate: Certificate | None = None,
    ) -> Laplace:
        """The least noise with which ``releases`` releases are (ε, δ)-private together, by basic composition.

        Args:
            epsilon: ε > 0 for all releases together.
            sensitivity: ℓ1 sensitivity Δ > 0.
            delta: δ in [0, 1) for all releases together.
            releases: T ≥ 1; a fraction rounds up.
            certificate: the certificate Δ came from, if any.

        Returns:
            The mechanism, b rounded up.

        Raises:
            ValueError: if an argument is out of range.

        Source:
            b = Δ/(ε − 2 ln(1 − δ)) for one release; see accounting.laplace_noise_multiplier.
        """
        facts = calibrate("laplace", total_epsilon=epsilon, delta=delta, num_releases=releases)
        scale = scale_for(facts.noise_multiplier, sensitivity=sensitivity)
        return cls(scale=scale, sensitivity=sensitivity, certificate=certificate)

    def sample_like(self, tensor: torch.Tensor, *, generator: torch.Generator | None) -> torch.Tensor:
        """Draw Laplace(0, b) for each coordinate; see ``Mechanism.sample_like``."""
        check_activations(tensor, what="tensor")
        stream = noise_stream(generator, mechanism=f"laplace {self.scale.hex()}")
        return to_tensor_like(stream.laplace(0.0, self.scale, tuple(tensor.shape)), tensor)
