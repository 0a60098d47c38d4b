"""DP-SGD steps against a slow twin: one record at a time, clipped by hand, and what must be refused."""

import copy
import math
import warnings
from collections import OrderedDict
from fractions import Fraction

import numpy as np
import pytest
import torch
from federations import all_rows
from torch import nn
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.federated.correction import record_losses
from asfl_privacy.federated.private_steps import run_private_steps
from asfl_privacy.federated.steps import Pool, Rule, run_steps
from asfl_privacy.models import build_model


def no_noise(values):
    return values


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(a=nn.Linear(3, 5), act=nn.ReLU(), b=nn.Linear(5, 2)))


def small_pool(count=40, num_own=40, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 3, generator=generator).to(dtype)
    return Pool(
        inputs=inputs[:num_own],
        received=inputs[num_own:] if num_own < count else None,
        labels=torch.arange(count) % 2,
    )


def take(network, pool, **changed):
    settings = {
        "num_steps": 3,
        "batch_size": 8,
        "rule": Rule(0.3),
        "rng": np.random.default_rng(1),
        "clip": 0.05,
        "add_noise": no_noise,
    }
    return run_private_steps(network, pool, **(settings | changed))


def slow_sum(network, pool, batch, *, clip, allowed=None):
    """The step's sum, written out: one record after the other through torch's autograd."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for row in batch:
        loss = F.cross_entropy(network(all_rows(pool)[row : row + 1]), pool.labels[row : row + 1])
        parts = torch.autograd.grad(loss, parameters, allow_unused=True)
        filled = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, parts, strict=True)]
        gradient = torch.cat([g.flatten() for g in filled]).double()
        if allowed is None or allowed[row]:
            total += gradient * min(1.0, clip / float(gradient.norm()))
    return total


def slow_steps(network, pool, *, noise, num_steps, batch_size, rule, rng, clip, allowed=None):
    for _ in range(num_steps):
        batch = rng.choice(len(pool.labels), size=min(batch_size, len(pool.labels)), replace=False)
        step = (slow_sum(network, pool, batch, clip=clip, allowed=allowed) + noise) / len(batch)
        done = 0
        with torch.no_grad():
            for parameter in (p for p in network.parameters() if p.requires_grad):
                piece = step[done : done + parameter.numel()].reshape(parameter.shape)
                parameter -= rule.lr * piece.to(parameter.dtype)
                done += parameter.numel()


def released_sums(pool, **settings):
    """The sums that steps hand to the noise."""
    sums = []
    take(small_net(), pool, add_noise=lambda v: sums.append(v) or v, **settings)
    return sums


def flat(network):
    return torch.cat([p.detach().flatten().double() for p in network.parameters()])


@pytest.mark.parametrize("name", ["small-cnn", "lenet"])
@pytest.mark.parametrize("part", ["whole", "tail"])
def test_steps_are_those_of_the_slow_twin(digits, name, part):
    """Catches whole-batch clipping, a layer or a bias left unclipped, clipping by layer, a mean for the sum, noise
    after the division, gradients that belong to another record."""
    model = build_model(name, data=digits, seed=3)
    network = model if part == "whole" else model[3:]
    inputs = digits.train_inputs[:60]
    pool = Pool(inputs=inputs if part == "whole" else model[:3](inputs).detach(), labels=digits.train_labels[:60])
    twin = copy.deepcopy(network)
    noise = 0.02 * torch.randn(flat(network).numel(), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    norms = [slow_sum(twin, pool, [row], clip=1e9).norm().item() for row in range(60)]
    settings = {
        "num_steps": 3,
        "batch_size": 10,
        "rule": Rule(0.2),
        "clip": float(np.median(norms)),
    }  # half are clipped
    before = flat(network)
    run_private_steps(network, pool, rng=np.random.default_rng(7), add_noise=lambda v: v + noise, **settings)
    slow_steps(twin, pool, rng=np.random.default_rng(7), noise=noise, **settings)
    assert (flat(network) - flat(twin)).norm() <= 1e-5 * (flat(twin) - before).norm()


def test_the_noise_is_in_the_units_of_the_sum_and_divided_by_the_batch():
    """Catches noise divided twice or not at all, and noise on one layer alone."""
    network, pool = small_net(), small_pool()
    plain = copy.deepcopy(network)
    shift = torch.arange(1.0, flat(network).numel() + 1, dtype=torch.float64)
    take(network, pool, num_steps=1, add_noise=lambda v: v + shift)
    take(plain, pool, num_steps=1)
    assert torch.allclose(flat(plain) - flat(network), 0.3 * shift / 8, atol=1e-5)


def test_gaussian_noise_of_the_stated_spread_arrives():
    """Catches .9σ and 1.1σ."""
    generator = torch.Generator().manual_seed(11)
    pool, moved = small_pool(), []
    for _ in range(40):
        network = small_net()
        take(
            network,
            pool,
            num_steps=1,
            add_noise=lambda v: v + 3.0 * torch.randn(len(v), generator=generator, dtype=torch.float64),
        )
        plain = small_net()
        take(plain, pool, num_steps=1)
        moved.append((flat(plain) - flat(network)) * 8 / 0.3)
    spread = torch.cat(moved).std().item()
    assert 3.0 * 0.93 < spread < 3.0 * 1.07  # 1,280 draws: five standard errors are 10 %, two are 4 %


def test_without_noise_or_clip_they_are_plain_steps():
    network, twin, pool = small_net().double(), small_net().double(), small_pool(dtype=torch.float64)
    done = take(network, pool, clip=1e6, num_steps=5, spacing=None)
    taken = run_steps(twin, pool, num_steps=5, batch_size=8, rule=Rule(0.3), rng=np.random.default_rng(1))
    assert torch.allclose(flat(network), flat(twin), atol=1e-7)
    assert done.num_remote == taken.num_remote == 0


def test_one_record_moves_a_step_by_at_most_twice_the_clip_exactly():
    """The sensitivity that is charged, in rationals. Catches C where 2C is due by coming close to 2C."""
    worst = Fraction(0)
    for seed in range(20):
        pool = small_pool(8, 8)
        other = Pool(inputs=pool.inputs.clone(), labels=pool.labels.clone())
        other.inputs[seed % 8] = torch.randn(3, generator=torch.Generator().manual_seed(seed)) * 100
        other.labels[seed % 8] = 1 - other.labels[seed % 8]
        sums = [released_sums(each, num_steps=1, clip=0.01)[0] for each in (pool, other)]
        gap = sum((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(sums[0].tolist(), sums[1].tolist(), strict=True))
        worst = max(worst, gap)
        assert gap <= Fraction(0.02) ** 2
    assert float(worst) ** 0.5 > 0.012  # beyond C: a charge for sensitivity C would be too small


def test_every_sum_has_norm_at_most_batch_times_clip_after_each_row_has_at_most_the_clip():
    sums = released_sums(small_pool(1, 1), num_steps=4, clip=0.01)
    assert len(sums) == 4
    for total in sums:
        assert sum(Fraction(v) ** 2 for v in total.tolist()) <= Fraction(0.01) ** 2


def test_participations_are_counted_row_by_row_and_remote_rows_are_not_charged():
    pool, draws = small_pool(40, 25), np.random.default_rng(1)
    done = take(small_net(), pool, num_steps=6)
    batches = [draws.choice(40, size=8, replace=False) for _ in range(6)]
    by_hand = np.bincount(np.concatenate(batches), minlength=40)
    assert done.participations.tolist() == by_hand[:25].tolist()
    assert done.num_remote == by_hand[25:].sum()
    assert done.participations.dtype == np.int64


def test_rows_past_their_allowance_add_nothing_and_the_divisor_stays():
    """Catches division by the admitted count, and a charge for a row that was not admitted."""
    pool = small_pool()
    allowance = np.zeros(40, dtype=np.int64)
    allowance[::3] = 100
    network, twin = small_net(), small_net()
    done = take(network, pool, allowance=allowance)
    slow_steps(
        twin,
        pool,
        noise=0.0,
        num_steps=3,
        batch_size=8,
        rule=Rule(0.3),
        rng=np.random.default_rng(1),
        clip=0.05,
        allowed=allowance > 0,
    )
    assert torch.allclose(flat(network), flat(twin), atol=1e-6)
    assert done.participations[allowance == 0].sum() == 0
    assert done.participations.sum() > 0


def test_a_row_never_takes_part_more_often_than_allowed():
    """Catches a budget checked once a call: with a batch of the whole pool every row is drawn in each step."""
    pool = small_pool(6, 4)
    sums = []
    done = take(
        small_net(),
        pool,
        num_steps=5,
        batch_size=6,
        allowance=np.array([0, 1, 3, 9]),
        add_noise=lambda v: sums.append(v) or v,
    )
    assert done.participations.tolist() == [0, 1, 3, 5]
    assert len(sums) == 5


def test_rows_past_their_allowance_leave_no_trace_whatever_they_hold():
    """Catches a product with 0, which lets NaN through."""
    pool = small_pool()
    allowance = np.full(40, 9)
    allowance[5] = 0
    network, twin = small_net(), small_net()
    take(network, pool, allowance=allowance, batch_size=40)
    pool.inputs[5] = math.nan
    take(twin, pool, allowance=allowance, batch_size=40)
    assert torch.equal(flat(network), flat(twin))


def test_nobody_admitted_still_releases_noise():
    network = small_net()
    before, calls = flat(network), []
    done = take(
        network, small_pool(), allowance=np.zeros(40, dtype=int), add_noise=lambda v: calls.append(v) or v + 1.0
    )
    assert len(calls) == 3
    assert all(bool((total == 0).all()) for total in calls)
    assert torch.allclose(before - flat(network), torch.tensor(3 * 0.3 / 8).double(), atol=1e-6)
    assert done.participations.sum() == 0


def test_the_network_is_left_without_a_trace_of_the_hooks():
    """The scratch network is used again: a later ordinary step must be the one it would have been."""
    network, pool = small_net(), small_pool()
    attributes = {name: set(vars(module)) for name, module in network.named_modules()}
    take(network, pool)
    fresh = small_net()
    fresh.load_state_dict(network.state_dict())
    for each in (network, fresh):
        run_steps(each, pool, num_steps=2, batch_size=8, rule=Rule(0.1), rng=np.random.default_rng(4))
    assert torch.equal(flat(network), flat(fresh))
    assert {name: set(vars(module)) for name, module in network.named_modules()} == attributes
    for module in network.modules():
        assert not module._forward_hooks
        assert not module._backward_hooks
    for parameter in network.parameters():
        assert not vars(parameter)
        assert parameter.grad is None


def test_global_generators_are_left_as_ordinary_steps_leave_them():
    def states_after(steps):
        torch.manual_seed(9)
        np.random.seed(9)  # noqa: NPY002
        steps()
        return torch.get_rng_state(), np.random.get_state()[1]  # noqa: NPY002

    network = small_net()
    network.act = nn.Dropout(0.4)
    pool = small_pool()
    plain = states_after(
        lambda: run_steps(
            copy.deepcopy(network), pool, num_steps=3, batch_size=8, rule=Rule(0.1), rng=np.random.default_rng(1)
        )
    )
    private = states_after(lambda: take(network, pool))
    assert torch.equal(plain[0], private[0])
    assert (plain[1] == private[1]).all()
    network = small_net()
    before = torch.manual_seed(9).get_state()
    take(network, pool)
    assert torch.equal(torch.get_rng_state(), before)


def test_modules_that_work_in_place_give_the_same_steps():
    pool, network, twin = small_pool(), small_net(), small_net()
    network.act = nn.ReLU(inplace=True)
    take(network, pool)
    take(twin, pool)
    assert torch.equal(flat(network), flat(twin))
    assert network.act.inplace


def test_frozen_parameters_do_not_move_and_count_in_no_norm():
    network = small_net()
    network.a.weight.requires_grad_(False)
    twin, before, pool = copy.deepcopy(network), network.a.weight.clone(), small_pool()
    take(network, pool)
    slow_steps(
        twin, pool, noise=0.0, num_steps=3, batch_size=8, rule=Rule(0.3), rng=np.random.default_rng(1), clip=0.05
    )
    assert torch.equal(network.a.weight, before)
    assert torch.allclose(flat(network), flat(twin), atol=1e-6)


def test_a_mixed_pool_is_trained_with_the_losses_given():
    T = torch.tensor([[0.8, 0.2], [0.3, 0.7]])
    pool, noisy = small_pool(40, 20), torch.arange(40) >= 20
    network, twin = small_net(), small_net()

    def losses(logits, rows):
        return record_losses(logits, pool.labels[rows], transition=T, noisy=noisy[rows])

    take(network, pool, num_steps=1, batch_size=40, clip=1e6, losses=losses)
    logits = twin(all_rows(pool))
    gradients = torch.autograd.grad(losses(logits, torch.arange(40)).mean(), list(twin.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(twin.parameters(), gradients, strict=True):
            parameter -= 0.3 * gradient
    assert torch.allclose(flat(network), flat(twin), atol=1e-6)


class Scale(nn.Module):
    """A user's own layer, which Opacus does through functorch."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return x * self.factor


@pytest.mark.parametrize(
    "layer", [Scale(), nn.GroupNorm(1, 5), nn.LayerNorm(5), nn.BatchNorm1d(5, affine=False).eval()]
)
def test_layers_that_keep_records_apart_are_done(layer):
    network, pool = small_net(), small_pool()
    network.act = layer
    twin = copy.deepcopy(network)
    take(network, pool, clip=0.5)
    slow_steps(twin, pool, noise=0.0, num_steps=3, batch_size=8, rule=Rule(0.3), rng=np.random.default_rng(1), clip=0.5)
    assert torch.allclose(flat(network), flat(twin), atol=1e-6)


def test_a_parameter_used_twice_is_clipped_with_both_uses():
    torch.manual_seed(2)
    network = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2))
    network[2].weight = network[0].weight
    twin, pool = copy.deepcopy(network), small_pool()
    take(network, pool, clip=0.2)
    slow_steps(twin, pool, noise=0.0, num_steps=3, batch_size=8, rule=Rule(0.3), rng=np.random.default_rng(1), clip=0.2)
    assert torch.allclose(flat(network), flat(twin), atol=1e-6)


class Centred(nn.Module):
    """Takes the batch's mean away: every row's output depends on all rows."""

    def forward(self, x):
        return x - x.mean(0)


class CentredInSecret(nn.Module):
    """The same with the mean detached, which no gradient shows."""

    def forward(self, x):
        return x - x.detach().mean(0)


class Borrowed(nn.Module):
    """Uses a parameter of another module behind its hooks."""

    def __init__(self, other):
        super().__init__()
        self.other = [other]

    def forward(self, x):
        return x * self.other[0].bias


class Spare(nn.Module):
    """Holds a layer that it does not use."""

    def __init__(self, width=1):
        super().__init__()
        self.spare = nn.Linear(3, width)

    def forward(self, x):
        return x


class Counts(nn.Module):
    """A buffer that changes in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x):
        self.seen += x.detach().sum(0)
        return x


class KeepsThePast(nn.Module):
    """Adds what it kept of the batch before."""

    def __init__(self):
        super().__init__()
        self.past = torch.zeros(())

    def forward(self, x):
        output = x + self.past
        self.past = x.detach().mean()
        return output


class InPlace(nn.Module):
    """Works in place by hand, on a tensor that hooks have wrapped."""

    def forward(self, x):
        return x.mul_(2.0)


class CountsLater(nn.Module):
    """A buffer that changes from the probe's fifth call on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if len(x) > 3:
            self.seen += x.detach().sum()
        return x


class NoBatch(nn.Module):
    """Uses its parameters by batch normalisation written by hand."""

    def forward(self, x):
        return F.batch_norm(x, None, None, training=True)


def frozen_norm():
    layer = nn.BatchNorm1d(5)
    return layer.eval()


def stale_norm():
    layer = nn.BatchNorm1d(5, affine=False, track_running_stats=False)
    return layer.eval()


@pytest.mark.parametrize(
    ("layer", "match"),
    [
        (nn.BatchNorm1d(5), "layer act is BatchNorm1d in train mode: its output mixes records"),
        (nn.BatchNorm1d(5, affine=False), "layer act is BatchNorm1d in train mode"),
        (stale_norm(), "layer act is BatchNorm1d in train mode"),
        (frozen_norm(), "layer act is BatchNorm1d"),
        (nn.Linear(5, 5).eval(), "layer act is Linear with parameters that train in eval mode"),
        (nn.Linear(5, 5).half(), r"layer act is Linear of torch\.float16"),
        (nn.MultiheadAttention(5, 1), "layer act is MultiheadAttention: Opacus has no per-record gradient"),
        (Centred(), "records are mixed"),
        (CentredInSecret(), "change with another record"),
        (NoBatch(), "records are mixed"),
        (Counts(), "act changed itself while running"),
        (KeepsThePast(), "act changed itself while running"),
        (CountsLater(), r"buffer act\.seen changed in training"),
        (InPlace(), "failed on a probe before any step"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_networks_without_bounded_records_are_refused_and_left_as_they_were(layer, match):
    network = small_net()
    network.act = layer
    before = {name: value.clone() for name, value in network.state_dict().items()}
    calls = []
    with pytest.raises(ValueError, match=match) as caught:
        take(network, small_pool(), add_noise=lambda v: calls.append(v) or v)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not calls or isinstance(layer, CountsLater)


def test_parameters_used_outside_their_module_are_refused():
    network = small_net()
    network.act = Borrowed(network.a)
    with pytest.raises(ValueError, match="do not sum to the batch's"):
        take(network, small_pool())
    network = small_net()
    network.act = nn.Sequential(spare := Spare(5), Borrowed(spare.spare))
    with pytest.raises(ValueError, match="do not sum to the batch's"):
        take(network, small_pool())
    network = small_net()
    network.a.extra = nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match="failed on a probe before any step"):
        take(network, small_pool())


def test_a_parameter_that_is_borrowed_only_after_the_probe_is_refused():
    """Catches trust in the probe alone: the part of a gradient that Opacus misses is not clipped."""

    class BorrowsLater(Borrowed):
        def forward(self, x):
            return super().forward(x) if len(x) > 3 else x

    network = small_net()
    network.act = BorrowsLater(network.a)
    before, calls = flat(network), []
    with pytest.raises(ValueError, match="do not sum to the batch's"):
        take(network, small_pool(), add_noise=lambda v: calls.append(v) or v)
    assert torch.equal(flat(network), before)
    assert not calls


def test_a_batch_larger_than_the_pool_is_divided_by_the_pool():
    """As in ordinary steps: the size of a pool is the same for neighbours."""
    network, twin, pool = small_net(), small_net(), small_pool(6, 6)
    done = take(network, pool, batch_size=50)
    slow_steps(
        twin, pool, noise=0.0, num_steps=3, batch_size=6, rule=Rule(0.3), rng=np.random.default_rng(1), clip=0.05
    )
    assert torch.allclose(flat(network), flat(twin), atol=1e-6)
    assert done.participations.tolist() == [3] * 6


def test_a_block_that_the_network_does_not_use_receives_noise_alone():
    network = small_net()
    network.act = Spare()
    before = network.act.spare.weight.clone()
    take(network, small_pool(), num_steps=1, add_noise=lambda v: v + 8.0)
    assert torch.allclose(network.act.spare.weight, before - 0.3)


def test_losses_that_mix_rows_or_are_means_are_refused():
    pool = small_pool()
    with pytest.raises(ValueError, match="drop the mean"):
        take(small_net(), pool, losses=lambda logits, rows: F.cross_entropy(logits, pool.labels[rows]))
    with pytest.raises(ValueError, match="another row's logits"):
        take(
            small_net(),
            pool,
            losses=lambda logits, rows: (
                F.cross_entropy(logits - logits.mean(), pool.labels[rows], reduction="none") * logits.std()
            ),
        )


def test_a_gradient_that_is_not_finite_is_refused_and_nothing_moves():
    pool, network = small_pool(), small_net()
    pool.inputs[7] = math.nan
    before = flat(network)
    with pytest.raises(ValueError, match="vector to be clipped holds NaN or inf"):
        take(network, pool, batch_size=40)
    assert torch.equal(flat(network), before)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"clip": 0.0}, "clip is 0.0"),
        ({"clip": math.nan}, "clip is nan"),
        ({"clip": math.inf}, "clip is inf"),
        ({"rule": Rule(math.nan)}, "lr is nan"),
        ({"num_steps": -1}, "num_steps is -1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"add_noise": lambda v: v.float()}, "add_noise gave"),
        ({"add_noise": lambda v: v * math.nan}, "add_noise gave NaN or inf"),
        ({"spacing": 0.3}, "spacing is 0.3"),
        ({"allowance": np.ones(39, dtype=int)}, "one count ≥ 0 an own row"),
        ({"allowance": -np.ones(40, dtype=int)}, "one count ≥ 0 an own row"),
        ({"allowance": np.ones(40)}, "one count ≥ 0 an own row"),
    ],
)
def test_arguments_out_of_range_are_refused_and_nothing_moves(changed, match):
    network = small_net()
    before = flat(network)
    with pytest.raises(ValueError, match=match):
        take(network, small_pool(), **changed)
    assert torch.equal(flat(network), before)


def test_no_steps_leave_the_network_as_it_was_and_charge_nobody():
    network = small_net()
    before = flat(network)
    done = take(network, small_pool(), num_steps=0)
    assert torch.equal(flat(network), before)
    assert done.participations.tolist() == [0] * 40


def test_a_network_with_nothing_to_train_is_refused():
    with pytest.raises(ValueError, match="no parameter that trains"):
        take(small_net().requires_grad_(False), small_pool())


def test_batches_are_those_of_ordinary_steps():
    """The same stream of draws, so that protecting the updates leaves every other draw as it was."""
    rng, twin = np.random.default_rng(1), np.random.default_rng(1)
    take(small_net(), small_pool(), rng=rng)
    run_steps(small_net(), small_pool(), num_steps=3, batch_size=8, rule=Rule(0.3), rng=twin)
    assert rng.integers(2**62) == twin.integers(2**62)


def test_warnings_of_the_networks_own_code_are_not_silenced():
    class Warns(nn.Module):
        def forward(self, x):
            warnings.warn("mine", UserWarning, stacklevel=2)
            return x

    network = small_net()
    network.act = Warns()
    with pytest.warns(UserWarning, match="mine"):
        take(network, small_pool())
