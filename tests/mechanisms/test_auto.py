"""Placement "auto": decided from weights and public constants, by a rule that hand-made heads confirm."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from asfl_privacy.mechanisms import choose_placement


def choose(head, **change):
    values = {"mechanism": "gaussian", "p": 2, "radius": 0.1, "input_shape": (64,)} | change
    return choose_placement(head, **values)


def averaging():
    """64 numbers to their sum: 1→1 = 1, 2→2 = 8."""
    fc = nn.Linear(64, 1, bias=False)
    with torch.no_grad():
        fc.weight.fill_(1.0)
    return nn.Sequential(OrderedDict(fc=fc)).eval()


def test_gaussian_noise_before_a_tie_goes_to_the_input():
    """For one linear block at p=q=2 the noise at its output is as large as the input's pushed through, when the block has
    one singular value; with more, the input wins."""
    choice = choose(averaging(), num_samples=4096)
    assert choice.relative_noise["input"] == pytest.approx(choice.relative_noise["exchange"], rel=0.2)
    torch.manual_seed(0)
    wide = nn.Sequential(OrderedDict(fc=nn.Linear(64, 64))).eval()
    assert choose(wide).placement == "input"
    identity = nn.Sequential(OrderedDict(one=nn.Flatten(), two=nn.Flatten())).eval()
    assert choose(identity).placement == "input"


@pytest.mark.parametrize("seed", range(8))
def test_noise_behind_a_rescaling_is_a_tie_that_the_input_wins(seed):
    """σ = zR/s behind a division by s is σ = zR before it. Catches a choice decided by the trial noise."""

    class Halve(nn.Module):
        def forward(self, x):
            return x / 0.376

    head = nn.Sequential(OrderedDict(normalize=Halve(), fc=nn.Linear(64, 16), relu=nn.ReLU())).eval()
    assert choose(head, seed=seed).placement == "input"


def test_laplace_with_an_l2_radius_goes_behind_a_narrow_block():
    """At the input b = 8zR on 64 numbers: variance 2·64·64·z²R² at the sum; behind it b = 8zR once: 64 times less."""
    choice = choose(averaging(), mechanism="laplace", num_samples=4096)
    assert choice.placement == "exchange"
    ratio = choice.relative_noise["input"] / choice.relative_noise["exchange"]
    assert ratio == pytest.approx(64.0, rel=0.2)
    assert "exchange" in choice.reason
    assert "\n" not in choice.reason


def test_the_disturbance_agrees_with_hand_work():
    """σ = zR at the input; the sum of 64 then has noise variance 64z²R²; the sum of U(0, 1) has mean square 32² + 64/12."""
    choice = choose(averaging(), noise_multiplier=5.0, num_samples=20_000)
    expected = 64.0 * (5.0 * 0.1) ** 2 / (32.0**2 + 64.0 / 12.0)
    assert choice.relative_noise["input"] == pytest.approx(expected, rel=0.05)


def test_the_choice_repeats_and_leaves_head_and_global_streams_alone():
    """Catches: drawing from torch's global generator, or a choice that differs between runs."""
    torch.manual_seed(7)
    head = nn.Sequential(OrderedDict(a=nn.Linear(64, 32), b=nn.ReLU(inplace=True), c=nn.Linear(32, 8))).eval()
    before, state = {key: value.clone() for key, value in head.state_dict().items()}, torch.get_rng_state()
    assert choose(head) == choose(head)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in head.state_dict().items())
    assert list(choose(head).relative_noise) == ["input", "after:a", "after:b", "exchange"]


def test_blocks_without_a_certificate_are_skipped_with_the_reason():
    class Unknown(nn.Module):
        def forward(self, x):
            return torch.frac(x)

    head = nn.Sequential(OrderedDict(unknown=Unknown(), fc=nn.Linear(64, 4))).eval()
    choice = choose(head)
    assert choice.placement == "input"
    assert list(choice.skipped) == ["after:unknown", "exchange"]
    assert "no certificate at after:unknown, exchange" in choice.reason


def test_train_mode_batchnorm_is_an_error_not_a_skip():
    head = nn.Sequential(OrderedDict(fc=nn.Linear(64, 8), norm=nn.BatchNorm1d(8)))
    with pytest.raises(ValueError, match="BatchNorm1d in train mode"):
        choose(head)


def test_a_clip_counts_as_disturbance():
    clipped, free = choose(averaging(), clip=0.5), choose(averaging())
    assert clipped.relative_noise["input"] > free.relative_noise["input"]
    assert choose(averaging(), clip=0.5, radius="any").placement in ("input", "exchange")
