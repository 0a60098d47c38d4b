"""Guards at the door: what a tensor must satisfy before noise is added and anything leaves."""

import math

import torch

from asfl_privacy.accounting.checks import check_real

_PRECISIONS = (torch.float32, torch.float64)


def check_activations(activations: torch.Tensor, *, what: str = "activations") -> None:
    """Refuse a tensor that must not be released.

    Args:
        activations: shape (batch, ...), float32 or float64.
        what: what the message calls the tensor.

    Raises:
        ValueError: for another type, half precision, integers, autocast, an empty batch, NaN or inf.
    """
    if not isinstance(activations, torch.Tensor):
        raise ValueError(f"{what} is a {type(activations).__name__}: it must be a torch tensor; pass a float32 tensor")
    if activations.dtype not in _PRECISIONS:
        raise ValueError(
            f"{what} has dtype {activations.dtype}: noise needs float32 or float64, since coarser numbers leak through "
            "their rounding; convert with .float()"
        )
    if torch.is_autocast_enabled(activations.device.type):
        raise ValueError(f"{what} is computed under autocast: noise needs full precision; leave the autocast block")
    if activations.dim() == 0 or activations.numel() == 0:
        raise ValueError(
            f"{what} has shape {tuple(activations.shape)}: a batch of at least one record is due; skip empty batches"
        )
    if not is_finite(activations):
        raise ValueError(f"{what} holds NaN or inf: only finite values have a bounded sensitivity; check the head")


def is_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite.

    Args:
        values: floating point, any shape.

    Guarantee:
        Exact. One NaN or infinity makes every sum NaN or infinite, so a finite sum settles it in one pass; a sum that is
        not finite may have overflowed, and then every value is looked at.

    Example:
        >>> is_finite(torch.tensor([3e38, 3e38])), is_finite(torch.tensor([1.0, float("nan")]))
        (True, False)
    """
    return math.isfinite(float(values.detach().sum())) or bool(torch.isfinite(values).all())


def check_resolution(activations: torch.Tensor, *, noise_stddev: float) -> None:
    """Refuse noise that the activations' precision would swallow, or that would overflow it.

    Args:
        activations: float32 or float64.
        noise_stddev: σ in the units of the activations.

    Raises:
        ValueError: where σ is below the spacing of the largest activation or near the ends of the number range.
    """
    facts = torch.finfo(activations.dtype)
    if not facts.tiny / facts.eps <= noise_stddev <= facts.max * facts.eps:
        raise ValueError(
            f"noise_stddev is {noise_stddev:.3g}: {activations.dtype} cannot hold such noise; use float64, or scale the "
            "activations"
        )
    spacing = float(activations.detach().abs().max()) * facts.eps
    if noise_stddev < spacing:
        raise ValueError(
            f"noise_stddev is {noise_stddev:.3g}: the largest activation is rounded to steps of {spacing:.3g}, which "
            "would swallow the noise; use float64, or clip the activations"
        )


def check_input_box(inputs: torch.Tensor, *, input_box: tuple[float, float]) -> None:
    """Refuse inputs outside the declared box, since every whole-record figure holds inside it only.

    Raises:
        ValueError: where an input lies outside.
    """
    low, high = input_box
    smallest, largest = float(inputs.min()), float(inputs.max())
    if smallest < low or largest > high:
        raise ValueError(
            f"inputs lie in [{smallest:.6g}, {largest:.6g}]: the declared input box is [{low:g}, {high:g}]; scale the "
            "raw inputs into the box (normalisation is the head's first layer) or declare a wider box"
        )


def check_clip(clip: object) -> float | None:
    """Return a clipping norm C > 0 or None, or raise ValueError."""
    if clip is None:
        return None
    return check_real("clip", clip, minimum=1e-30, exclusive=False, fix="pass e.g. clip=1.0, or clip=None for no clip")


def make_input_shape(input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one record as positive integers, or raise ValueError."""
    shape = tuple(input_shape)
    if not shape or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in shape):
        raise ValueError(f"input_shape is {shape!r}: it must hold positive integers, no batch; pass e.g. (1, 28, 28)")
    return shape
