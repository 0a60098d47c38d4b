"""PSNR and SSIM against hand values and a slow twin."""

import math

import pytest
import torch

from asfl_privacy.attacks import psnr, ssim
from asfl_privacy.attacks.measures import gaussian_window


def slow_ssim(x, y):
    """Eq. (13) to (16) of Wang et al. 2004, pixel by pixel, for one-channel images in [0, 1]."""
    height, width = len(x), len(x[0])
    size = min(11, height, width)
    size -= size % 2 == 0
    half = size // 2
    weights = {
        (i, j): math.exp(-(i * i + j * j) / (2 * 1.5**2))
        for i in range(-half, half + 1)
        for j in range(-half, half + 1)
    }
    total = sum(weights.values())
    values = []
    for row in range(half, height - half):
        for column in range(half, width - half):
            points = [(w / total, x[row + i][column + j], y[row + i][column + j]) for (i, j), w in weights.items()]
            mean_x, mean_y = sum(w * a for w, a, _ in points), sum(w * b for w, _, b in points)
            var_x = sum(w * (a - mean_x) ** 2 for w, a, _ in points)
            var_y = sum(w * (b - mean_y) ** 2 for w, _, b in points)
            cov = sum(w * (a - mean_x) * (b - mean_y) for w, a, b in points)
            luminance = (2 * mean_x * mean_y + 1e-4) / (mean_x**2 + mean_y**2 + 1e-4)
            values.append(luminance * (2 * cov + 9e-4) / (var_x + var_y + 9e-4))
    return sum(values) / len(values)


@pytest.mark.parametrize("shape", [(8, 8), (13, 16), (28, 11), (3, 9)])
def test_ssim_equals_its_slow_twin(shape):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(3, 1, *shape, generator=generator)
    y = (x + 0.3 * torch.rand(x.shape, generator=generator)).clamp(0, 1)
    expected = [slow_ssim(a[0].double().tolist(), b[0].double().tolist()) for a, b in zip(x, y, strict=True)]
    assert ssim(x, y, input_box=(0, 1)).tolist() == pytest.approx(expected, abs=1e-12)


def test_ssim_of_equal_images_is_one_and_of_a_constant_shift_its_luminance_term():
    # Flat images a and b: variances vanish, so SSIM = (2ab + C1)/(a² + b² + C1), C1 = 1e-4.
    a, b = (torch.full((1, 1, 12, 12), value, dtype=torch.float64) for value in (0.3, 0.5))
    assert ssim(a, b, input_box=(0, 1)).item() == pytest.approx((2 * 0.15 + 1e-4) / (0.09 + 0.25 + 1e-4), rel=1e-12)
    image = torch.rand(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    assert ssim(image, image, input_box=(0, 1)).tolist() == [1.0, 1.0]


def test_measures_use_the_width_of_the_box():
    # Catches: a data range of 1, or one read off the images. Images scaled with their box measure the same.
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(2, 2, 1, 9, 9, generator=generator, dtype=torch.float64)
    for measure in (psnr, ssim):
        scaled = measure(x * 510 - 255, y * 510 - 255, input_box=(-255, 255))
        assert scaled.tolist() == pytest.approx(measure(x, y, input_box=(0, 1)).tolist(), rel=1e-9)


def test_psnr_by_hand():
    # one pixel of four off by .2: MSE .01, so 20 dB; all off by half the width: 6.02 dB
    original = torch.zeros(2, 1, 2, 2)
    image = torch.tensor([[0.2, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5]]).reshape(2, 1, 2, 2)
    assert psnr(image, original, input_box=(0, 1)).tolist() == pytest.approx([20.0, 20 * math.log10(2)], rel=1e-6)
    assert psnr(original, original, input_box=(0, 1)).tolist() == pytest.approx([20 * 23 * math.log10(2)] * 2)


def test_the_window_has_weight_one_and_shrinks_to_odd_sizes():
    for side, size in ((28, 11), (11, 11), (10, 9), (8, 7), (2, 1), (1, 1)):
        window = gaussian_window(side)
        assert window.shape == (size, size)
        assert window.sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("images", "originals", "box", "words"),
    [
        (torch.zeros(1, 1, 8, 8), torch.zeros(2, 1, 8, 8), (0, 1), "one each"),
        (torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8, 9), (0, 1), "rows of shape"),
        (torch.full((1, 1, 8, 8), math.nan), torch.zeros(1, 1, 8, 8), (0, 1), "NaN"),
        (torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8, 8), (1, 1), "below high"),
        (torch.zeros(1, 1, 8, 8, dtype=torch.int64), torch.zeros(1, 1, 8, 8), (0, 1), "float32"),
    ],
)
def test_bad_images_are_refused_in_one_line(images, originals, box, words):
    for measure in (psnr, ssim):
        with pytest.raises(ValueError, match=words) as caught:
            measure(images, originals, input_box=box)
        assert "\n" not in str(caught.value)


def test_ssim_refuses_records_that_are_no_images():
    with pytest.raises(ValueError, match="use psnr"):
        ssim(torch.zeros(1, 4), torch.zeros(1, 4), input_box=(0, 1))
