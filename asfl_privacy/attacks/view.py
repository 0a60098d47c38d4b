"""What a recipient knows of how a release was made: everything but the noise that was drawn."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from asfl_privacy.accounting.checks import check_choice, check_real
from asfl_privacy.attacks.guards import check_rows, check_settled, check_stddev

MECHANISMS = ("gaussian", "laplace")


@dataclass(frozen=True, kw_only=True)
class RecipientView:
    """released = after_noise(clip(before_noise(inputs)) + noise).

    Attributes:
        before_noise: What runs before the noise, differentiable; `nn.Identity()` at placement "input".
        after_noise: What runs after it, differentiable; `nn.Identity()` where the noise sits at the end of the head.
        mechanism: "gaussian" or "laplace".
        noise_stddev: σ or √2·b of each coordinate, in the units of what is noised; None where no noise is added.
        clip: C where rows are clipped before the noise, in ℓ2 for Gaussian and ℓ1 for Laplace noise; or None.
    """

    before_noise: Callable[[Tensor], Tensor]
    after_noise: Callable[[Tensor], Tensor]
    mechanism: str = "gaussian"
    noise_stddev: float | None = None
    clip: float | None = None

    def __post_init__(self) -> None:
        check_choice("mechanism", self.mechanism, MECHANISMS)
        check_stddev(self.noise_stddev)
        if self.clip is not None:
            check_real("clip", self.clip, minimum=0.0, exclusive=True, fix="pass clip=None for no clip")
        check_settled(self.before_noise, what="before_noise")
        check_settled(self.after_noise, what="after_noise")

    @property
    def norm(self) -> int:
        """q, the norm that the mechanism's noise hides differences in."""
        return 2 if self.mechanism == "gaussian" else 1

    @property
    def noise_is_last(self) -> bool:
        """Whether nothing runs after the noise, so that its likelihood is known in closed form."""
        after = self.after_noise
        return isinstance(after, nn.Identity) or (isinstance(after, nn.Sequential) and len(after) == 0)

    def noised_quantity(self, inputs: Tensor) -> Tensor:
        """What the noise is added to, clipped, shape (batch, ...), with gradient.

        Example:
            >>> view = RecipientView(before_noise=nn.Identity(), after_noise=nn.Identity(), clip=1.0)
            >>> view.noised_quantity(torch.tensor([[3.0, 4.0]]))
            tensor([[0.6000, 0.8000]])
        """
        before = check_rows(self.before_noise(inputs), what="before_noise", count=len(inputs))
        if self.clip is None:
            return before
        norms = torch.linalg.vector_norm(before.flatten(1), ord=self.norm, dim=1).clamp_min(1e-30)
        clipped: Tensor = before * (self.clip / norms).clamp_max(1.0).reshape(-1, *(1,) * (before.dim() - 1))
        return clipped

    def expected(self, inputs: Tensor) -> Tensor:
        """What would be released without noise, shape (batch, ...), with gradient."""
        after = self.after_noise(self.noised_quantity(inputs))
        return check_rows(after, what="after_noise", count=len(inputs))
