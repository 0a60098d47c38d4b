"""Facts about exchange layers: bytes that a run sends, arithmetic by hand, certified bounds, and no record behind them."""

from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from federations import few_records
from torch import nn

from asfl_privacy.cli.one_cell import one_cell
from asfl_privacy.config import SweepConfig
from asfl_privacy.exchange_layers import compare_layers, saved_by_tail, signal_to_noise
from asfl_privacy.mechanisms import plan_release
from asfl_privacy.models import build_model, split_model
from asfl_privacy.run import execute_run, prepare_run

SIZES = {
    "clients": 5,
    "cohort": 5,
    "rounds": 1,
    "tail_steps": 3,
    "full_steps": 1,
    "batch_size": 8,
    "executor": "serial",
}
PRIVATE = {"epsilon": 4.0, "radius": 1.0}
CLEAN = {"mech": "none"}


def compared(data, **fields):
    config, cell = one_cell(SweepConfig(**(SIZES | fields)), command="layers")
    return {layer.exchange_layer: layer for layer in compare_layers(config, cell, data=data)}


@pytest.fixture(scope="module")
def private(digits):
    return compared(digits, **PRIVATE)


@pytest.mark.parametrize("method", ["asfl", "scaffold+sharing"])
def test_bytes_are_those_of_a_round_in_which_every_client_takes_part(digits, method):
    """Catches: odd τ' not rounded up, batches beyond a client's records, labels as sent in training, one way of two.

    Skewed partition: some clients hold fewer than 2·8 records. The other way: a round is run and its traffic counted.
    """
    fields = {"method": method, "partition": "dirichlet:0.3", **CLEAN}
    data = few_records(digits, 90)
    found = compared(data, **fields)
    for name in ("conv1", "fc1"):
        config, cell = one_cell(SweepConfig(**(SIZES | fields), exchange_layer=name), command="train")
        row = execute_run(config, prepare_run(config, cell, data=data), data=data, folder=None).row
        layer = found[name]
        assert layer.records < 16
        assert 5 * layer.activation_bytes == pytest.approx(row["bytes_activations"], rel=1e-12)
        assert 5 * layer.label_bytes == pytest.approx(row["bytes_labels"], rel=1e-12)
        assert 5 * layer.model_bytes == row["bytes_model"]
        cost = (row["bytes_activations"] + row["bytes_labels"]) / row["bytes_model"]
        assert layer.exchange_to_model == pytest.approx(cost, rel=1e-12)


def test_shares_of_parameters_and_arithmetic_by_hand(digits):
    """small-cnn on 8×8: parameters by block, and multiply-adds of forward, weight gradients and input gradients.

    Catches: the head's share for the tail's, the input gradient of the first trained block counted.
    """
    found = compared(digits, **CLEAN)
    params = {"conv1": 160, "conv2": 4640, "fc1": 512 * 64 + 64, "classifier": 650}
    macs = {"conv1": 9 * 16 * 64, "conv2": 9 * 16 * 32 * 16, "fc1": 512 * 64, "classifier": 640}
    names = list(params)

    def step(blocks):
        return (
            3 * sum(macs[block] for block in blocks) - macs[blocks[0]]
        )  # nothing before it asks for its input gradient

    for cut, name in enumerate(names[:-1], start=1):
        assert found[name].trained_in_tail == pytest.approx(sum(params[b] for b in names[cut:]) / sum(params.values()))
        assert found[name].saved_by_tail == pytest.approx(1 - step(names[cut:]) / step(names), rel=1e-12)
    assert (found["normalize"].trained_in_tail, found["normalize"].saved_by_tail) == (1.0, 0.0)


def test_no_arithmetic_counted_is_blank_not_zero():
    assert saved_by_tail(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4).eval()), cut=1, input_shape=(4,)) is None


def test_privacy_is_that_of_the_run_and_of_the_whole_head(digits, private):
    """Catches the sensitivity at the placement shown as the head's, and multipliers of another ε."""
    for name, layer in private.items():
        config, cell = one_cell(SweepConfig(**(SIZES | PRIVATE), exchange_layer=name), command="train")
        run = prepare_run(config, cell, data=digits)
        head = split_model(build_model("small-cnn", data=digits, seed=seed_of_weights()), name).head.eval()
        here = {"mechanism": "gaussian", "noise_multiplier": run.privacy.noise_multiplier, "p": 2, "radius": 1.0}
        at_end = plan_release(head, placement="exchange", input_shape=(1, 8, 8), **here)
        there = plan_release(head, placement=run.privacy.placement, input_shape=(1, 8, 8), **here)
        facts = layer.privacy
        assert (facts.p, facts.q, facts.radius) == (2.0, 2.0, 1.0)
        assert facts.head_sensitivity == at_end.sensitivity.value
        assert facts.placement == run.cell.target.placement == "input"
        assert facts.placement_sensitivity == there.sensitivity.value == 1.0
        assert facts.noise_stddev == there.noise_stddev


def seed_of_weights():
    from asfl_privacy.federated.streams import SERVER, torch_seed

    return torch_seed(0, round=-1, client=SERVER, purpose="weights")


def test_a_constant_that_all_records_share_is_no_signal():
    """A larger bias makes no layer clearer. Catches the mean square in place of the variance."""
    plain, biased = (nn.Linear(64, 8) for _ in range(2))
    with torch.no_grad():
        biased.weight.copy_(plain.weight)
        biased.bias.copy_(plain.bias + 100.0)
    found = []
    for linear in (plain, biased):
        head = nn.Sequential(OrderedDict(flat=nn.Flatten(), linear=linear)).eval()
        plan = plan_release(
            head, placement="input", mechanism="gaussian", noise_multiplier=2.0, p=2, radius=1.0, input_shape=(1, 8, 8)
        )
        found.append(signal_to_noise(plan, head, seed=0))
    assert found[0] == pytest.approx(found[1], rel=1e-3)


@pytest.mark.parametrize(("placement", "gain"), [("exchange", 1.0), ("after:flat", 9.0 / 4.0)])
def test_signal_to_noise_of_a_linear_head_is_its_closed_form(placement, gain):
    """Noise of variance σ² before x → 3·(x₁ + … in fours)/4, 256 inputs to 64 outputs: σ²·4·(3/4)² at the exchange layer.

    Catches: σ for σ², Δ for σ, the noise not carried through the rest of the head, signal and noise exchanged.
    """
    linear = nn.Linear(256, 64, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.kron(torch.eye(64), torch.full((1, 4), 0.75)))
    head = nn.Sequential(OrderedDict(flat=nn.Flatten(), linear=linear)).eval()
    plan = plan_release(
        head, placement=placement, mechanism="gaussian", noise_multiplier=2.0, p=2, radius=1.0, input_shape=(1, 16, 16)
    )
    signal = 0.75**2 * 4 / 12  # variance of a sum of four uniform numbers
    expected = signal / (plan.noise_stddev**2 * gain)
    assert signal_to_noise(plan, head, seed=0) == pytest.approx(expected, rel=0.1)
    assert signal_to_noise(plan, head, seed=0) == signal_to_noise(plan, head, seed=0)


def test_a_head_whose_activations_are_all_zero_has_no_signal():
    dead = nn.Linear(4, 4)
    nn.init.constant_(dead.bias, -1e9)
    head = nn.Sequential(OrderedDict(flat=nn.Flatten(), dead=nn.Sequential(dead, nn.ReLU()))).eval()
    noise = {"mechanism": "gaussian", "noise_multiplier": 1.0, "p": 2, "radius": 1.0, "input_shape": (1, 2, 2)}
    assert signal_to_noise(plan_release(head, placement="input", **noise), head, seed=0) is None
    assert signal_to_noise(plan_release(head, placement="exchange", clip=1.0, **noise), head, seed=0) == 0.0


def test_no_record_moves_any_figure(digits, private):
    """Other pixels, same labels: every fact and the choice stay the same to the bit. Catches trial inputs from clients."""
    swapped = replace(digits, train_inputs=1.0 - digits.train_inputs.flip(0), test_inputs=digits.test_inputs * 0.0)
    assert compared(swapped, **PRIVATE) == private


def test_the_mark_is_on_the_block_that_a_run_takes(digits, private):
    config, cell = one_cell(SweepConfig(**(SIZES | PRIVATE)), command="train")
    run = prepare_run(config, cell, data=digits)
    (chosen,) = [layer for layer in private.values() if layer.is_automatic]
    assert chosen.exchange_layer == run.cell.exchange_layer
    assert f"exchange layer {chosen.exchange_layer}: {chosen.reason}" in run.notes


def test_without_noise_the_privacy_columns_are_blank(digits, private):
    for name, layer in compared(digits, **CLEAN).items():
        assert layer.privacy is None
        assert layer.refused is None
        values = layer.to_dict()
        assert values.keys() == private[name].to_dict().keys()
        assert {
            values[key] for key in ("head_sensitivity", "placement", "noise_stddev", "signal_to_noise", "p", "q")
        } == {None}
        assert values["activation_bytes"] == private[name].activation_bytes


def unbounded(*, input_shape, num_classes):
    """A second block without a certificate, and a third that mixes records."""

    class Unknown(nn.Module):
        def forward(self, x):
            return torch.sort(x, dim=1).values * x

    return nn.Sequential(
        OrderedDict(
            first=nn.Sequential(nn.Conv2d(input_shape[0], 2, 7), nn.Flatten()),
            second=nn.Sequential(Unknown(), nn.Linear(8, 8)),
            third=nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
            out=nn.Linear(8, num_classes),
        )
    )


def test_what_one_block_refuses_stands_beside_it(digits):
    """Catches a refusal that hides the other blocks, and a bound made up where there is none."""
    found = compared(
        digits, model="test_exchange_layers:unbounded", placement="input", exchange_layer="first", **PRIVATE
    )
    assert found["first"].privacy is not None
    second = found["second"].privacy
    assert second.head_sensitivity is None
    assert second.signal_to_noise > 0.0
    assert found["third"].privacy is None
    assert "mixes records" in found["third"].refused
    assert found["third"].activation_bytes == found["second"].activation_bytes
    at_end = compared(
        digits, model="test_exchange_layers:unbounded", placement="exchange", exchange_layer="first", **PRIVATE
    )
    assert at_end["second"].privacy is None
    assert at_end["second"].refused


def two_tensors(*, input_shape, num_classes):
    """A first block whose output is a pair, which no exchange can send."""

    class Twice(nn.Linear):
        def forward(self, x):
            return x, super().forward(x.flatten(1))

    class Second(nn.Linear):
        def forward(self, pair):
            return super().forward(pair[1])

    blocks = OrderedDict(pair=Twice(64, 8), second=Second(8, 8), out=nn.Linear(8, num_classes))
    return nn.Sequential(blocks)


def test_a_block_that_gives_no_single_tensor_is_refused_beside_the_others(digits):
    found = compared(digits, model="test_exchange_layers:two_tensors", **CLEAN)
    assert "does not give one tensor" in found["pair"].refused
    assert (found["pair"].activation_bytes, found["pair"].exchange_to_model, found["pair"].saved_by_tail) == (None,) * 3
    assert (found["second"].refused, found["second"].is_automatic) == (None, True)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"method": "fedavg", **CLEAN}, "method fedavg shares no activations"),
        ({"tail_steps": 0, **CLEAN}, "tail_steps 0 exchanges nothing"),
        ({"exchange_layer": "conv9", **CLEAN}, "use auto or one of normalize, conv1, conv2, fc1"),
        ({"placement": "after:conv9", **PRIVATE}, "after:conv9"),
        ({"model": "nowhere", **CLEAN}, "nowhere"),
    ],
)
def test_what_every_block_refuses_is_refused_as_a_whole(digits, fields, words):
    with pytest.raises(ValueError, match=words):
        compared(digits, **fields)
