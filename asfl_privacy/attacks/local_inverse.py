"""What was noised, estimated from what the rest of the head made of it: a linear inverse around two candidates.

Behind further layers the likelihood of a release has no closed form. The attacker knows those layers, so it draws noise
of its own around the candidates, runs it through, and regresses what it drew on what came out. Where the layers keep
all of it and are linear over the reach of the noise, nothing is lost and the likelihood ratio stays optimal.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from asfl_privacy.attacks.guards import check_rows
from asfl_privacy.attacks.view import RecipientView

LEAST_DRAWS = 1000
DRAWS_PER_COORDINATE = 3
_RIDGE = 1e-6  # of the mean eigenvalue; keeps the solve well posed where the layers drop a direction


def local_inverse(view: RecipientView, candidates: Tensor, *, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    """Fit the linear map from released rows back to what was noised.

    Args:
        view: what the attacker knows.
        candidates: what is noised, without its noise, of the candidates, shape (candidates, ...).
        generator: for the attacker's own noise.

    Returns:
        A function from released rows, shape (batch, ...), to estimates of noised rows, shape (batch, ...).

    Raises:
        ValueError: layers whose output is not finite.

    Source:
        Ridge regression (Hoerl & Kennard 1970), solved in the smaller of its two forms.

    Example:
        >>> view = RecipientView(before_noise=lambda x: x, after_noise=lambda x: 2 * x + 1, noise_stddev=0.1)
        >>> inverse = local_inverse(view, torch.zeros(2, 3), generator=torch.Generator().manual_seed(0))
        >>> bool((inverse(torch.full((1, 3), 1.2)) - 0.1).abs().max() < 1e-4)
        True
    """
    draws = max(LEAST_DRAWS, DRAWS_PER_COORDINATE * candidates[0].numel())
    per_candidate = math.ceil(draws / len(candidates))
    around = candidates.repeat_interleave(per_candidate, 0)
    noised = around + draw_noise(around, mechanism=view.mechanism, stddev=view.noise_stddev, generator=generator)
    with torch.no_grad():
        outputs = check_rows(view.after_noise(noised), what="after_noise", count=len(noised))
    X, Y = outputs.flatten(1).double(), noised.flatten(1).double()
    centre_x, centre_y = X.mean(0), Y.mean(0)
    X, Y = X - centre_x, Y - centre_y
    wide = X.shape[1] > X.shape[0]
    gram = X @ X.T if wide else X.T @ X
    ridge = max(_RIDGE * float(gram.diagonal().mean()), 1e-30)
    factor = torch.linalg.cholesky(gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
    weights = X.T @ torch.cholesky_solve(Y, factor) if wide else torch.cholesky_solve(X.T @ Y, factor)

    def estimate(released: Tensor) -> Tensor:
        rows = (released.flatten(1).double() - centre_x) @ weights + centre_y
        return rows.reshape(-1, *candidates.shape[1:])

    return estimate


def draw_noise(like: Tensor, *, mechanism: str, stddev: float | None, generator: torch.Generator) -> Tensor:
    """Noise of the attacker's own in the shape of `like`; a hundredth of its spread where the release has none."""
    scale = stddev if stddev is not None else max(0.01 * float(like.double().std()), 1e-6)
    if mechanism == "gaussian":
        noise = torch.randn(like.shape, generator=generator, dtype=torch.float64)
    else:  # the difference of two unit exponentials is Laplace with standard deviation √2
        first, second = torch.empty(2, *like.shape, dtype=torch.float64).exponential_(generator=generator)
        noise = (first - second) / math.sqrt(2.0)
    return (scale * noise).to(like)
