"""The noise families by name."""

from asfl_privacy.accounting.checks import check_choice
from asfl_privacy.mechanisms.gaussian import Gaussian
from asfl_privacy.mechanisms.laplace import Laplace
from asfl_privacy.mechanisms.mechanism import Mechanism
from sensitivity import Certificate

FAMILIES: dict[str, type[Mechanism]] = {"gaussian": Gaussian, "laplace": Laplace}


def make_mechanism(
    family: str, *, scale: float, sensitivity: float | None = None, certificate: Certificate | None = None
) -> Mechanism:
    """A mechanism from its family's name and its scale.

    Args:
        family: "gaussian" or "laplace".
        scale: σ or b > 0.
        sensitivity: Δ in the family's norm, if known.
        certificate: the certificate Δ came from, if any.

    Returns:
        The mechanism.

    Raises:
        ValueError: for an unknown family or a scale that is ≤ 0, NaN or infinite.

    Example:
        >>> make_mechanism("laplace", scale=2.0)
        Laplace(sensitivity=None, certificate=None, scale=2.0)
    """
    check_choice("mechanism", family, tuple(FAMILIES))
    if family == "gaussian":
        return Gaussian(noise_stddev=scale, sensitivity=sensitivity, certificate=certificate)
    return Laplace(scale=scale, sensitivity=sensitivity, certificate=certificate)
