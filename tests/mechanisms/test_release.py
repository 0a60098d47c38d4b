"""The release: what is planned is what runs, and what must not leave does not."""

import math
from collections import OrderedDict
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import nn

from asfl_privacy.accounting import Ledger, calibrate
from asfl_privacy.mechanisms import add_noise, apply_release, clip_rows, finish_release, plan_release
from sensitivity import StaleCertificateError, UnsupportedModuleError, certify

SHAPE = (1, 8, 8)
PLACEMENTS = ["input", "after:conv1", "exchange"]


def make_head(dtype=torch.float32):
    torch.manual_seed(0)
    blocks = OrderedDict(
        conv1=nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()),
        conv2=nn.Sequential(nn.Conv2d(4, 2, 3), nn.ReLU(inplace=True)),
    )
    return nn.Sequential(blocks).to(dtype).eval()


def make_plan(head, **change):
    values = {
        "placement": "exchange",
        "mechanism": "gaussian",
        "noise_multiplier": 3.0,
        "p": 2,
        "radius": 0.1,
        "input_shape": SHAPE,
    } | change
    return plan_release(head, **values)


def inputs(count=5, dtype=torch.float32):
    return torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=dtype)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_noise_at_its_place_has_the_planned_scale(placement, mechanism, clip):
    """Catches: σ from an older head, z and 1/z swapped, noise before the clip, no clip, noise at another place."""
    head = make_head(torch.float64)
    plan = make_plan(head, placement=placement, mechanism=mechanism, clip=clip)
    q = 1 if mechanism == "laplace" else 2
    assert Fraction(plan.scale) >= 3 * Fraction(plan.sensitivity.value)
    assert plan.scale == pytest.approx(3.0 * plan.sensitivity.value)
    x = inputs(400, torch.float64)
    with torch.no_grad():
        clean = {"input": lambda: x, "after:conv1": lambda: head.conv1(x), "exchange": lambda: head(x)}[placement]()
        if clip is not None:
            clean = clip_rows(clean, max_norm=clip, norm=q)
    residual = add_noise(plan, head, x, generator=seeded()) - clean
    assert float(residual.std()) == pytest.approx(plan.noise_stddev, rel=0.03)
    if mechanism == "laplace":
        assert float(residual.abs().mean()) == pytest.approx(plan.scale, rel=0.03)


def test_the_plan_uses_the_certificate_of_the_head_as_it_is_now():
    """Catches: a cached certificate; at p=q=2 scaling the weights of both blocks by 2 scales Δ by 4."""
    head = make_head()
    before = make_plan(head)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter *= 2.0
    after = make_plan(head)
    assert after.scale == pytest.approx(4.0 * before.scale)
    assert after.sensitivity.value == certify(head, p=2, q=2, input_shape=SHAPE).map(0.1)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_release_is_prefix_noise_rest(placement):
    head = make_head()
    plan = make_plan(head, placement=placement, noise_multiplier=1e-3)
    x = inputs()
    released = apply_release(plan, head, x, generator=seeded())
    with torch.no_grad():
        clean = head(x)
    assert released.shape == clean.shape
    assert not released.requires_grad
    assert 0.0 < float((released - clean).abs().max()) < 0.01
    assert torch.equal(released, apply_release(plan, head, x, generator=seeded()))
    assert not torch.equal(released, apply_release(plan, head, x, generator=seeded(1)))
    assert not torch.equal(apply_release(plan, head, x, generator=None), apply_release(plan, head, x, generator=None))


def test_rows_are_released_one_by_one():
    """Catches: clipping by the whole batch; a batch of one equals its row in a larger batch, but for the noise."""
    head = make_head(torch.float64)
    plan = make_plan(head, clip=0.3, noise_multiplier=1e-9)
    x = inputs(4, torch.float64)
    together = apply_release(plan, head, x, generator=seeded())
    alone = torch.cat([apply_release(plan, head, row.unsqueeze(0), generator=seeded()) for row in x])
    assert torch.allclose(together, alone, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("placement", ["after:conv1", "exchange"])
def test_a_stale_certificate_is_refused(placement):
    """Catches: planning once and training on."""
    head = make_head()
    plan = make_plan(head, placement=placement)
    with torch.no_grad():
        head.conv1[0].weight[0, 0, 0, 0] += 1e-6
    with pytest.raises(StaleCertificateError):
        apply_release(plan, head, inputs(), generator=seeded())


def test_weights_after_the_noise_may_change():
    """At "input" no weights come before the noise, so a plan outlives training: that is what makes noise "once" possible."""
    head = make_head()
    plan = make_plan(head, placement="input")
    kept = add_noise(plan, head, inputs(), generator=seeded())
    copy = kept.clone()
    first = finish_release(plan, head, kept)
    with torch.no_grad():
        head.conv1[0].weight *= 2.0
    second = finish_release(plan, head, kept)
    assert torch.equal(kept, copy)
    assert not torch.equal(first, second)
    assert torch.equal(second, head(kept.clone()).detach())


def test_in_place_layers_leave_inputs_and_kept_noise_alone():
    """Catches: a rest of the head that begins in place and overwrites what the client keeps."""
    head = nn.Sequential(OrderedDict(relu=nn.ReLU(inplace=True), flat=nn.Flatten())).eval()
    x = inputs() - 0.5
    for placement in ("input", "exchange"):
        plan = make_plan(head, placement=placement, input_box=(-1.0, 1.0))
        before = x.clone()
        kept = add_noise(plan, head, x, generator=seeded())
        copy = kept.clone()
        finish_release(plan, head, kept)
        assert torch.equal(x, before)
        assert torch.equal(kept, copy)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (torch.full((2, *SHAPE), 1.0001), "declared input box"),
        (torch.full((2, *SHAPE), -1e-3), "declared input box"),
        (torch.full((2, *SHAPE), float("nan")), "NaN or inf"),
        (torch.full((2, *SHAPE), float("inf")), "NaN or inf"),
        (torch.empty(0, *SHAPE), "at least one record"),
        (torch.zeros(2, 1, 8, 9), r"planned|made for \(batch"),
        (torch.zeros(8, 8), "made for"),
        (torch.zeros(2, *SHAPE, dtype=torch.float16), "float32 or float64"),
        (torch.zeros(2, *SHAPE, dtype=torch.uint8), "float32 or float64"),
        (torch.zeros(2, *SHAPE, dtype=torch.float64), "they must agree"),
    ],
)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_inputs_that_break_the_claim_are_refused_in_one_line(bad, words, placement):
    head = make_head()
    plan = make_plan(head, placement=placement)
    with pytest.raises(ValueError, match=words) as caught:
        apply_release(plan, head, bad, generator=seeded())
    assert "\n" not in str(caught.value)


def test_activations_that_are_not_finite_are_refused():
    """Catches: checking inputs only. A huge bias overflows float32 without touching the certificate."""
    head = make_head()
    with torch.no_grad():
        head.conv1[0].bias.fill_(3e38)
        head.conv1[0].weight.abs_().mul_(1e38)
    plan = make_plan(head, radius=1e-30)
    with pytest.raises(ValueError, match=r"^activations holds NaN or inf"):
        apply_release(plan, head, inputs(), generator=seeded())


def test_noise_that_rounding_would_swallow_is_refused():
    head = make_head()
    with torch.no_grad():
        head.conv2[0].bias.fill_(1e9)
    plan = make_plan(head)
    with pytest.raises(ValueError, match="swallow the noise"):
        apply_release(plan, head, inputs(), generator=seeded())


def test_train_mode_is_refused():
    """Catches: BatchNorm that mixes records, and dropout that the certificate has not seen."""
    mixing = nn.Sequential(OrderedDict(conv=nn.Conv2d(1, 2, 3), norm=nn.BatchNorm2d(2)))
    for placement in ("input", "exchange"):
        with pytest.raises(ValueError, match=r"norm is BatchNorm2d in train mode: its output mixes records"):
            make_plan(mixing.train(), placement=placement)
    head = make_head()
    plan = make_plan(head)
    with pytest.raises(ValueError, match=r"call \.eval\(\)"):
        make_plan(head.train())
    with pytest.raises(ValueError, match=r"call \.eval\(\)"):
        apply_release(plan, head, inputs(), generator=seeded())


def test_a_head_without_a_certificate_is_refused_but_at_the_input():
    class Unknown(nn.Module):
        def forward(self, x):
            return torch.frac(x)

    head = nn.Sequential(OrderedDict(unknown=Unknown())).eval()
    with pytest.raises(UnsupportedModuleError):
        make_plan(head, placement="exchange")
    plan = make_plan(head, placement="input")
    assert apply_release(plan, head, inputs(), generator=seeded()).shape == (5, *SHAPE)


def test_hooks_are_refused():
    head = make_head()
    plan = make_plan(head)
    head.conv1[0].register_forward_hook(lambda module, args, output: output * 2.0)
    with pytest.raises(StaleCertificateError):
        apply_release(plan, head, inputs(), generator=seeded())


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("radius", "clip"), [(0.1, None), (0.1, 0.5), ("any", 0.5)])
def test_what_the_ledger_counts_is_what_ran(mechanism, placement, radius, clip):
    """Catches: a whole-record multiplier from Δ(R), or one rounded up."""
    delta = 1e-5 if mechanism == "gaussian" else 0.0
    asked = calibrate(mechanism, total_epsilon=4.0, delta=delta, num_releases=20)
    head = make_head()
    ledger = Ledger(p=2, radius=radius)
    for number in range(20):
        plan = make_plan(
            head,
            mechanism=mechanism,
            placement=placement,
            radius=radius,
            clip=clip,
            noise_multiplier=asked.noise_multiplier,
        )
        ledger.record(
            channel="activations",
            mechanism=mechanism,
            noise_multiplier=plan.noise_multiplier,
            whole_record_multiplier=plan.whole_record_multiplier,
            round=number,
            records=[0, 1],
        )
        assert Fraction(plan.whole_record_multiplier) * Fraction(plan.sensitivity.whole_record) <= Fraction(plan.scale)
        with torch.no_grad():
            head.conv1[0].weight *= 1.1
    near, anywhere = (ledger.epsilon(delta=delta, distance=distance).high for distance in (1.0, math.inf))
    assert 3.99 < near <= 4.0
    if radius == "any":
        assert anywhere == near
    elif clip is None:
        assert 4.0 < anywhere < math.inf
        if mechanism == "laplace" and placement == "input":  # 64 against √64·0.1, so 80 times as much
            assert anywhere == pytest.approx(320.0)
    else:
        assert near <= anywhere < math.inf


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"placement": "auto"}, "input, after:conv1, after:conv2, exchange"),
        ({"mechanism": "uniform"}, "gaussian, laplace"),
        ({"noise_multiplier": 0.0}, "noise_multiplier is 0.0"),
        ({"noise_multiplier": math.nan}, "noise_multiplier is nan"),
        ({"radius": "any"}, "pass a clip"),
        ({"radius": -1.0}, "radius is -1.0"),
        ({"p": 3}, "p is 3"),
    ],
)
def test_bad_plans_are_refused_in_one_line(change, words):
    with pytest.raises(ValueError, match=words) as caught:
        make_plan(make_head(), **change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_laplace_noise_is_added_to_lies_in_the_l1_ball(placement):
    """Catches: clipping in ℓ2 before Laplace noise, which leaves ℓ1 norms up to √d·C and so breaks Δ = 2C."""
    head = make_head(torch.float64)
    plan = make_plan(head, placement=placement, mechanism="laplace", clip=0.5, radius="any", noise_multiplier=1e-10)
    assert plan.sensitivity.value == 1.0
    noised = add_noise(plan, head, inputs(dtype=torch.float64), generator=seeded())
    norms = noised.flatten(1).abs().sum(dim=1)
    assert float(norms.max()) <= 0.5 * (1.0 + 1e-6)
    assert float(norms.max()) == pytest.approx(0.5, rel=1e-6)


class Rememberer(nn.Module):
    """Adds the mean of its last batch to this one, and keeps that mean outside the state_dict."""

    def __init__(self, *, in_buffer):
        super().__init__()
        self.in_buffer, self.last = in_buffer, torch.zeros(())
        self.register_buffer("hidden", torch.zeros(()), persistent=False)

    def forward(self, x):
        y = x + self.last + self.hidden
        if self.in_buffer:
            self.hidden.copy_(x.mean())
        else:
            self.last = x.mean()
        return y


@pytest.mark.parametrize("in_buffer", [False, True])
@pytest.mark.parametrize("placement", ["input", "after:conv1"])
def test_a_rest_that_remembers_an_earlier_batch_is_refused(in_buffer, placement):
    """Catches: post-processing that carries a clean batch into a release; no state_dict shows it."""
    head = make_head()
    head.add_module("memory", Rememberer(in_buffer=in_buffer).eval())
    plan = make_plan(head, placement=placement)
    noised = add_noise(plan, head, inputs(), generator=seeded())
    with pytest.raises(ValueError, match="head block memory changed itself while running") as caught:
        finish_release(plan, head, noised)
    assert "\n" not in str(caught.value)


def test_a_block_before_the_noise_that_changes_itself_is_refused():
    """Catches: a check of what comes after the noise only; the plan's certificate is that of a stateless twin."""
    head = make_head()
    plan = replace(make_plan(head), sensitivity=replace(make_plan(head).sensitivity, certificate=None))
    head.add_module("memory", Rememberer(in_buffer=False).eval())
    with pytest.raises(ValueError, match="head block memory changed itself while running"):
        add_noise(plan, head, inputs(), generator=seeded())
