"""FedVARP against a scalar twin, its two special cases, and mutants of what the server remembers."""

from dataclasses import replace

import pytest
import torch
from executor_contract import assert_same_run, assert_same_tensors
from federations import gaussian, make_tiny
from quadratic import (
    FIVE,
    TWO,
    WEIGHT,
    assert_goes_on_from_a_checkpoint,
    end,
    every_state,
    make_wells,
    plain_end,
    skewed_run,
)

from asfl_privacy.accounting import Ledger
from asfl_privacy.execution import begin_run, run_rounds
from asfl_privacy.execution.choice import make_executor
from asfl_privacy.federated import METHODS, sample_cohort
from asfl_privacy.federated.methods import FedVARP
from asfl_privacy.federated.methods.fedvarp import LAST
from asfl_privacy.federated.schedules import parse_schedule
from asfl_privacy.federated.settings import MethodOptions

FEDVARP = FedVARP()
KEY = LAST + WEIGHT
EXACT = 1e-12


def by_hand(wells, cohorts, *, lr, steps=10, server_lr=1.0):
    """Algorithm 2 in Python's floats: x and all Y after each round."""
    x, remembered, history = 0.0, [0.0] * len(wells), []
    for round, cohort in enumerate(cohorts):
        length = lr(round) * steps
        sent = {i: (x - plain_end(wells[i], x, steps=steps, lr=lr(round))) / length for i in cohort}
        v = sum(sent[i] - remembered[i] for i in cohort) / len(cohort) + sum(remembered) / len(wells)
        x -= server_lr * length * v
        for i, last in sent.items():
            remembered[i] = last
        history.append((x, tuple(remembered)))
    return history


def check_by_hand(method, *, lr_schedule="constant", server_lr=1.0, tail_steps=0):
    """Weights, each Y_i and the server's mean of all of them, after every round of partial participation."""
    schedule = parse_schedule(lr_schedule)
    federation = make_wells(
        FIVE,
        cohort=2,
        rounds=12,
        tail_steps=tail_steps,
        full_steps=10 - tail_steps,
        schedule=schedule,
        options=MethodOptions(server_lr=server_lr),
    )
    cohorts = [sample_cohort(federation, round=round) for round in range(12)]
    assert len(set(cohorts)) > 3
    twin = by_hand(FIVE, cohorts, lr=lambda round: 0.05 * schedule.multiplier(round, rounds=12), server_lr=server_lr)
    for state, (x, remembered) in zip(every_state(federation, method)[1:], twin, strict=True):
        assert float(state.weights[WEIGHT]) == pytest.approx(x, abs=EXACT)
        assert float(state.server[KEY]) == pytest.approx(sum(remembered) / len(FIVE), abs=EXACT)
        for i, last in enumerate(remembered):
            kept = float(state.clients[i][KEY]) if i in state.clients else 0.0
            assert kept == pytest.approx(last, abs=EXACT)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"server_lr": 0.5},
        {"lr_schedule": "step:0.5@3,7"},
        {"lr_schedule": "cosine", "server_lr": 1.5},
        {"tail_steps": 4},
    ],
)
def test_every_round_is_hand_work(how):
    """Catches the mutants below, η_g on what is remembered, and τ that leaves the τ' steps out."""
    check_by_hand(FEDVARP, **how)


class NewY(FedVARP):
    """V with the Y that this round has changed already."""

    def aggregate(self, state, updates, *, federation, round):
        after = super().aggregate(state, updates, federation=federation, round=round)
        early = replace(state, server=after.server)
        return replace(after, weights=super().aggregate(early, updates, federation=federation, round=round).weights)


class Forgetful(FedVARP):
    """Y_i of clients that are not in the cohort are forgotten."""

    def aggregate(self, state, updates, *, federation, round):
        return super().aggregate(replace(state, server={}), updates, federation=federation, round=round)


class OfTheCohort(FedVARP):
    """The mean of Y over the cohort."""

    def aggregate(self, state, updates, *, federation, round):
        fewer = replace(federation, clients=federation.clients[: len(updates)])
        return super().aggregate(state, updates, federation=fewer, round=round)


class FirstRate(FedVARP):
    """Divided by the rate of the first round."""

    def finish(self, update, state, client, *, steps, federation, round):
        return super().finish(update, state, client, steps=steps, federation=federation, round=0)


@pytest.mark.parametrize("mutant", [NewY(), Forgetful(), OfTheCohort(), FirstRate()])
def test_a_wrong_version_fails(mutant):
    with pytest.raises(AssertionError):
        check_by_hand(mutant, lr_schedule="step:0.5@3,7")


def test_with_all_clients_it_is_fedavg_with_an_unweighted_mean():
    """Round by round; on the two clients both end at .713. Catches FedAvg's weights: clients hold 1 and 7 records."""
    fedvarp = every_state(make_wells(TWO, records=[1, 7], rounds=8), FEDVARP)
    fedavg = every_state(make_wells(TWO, rounds=8), METHODS["fedavg"])
    for one, other in zip(fedvarp, fedavg, strict=True):
        assert float(one.weights[WEIGHT]) == pytest.approx(float(other.weights[WEIGHT]), abs=EXACT)
    assert end(make_wells(rounds=40), FEDVARP) == pytest.approx(0.713123, abs=1e-6)


def test_the_first_round_is_fedavg_over_the_cohort(digits):
    """Equal numbers of records: to rounding in float32. Catches a first Y that is not zero, and a mean over all N."""
    ends = [
        every_state(make_tiny(digits, clients=3, cohort=2, rounds=1), METHODS[name])[-1].weights
        for name in ("fedvarp", "fedavg")
    ]
    for name, value in ends[0].items():
        assert torch.allclose(value, ends[1][name], rtol=0.0, atol=1e-7), name
        assert value.dtype == torch.float32


def test_what_is_remembered_is_what_was_sent(digits):
    """With clipped, noised updates Y_i is of these. Catches a server that would know the update before its noise."""
    privacy = gaussian(placement="updates", updates="dp-fedavg", update_multiplier=4.0, update_clip=0.01)
    federation = make_tiny(digits, privacy=privacy, rounds=1, clients=3, cohort=2)
    ledger = Ledger(p=2.0, radius=1.0)
    with make_executor("serial", federation, FEDVARP) as running:
        begun = begin_run(federation, ledger=ledger)
        cohort = sample_cohort(federation, round=0)
        collected = running.collect(begun.state, cohort, plan=None, remaining=None, round=0)
        updates = running.train(
            begun.state, cohort, plan=None, collected=collected, received={}, remaining=None, round=0
        )
    length, floor = 0.1 * 4, 0.01
    for update in updates.values():
        sent = {name: (begun.state.weights[name] - value) / length for name, value in update.weights.items()}
        assert_same_tensors({LAST + name: value for name, value in sent.items()}, update.client_state)
        size = torch.cat([(begun.state.weights[n] - v).flatten() for n, v in update.weights.items()]).norm()
        assert float(size) > 10 * floor  # the noise is in it: a clipped change alone is no longer than 0.01


def test_running_statistics_are_plain_means(digits):
    """In a second round too. Catches Y of buffers, and v on running statistics."""
    net = {"model_name": "own_nets:norm_and_dropout", "exchange_layer": "head"}
    federation = make_tiny(digits, rounds=2, **net, options=MethodOptions(server_lr=0.5))
    state = every_state(federation, FEDVARP)[1]
    updates = {
        i: FEDVARP.train(state, i, federation=federation, plan=None, own=None, received=None, remaining=None, round=1)
        for i in (0, 1)
    }
    after = FEDVARP.aggregate(state, updates, federation=federation, round=1).weights
    mean = (updates[0].weights["tail.1.running_var"] + updates[1].weights["tail.1.running_var"]) / 2
    assert torch.allclose(after["tail.1.running_var"], mean, rtol=0.0, atol=1e-7)
    assert after["tail.1.num_batches_tracked"].item() == 8
    assert not any("running" in name for name in (*state.server, *state.clients[0]))


def test_a_server_step_that_overflows_is_refused(digits):
    """Catches inf that only the next round would refuse, and the last round would evaluate."""
    federation = make_tiny(digits, rounds=1, options=MethodOptions(server_lr=1e300))
    with pytest.raises(ValueError, match=r"not finite after the server's step.*lower server_lr"):
        every_state(federation, FEDVARP)


def test_what_a_client_keeps_of_its_releases_stays_beside_what_the_method_keeps(digits):
    """Catches a state that replaces the noise drawn once: a second draw for a record that is charged once alone."""
    federation = make_tiny(digits, clients=3, cohort=2, privacy=gaussian(noise="once", label_epsilon=2.0))
    method = METHODS["fedvarp+sharing"]
    with make_executor("serial", federation, method) as running:
        begun = begin_run(federation, ledger=Ledger(p=2.0, radius=1.0))
        run = run_rounds(federation, method, executor=running, start=begun)
    assert len(run.state.clients) > 0
    for kept in run.state.clients.values():
        assert {"noised_inputs", "randomized_labels"} < set(kept)


def test_nothing_travels_but_weights(digits):
    federation = make_tiny(digits, clients=3, cohort=2, rounds=3, tail_steps=0)
    with make_executor("serial", federation, FEDVARP) as running:
        run = run_rounds(federation, FEDVARP, executor=running, start=begin_run(federation, ledger=None))
    assert run.traffic.model == 3 * 2 * 2 * 610 * 4


def test_a_rate_that_vanishes_is_refused_not_divided_by():
    """Catches 0/0, which would reach the weights as NaN."""
    federation = make_wells(rounds=2, lr=5e-324, full_steps=1, schedule=parse_schedule("step:0.1@1"))
    with pytest.raises(ValueError, match=r"learning rate of round 1 is 0.*raise lr"):
        every_state(federation, FEDVARP)


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_executors_give_the_same_run_to_the_bit(digits, executor):
    assert_same_run(skewed_run(digits, FEDVARP), skewed_run(digits, FEDVARP, executor=executor))


def test_a_run_that_goes_on_from_a_checkpoint_is_the_same_to_the_bit(digits, tmp_path):
    """Catches what is remembered, of clients or all together, that a checkpoint drops."""
    assert_goes_on_from_a_checkpoint(digits, METHODS["fedvarp+sharing"], folder=tmp_path)
