"""How much a rebuilt image resembles the original: PSNR and SSIM, image by image."""

import math

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from asfl_privacy.accounting.checks import check_box
from asfl_privacy.attacks.guards import check_batch

PSNR_CEILING = 20.0 * math.log10(2.0**23)
"""138.5 dB: an error of one float32 step at the width of the box; equal images count as this near, not as infinitely near."""
WINDOW = 11
WINDOW_STDDEV = 1.5
K1, K2 = 0.01, 0.03


def psnr(images: Tensor, originals: Tensor, *, input_box: tuple[float, float]) -> Tensor:
    """Peak signal-to-noise ratio 10·log10(width²/MSE) of each record, the peak being the width of the box.

    Args:
        images: rebuilt records, shape (batch, ...).
        originals: same shape.
        input_box: (low, high) of the pixels.

    Returns:
        Decibels, shape (batch,), float64.

    Raises:
        ValueError: shapes that differ, NaN, inf or a box without width.

    Edge cases:
        Equal images give 138.5 dB, the resolution of float32, so that means stay finite.

    Example:
        >>> psnr(torch.full((1, 4), 0.6), torch.full((1, 4), 0.5), input_box=(0, 1))  # MSE .01
        tensor([20.0000], dtype=torch.float64)
    """
    low, high = check_box(input_box)
    originals = check_batch(originals, what="originals").double()
    images = check_batch(images, what="images", shape=tuple(originals.shape[1:])).double()
    _check_count(images, originals)
    errors = (images - originals).flatten(1).square().mean(1) / (high - low) ** 2
    return (-10.0 * torch.log10(errors.clamp_min(10.0 ** (-PSNR_CEILING / 10.0)))).clamp_max(PSNR_CEILING)


def ssim(images: Tensor, originals: Tensor, *, input_box: tuple[float, float]) -> Tensor:
    """Mean structural similarity of each image, averaged over windows and channels.

    Args:
        images: rebuilt images, shape (batch, channels, height, width).
        originals: same shape.
        input_box: (low, high) of the pixels; low counts as black.

    Returns:
        Values in [−1, 1], shape (batch,), float64; 1 for equal images.

    Raises:
        ValueError: records that are no images, shapes that differ, NaN, inf or a box without width.

    Edge cases:
        Images below 11 pixels a side use the largest odd window that fits, with the same 1.5 pixels of standard
        deviation, renormalised. Figures of windows of different size are not comparable.

    Source:
        Wang, Bovik, Sheikh & Simoncelli 2004, eq. (13) to (16): 11×11 Gaussian window of 1.5 pixels, K1 = .01, K2 = .03,
        windows inside the image only.

    Example:
        >>> image = torch.linspace(0, 1, 64).reshape(1, 1, 8, 8)
        >>> ssim(image, image, input_box=(0, 1)).item()
        1.0
    """
    low, high = check_box(input_box)
    originals = check_batch(originals, what="originals").double()
    images = check_batch(images, what="images", shape=tuple(originals.shape[1:])).double()
    _check_count(images, originals)
    if images.dim() != 4:
        raise ValueError(
            f"images have shape {tuple(images.shape)}: SSIM is for (batch, channels, height, width); use psnr for others"
        )
    x, y = (((batch - low) / (high - low)).flatten(0, 1).unsqueeze(1) for batch in (images, originals))
    window = gaussian_window(min(images.shape[2:]))

    def local(batch: Tensor) -> Tensor:
        return conv2d(batch, window.to(batch).expand(1, 1, -1, -1))

    mean_x, mean_y = local(x), local(y)
    var_x, var_y = local(x * x) - mean_x.square(), local(y * y) - mean_y.square()
    covariance = local(x * y) - mean_x * mean_y
    c1, c2 = K1**2, K2**2
    quality = ((2 * mean_x * mean_y + c1) * (2 * covariance + c2)) / (
        (mean_x.square() + mean_y.square() + c1) * (var_x + var_y + c2)
    )
    return quality.reshape(len(images), -1).mean(1).clamp(-1.0, 1.0)


def gaussian_window(side: int) -> Tensor:
    """Weights of the window for images whose shorter side is `side`: 11×11, or the largest odd size that fits; sum 1."""
    size = min(WINDOW, side if side % 2 else side - 1)
    steps = torch.arange(max(size, 1), dtype=torch.float64) - (max(size, 1) - 1) / 2
    profile = torch.exp(-steps.square() / (2.0 * WINDOW_STDDEV**2))
    weights = torch.outer(profile, profile)
    return weights / weights.sum()


def _check_count(images: Tensor, originals: Tensor) -> None:
    if len(images) != len(originals):
        raise ValueError(f"{len(images)} images against {len(originals)} originals: one each is due; match the batches")
