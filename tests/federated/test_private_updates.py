"""Clipped, noised vectors: what leaves is bounded by 2C before noise, and nothing but parameters changes."""

import math
from collections import OrderedDict
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from asfl_privacy.federated.private_updates import noise_multiplier_of, noised_sum, privatize_update, trained_names
from asfl_privacy.federated.weights import load_weights, read_weights


def no_noise(values):
    return values


def square_norm(values):
    """Exact square of a float vector's ℓ2 norm."""
    return sum(Fraction(v) ** 2 for v in values.tolist())


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(a=nn.Linear(3, 4), norm=nn.BatchNorm1d(4), b=nn.Linear(4, 2)))


def shifted(weights, names, by):
    return {n: v + by if n in names else v.clone() for n, v in weights.items()}


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 9),
    st.integers(1, 40),
    st.floats(1e-6, 1e6),
    st.integers(0, 2**31),
    st.floats(-12, 12),
    st.sampled_from([None, -20, -6]),
)
def test_sums_of_neighbours_differ_by_at_most_twice_the_clip_exactly(n, d, clip, seed, size, cells):
    """Catches no clip, C where the norm exceeds it by rounding, inexact sums, truncation away from zero."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, d, generator=generator) * 10.0**size * clip
    other = rows.clone()
    other[seed % n] = -rows[seed % n] if seed % 2 else torch.randn(d, generator=generator) * clip
    spacing = None if cells is None else 2.0 ** (math.frexp(clip)[1] + cells)
    first, second = (noised_sum(r, clip=clip, add_noise=no_noise, spacing=spacing) for r in (rows, other))
    difference = [Fraction(a) - Fraction(b) for a, b in zip(first.tolist(), second.tolist(), strict=True)]
    assert sum(d * d for d in difference) <= 4 * Fraction(clip) ** 2


def test_no_rounding_lifts_a_row_over_the_clip():
    """Catches min(1, C/norm) without room for rounding: in one dimension x·(C/x) is often the float after C."""
    generator = torch.Generator().manual_seed(0)
    for size, clip in torch.rand(300, 2, generator=generator, dtype=torch.float64).add(0.5).tolist():
        for width in (1, 3):
            row = torch.full((1, width), 10.0 * size, dtype=torch.float64)
            assert square_norm(noised_sum(row, clip=clip, add_noise=no_noise)) <= Fraction(clip) ** 2


def test_opposite_rows_reach_twice_the_clip():
    """Shows that C alone would be too small a sensitivity: the mutation z = σ/C."""
    row = torch.tensor([[30.0, -40.0, 0.0]])
    both = [noised_sum(sign * row, clip=1.5, add_noise=no_noise) for sign in (1, -1)]
    assert (both[0] - both[1]).norm().item() == pytest.approx(3.0, rel=1e-9)


def test_rows_are_clipped_one_by_one_and_small_ones_stay():
    """Catches clipping of the whole batch, clipping of the sum, and scaling of all rows alike."""
    rows = torch.tensor([[3.0, 4.0], [0.25, -0.5], [0.0, 0.0]])
    total = noised_sum(rows, clip=1.0, add_noise=no_noise)
    assert total.tolist() == pytest.approx([0.6 + 0.25, 0.8 - 0.5], abs=1e-12)
    many = torch.full((1000, 2), 1.0)
    assert noised_sum(many, clip=0.5, add_noise=no_noise).norm().item() == pytest.approx(500.0, rel=1e-9)


def test_the_sum_is_exact_in_any_order_and_in_any_chunks(monkeypatch):
    """Catches a plain float sum, whose rounding depends on the other rows."""
    rows = torch.randn(100, 7, generator=torch.Generator().manual_seed(1)).double()
    total = noised_sum(rows, clip=0.3, add_noise=no_noise)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(2))
    assert torch.equal(noised_sum(rows[order], clip=0.3, add_noise=no_noise), total)
    monkeypatch.setattr("asfl_privacy.federated.private_updates._CHUNK", 21)
    assert torch.equal(noised_sum(rows, clip=0.3, add_noise=no_noise), total)
    one_by_one = [noised_sum(row.unsqueeze(0), clip=0.3, add_noise=no_noise, spacing=2.0**-46) for row in rows]
    exact = [sum(Fraction(part[j].item()) for part in one_by_one) for j in range(7)]
    lattice = noised_sum(rows, clip=0.3, add_noise=no_noise, spacing=2.0**-46)
    assert [Fraction(v) for v in lattice.tolist()] == exact


def test_a_spacing_puts_the_sum_on_the_lattice_without_growing_a_row():
    rows = torch.randn(5, 30, generator=torch.Generator().manual_seed(1))
    cells = noised_sum(rows, clip=1.0, add_noise=no_noise, spacing=2.0**-10) * 2**10
    assert torch.equal(cells, cells.round())
    one = noised_sum(rows[:1], clip=1.0, add_noise=no_noise, spacing=2.0**-10)
    assert square_norm(one) <= 1


@pytest.mark.parametrize("spacing", [0.3, 0.0, -0.5, math.nan, math.inf, 2.0**-60])
def test_other_spacings_are_refused(spacing):
    with pytest.raises(ValueError, match="spacing is"):
        noised_sum(torch.ones(4, 2), clip=1.0, add_noise=no_noise, spacing=spacing)


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan, math.inf, 1e31, None, True])
def test_clips_that_bound_nothing_are_refused(clip):
    with pytest.raises(ValueError, match="clip is"):
        noised_sum(torch.ones(4, 2), clip=clip, add_noise=no_noise)
    with pytest.raises(ValueError, match="clip is"):
        noise_multiplier_of(1.0, clip=clip)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
def test_rows_that_are_not_finite_are_refused_before_any_noise(value):
    def fail(values):
        raise AssertionError

    with pytest.raises(ValueError, match="NaN or inf"):
        noised_sum(torch.tensor([[1.0, value]], dtype=torch.float64), clip=1.0, add_noise=fail)


@pytest.mark.parametrize(
    "add_noise",
    [
        lambda v: v.float(),
        lambda v: v[:-1],
        lambda v: v.tolist(),
        lambda v: v * math.nan,
        lambda v: v + math.inf,
        lambda v: None,
    ],
)
def test_noise_that_spoils_the_vector_is_refused(add_noise):
    with pytest.raises(ValueError, match="add_noise gave"):
        noised_sum(torch.ones(2, 3), clip=1.0, add_noise=add_noise)


@given(st.floats(1e-12, 1e12), st.floats(1e-12, 1e12))
def test_the_multiplier_is_that_of_twice_the_clip_rounded_down(sigma, clip):
    """Catches σ/C (add/remove) in place of σ/(2C) (replace-one), and rounding up."""
    z = noise_multiplier_of(sigma, clip=clip)
    assert Fraction(z) * 2 * Fraction(clip) <= Fraction(sigma)
    assert z == pytest.approx(sigma / (2 * clip), rel=1e-15)


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan, math.inf])
def test_multipliers_without_noise_are_refused(sigma):
    with pytest.raises(ValueError, match="noise_stddev is"):
        noise_multiplier_of(sigma, clip=1.0)


def test_an_update_is_the_clipped_change_of_all_parameters_together():
    """Catches clipping by layer, the weights clipped in place of the change, a parameter left out."""
    net = make_net()
    old, names = read_weights(net), trained_names(net)
    seen = []

    def watch(change):
        seen.append(change)
        return change

    generator = torch.Generator().manual_seed(3)
    new = {n: v + torch.randn(v.shape, generator=generator) if n in names else v for n, v in old.items()}
    sent = privatize_update(new, old_weights=old, parameters=names, clip=0.5, add_noise=watch)
    change = torch.cat([(new[n].double() - old[n].double()).flatten() for n in names])
    assert square_norm(seen[0]) <= Fraction(1, 4)
    assert torch.allclose(seen[0], change * (0.5 / change.norm()), atol=1e-12)
    moved = torch.cat([(sent[n] - old[n]).flatten() for n in names])
    assert torch.allclose(moved.double(), seen[0], atol=1e-6)
    assert all(torch.equal(sent[n], old[n]) for n in old if n not in names)
    load_weights(net, sent)


def test_noise_reaches_every_parameter_in_its_place_and_nothing_else():
    """Catches noise on some layers only, and noise in the wrong order."""
    net = make_net()
    old, names = read_weights(net), trained_names(net)
    total = sum(old[n].numel() for n in names)
    sent = privatize_update(
        old, old_weights=old, parameters=names, clip=1.0, add_noise=lambda v: v + torch.arange(1.0, total + 1).double()
    )
    added = torch.cat([(sent[n].double() - old[n].double()).flatten() for n in old if n in names])
    assert torch.allclose(added, torch.arange(1.0, total + 1).double(), atol=1e-4)
    assert sent["norm.num_batches_tracked"].dtype == torch.int64


def test_two_clients_whatever_their_data_differ_by_at_most_twice_the_clip():
    net = make_net()
    old, names = read_weights(net), trained_names(net)
    inputs = []
    for by in (1e6, -1e6):
        privatize_update(
            shifted(old, names, by),
            old_weights=old,
            parameters=names,
            clip=0.1,
            add_noise=lambda v: inputs.append(v) or v,
        )
    assert square_norm(inputs[0] - inputs[1]) <= Fraction(0.2) ** 2
    assert (inputs[0] - inputs[1]).norm().item() == pytest.approx(0.2, rel=1e-6)


@pytest.mark.parametrize("name", ["norm.running_mean", "norm.num_batches_tracked"])
def test_buffers_that_changed_are_refused_and_others_pass(name):
    """Catches buffers sent in the clear beside the noised parameters."""
    net = make_net()
    old, names = read_weights(net), trained_names(net)
    new = shifted(old, [name], 1)
    with pytest.raises(ValueError, match=f"weights {name} changed"):
        privatize_update(new, old_weights=old, parameters=names, clip=1.0, add_noise=no_noise)


def test_a_frozen_parameter_must_not_have_moved():
    net = make_net()
    net.a.weight.requires_grad_(False)
    old, names = read_weights(net), trained_names(net)
    assert "a.weight" not in names
    with pytest.raises(ValueError, match=r"weights a\.weight changed"):
        privatize_update(shifted(old, ["a.weight"], 1), old_weights=old, parameters=names, clip=1.0, add_noise=no_noise)


def test_a_shared_parameter_keeps_all_its_names():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    assert trained_names(net) == ("0.weight", "0.bias", "1.weight", "1.bias")


def test_updates_that_do_not_fit_are_refused_before_any_noise():
    old = {"w": torch.zeros(2), "n": torch.tensor(1)}

    def fail(values):
        raise AssertionError

    def send(new, *, old=old, parameters=("w",)):
        privatize_update(new, old_weights=old, parameters=parameters, clip=1.0, add_noise=fail)

    for match, new in {
        "NaN or inf": {"w": torch.tensor([1.0, math.nan]), "n": torch.tensor(1)},
        "do not fit": {"w": torch.zeros(2)},
        "weights w are": {"w": torch.zeros(3), "n": torch.tensor(1)},
    }.items():
        with pytest.raises(ValueError, match=match):
            send(new)
    with pytest.raises(ValueError, match="do not fit"):
        send(old, parameters=())
    with pytest.raises(ValueError, match="do not fit"):
        send(old, parameters=("w", "x"))
    half = {"w": torch.zeros(2, dtype=torch.float16)}
    with pytest.raises(ValueError, match="needs float32 or float64"):
        send(half, old=half)
