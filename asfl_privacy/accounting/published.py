"""PixelDP's noise as published: for comparison with the paper, never for a promise."""

import math

from asfl_privacy.accounting.checks import check_choice, check_delta, check_real


def published_noise_multiplier(mechanism: str, *, epsilon: float, delta: float) -> float:
    """σ/Δ or b/Δ by the formulas that PixelDP prints.

    Args:
        mechanism: "gaussian" or "laplace".
        epsilon: ε > 0 that the formula claims.
        delta: δ in (0, 1) for Gaussian; ignored for Laplace.

    Returns:
        √(2 ln(1.25/δ))/ε, or 1/ε; not rounded to a safe side, since nothing is promised.

    Raises:
        ValueError: for a value out of range.

    Edge cases:
        The Gaussian formula is proven for ε < 1 only; from there on what it claims can be false (at ε = 16, δ = 1e-5 the
        noise it gives is worth ε = 18.9), so print ``gaussian_epsilon`` of the result beside the claim.

    Source:
        Lécuyer et al. (2019), §3.2; the Gaussian formula is Dwork & Roth (2014), Theorem A.1, stated for ε < 1.

    Example:
        >>> round(published_noise_multiplier("gaussian", epsilon=16.0, delta=1e-5), 4)
        0.3028
    """
    check_choice("mechanism", mechanism, ("gaussian", "laplace"))
    epsilon = check_real("epsilon", epsilon, minimum=0.0, exclusive=True, fix="pass e.g. epsilon=1.0")
    if mechanism == "laplace":
        return 1.0 / epsilon
    return math.sqrt(2.0 * math.log(1.25 / check_delta(delta))) / epsilon
