"""The decoder: learns to undo a release, and falls back on the mean record where there is nothing to learn."""

import itertools
import math

import pytest
import torch
from torch import nn

from asfl_privacy.attacks import psnr, reconstruct, train_decoder

BOX = (0.0, 1.0)


def noisy_release(head, stddev, *, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def release(inputs):
        with torch.no_grad():
            rows = head(inputs)
        return rows + stddev * torch.randn(rows.shape, generator=generator)

    return release


def figure(release, records, auxiliary, *, steps=120):
    decoder = train_decoder(
        release, auxiliary, input_box=BOX, steps=steps, width=128, generator=torch.Generator().manual_seed(0)
    )
    return psnr(reconstruct(decoder, release(records)), records, input_box=BOX).mean().item()


def test_noise_degrades_the_decoder_down_to_the_mean_record(conv_head, digits):
    # Catches: training without the noise (would be far below the baseline at large noise), no early stopping.
    records, auxiliary = digits.test_inputs[:64], digits.train_inputs
    baseline = psnr(auxiliary.mean(0).expand_as(records), records, input_box=BOX).mean().item()
    figures = [figure(noisy_release(conv_head, stddev), records, auxiliary) for stddev in (0.0, 0.4, 1.0, 1000.0)]
    assert figures[0] > 20.0
    assert all(later < earlier - 0.5 for earlier, later in itertools.pairwise(figures))
    assert figures[2] > baseline + 0.5
    assert figures[-1] == pytest.approx(baseline, abs=0.3)


def test_flat_activations_and_flat_records_are_decoded_too(digits):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 48, generator=generator) / 8
    records, auxiliary = digits.test_inputs[:64], digits.train_inputs
    baseline = psnr(auxiliary.mean(0).expand_as(records), records, input_box=BOX).mean().item()
    assert figure(lambda x: x.flatten(1) @ weight, records, auxiliary) > baseline + 4.0
    decoder = train_decoder(
        lambda x: x @ weight, auxiliary.flatten(1), input_box=BOX, steps=20, generator=torch.Generator().manual_seed(0)
    )
    rebuilt = reconstruct(decoder, records.flatten(1) @ weight)
    assert rebuilt.shape == (64, 64)
    assert float(rebuilt.min()) >= 0.0
    assert float(rebuilt.max()) <= 1.0


def test_a_decoder_that_only_gets_worse_stays_the_mean_record():
    # Catches: keeping the last step, or the best without step 0.
    records = torch.rand(50, 4, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    decoder = train_decoder(
        lambda x: torch.randn(x.shape, generator=generator),
        records,
        input_box=BOX,
        steps=20,
        learning_rate=3.0,
        generator=torch.Generator().manual_seed(0),
    )
    rebuilt = reconstruct(decoder, torch.randn(6, 4, generator=generator))
    assert torch.equal(rebuilt, rebuilt[:1].expand(6, 4))


def test_a_seed_reproduces_and_global_state_stays(conv_head, digits):
    auxiliary = digits.train_inputs[:100]
    before = torch.get_rng_state()
    released = conv_head(auxiliary[:5]).detach()
    rebuilt = []
    for seed in (0, 0, 1):
        decoder = train_decoder(
            noisy_release(conv_head, 0.1),
            auxiliary,
            input_box=BOX,
            steps=30,
            generator=torch.Generator().manual_seed(seed),
        )
        rebuilt.append(reconstruct(decoder, released))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(rebuilt[0], rebuilt[1])
    assert not torch.equal(rebuilt[0], rebuilt[2])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"auxiliary_inputs": torch.zeros(9, 4)}, "at least 10"),
        ({"auxiliary_inputs": torch.full((20, 4), math.nan)}, "NaN"),
        ({"steps": 0}, "steps"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"release": lambda x: x[:1]}, "one row a record"),
        ({"release": lambda x: x * math.inf}, "NaN or inf"),
    ],
)
def test_bad_decoder_input_is_refused_in_one_line(changes, words):
    arguments = {"input_box": BOX, "steps": 2, "generator": torch.Generator()}
    release = changes.pop("release", nn.Identity())
    inputs = changes.pop("auxiliary_inputs", torch.rand(20, 4, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(ValueError, match=words) as caught:
        train_decoder(release, inputs, **{**arguments, **changes})
    assert "\n" not in str(caught.value)


def test_a_decoder_refuses_rows_of_another_shape_and_other_modules_are_refused():
    decoder = train_decoder(nn.Identity(), torch.rand(20, 4), input_box=BOX, steps=1, generator=torch.Generator())
    with pytest.raises(ValueError, match="rows of shape"):
        reconstruct(decoder, torch.zeros(2, 5))
    with pytest.raises(ValueError, match="train_decoder"):
        reconstruct(nn.Identity(), torch.zeros(2, 4))
