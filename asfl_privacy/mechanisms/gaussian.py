"""Gaussian noise: adds N(0, (zΔ)²) to each coordinate, Δ the ℓ2 sensitivity."""

from __future__ import annotations

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
class Gaussian(Mechanism):
    """N(0, noise_stddev²) on each coordinate.

    Args:
        noise_stddev: σ > 0, in the units of what is noised.
        sensitivity: ℓ2 sensitivity Δ, or None where it is not known.
        certificate: the certificate Δ came from, if any (q must be 2).

    Raises:
        ValueError: if σ or Δ is ≤ 0, NaN or infinite, or the certificate has another q.

    Guarantee:
        In ideal arithmetic, (ε, δ) as stated by ``asfl_privacy.accounting.gaussian_epsilon`` for noise_stddev/Δ.

    Example:
        >>> mechanism = Gaussian.calibrate(epsilon=1.0, delta=1e-5, sensitivity=2.0)
        >>> round(mechanism.noise_stddev, 4)
        7.4613
    """

    family: ClassVar[str] = "gaussian"
    norm: ClassVar[int] = 2

    noise_stddev: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "noise_stddev", check_multiplier(self.noise_stddev, name="noise_stddev"))

    @property
    def scale(self) -> float:
        """σ."""
        return self.noise_stddev

    @classmethod
    def calibrate(
        cls,
        *,
        epsilon: float,
        delta: float,
        sensitivity: float,
        releases: float = 1,
        method: str = "analytic",
        certificate: Certificate | None = None,
    ) -> Gaussian:
        """The least noise with which ``releases`` releases are (ε, δ)-private together.

        Args:
            epsilon: ε > 0 for all releases together.
            delta: δ in (0, 1) for all releases together.
            sensitivity: ℓ2 sensitivity Δ > 0.
            releases: T ≥ 1; a fraction rounds up.
            method: "analytic", or "classic" (refused from ε=1 per release).
            certificate: the certificate Δ came from, if any.

        Returns:
            The mechanism, σ rounded up.

        Raises:
            ValueError: if an argument is out of range.

        Source:
            Balle & Wang (2018), Theorem 9; see accounting.calibrate.
        """
        facts = calibrate("gaussian", total_epsilon=epsilon, delta=delta, num_releases=releases, method=method)
        stddev = scale_for(facts.noise_multiplier, sensitivity=sensitivity)
        return cls(noise_stddev=stddev, sensitivity=sensitivity, certificate=certificate)

    def sample_like(self, tensor: torch.Tensor, *, generator: torch.Generator | None) -> torch.Tensor:
        """Draw N(0, σ²) for each coordinate; see ``Mechanism.sample_like``."""
        check_activations(tensor, what="tensor")
        stream = noise_stream(generator, mechanism=f"gaussian {self.noise_stddev.hex()}")
        return to_tensor_like(stream.standard_normal(tuple(tensor.shape)) * self.noise_stddev, tensor)
