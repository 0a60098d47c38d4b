"""Layers that misbehave, and an audit that leaves no trace."""

import copy
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from audit.mutants import GAUSSIAN, SIGMA, fresh, honest, normal
from torch import nn

from asfl_privacy import audit
from asfl_privacy.audit.randomness import untouched_randomness

METRIC = audit.Claim(family="gaussian", scale=SIGMA, sensitivity=2.0, input_shape=(3, 4, 4))
QUICK = ("scale", "family")


class Additive(nn.Module):
    """x + noise, however ``respond`` has it."""

    def __init__(self, respond):
        super().__init__()
        self.respond = respond

    def forward(self, x):
        return self.respond(x)


def add(x):
    return x + normal(x.shape, SIGMA).to(x.dtype)


def add_in_place(x):
    return x.add_(normal(x.shape, SIGMA).to(x.dtype))


def test_layers_in_place_are_audited_against_the_inputs_they_got():
    assert audit.run(Additive(add_in_place), METRIC).passed
    silent = audit.run(Additive(lambda x: x.add_(0.0)), METRIC)
    assert not silent.passed


def test_a_layer_that_returns_one_buffer_again_and_again_is_read_at_once():
    """Catches: residuals of the last call in place of each call's own."""
    buffers = {}

    def respond(x):
        buffer = buffers.setdefault(x.shape, torch.empty_like(x))
        return buffer.copy_(add(x))

    assert audit.run(Additive(respond), METRIC).passed


def test_plain_functions_have_one_mode():
    report = audit.run(add, METRIC)
    assert report.passed
    assert not any("train" in note for part in report.parts for note in part.notes)


def test_a_layer_in_double_precision():
    class Double(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, x):
            assert x.dtype == torch.float64
            return x + self.bias + normal(x.shape, SIGMA)

    assert audit.run(Double(), METRIC).passed


def test_a_layer_that_takes_images_only():
    def respond(x):
        if x.dim() != 4:
            raise ValueError("images are due")
        return add(x)

    assert audit.run(Additive(respond), METRIC).passed


def test_refusing_is_safe_and_noted():
    def respond(x):
        if len(x) < 2 or float(x.abs().max()) > 1e3:
            raise ValueError("no such batch")
        return add(x)

    report = audit.run(Additive(respond), METRIC)
    assert report.passed, report.summary()
    assert "batch of 1 refused: ValueError: no such batch" in report.summary()
    assert "huge inputs" in report.summary()


def test_a_layer_that_refuses_everything_is_not_passed():
    """Catches: an audit of nothing that passes."""

    def respond(x):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(ValueError, match=r"refuses every batch .*cannot be multiplied"):
        audit.run(Additive(respond), METRIC)


@pytest.mark.parametrize(
    ("respond", "message"),
    [
        (lambda x: x.flatten(1)[:, :5], "tap= .* or noise_of="),
        (lambda x: x.flatten(), "one real row per record"),
        (lambda x: (x, x), "returns a tuple"),
        (lambda x: x.to(torch.complex64), "one real row per record"),
    ],
)
def test_outputs_without_residuals_are_refused(respond, message):
    with pytest.raises(ValueError, match=message):
        audit.run(Additive(respond), METRIC)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_layer_that_sometimes_answers_nan_is_a_breach(value):
    """Catches: NaN that compares false and slips through, or that is left out of the statistics."""

    def respond(x):
        out = add(x)
        if len(x) == 1:
            out[..., 0] = value
        return out

    report = audit.run(Additive(respond), METRIC)
    assert [breach.observed > 0 for breach in report.breaches if "NaN" in breach.meaning] == [True]
    always = audit.run(Additive(lambda x: x * value), METRIC)
    assert not always.passed
    assert always.epsilon_low == 0.0


def test_noise_inside_a_layer_is_reached_by_its_tap_or_by_noise_of():
    head = nn.Linear(48, 10, bias=False)
    claim = replace(METRIC, sensitivity=None, epsilon=None)

    def flat(x):
        return head(x.flatten(1))

    assert audit.run(Additive(lambda x: add(flat(x))), claim, tap=flat, parts=QUICK).passed
    scaled = Additive(lambda x: 3.0 * add(x))
    assert audit.run(scaled, claim, noise_of=lambda x, y: y / 3.0 - x, parts=QUICK).passed
    assert not audit.run(scaled, claim, noise_of=lambda x, y: y / 4.0 - x, parts=QUICK).passed


def test_global_random_states_are_left_alone():
    """Catches: seeding or drawing from a global generator, by the audit or by the layer."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    audit.run(lambda x: x + SIGMA * torch.randn_like(x) + random.random() * np.random.rand(), METRIC)  # noqa: NPY002
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert all(np.array_equal(a, b) for a, b in zip(states[2], np.random.get_state(), strict=True))  # noqa: NPY002


def test_random_states_are_put_back_after_an_error():
    before = torch.get_rng_state()

    def fail_after_seeding():
        with untouched_randomness():
            torch.manual_seed(5)
            raise KeyError

    with pytest.raises(KeyError):
        fail_after_seeding()
    assert torch.equal(before, torch.get_rng_state())


def test_modes_and_buffers_are_left_alone():
    layer = nn.Sequential(nn.BatchNorm2d(3), Additive(add))
    layer.train()
    layer[1].eval()
    before = copy.deepcopy(layer.state_dict())
    report = audit.run(layer, METRIC, tap=layer[0], parts=QUICK)
    assert report.passed, report.summary()
    assert (layer.training, layer[0].training, layer[1].training) == (True, True, False)
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())


def test_test_inputs_follow_the_seed_alone():
    def inputs_at(seed):
        seen = []

        def respond(x):
            seen.append(x.clone())
            return add(x)

        audit.run(respond, METRIC, parts=("scale",), seed=seed)
        return torch.cat([x.flatten() for x in seen])

    assert torch.equal(inputs_at(1), inputs_at(1))
    assert not torch.equal(inputs_at(1), inputs_at(2))


def test_a_claim_without_a_distance_has_no_bound():
    report = audit.run(add, replace(METRIC, sensitivity=None, epsilon=None))
    assert report.passed
    assert report.epsilon_low == 0.0
    assert report.epsilon_claimed is None
    assert "no worst pair is known" in report.summary()


def test_false_alarms_are_no_more_frequent_than_alpha():
    """At alpha = .2, of 24 honest runs fewer than 14 fail (probability 2e-5 at a rate of .2). Catches: no Bonferroni."""
    claim = replace(METRIC, input_shape=(4,))
    failures = sum(
        not audit.run(add, claim, alpha=0.2, num_residuals=2048, parts=("scale", "pairs", "family", "reuse")).passed
        for _ in range(24)
    )
    assert failures < 14


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": 1.0}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"parts": ("scale", "size")}, "parts"),
        ({"parts": ()}, "parts"),
        ({"parts": ("scale", "scale")}, "parts"),
        ({"modes": ("test",)}, "modes"),
        ({"seed": -1}, "seed"),
        ({"num_residuals": 1}, "num_residuals"),
        ({"dtype": torch.int64}, "dtype"),
        ({"tap": 3}, "tap"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        audit.run(add, METRIC, **change)


def test_what_is_no_claim_and_what_is_no_layer_is_refused():
    with pytest.raises(ValueError, match="a Claim is due"):
        audit.run(add, {"scale": 1.0})
    with pytest.raises(ValueError, match="layer is a Tensor"):
        audit.run(torch.zeros(3), METRIC)


def test_a_child_that_hangs_or_dies_is_noted(monkeypatch):
    """Catches: waiting for ever on a forked child, or taking its silence for equal noise."""
    import os
    import time

    parent = os.getpid()

    def respond(x):
        if os.getpid() != parent:
            time.sleep(60.0)
        return add(x)

    monkeypatch.setattr("asfl_privacy.audit.freshness.FORK_TIMEOUT_S", 0.2)
    report = audit.run(respond, METRIC, parts=("freshness",))
    assert report.passed
    assert "the forked child refused or gave no answer" in report.summary()


def test_the_honest_clip_is_not_disturbed_by_being_called():
    layer = honest(GAUSSIAN)
    x = torch.from_numpy(fresh().normal(size=(2, 4, 4, 4)))
    before = layer.tap(x)
    audit.run(layer, GAUSSIAN, tap=layer.tap, parts=("tap",))
    assert torch.equal(before, layer.tap(x))
