"""Inversion: near exact without noise, worse with more of it, worthless in the limit."""

import itertools
import math

import pytest
import torch
from torch import nn

from asfl_privacy.attacks import invert, invert_then_denoise, psnr, total_variation_weight
from asfl_privacy.attacks.inversion import invert_noised, total_variation

BOX = (0.0, 1.0)


def noisy(rows, stddev, *, seed=0):
    return rows + stddev * torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed))


def rebuild(head, released, **changes):
    arguments = {
        "input_shape": (1, 8, 8),
        "input_box": BOX,
        "generator": torch.Generator().manual_seed(0),
        "steps": 200,
    }
    return invert(head, released, **{**arguments, **changes})


def mean_psnr(images, originals):
    return psnr(images, originals, input_box=BOX).mean().item()


def test_without_noise_a_conv_head_hides_nothing_and_noise_degrades_the_rebuild(conv_head, digits):
    records = digits.test_inputs[:24]
    weight = 0.2 * total_variation_weight(digits.train_inputs)
    mean = digits.train_inputs.mean(0)
    baseline = mean_psnr(mean.expand_as(records), records)
    with torch.no_grad():
        clean = conv_head(records)
    exact = mean_psnr(rebuild(conv_head, clean, prior_weight=weight), records)
    assert exact > 20.0
    assert exact > baseline + 10.0
    figures = [exact]
    for stddev in (0.03, 0.3, 3.0, 300.0):
        rebuilt = rebuild(
            conv_head, noisy(clean, stddev), noise_stddev=stddev, prior_weight=weight, start=mean, restarts=0
        )
        figures.append(mean_psnr(rebuilt, records))
    assert all(later < earlier - 1.0 for earlier, later in itertools.pairwise(figures[:-1]))
    assert max(figures[-2:]) <= baseline + 0.5


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_the_prior_weight_is_in_units_of_the_likelihood(mechanism):
    """Two pixels under an identity head, noised to 0 and 2 in a wide box: the optimum is known by hand.

    Gaussian: (x − 0)²/2σ² + (y − 2)²/2σ² + λ|x − y| is least at x = λσ², y = 2 − λσ². Laplace: (|x| + |y − 2|)/b + λ|x − y| stays
    at 0 and 2 for λ < 1/b. Catches: σ for σ², a factor 2 in the weight, √2 left out of b.
    """
    released = torch.tensor([[[[0.0, 2.0]]]])
    stddev, weight = (0.5, 1.2) if mechanism == "gaussian" else (math.sqrt(2.0), 0.95)  # b = 1
    found = invert(
        nn.Identity(),
        released,
        input_shape=(1, 1, 2),
        input_box=(-1.0, 3.0),
        mechanism=mechanism,
        noise_stddev=stddev,
        prior_weight=weight,
        steps=600,
        generator=torch.Generator().manual_seed(0),
    ).flatten()
    expected = [0.3, 1.7] if mechanism == "gaussian" else [0.0, 2.0]
    assert found.tolist() == pytest.approx(expected, abs=0.02)
    if mechanism == "laplace":  # and beyond 1/b both pixels meet
        met = invert(
            nn.Identity(),
            released,
            input_shape=(1, 1, 2),
            input_box=(-1.0, 3.0),
            mechanism=mechanism,
            noise_stddev=stddev,
            prior_weight=1.05,
            steps=600,
            generator=torch.Generator().manual_seed(0),
        ).flatten()
        assert met[0].item() == pytest.approx(met[1].item(), abs=0.1)


def test_total_variation_and_its_weight_by_hand():
    images = torch.tensor([[[[0.0, 1.0], [3.0, 1.0]]], [[[0.0, 0.0], [0.0, 2.0]]]])
    assert total_variation(images).tolist() == [6.0, 4.0]
    assert total_variation_weight(images) == pytest.approx(2 * 3 / 10)
    assert total_variation_weight(torch.zeros(2, 1, 4, 4)) == 0.0


def test_what_was_noised_is_found_outside_the_box_too(conv_head, digits):
    # Catches: a box that cuts noised pixels off: half of all are below 0 or above 1 here.
    noised = noisy(digits.test_inputs[:4], 1.0)
    with torch.no_grad():
        released = conv_head(noised)
    found = invert_noised(
        conv_head,
        released,
        input_shape=(1, 8, 8),
        input_box=BOX,
        noise_stddev=1.0,
        generator=torch.Generator().manual_seed(0),
    )
    assert float((found - noised).abs().mean()) < 0.05


def test_noise_at_the_input_is_inverted_then_denoised(conv_head, digits):
    # Catches: no denoising. Noise of .3 alone leaves −20·log10(.3) = 10.5 dB.
    records, stddev = digits.test_inputs[:16], 0.3
    with torch.no_grad():
        released = conv_head(noisy(records, stddev))
    arguments = {
        "input_shape": (1, 8, 8),
        "input_box": BOX,
        "noise_stddev": stddev,
        "steps": 200,
        "prior_weight": 0.2 * total_variation_weight(digits.train_inputs),
    }
    rebuilt = invert_then_denoise(conv_head, released, **arguments, generator=torch.Generator().manual_seed(0))
    assert mean_psnr(rebuilt, records) > 12.5
    assert float(rebuilt.min()) >= 0.0
    assert float(rebuilt.max()) <= 1.0


def test_seeds_reproduce_and_nothing_else_is_touched(conv_head, digits):
    records = digits.test_inputs[:4]
    with torch.no_grad():
        released = conv_head(records)
    given = released.clone()
    before = torch.get_rng_state()
    first, second = (rebuild(conv_head, released, steps=5, restarts=2) for _ in range(2))
    other = rebuild(conv_head, released, steps=5, restarts=2, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(released, given)
    assert all(parameter.grad is None for parameter in conv_head.parameters())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"released": torch.full((2, 16, 4, 4), math.nan)}, "NaN"),
        ({"released": torch.zeros(0, 16, 4, 4)}, "at least one row"),
        ({"released": torch.zeros(2, 16, 4, 5)}, "must agree"),
        ({"released": torch.zeros(2, 16, 4, 4).half()}, "float32"),
        ({"noise_stddev": 0.0}, "noise_stddev"),
        ({"noise_stddev": math.nan}, "noise_stddev"),
        ({"prior_weight": -1.0}, "prior_weight"),
        ({"steps": 0}, "steps"),
        ({"restarts": 0}, "restarts"),
        ({"input_box": (1.0, 0.0)}, "below high"),
        ({"mechanism": "uniform"}, "one of gaussian, laplace"),
        ({"start": torch.zeros(3)}, "start has shape"),
        ({"start": torch.full((1, 8, 8), math.inf)}, "start holds"),
        ({"input_shape": (64,), "prior_weight": 1.0}, "total variation"),
    ],
)
def test_bad_input_is_refused_in_one_line(conv_head, changes, words):
    released = changes.pop("released", torch.zeros(2, 16, 4, 4))
    with pytest.raises(ValueError, match=words) as caught:
        rebuild(conv_head, released, **changes)
    assert "\n" not in str(caught.value)


def test_a_head_in_train_mode_or_with_nan_is_refused():
    released = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="train mode"):
        rebuild(nn.Sequential(nn.Flatten(), nn.Dropout()), released)
    with pytest.raises(ValueError, match="NaN or inf"):
        rebuild(lambda x: x.flatten(1)[:, :4] * math.nan, released)
