"""Inversion: the record that explains released activations best, found by gradient descent through the head."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from asfl_privacy.accounting.checks import check_box, check_choice, check_integer, check_real
from asfl_privacy.attacks.guards import check_batch, check_rows, check_settled, check_stddev
from asfl_privacy.attacks.view import MECHANISMS

EXACT = 1e-3
"""Noise that is assumed where none was added, in root mean squares of the activations: the prior then breaks ties."""


def invert(
    head: Callable[[Tensor], Tensor],
    released: Tensor,
    *,
    input_shape: tuple[int, ...],
    input_box: tuple[float, float],
    mechanism: str = "gaussian",
    noise_stddev: float | None = None,
    steps: int = 300,
    restarts: int = 1,
    prior_weight: float = 0.0,
    start: Tensor | None = None,
    generator: torch.Generator,
) -> Tensor:
    """Maximum-a-posteriori inversion: minimise −log p(released | head(x)) + prior_weight·TV(x) over x in the box.

    Args:
        head: known to the attacker, differentiable; inputs (batch, *input_shape) to rows of `released`'s shape.
        released: activations, shape (batch, ...), float32 or float64.
        input_shape: shape of one record.
        input_box: (low, high) that every input lies in.
        mechanism: "gaussian" (squared error) or "laplace" (absolute error).
        noise_stddev: σ or √2·b at the end of the head; None where no noise was added.
        steps: Adam steps.
        restarts: random starts in the box; the one of the least objective is kept, record by record.
        prior_weight: nats a unit of total variation, see `total_variation_weight`; 0 for records that are no images.
        start: one more start, of input_shape or (batch, *input_shape), for example the mean of auxiliary records.
        generator: for the random starts; torch's global generator is left as it was.

    Returns:
        Rebuilt records in the box, shape (batch, *input_shape), without gradient.

    Raises:
        ValueError: values out of range, a head in train mode or one whose rows do not have the shape of `released`.

    Guarantee:
        None about the record: this is an attack, and a poor rebuild does not prove that a better attack fails.

    Source:
        Fredrikson, Jha & Ristenpart 2015 (inversion by gradient descent); Mahendran & Vedaldi 2015, eq. (1) and (4)
        (the total variation prior). Deviations: the loss is the likelihood of the noise, and x stays in the box.

    Example:
        >>> weight = torch.tensor([[2.0, 0.0], [1.0, 1.0]])
        >>> record = torch.tensor([[0.25, 0.75]])
        >>> rebuilt = invert(
        ...     lambda x: x @ weight.T, record @ weight.T, input_shape=(2,), input_box=(0, 1),
        ...     generator=torch.Generator().manual_seed(0),
        ... )
        >>> bool((rebuilt - record).abs().max() < 1e-3)
        True
    """
    released = check_batch(released, what="released")
    low, high = check_box(input_box)
    stddev = check_stddev(noise_stddev)
    check_choice("mechanism", mechanism, MECHANISMS)
    check_settled(head, what="head")
    steps = check_integer("steps", steps, minimum=1)
    restarts = check_integer("restarts", restarts, minimum=0 if start is not None else 1)
    prior_weight = check_real("prior_weight", prior_weight, minimum=0.0, exclusive=False, fix="pass 0 for no prior")
    if prior_weight > 0.0:
        _check_image(input_shape)
    if stddev is None:
        stddev = max(EXACT * float(released.double().square().mean().sqrt()), 1e-30)
    likelihood_weight = 1.0 / (2.0 * stddev**2) if mechanism == "gaussian" else math.sqrt(2.0) / stddev
    largest = max(likelihood_weight, prior_weight)  # a common factor moves no minimum, and keeps float32 in range

    count = len(released)
    starts = _starts(count, restarts, input_shape=tuple(input_shape), box=(low, high), start=start, generator=generator)
    x = starts.to(released).requires_grad_(True)
    targets = released.repeat(len(x) // count, *(1,) * (released.dim() - 1))

    def objectives() -> Tensor:
        outputs = check_rows(head(x), what="head", count=len(x))
        if outputs.shape != targets.shape:
            raise ValueError(
                f"head gives rows of shape {tuple(outputs.shape[1:])} and released has {tuple(targets.shape[1:])}: they "
                "must agree; pass the head that made the release"
            )
        errors = (outputs - targets).flatten(1)
        misfits = errors.square().sum(1) if mechanism == "gaussian" else errors.abs().sum(1)
        total = (likelihood_weight / largest) * misfits
        return total if prior_weight == 0.0 else total + (prior_weight / largest) * total_variation(x)

    optimizer = torch.optim.Adam([x], lr=0.1 * (high - low))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    with torch.enable_grad():
        for _ in range(steps):
            (x.grad,) = torch.autograd.grad(objectives().sum(), x)
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                x.clamp_(low, high)
    with torch.no_grad():
        best = objectives().reshape(-1, count).argmin(0)
        return x.detach().reshape(-1, count, *input_shape)[best, torch.arange(count)]


def invert_then_denoise(
    after_noise: Callable[[Tensor], Tensor],
    released: Tensor,
    *,
    input_shape: tuple[int, ...],
    input_box: tuple[float, float],
    mechanism: str = "gaussian",
    noise_stddev: float,
    steps: int = 300,
    restarts: int = 1,
    prior_weight: float = 0.0,
    generator: torch.Generator,
) -> Tensor:
    """Where the noise sits at the input: first what was noised, by exact inversion, then the record behind the noise.

    Args:
        after_noise: what ran after the noise, so the whole head.
        released: see `invert`.
        input_shape: see `invert`.
        input_box: see `invert`; noised inputs are looked for up to 6 standard deviations outside of it.
        mechanism: see `invert`.
        noise_stddev: σ or √2·b at the input.
        steps: see `invert`, for each of the two.
        restarts: see `invert`.
        prior_weight: see `invert`; used for the second step alone, since noise has no small total variation.
        generator: see `invert`.

    Returns:
        Rebuilt records in the box, shape (batch, *input_shape).

    Raises:
        ValueError: see `invert`.
    """
    noised = invert_noised(
        after_noise,
        released,
        input_shape=input_shape,
        input_box=input_box,
        noise_stddev=noise_stddev,
        steps=steps,
        restarts=restarts,
        generator=generator,
    )
    return invert(
        torch.nn.Identity(),
        noised,
        input_shape=input_shape,
        input_box=input_box,
        mechanism=mechanism,
        noise_stddev=noise_stddev,
        steps=steps,
        prior_weight=prior_weight,
        generator=generator,
    )


def invert_noised(
    after_noise: Callable[[Tensor], Tensor],
    released: Tensor,
    *,
    input_shape: tuple[int, ...],
    input_box: tuple[float, float],
    noise_stddev: float,
    steps: int = 300,
    restarts: int = 1,
    generator: torch.Generator,
) -> Tensor:
    """The first half of `invert_then_denoise`: the noised record, found up to 6 standard deviations outside the box."""
    low, high = check_box(input_box)
    stddev = check_real("noise_stddev", noise_stddev, minimum=0.0, exclusive=True, fix="use invert where there is none")
    return invert(
        after_noise,
        released,
        input_shape=input_shape,
        input_box=(low - 6.0 * stddev, high + 6.0 * stddev),
        steps=steps,
        restarts=restarts,
        start=torch.full(input_shape, (low + high) / 2.0),
        generator=generator,
    )


def total_variation(images: Tensor) -> Tensor:
    """Sum of absolute differences of neighbouring pixels, image by image, with gradient.

    Args:
        images: shape (batch, channels, height, width).

    Returns:
        Shape (batch,), in pixel units.

    Source:
        Rudin, Osher & Fatemi 1992, in its anisotropic form: the log density of independent Laplace differences.

    Example:
        >>> total_variation(torch.tensor([[[[0.0, 1.0], [3.0, 1.0]]]]))  # |1|, |−2| across and |3|, |0| down
        tensor([6.])
    """
    across, down = images.diff(dim=3).abs().flatten(1).sum(1), images.diff(dim=2).abs().flatten(1).sum(1)
    return across + down


def total_variation_weight(images: Tensor) -> float:
    """The prior weight that fits images best: the maximum likelihood λ of the density ∝ exp(−λ·TV) of a channel.

    Args:
        images: auxiliary records of the kind that is attacked, shape (batch, channels, height, width).

    Returns:
        Nats a pixel unit; 0 for images without any difference, which say nothing.

    Raises:
        ValueError: other shapes, NaN or inf.

    Source:
        TV is homogeneous on the pixels − 1 dimensions beside the mean, so the density's integral is proportional to
        λ^−(pixels − 1) and λ = (pixels − 1)/mean TV; the box and the mean are left out of it.

    Example:
        >>> total_variation_weight(torch.tensor([[[[0.0, 1.0], [3.0, 1.0]]]]))  # 4 pixels, TV 6
        0.5
    """
    images = check_batch(images, what="images").double()
    _check_image(tuple(images.shape[1:]))
    total = float(total_variation(images).sum())
    pixels = images.shape[2] * images.shape[3]
    return len(images) * images.shape[1] * (pixels - 1) / total if total > 0.0 else 0.0


def _check_image(input_shape: tuple[int, ...]) -> None:
    if len(input_shape) != 3:
        raise ValueError(
            f"input_shape is {tuple(input_shape)}: total variation is for (channels, height, width); pass prior_weight=0"
        )


def _starts(
    count: int,
    restarts: int,
    *,
    input_shape: tuple[int, ...],
    box: tuple[float, float],
    start: Tensor | None,
    generator: torch.Generator,
) -> Tensor:
    """Rows to start from, one block of `count` a start."""
    low, high = box
    blocks = []
    if start is not None:
        if tuple(start.shape) not in (input_shape, (count, *input_shape)):
            raise ValueError(
                f"start has shape {tuple(start.shape)}: {input_shape} or {(count, *input_shape)} is due; reshape it"
            )
        given = start.detach().to("cpu", torch.float64).expand(count, *input_shape)
        if not bool(torch.isfinite(given).all()):
            raise ValueError("start holds NaN or inf: a descent begins at a finite record; pass start=None")
        blocks.append(given.clamp(low, high))
    if restarts:
        drawn = torch.rand(restarts * count, *input_shape, generator=generator, dtype=torch.float64)
        blocks.append(low + (high - low) * drawn)
    return torch.cat(blocks)
