"""FedPVR between FedAvg and SCAFFOLD: a twin of two parameters by hand, both ends of the mask, names of blocks."""

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from executor_contract import assert_same_run, assert_same_tensors
from federations import make_tiny
from quadratic import (
    FIVE,
    SHIFT,
    WEIGHT,
    assert_goes_on_from_a_checkpoint,
    end,
    every_state,
    make_wells,
    skewed_run,
)
from torch import nn

from asfl_privacy.execution import begin_run, run_rounds
from asfl_privacy.execution.choice import make_executor
from asfl_privacy.federated import METHODS, sample_cohort
from asfl_privacy.federated.methods import FedPVR, Scaffold
from asfl_privacy.federated.methods.scaffold import CONTROL
from asfl_privacy.federated.settings import MethodOptions

FEDPVR = FedPVR()
EXACT = 1e-12


def from_block(name, **changes):
    return {"options": MethodOptions(corrected_from=name)} | changes


def by_hand(wells, cohorts, *, mask, steps=10, lr=0.05):
    """Algorithm 1 in Python's floats on ½h(s + w − a)²: (s, w) and c after each round; `mask` says what is corrected."""
    x, c, controls, history = [0.0, 0.0], [0.0, 0.0], {}, []
    for cohort in cohorts:
        ends, changes = [], []
        for i in cohort:
            (h, a), y, mean = wells[i], list(x), 0.0
            own = controls.get(i, [0.0, 0.0])
            for _ in range(steps):
                gradient = h * (sum(y) - a)
                mean += gradient / steps
                y = [
                    value - lr * (gradient + m * (c[k] - own[k]))
                    for k, (value, m) in enumerate(zip(y, mask, strict=True))
                ]
            ends.append(y)
            changes.append((i, [m * mean for m in mask]))
        for i, after in changes:
            own = controls.get(i, [0.0, 0.0])
            c = [c[k] + (after[k] - own[k]) / len(wells) for k in (0, 1)]
        controls.update(changes)
        x = [sum(y[k] for y in ends) / len(cohort) for k in (0, 1)]
        history.append((x, c))
    return history


def check_by_hand(method, *, corrected_from, mask):
    federation = make_wells(FIVE, cohort=2, rounds=10, model_name="quadratic:shifted", **from_block(corrected_from))
    twin = by_hand(FIVE, [sample_cohort(federation, round=round) for round in range(10)], mask=mask)
    for state, (x, c) in zip(every_state(federation, method)[1:], twin, strict=True):
        for k, name in enumerate((SHIFT, WEIGHT)):
            assert float(state.weights[name]) == pytest.approx(x[k], abs=EXACT)
            kept = state.server.get(CONTROL + name)
            assert (0.0 if kept is None else float(kept)) == pytest.approx(c[k], abs=EXACT)


@pytest.mark.parametrize(("corrected_from", "mask"), [("auto", (0, 1)), ("well", (0, 1)), ("shift", (1, 1))])
def test_only_the_blocks_from_the_first_one_on_are_corrected(corrected_from, mask):
    check_by_hand(FEDPVR, corrected_from=corrected_from, mask=mask)


class FirstBlocks(FedPVR):
    """A mutant that corrects what comes before the block."""

    def corrected(self, federation):
        right = super().corrected(federation)
        return tuple(name for name in Scaffold().corrected(federation) if name not in right)


class Everything(FedPVR):
    """A mutant without a mask."""

    def corrected(self, federation):
        return Scaffold().corrected(federation)


class Nothing(FedPVR):
    """The empty mask, which no configuration can ask for."""

    def corrected(self, federation):
        return ()


@pytest.mark.parametrize("mutant", [FirstBlocks(), Everything(), Nothing()])
def test_a_wrong_mask_is_seen(mutant):
    with pytest.raises(AssertionError):
        check_by_hand(mutant, corrected_from="well", mask=(0, 1))


@pytest.mark.parametrize("first", ["body", "out"])
def test_with_the_first_trained_block_it_is_scaffold_bit_for_bit_and_else_not(digits, first):
    fedpvr = skewed_run(digits, FEDPVR, **from_block(first))
    scaffold = skewed_run(digits, Scaffold(), **from_block(first))
    if first == "body":
        assert_same_run(fedpvr, scaffold)
    else:
        assert not torch.equal(fedpvr.state.weights["out.weight"], scaffold.state.weights["out.weight"])


def test_the_full_mask_ends_at_the_minimiser_of_the_two_clients():
    """With sharing too; FedAvg ends at .713."""
    for name in ("fedpvr", "fedpvr+sharing"):
        found = end(make_wells(rounds=40, tail_steps=4, **from_block("well")), METHODS[name])
        assert found == pytest.approx(0.9, abs=1e-9)


def test_the_empty_mask_is_fedavg_bit_for_bit_where_clients_hold_as_many_records(digits):
    """Only the mean differs from FedAvg's: it is not weighted by records. Nothing is kept for the correction but c_i."""
    sizes = {"clients": 3, "cohort": 2, "rounds": 4}
    empty, fedavg = (every_state(make_tiny(digits, **sizes), method)[-1] for method in (Nothing(), METHODS["fedavg"]))
    assert_same_tensors(empty.weights, fedavg.weights)
    assert dict(empty.server) == {}


def test_clients_keep_control_variates_of_what_is_corrected_alone(digits):
    """Catches c_i of the whole network, P numbers a client, of which P_mask are ever read."""
    state = skewed_run(digits, FEDPVR).state
    names = [CONTROL + "out.weight", CONTROL + "out.bias"]
    assert list(state.server) == names
    assert all(list(state.clients[i]) == names for i in state.clients)
    assert len(state.clients) > 0


@pytest.mark.parametrize(("first", "corrected"), [("auto", 90), ("out", 90), ("body", 610)])
def test_bytes_are_p_and_p_mask_each_way(digits, first, corrected):
    federation = make_tiny(digits, clients=3, cohort=2, rounds=3, tail_steps=0, **from_block(first))
    with make_executor("serial", federation, FEDPVR) as running:
        run = run_rounds(federation, FEDPVR, executor=running, start=begin_run(federation, ledger=None))
    assert run.traffic.model == 3 * 2 * 2 * (610 + corrected) * 4


def ends_without_parameters(*, input_shape, num_classes):
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
    return nn.Sequential(OrderedDict(body=body, squash=nn.Tanh()))


def tied(*, input_shape, num_classes):
    """The first and the last block share one parameter."""
    first, last = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    last.weight = first.weight
    middle = nn.Sequential(nn.ReLU(), nn.Linear(64, 64))
    head = nn.Sequential(nn.Flatten(), first)
    return nn.Sequential(OrderedDict(head=head, middle=middle, last=last, cut=Cut(num_classes)))


class Cut(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.count = count

    def forward(self, x):
        return x[:, : self.count]


def net(factory, *, frozen=()):
    model = factory(input_shape=(1, 8, 8), num_classes=10)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return model


def corrected(model, first):
    """Names of the corrected parameters; of a federation the method reads the network and its own option."""
    settings = SimpleNamespace(options=MethodOptions(corrected_from=first))
    return FEDPVR.corrected(SimpleNamespace(model=model, settings=settings))


def test_an_unknown_block_is_refused_with_the_names_there_are(digits):
    federation = make_tiny(digits, **from_block("fc9"))
    with pytest.raises(ValueError, match="corrected_from 'fc9' names no block; use auto or one of body, out"):
        every_state(federation, FEDPVR)


def test_a_block_after_which_nothing_trains_is_refused_and_auto_passes_it_over():
    model = net(ends_without_parameters)
    with pytest.raises(ValueError, match=r"'squash': no parameter trains from there on.*use one of body"):
        corrected(model, "squash")
    assert corrected(model, "auto") == ("body.1.weight", "body.1.bias")


def test_frozen_parameters_are_not_corrected_and_auto_passes_a_frozen_block_over():
    model = net(tied, frozen=("middle.1.bias", "head.1.weight"))
    assert corrected(model, "auto") == ("middle.1.weight",)


def test_a_parameter_that_a_corrected_block_shares_with_an_earlier_one_is_corrected_once():
    """It is a parameter of the last layers too; it has the name of its first place. Catches a mask by first names alone."""
    model = net(tied)
    assert corrected(model, "last") == ("head.1.weight",)
    assert corrected(model, "auto") == ("head.1.weight",)
    assert corrected(model, "middle") == ("head.1.weight", "middle.1.weight", "middle.1.bias")


def test_threads_give_the_same_run_to_the_bit(digits):
    assert_same_run(skewed_run(digits, FEDPVR), skewed_run(digits, FEDPVR, executor="threads"))


def test_a_run_that_goes_on_from_a_checkpoint_is_the_same_to_the_bit(digits, tmp_path):
    assert_goes_on_from_a_checkpoint(digits, METHODS["fedpvr+sharing"], folder=tmp_path)
