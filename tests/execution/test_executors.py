"""The contract of every executor, for every method there is: the same seed gives the same run, whoever does the work."""

import dataclasses
import math

import pytest
import torch
from executor_contract import assert_same_run
from federations import gaussian, make_federation, make_tiny
from stateful_method import Momentum

from asfl_privacy.accounting import Ledger
from asfl_privacy.accounting.budget import RecordBudget
from asfl_privacy.execution import RunStoppedError, begin_run, run_rounds
from asfl_privacy.execution.batched import BatchedExecutor
from asfl_privacy.execution.choice import choose_executor, make_executor
from asfl_privacy.federated import METHODS

EVERY_METHOD = {**METHODS, "momentum": Momentum()}
EVERY_CHANNEL = {"label_epsilon": 2.0, "updates": "dp-fedavg", "update_multiplier": 4.0, "update_clip": 0.002}
FILTERED = {
    "budget": RecordBudget(gaussian_budget=0.3, excess_budget=1e-6, tail_budget=1e-12),  # one release at z = 2
    "own": "released",
}
SETTINGS = {
    "clean, an odd cohort": {"cohort": 5},
    "noise at the input": {"privacy": gaussian()},
    "noise at the exchange": {"privacy": gaussian(placement="exchange")},
    "noise kept, every channel": {"privacy": gaussian(noise="once", **EVERY_CHANNEL)},
    "a filter, own as released": {"privacy": gaussian(**FILTERED), "rounds": 4},
    "dp-sgd": {"privacy": gaussian(updates="dp-sgd", update_multiplier=3.0, update_clip=0.5)},
    "PixelDP's training": {"privacy": gaussian(noisy_training=True)},
    "small pools": {"clients": 40, "batch_size": 64, "partition": "dirichlet:0.2"},
    "bfloat16": {"precision": "bfloat16"},
}


STACKED = [name for name in METHODS if name.partition("+")[0] not in ("moon", "fedproto")]
"""Methods whose local steps are plain."""


def pairs(methods, settings):
    """Methods and settings that go together."""
    return [(m, s) for m in methods for s in settings if goes(EVERY_METHOD[m], SETTINGS[s].get("privacy"))]


def goes(method, privacy):
    """Whether all that the method sends is covered, or nothing is promised."""
    if privacy is None:
        return True
    return not method.exposes_records and not (method.in_the_clear and privacy.updates != "none")


def a_run(digits, method, setting, executor, *, workers=2, make=make_federation, **changes):
    federation = make(digits, **{**SETTINGS[setting], **changes})
    privacy = federation.privacy
    ledger = None if privacy is None else Ledger(p=privacy.p, radius=privacy.radius)
    method = EVERY_METHOD[method]
    with make_executor(executor, federation, method, workers=workers) as running:
        return run_rounds(federation, method, executor=running, start=begin_run(federation, ledger=ledger))


def test_the_contracts_filter_lets_records_go_and_holds_others_back(digits):
    """Catches a budget below one release, with which the contract would compare runs that share nothing."""
    run = a_run(digits, "asfl", "a filter, own as released", "serial")
    assert run.drawn_remote > 0
    assert run.ledger.counts.releases > 0
    assert run.held_back > 0


@pytest.mark.parametrize(("method", "setting"), pairs(EVERY_METHOD, [name for name in SETTINGS if name != "dp-sgd"]))
def test_threads_give_the_run_of_the_serial_executor_to_the_bit(digits, method, setting):
    """Catches a network that two threads share, and answers in the order in which they came."""
    assert_same_run(a_run(digits, method, setting, "serial"), a_run(digits, method, setting, "threads", workers=3))


@pytest.mark.parametrize(
    ("method", "setting"), pairs(EVERY_METHOD, ["clean, an odd cohort", "noise kept, every channel"])
)
def test_processes_give_the_run_of_the_serial_executor_to_the_bit(digits, method, setting):
    """Catches slots that are read after they were written anew, and state that stays in a worker."""
    assert_same_run(a_run(digits, method, setting, "serial"), a_run(digits, method, setting, "processes"))


def test_dp_sgd_on_processes_is_the_same_run_too(digits):
    setting = {"make": make_tiny}
    assert_same_run(
        a_run(digits, "asfl", "dp-sgd", "serial", **setting), a_run(digits, "asfl", "dp-sgd", "processes", **setting)
    )


def test_one_process_clean_activations_and_dropout_are_the_same_run_too(digits):
    own = {"model_name": "own_nets:norm_and_dropout", "exchange_layer": "head", "partition": "iid"}
    setting = "clean, an odd cohort"
    serial = a_run(digits, "asfl", setting, "serial", **own)
    assert_same_run(serial, a_run(digits, "asfl", setting, "processes", workers=1, **own))


def test_threads_refuse_a_network_that_draws_from_what_they_share(digits):
    federation = make_federation(digits, model_name="own_nets:norm_and_dropout", exchange_layer="head", partition="iid")
    with pytest.raises(ValueError, match=r"executor threads: .*global generator.*; use executor processes or serial"):
        make_executor("threads", federation, METHODS["asfl"], workers=2)
    dp_sgd = make_tiny(digits, privacy=gaussian(updates="dp-sgd", update_multiplier=3.0))
    with pytest.raises(ValueError, match="executor threads: updates dp-sgd"):
        make_executor("threads", dp_sgd, METHODS["asfl"], workers=2)
    assert choose_executor("auto", dp_sgd, METHODS["asfl"], workers=2).name == "processes"


BATCHED = [name for name in SETTINGS if name not in ("dp-sgd", "PixelDP's training", "bfloat16")]


@pytest.mark.parametrize(("method", "setting"), pairs(STACKED, BATCHED))
def test_batched_is_the_serial_run_but_for_rounding_in_float32(digits, method, setting):
    """Five rounds, 1e-5 relative to each tensor's norm; draws, charges and bytes are the same.

    Methods with a memory carry a ReLU that flips within rounding of 0, which moves a weight by up to 1e-4, from round to
    round; what they compute is held to 1e-12 in float64 below.
    """
    rounds = {} if setting == "a filter, own as released" else {"rounds": 5}
    serial, batched = (a_run(digits, method, setting, name, **rounds) for name in ("serial", "batched"))
    remembers = method.partition("+")[0] in ("scaffold", "fedpvr", "fedvarp")
    assert_close(serial, batched, tolerance=1e-4 if remembers else 1e-5)
    if setting == "noise at the exchange":  # the bound follows the head to its last digit
        assert serial.ledger.counts == batched.ledger.counts
        spent = [one.ledger.epsilon(delta=1e-5, distance=math.inf).high for one in (serial, batched)]
        assert spent[0] == pytest.approx(spent[1], rel=1e-4)
    else:
        assert serial.ledger == batched.ledger
    for name in ("drawn", "drawn_remote", "held_back"):
        assert getattr(serial, name) == getattr(batched, name), name


@pytest.mark.parametrize("method", STACKED)
@pytest.mark.parametrize("setting", ["clean, an odd cohort", "small pools"])
def test_batched_is_the_serial_run_to_1e_12_in_float64(digits, method, setting):
    """Catches a mask, a mean or a step size that is a little wrong, which float32 hides."""

    def in_float64(data, **changes):
        federation = make_federation(data, **changes)
        federation.model.double()
        clients = tuple(dataclasses.replace(client, inputs=client.inputs.double()) for client in federation.clients)
        weights = {
            name: value.double() if value.is_floating_point() else value
            for name, value in federation.initial_weights.items()
        }
        data = dataclasses.replace(federation.data, test_inputs=federation.data.test_inputs.double())
        return dataclasses.replace(federation, clients=clients, initial_weights=weights, data=data)

    serial, batched = (
        a_run(digits, method, setting, name, make=in_float64, rounds=5) for name in ("serial", "batched")
    )
    assert next(iter(serial.state.weights.values())).dtype == torch.float64
    assert_close(serial, batched, tolerance=1e-12)


def assert_close(first, second, *, tolerance):
    """Each tensor within `tolerance` of the other, relative to its norm."""
    for name, value in first.state.weights.items():
        difference = float((value.double() - second.state.weights[name].double()).norm())
        assert difference <= tolerance * float(value.double().norm()), (name, difference)


def test_what_cannot_be_batched_says_why(digits):
    dp_sgd = make_tiny(digits, privacy=gaussian(updates="dp-sgd", update_multiplier=3.0))
    with pytest.raises(ValueError, match="executor batched: updates dp-sgd clips every record's gradient"):
        BatchedExecutor(dp_sgd, METHODS["asfl"])
    with pytest.raises(ValueError, match="executor batched: method momentum does other local work"):
        BatchedExecutor(make_tiny(digits), Momentum())


def test_auto_does_not_let_the_number_of_cores_decide_the_last_digits(digits, monkeypatch):
    """Batched or not depends on network and method alone; among the others all give the same bits."""
    monkeypatch.setattr("asfl_privacy.execution.choice.SMALL", 1_000)
    tiny, big = make_tiny(digits), make_federation(digits)
    for workers in (1, 2, 8):
        assert choose_executor("auto", tiny, METHODS["asfl"], workers=workers).name == "batched"
        assert choose_executor("auto", big, METHODS["asfl"], workers=workers).name in ("serial", "threads")
        assert choose_executor("auto", tiny, Momentum(), workers=workers).name in ("serial", "threads")
    assert choose_executor("serial", tiny, METHODS["asfl"], workers=2).name == "serial"


@pytest.mark.parametrize("executor", ["serial", "threads", "batched"])
def test_a_failing_client_stops_the_run_and_is_named(digits, executor, monkeypatch):
    federation = broken(digits, client=2)
    with (
        pytest.raises(IndexError, match="out of bounds") as caught,
        make_executor(executor, federation, METHODS["fedavg"], workers=2) as running,
    ):
        run_rounds(federation, METHODS["fedavg"], executor=running, start=begin_run(federation, ledger=None))
    assert caught.value.__notes__[0] == ("round 0" if executor == "batched" else "round 0, client 2")


@pytest.mark.parametrize("executor", ["serial", "threads", "batched"])
def test_a_tolerant_run_averages_over_the_survivors_and_says_whom_it_lost(digits, executor):
    """Against the run of the same clients without the broken one; catches weights normalised over the whole cohort."""
    federation = broken(digits, client=2)
    method = METHODS["fedavg"]
    with make_executor(executor, federation, method, workers=2, tolerate_failures=True) as running:
        result = run_rounds(federation, method, executor=running, start=begin_run(federation, ledger=None))
    lost = {(note.round, note.client, note.phase) for note in result.failures}
    assert lost == {(round, 2, "train") for round in range(3)}
    assert all("client 2" in note.reason for note in result.failures)
    alone = make_federation(digits, cohort=6, tail_steps=0)
    state = begin_run(alone, ledger=None).state
    with make_executor("serial", alone, method) as running:
        for round in range(3):
            updates = running.train(
                state,
                (0, 1, 3, 4, 5),
                plan=None,
                collected=running.collect(state, (0, 1, 3, 4, 5), plan=None, remaining=None, round=round),
                received={},
                remaining=None,
                round=round,
            )
            state = method.aggregate(state, updates, federation=alone, round=round)
    difference = max(float((state.weights[n] - v).abs().max()) for n, v in result.state.weights.items())
    assert difference <= (1e-5 if executor == "batched" else 0.0)


def broken(digits, *, client):
    """A federation in which one client's labels are of a class that the network lacks."""
    federation = make_federation(digits, cohort=6, tail_steps=0)
    clients = list(federation.clients)
    clients[client] = dataclasses.replace(clients[client], labels=clients[client].labels + 90)
    return dataclasses.replace(federation, clients=tuple(clients))


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_a_run_in_which_every_client_fails_ends(digits, executor):
    federation = make_federation(digits, cohort=6, tail_steps=0)
    clients = [dataclasses.replace(client, labels=client.labels + 90) for client in federation.clients]
    federation = dataclasses.replace(federation, clients=tuple(clients))
    with (
        pytest.raises(Exception, match=r"out of bounds|Target"),
        make_executor(executor, federation, METHODS["fedavg"], workers=2, tolerate_failures=True) as running,
    ):
        run_rounds(federation, METHODS["fedavg"], executor=running, start=begin_run(federation, ledger=None))


@pytest.mark.parametrize("executor", ["serial", "threads", "batched"])
@pytest.mark.parametrize(("method", "setting"), pairs(METHODS, ["clean, an odd cohort", "noise kept, every channel"]))
def test_a_run_cut_in_two_is_the_whole_run(digits, method, setting, executor):
    """State in, state out: nothing stays in an executor between rounds."""
    if executor == "batched" and method not in STACKED:
        pytest.skip("its steps are not plain")
    if method not in ("asfl", "fedavg") and executor == "threads":
        pytest.skip("as serial, which the contract compares")
    whole = a_run(digits, method, setting, executor)
    federation = make_federation(digits, **SETTINGS[setting])
    latest = [begin_run(federation, ledger=None if federation.privacy is None else Ledger(p=2.0, radius=1.0))]
    asked = iter([False, True])
    with (
        pytest.raises(RunStoppedError, match="after 1 of 3 rounds"),
        make_executor(executor, federation, METHODS[method], workers=2) as running,
    ):
        run_rounds(
            federation, METHODS[method], executor=running, start=latest[0], should_stop=lambda: next(asked),
            after_round=latest.append,
        )  # fmt: skip
    again = make_federation(digits, **SETTINGS[setting])
    with make_executor(executor, again, METHODS[method], workers=2) as running:
        rest = run_rounds(again, METHODS[method], executor=running, start=latest[-1])
    assert_same_run(whole, rest)
    assert math.isfinite(rest.seconds)


@pytest.mark.parametrize("executor", ["serial", "threads", "batched"])
def test_a_client_whose_stages_fail_is_lost_alone(digits, executor, monkeypatch):
    """Catches a batched run that ends where the others go on without the client."""
    stages = type(METHODS["fedavg"]).stages

    def failing(self, state, client, **kwargs):
        if client == 2:
            raise ValueError("no records today")
        return stages(self, state, client, **kwargs)

    federation = make_federation(digits, cohort=6, tail_steps=0)
    with make_executor(executor, federation, METHODS["fedavg"], workers=2, tolerate_failures=True) as running:
        monkeypatch.setattr(type(METHODS["fedavg"]), "stages", failing)
        result = run_rounds(federation, METHODS["fedavg"], executor=running, start=begin_run(federation, ledger=None))
    assert {(note.round, note.client) for note in result.failures} == {(round, 2) for round in range(3)}


def test_a_private_run_of_a_method_that_sends_more_than_is_counted_is_refused(digits):
    """The library itself, not the command line alone. Catches raw gradients beside an ε."""
    private = gaussian(updates="dp-fedavg", update_multiplier=4.0)
    for name, privacy in (("scaffold", private), ("fedproto", gaussian()), ("splitfed-v1", gaussian())):
        federation, ledger = make_tiny(digits, privacy=privacy), Ledger(p=2.0, radius=1.0)
        with (
            make_executor("serial", federation, METHODS[name]) as running,
            pytest.raises(ValueError, match="which no ledger counts"),
        ):
            run_rounds(federation, METHODS[name], executor=running, start=begin_run(federation, ledger=ledger))
        assert ledger.counts.releases == 0
