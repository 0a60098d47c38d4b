"""The release: what is planned is what runs, and what must not leave does not."""

import functools
import math
from collections import OrderedDict
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from asfl_privacy.accounting import Ledger, calibrate, gaussian_epsilon
from asfl_privacy.mechanisms import (
    add_noise,
    apply_release,
    clip_rows,
    finish_both,
    finish_release,
    noised_and_clean,
    payload_bytes,
    plan_release,
)
from asfl_privacy.mechanisms.lattice import (
    LatticeNoise,
    SeededSource,
    SystemSource,
    decode,
    encode,
    norm_at_most,
    truncate,
)
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


@functools.cache
def known_plan(dtype=torch.float32, **change):
    """The plan of the head as ``make_head`` makes it: certificates are the slow part, and a plan is a frozen fact."""
    return make_plan(make_head(dtype), **change)


def inputs(count=5, dtype=torch.float32):
    return torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=dtype)


def seeded(seed=0):
    return SeededSource(b"test_release %d" % seed)


TRUNCATION, SCALE_BITS = Fraction(1, 2**10), Fraction(1, 2**9)
"""What truncation may add to Δ, in parts of it, and what rounding the scale up to 10 significant bits may add."""


def check_scale(plan, *, noise_multiplier):
    """z·Δ ≤ z·Δ_lattice ≤ scale, in exact arithmetic, and no more noise than truncation and scale bits explain."""
    z, moved, on_lattice = (Fraction(x) for x in (noise_multiplier, plan.sensitivity.value, plan.lattice.sensitivity))
    ulps = 1 + Fraction(1, 2**45)
    assert moved <= on_lattice <= moved * (1 + TRUNCATION) * ulps
    assert z * on_lattice <= Fraction(plan.scale) <= z * on_lattice * (1 + SCALE_BITS) * ulps
    assert plan.lattice.scale == plan.scale


def noised_integers(monkeypatch, plan, head, x):
    """The integers before and after noise, caught at the sampler, and what comes out."""
    caught = []
    release = LatticeNoise.release

    def spy(self, integers, source):
        noised = release(self, integers, source)
        caught.append((integers.copy(), noised.copy()))
        return noised

    monkeypatch.setattr(LatticeNoise, "release", spy)
    released = add_noise(plan, head, x, source=seeded())
    ((integers, noised),) = caught
    return integers, noised, released


def exact_norm_power(row, *, norm):
    """‖row‖₁, or ‖row‖₂², of integers as a Python integer."""
    return sum(abs(int(k)) ** norm for k in row.reshape(-1))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_noise_at_its_place_has_the_planned_scale(placement, mechanism, clip):
    """Catches: σ from an older head, z and 1/z swapped, noise before the clip, no clip, noise at another place."""
    head = make_head(torch.float64)
    plan = known_plan(torch.float64, placement=placement, mechanism=mechanism, clip=clip)
    q = 1 if mechanism == "laplace" else 2
    check_scale(plan, noise_multiplier=3.0)
    x = inputs(400, torch.float64)
    with torch.no_grad():
        clean = {"input": lambda: x, "after:conv1": lambda: head.conv1(x), "exchange": lambda: head(x)}[placement]()
        if clip is not None:
            clean = clip_rows(clean, max_norm=clip, norm=q)
    residual = add_noise(plan, head, x, source=seeded()) - clean
    assert float(residual.std()) == pytest.approx(plan.noise_stddev, rel=0.03)
    if mechanism == "laplace":
        assert float(residual.abs().mean()) == pytest.approx(plan.scale, rel=0.03)


def test_the_plan_uses_the_certificate_of_the_head_as_it_is_now():
    """Catches: a cached certificate; at p=q=2 scaling the weights of both blocks by 2 scales Δ by 4.

    The rounding of the forward pass is part of Δ and scales by less, since the second bias only doubles.
    """
    head = make_head()
    before = known_plan()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter *= 2.0
    after = make_plan(head)
    certificates = [
        certify(one, p=2, q=2, input_shape=SHAPE, input_box=(0.0, 1.0), budget_s=0.1) for one in (make_head(), head)
    ]
    assert [before.sensitivity.value, after.sensitivity.value] == [one.map(0.1) for one in certificates]
    slack = [one.map(0.1) - 0.1 * one.value for one in certificates]
    assert after.sensitivity.value - slack[1] == pytest.approx(4.0 * (before.sensitivity.value - slack[0]), rel=1e-9)
    for plan in (before, after):
        check_scale(plan, noise_multiplier=3.0)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_release_is_prefix_noise_rest(placement):
    head = make_head()
    plan = known_plan(placement=placement, noise_multiplier=1e-3)
    x = inputs()
    released = apply_release(plan, head, x, source=seeded())
    with torch.no_grad():
        clean = head(x)
    assert released.shape == clean.shape
    assert not released.requires_grad
    assert 0.0 < float((released - clean).abs().max()) < 0.01
    assert torch.equal(released, apply_release(plan, head, x, source=seeded()))
    assert not torch.equal(released, apply_release(plan, head, x, source=seeded(1)))
    fresh = [apply_release(plan, head, x, source=SystemSource()) for _ in range(2)]
    assert not torch.equal(*fresh)


def test_rows_are_released_one_by_one():
    """Catches: clipping by the whole batch; a batch of one equals its row in a larger batch, but for the noise."""
    head = make_head(torch.float64)
    plan = make_plan(head, clip=0.3, noise_multiplier=1e-9)
    x = inputs(4, torch.float64)
    together = apply_release(plan, head, x, source=seeded())
    alone = torch.cat([apply_release(plan, head, row.unsqueeze(0), source=seeded()) for row in x])
    assert torch.allclose(together, alone, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("placement", ["after:conv1", "exchange"])
def test_a_stale_certificate_is_refused(placement):
    """Catches: planning once and training on."""
    head = make_head()
    plan = known_plan(placement=placement)
    with torch.no_grad():
        head.conv1[0].weight[0, 0, 0, 0] += 1e-6
    with pytest.raises(StaleCertificateError):
        apply_release(plan, head, inputs(), source=seeded())


def test_weights_after_the_noise_may_change():
    """At "input" no weights come before the noise, so a plan outlives training: that is what makes noise "once" possible."""
    head = make_head()
    plan = make_plan(head, placement="input")
    kept = add_noise(plan, head, inputs(), source=seeded())
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
        kept = add_noise(plan, head, x, source=seeded())
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
    plan = known_plan(placement=placement)
    with pytest.raises(ValueError, match=words) as caught:
        apply_release(plan, head, bad, source=seeded())
    assert "\n" not in str(caught.value)


def test_activations_that_are_not_finite_are_refused():
    """Catches: checking inputs only. A huge bias overflows float32 without touching the certificate."""
    head = make_head()
    with torch.no_grad():
        head.conv1[0].bias.fill_(3e38)
        head.conv1[0].weight.abs_().mul_(1e38)
    plan = make_plan(head, radius=1e-30)
    with pytest.raises(ValueError, match=r"^activations holds NaN or inf"):
        apply_release(plan, head, inputs(), source=seeded())


def test_noise_that_float32_could_not_hold_is_added_before_anything_is_rounded(monkeypatch):
    """σ = 1e-4 on activations of 1000, whose float32 steps are 6e-5. Catches: integers turned into floats, then noised,
    whose low bits tell the clean value. On the lattice every integer gets its own noise and only the sum is rounded."""
    head = nn.Sequential(OrderedDict(flat=nn.Flatten())).eval()
    plan = make_plan(head, placement="input", input_box=(0.0, 1000.0), radius=1e-4, noise_multiplier=1.0)
    x = torch.full((64, *SHAPE), 1000.0)
    integers, noised, released = noised_integers(monkeypatch, plan, head, x)
    assert set(integers.reshape(-1).tolist()) == {1000 * int(1 / plan.lattice.spacing)}
    residual = (noised - integers) * plan.lattice.spacing  # float64: exact
    assert residual.std() == pytest.approx(plan.noise_stddev, rel=0.05)
    assert len(np.unique(noised)) > 100 * len(np.unique(released))
    steps = torch.nextafter(torch.tensor(1000.0), torch.tensor(2000.0)) - 1000.0
    assert float(steps) > 0.5 * plan.noise_stddev
    assert released.double().numpy() == pytest.approx(noised * plan.lattice.spacing, abs=float(steps))


def test_activations_beyond_the_lattice_are_refused():
    """Catches: int64 sums that wrap around. 2^61 cells of g ≤ 2^-13·Δ/32: 1e12 with Δ = 1e-9."""
    head = nn.Sequential(OrderedDict(flat=nn.Flatten())).eval()
    plan = make_plan(head, placement="input", input_box=(0.0, 1e12), radius=1e-9)
    with pytest.raises(ValueError, match=r"2\^61 cells or more") as caught:
        apply_release(plan, head, torch.full((2, *SHAPE), 1e12), source=seeded())
    assert "\n" not in str(caught.value)


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
        apply_release(plan, head, inputs(), source=seeded())


def test_a_head_without_a_certificate_is_refused_but_at_the_input():
    class Unknown(nn.Module):
        def forward(self, x):
            return torch.frac(x)

    head = nn.Sequential(OrderedDict(unknown=Unknown())).eval()
    with pytest.raises(UnsupportedModuleError):
        make_plan(head, placement="exchange")
    plan = make_plan(head, placement="input")
    assert apply_release(plan, head, inputs(), source=seeded()).shape == (5, *SHAPE)


def test_hooks_are_refused():
    head = make_head()
    plan = make_plan(head)
    head.conv1[0].register_forward_hook(lambda module, args, output: output * 2.0)
    with pytest.raises(StaleCertificateError):
        apply_release(plan, head, inputs(), source=seeded())


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("radius", "clip"), [(0.1, None), (0.1, 0.5), ("any", 0.5)])
def test_what_the_ledger_counts_is_what_ran(mechanism, placement, radius, clip):
    """Catches: a whole-record multiplier from Δ(R), or one rounded up."""
    delta = 1e-5 if mechanism == "gaussian" else 0.0
    asked = calibrate(mechanism, total_epsilon=4.0, delta=delta, num_releases=3)
    head = make_head()
    ledger = Ledger(p=2, radius=radius)
    for number in range(3):
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
            sampler="lattice",
            epsilon_excess=plan.epsilon_excess,
            tail_probability=plan.tail_probability,
        )
        check_scale(plan, noise_multiplier=asked.noise_multiplier)
        assert Fraction(plan.whole_record_multiplier) * Fraction(plan.sensitivity.whole_record) <= Fraction(plan.scale)
        with torch.no_grad():
            head.conv1[0].weight *= 1.1
    near, anywhere = (ledger.epsilon(delta=delta, distance=distance).high for distance in (1.0, math.inf))
    assert 3.99 < near <= 4.0 * (1.0 + 2.0**-48)  # the sampler's error is charged on top of what was calibrated
    if radius == "any":
        assert anywhere == near
    elif clip is None:
        # three releases, whose sampler may leave its tables with probability 3τ: past e^ε·3τ = δ no ε is proven
        largest = math.inf if not plan.tail_probability else math.log(delta / (3 * plan.tail_probability))
        pure = mechanism == "laplace"
        z = plan.whole_record_multiplier
        ideal = 3 / z if pure else gaussian_epsilon(delta, noise_multiplier=z / math.sqrt(3))
        assert anywhere > 4.0
        assert (anywhere < math.inf) == (ideal < largest)
        if mechanism == "laplace" and placement == "input":  # 64 against √64·0.1, so 80 times as much
            # but for the scale, up to 2^-10 + 2^-9 above z·√64·0.1, and truncation of 64 numbers by g ≤ 2^-10·Δ/64
            assert 320.0 * (1 - 0.003) <= anywhere <= 320.0 * (1 + 1e-4)
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
    plan = known_plan(
        torch.float64, placement=placement, mechanism="laplace", clip=0.5, radius="any", noise_multiplier=1e-10
    )
    assert plan.sensitivity.value == plan.lattice.sensitivity == 1.0
    noised = add_noise(plan, head, inputs(dtype=torch.float64), source=seeded())
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
    noised = add_noise(plan, head, inputs(), source=seeded())
    with pytest.raises(ValueError, match="head block memory changed itself while running") as caught:
        finish_release(plan, head, noised)
    assert "\n" not in str(caught.value)


class Passer(nn.Module):
    """Adds to every second batch the one before it, and forgets it then: nothing is left to see after two batches."""

    def __init__(self):
        super().__init__()
        self.kept = None

    def forward(self, x):
        if self.kept is None:
            self.kept = x.mean()
            return x * 1.0
        x, self.kept = x + self.kept, None
        return x


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_clean_rows_beside_a_release_are_the_heads_own_and_the_release_stays_as_it_is(placement):
    """Catches: clean rows after clip or truncation, and a release that is finished from them."""
    head, x = make_head(), inputs()
    plan = make_plan(head, placement=placement, clip=0.1)
    noised, before = noised_and_clean(plan, head, x, source=seeded())
    assert torch.equal(noised, add_noise(plan, head, x, source=seeded()))
    released, clean = finish_both(plan, head, noised, before)
    assert torch.equal(released, finish_release(plan, head, noised))
    assert torch.equal(clean, head(x).detach())


def test_what_is_released_runs_before_the_clean_rows():
    """Catches: the clean batch first, or both in one batch: a block that passes one on to the other would leak it."""
    head = make_head()
    plan = make_plan(head, placement="input")
    noised, before = noised_and_clean(plan, head, inputs(), source=seeded())
    alone = finish_release(plan, head, noised)
    head.add_module("passer", Passer().eval())
    released, clean = finish_both(plan, head, noised, before)
    assert torch.equal(released, alone)
    assert not torch.equal(
        clean, make_head()(inputs()).detach()
    )  # that the noised rows reached the clean ones hurts nobody


def test_a_block_that_keeps_clean_rows_is_refused():
    """Catches: holdings compared after the noised batch alone."""
    head = make_head()
    plan = make_plan(head, placement="input")
    noised, before = noised_and_clean(plan, head, inputs(), source=seeded())
    head.add_module("memory", Rememberer(in_buffer=False).eval())
    with pytest.raises(ValueError, match="head block memory changed itself while running"):
        finish_both(plan, head, noised, before)


def test_a_block_before_the_noise_that_changes_itself_is_refused():
    """Catches: a check of what comes after the noise only; the plan's certificate is that of a stateless twin."""
    head = make_head()
    plan = replace(known_plan(), sensitivity=replace(known_plan().sensitivity, certificate=None))
    head.add_module("memory", Rememberer(in_buffer=False).eval())
    with pytest.raises(ValueError, match="head block memory changed itself while running"):
        add_noise(plan, head, inputs(), source=seeded())


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_a_payload_lies_on_the_lattice_and_is_read_back_whole(mechanism, clip):
    """Catches: float noise on top, another spacing than the one named, a lossy code."""
    plan = known_plan(mechanism=mechanism, clip=clip)
    released = apply_release(plan, make_head(), inputs(40), source=seeded())
    spacing = plan.payload_spacing
    assert math.frexp(spacing)[0] == 0.5
    assert 32 * spacing <= plan.scale < 64 * spacing
    cells = [Fraction(value) / Fraction(spacing) for value in released.double().flatten().tolist()]
    assert all(cell.denominator == 1 for cell in cells)
    assert any(cell.numerator % 2 for cell in cells)  # and on no coarser one
    packed = encode(truncate(released, spacing=spacing), spacing=spacing)
    integers, read = decode(packed)
    assert (read, integers.shape) == (spacing, tuple(released.shape))
    assert integers.reshape(-1).tolist() == [cell.numerator for cell in cells]
    assert torch.equal(torch.from_numpy(integers).double() * read, released.double())
    assert payload_bytes(plan, released) == len(packed)


def test_a_payload_of_noise_is_within_a_few_bits_of_its_entropy():
    """log2(σ√(2πe)/g) with 32 ≤ σ/g < 64 is 7.05 to 8.05 bits a number, more where activations add their spread."""
    plan = known_plan()
    released = apply_release(plan, make_head(), inputs(400), source=seeded())
    assert payload_bytes(plan, released) <= 0.4 * 4 * released.numel()
    elsewhere = known_plan(placement="input")
    assert payload_bytes(elsewhere, released) == payload_bytes(None, released) == 4 * released.numel()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("mechanism", "clip"), [("gaussian", 0.5), ("laplace", 0.5), ("gaussian", None)])
def test_what_is_noised_is_truncated_toward_zero(monkeypatch, mechanism, clip, placement):
    """Catches: rounding to nearest or downward, and clipping in float32 before the lattice; exact rationals."""
    head = make_head()
    plan = known_plan(mechanism=mechanism, clip=clip, placement=placement)
    integers, noised, released = noised_integers(monkeypatch, plan, head, inputs())
    x = inputs()
    with torch.no_grad():
        clean = {"input": lambda: x, "after:conv1": lambda: head.conv1(x), "exchange": lambda: head(x)}[placement]()
    rows = clean.double()
    if clip is not None:
        rows = clip_rows(rows, max_norm=clip, norm=plan.mechanism.norm)
    g = Fraction(plan.lattice.spacing)
    expected = [math.trunc(Fraction(value) / g) for value in rows.flatten().tolist()]
    assert integers.reshape(-1).tolist() == expected
    assert len(set(expected)) > 10
    coarse = Fraction(plan.payload_spacing if placement == "exchange" else plan.lattice.spacing)
    nearest = [Fraction(int(k)) * g for k in noised.reshape(-1)]  # what is sent is the noised sum, and nothing else
    for sum_, sent in zip(nearest, released.double().flatten().tolist(), strict=True):
        half = coarse / 2 if placement == "exchange" else 0
        assert abs(Fraction(sent) - sum_) <= half + abs(sum_) / 2**23


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
@pytest.mark.parametrize("radius", [0.1, "any"])
def test_clipped_rows_keep_their_norm_in_exact_integers(monkeypatch, mechanism, radius):
    """Catches: rounding away from zero after the clip, by which rows leave the ball of norm C and 2C is no bound.

    Two opposite rows at the clip are as far apart as Δ, which is 2C exactly.
    """
    clip, q = 0.7, {"gaussian": 2, "laplace": 1}[mechanism]
    head = nn.Sequential(OrderedDict(flat=nn.Flatten())).eval()
    plan = make_plan(
        head, mechanism=mechanism, clip=clip, radius=radius, input_box=(-1.0, 1.0), p=2, noise_multiplier=1e-3
    )
    spread = 2.0 * inputs(200) - 1.0
    spread[0], spread[1] = 1.0, -1.0
    integers, _, _ = noised_integers(monkeypatch, plan, head, spread)
    limit = (Fraction(clip) / Fraction(plan.lattice.spacing)) ** q
    powers = [exact_norm_power(row, norm=q) for row in integers]
    assert max(powers) <= limit
    assert max(powers) >= limit * Fraction(99, 100)
    assert bool(norm_at_most(integers, norm=q, bound=clip, spacing=plan.lattice.spacing).all())
    if radius == "any":
        assert plan.sensitivity.is_clip_only
        apart = exact_norm_power(integers[0] - integers[1], norm=q) * Fraction(plan.lattice.spacing) ** q
        assert Fraction(99, 100) * Fraction(2 * clip) ** q <= apart <= Fraction(plan.lattice.sensitivity) ** q
        assert plan.lattice.sensitivity == 2 * clip


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_neighbours_stay_within_the_sensitivity_after_truncation(monkeypatch, mechanism):
    """Catches: Δ before truncation, which this pair exceeds: every number just misses a lattice point and steps over it."""
    q = {"gaussian": 2, "laplace": 1}[mechanism]
    head = nn.Sequential(OrderedDict(flat=nn.Flatten())).double().eval()
    plan = make_plan(head, mechanism=mechanism, p=q, radius=0.1, placement="exchange")
    g, size = plan.lattice.spacing, math.prod(SHAPE)
    step = 0.1 * (1 - 1e-12) / size ** (1 / q)  # on each of the 64 numbers: distance R
    low = np.nextafter(g * 2.0**12, 0.0)
    pair = torch.full((2, *SHAPE), low, dtype=torch.float64)
    pair[1] += step
    assert float(torch.linalg.vector_norm((pair[1] - pair[0]).flatten(), ord=q)) <= 0.1
    integers, _, _ = noised_integers(monkeypatch, plan, head, pair)
    apart = exact_norm_power(integers[0] - integers[1], norm=q) * Fraction(g) ** q
    assert Fraction(plan.sensitivity.value) ** q < apart <= Fraction(plan.lattice.sensitivity) ** q


def test_a_clip_that_would_not_hold_on_the_lattice_is_refused(monkeypatch):
    """Catches: norms that are not checked again behind a faulty clip."""
    head = make_head()
    plan = known_plan(clip=0.5)
    monkeypatch.setattr("asfl_privacy.mechanisms.release.clip_rows", lambda rows, **_: rows * 2.0)
    with pytest.raises(ValueError, match=r"norm above clip 0\.5 on the lattice: nothing was released"):
        apply_release(plan, head, inputs(), source=seeded())


def test_what_runs_before_the_noise_must_run_where_its_rounding_is_bounded():
    """Catches: TF32 and Winograd before the noise, whose errors no certificate covers."""
    head = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).eval().to("meta")
    noise = {"mechanism": "gaussian", "noise_multiplier": 10.0, "p": 2, "radius": 0.5, "input_shape": (1, 2, 2)}
    with pytest.raises(ValueError, match=r"is on meta: rounding is bounded on the CPU only.*deepcopy\(head\)\.cpu\(\)"):
        plan_release(head, placement="exchange", **noise)
    assert plan_release(head, placement="input", **noise).certificate is None
