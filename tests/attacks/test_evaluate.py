"""All attacks together on a release."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from asfl_privacy.accounting.gaussian import gaussian_noise_multiplier
from asfl_privacy.attacks import Effort, RecipientView, attack_release

QUICK = Effort(inversion_steps=100, restarts=0, decoder_steps=60, search_steps=15, membership_pairs=2)


def attack(digits, head, *, placement, stddev, seed=0, noise_seed=0, **changes):
    generator = torch.Generator().manual_seed(noise_seed)
    before, after = (nn.Identity(), head) if placement == "input" else (head, nn.Identity())

    def release(inputs):
        with torch.no_grad():
            rows = before(inputs)
            noise = 0.0 if stddev is None else stddev * torch.randn(rows.shape, generator=generator)
            return after(rows + noise)

    arguments = {
        "held_out_inputs": digits.test_inputs[:8],
        "held_out_labels": digits.test_labels[:8],
        "auxiliary_inputs": digits.train_inputs[:400],
        "auxiliary_labels": digits.train_labels[:400],
        "input_box": (0.0, 1.0),
        "seed": seed,
        "effort": QUICK,
    }
    view = RecipientView(before_noise=before, after_noise=after, noise_stddev=stddev)
    return attack_release(release, view, **{**arguments, **changes})


@pytest.mark.parametrize("placement", ["input", "exchange"])
def test_a_release_is_attacked_from_every_side(digits, conv_head, placement):
    # At the exchange layer the head moves by more than R, so the noise is calibrated to what the search finds at most:
    # σ_max of the head on an 8×8 grid, by brute force.
    basis = torch.eye(64).reshape(64, 1, 8, 8)
    with torch.no_grad():
        matrix = (conv_head[0](basis) - conv_head[0](torch.zeros(1, 1, 8, 8))).flatten(1)
    gain = 1.0 if placement == "input" else float(torch.linalg.matrix_norm(matrix, ord=2))
    radius, epsilon = 0.1, 4.0
    stddev = radius * gain * gaussian_noise_multiplier(epsilon, delta=1e-5)
    result = attack(
        digits, conv_head, placement=placement, stddev=stddev, epsilon=epsilon, delta=1e-5, radius=radius, p=2
    )
    names = [one.attack for one in result.reconstructions]
    inner = ["inversion, then denoising"] if placement == "input" else []
    assert names == ["inversion", *inner, "decoder", "best of each record"]
    assert result.best_without_noise.psnr.mean > result.baseline.psnr.mean + 10.0
    assert result.best.psnr.mean < result.best_without_noise.psnr.mean - 5.0
    assert np.array_equal(
        result.best.psnr_by_record, np.max([one.psnr_by_record for one in result.reconstructions[:-1]], axis=0)
    )
    assert result.neighbours is not None
    assert result.neighbours.low <= result.neighbours.bound == pytest.approx(math.tanh(2.0), abs=1e-5)
    assert result.neighbours.num_trials == 500
    assert result.any_two is not None
    assert result.any_two.advantage > result.neighbours.advantage
    assert result.any_two.bound is None
    assert result.property_without_noise.accuracy > result.property_without_noise.majority_rate
    for one in (*result.reconstructions, *result.without_noise, result.baseline):
        assert one.records.shape == (8, 1, 8, 8)
        assert one.records.dtype == np.float32
        assert 0.0 <= one.records.min() <= one.records.max() <= 1.0
    assert json.loads(json.dumps(result.figures(), allow_nan=False))["num_records"] == 8


def test_too_little_noise_for_the_claimed_epsilon_is_refuted(digits, conv_head):
    # Catches: a bound that is never compared, an interval that always reaches down to it.
    effort = Effort(inversion_steps=2, restarts=0, decoder_steps=2, membership_pairs=2)
    result = attack(
        digits, conv_head, placement="input", stddev=0.02, epsilon=1.0, delta=1e-5, radius=0.1, effort=effort
    )
    assert result.neighbours.low > result.neighbours.bound


def test_equal_seeds_give_equal_results_and_global_state_stays(digits, conv_head):
    effort = Effort(
        inversion_steps=10, restarts=1, decoder_steps=5, search_steps=3, membership_pairs=1, membership_trials=50
    )
    before = (torch.get_rng_state(), np.random.get_state()[1].copy())  # noqa: NPY002
    arguments = {"placement": "input", "stddev": 0.3, "radius": 0.1, "effort": effort}
    first, second, other = (attack(digits, conv_head, seed=seed, **arguments) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
    assert first.figures() == second.figures()
    assert np.array_equal(first.best.records, second.best.records)
    assert not np.array_equal(first.best.records, other.best.records)


def test_records_that_are_no_images_and_releases_without_noise_are_attacked_too(digits):
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    flat = {
        "held_out_inputs": digits.test_inputs[:4].flatten(1),
        "held_out_labels": digits.test_labels[:4],
        "auxiliary_inputs": digits.train_inputs[:100].flatten(1),
        "auxiliary_labels": digits.train_labels[:100],
    }
    result = attack(digits, lambda x: x @ weight, placement="exchange", stddev=None, **flat)
    assert result.best.ssim is None
    assert result.neighbours is None
    assert result.reconstructions == result.without_noise
    assert result.any_two.advantage == 1.0


def test_a_view_that_does_not_fit_and_bad_values_are_refused(digits, conv_head):
    wrong = RecipientView(before_noise=conv_head, after_noise=nn.Flatten().eval(), noise_stddev=1.0)
    records = digits.test_inputs[:12]
    arguments = {
        "held_out_inputs": records[:2],
        "held_out_labels": digits.test_labels[:2],
        "auxiliary_inputs": records,
        "auxiliary_labels": digits.test_labels[:12],
        "input_box": (0, 1),
        "seed": 0,
        "effort": QUICK,
    }
    with pytest.raises(ValueError, match="the view must describe the release"):
        attack_release(lambda x: conv_head(x).detach(), wrong, **arguments)
    right = RecipientView(before_noise=conv_head, after_noise=nn.Identity(), noise_stddev=1.0)
    for change, words in (
        ({"epsilon": math.nan}, "epsilon"),
        ({"seed": -1}, "seed"),
        ({"held_out_labels": digits.test_labels[:3]}, "one a record"),
        ({"auxiliary_inputs": records.flatten(1)}, "rows of shape"),
        ({"held_out_inputs": records[:2] * math.nan}, "NaN"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            attack_release(lambda x: conv_head(x).detach(), right, **{**arguments, **change})
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="membership_trials"):
        Effort(membership_trials=0)
