"""SCAFFOLD against hand work: a scalar twin, Option II, the two-client quadratic, and the wrong versions that are known."""

from dataclasses import dataclass, replace

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
    skewed_run,
)

from asfl_privacy.accounting import Ledger
from asfl_privacy.execution import begin_run, run_rounds
from asfl_privacy.execution.choice import make_executor
from asfl_privacy.federated import METHODS, State, sample_cohort
from asfl_privacy.federated.methods import Scaffold
from asfl_privacy.federated.methods.scaffold import CONTROL
from asfl_privacy.federated.private_updates import trained_names
from asfl_privacy.federated.schedules import parse_schedule
from asfl_privacy.federated.settings import MethodOptions

SCAFFOLD = Scaffold()
KEY = CONTROL + WEIGHT
PARTIAL = {"wells": FIVE, "cohort": 2, "rounds": 12}
EXACT = 1e-12


def by_hand(wells, cohorts, *, steps=10, lr=lambda round: 0.05, server_lr=1.0):
    """Algorithm 1 with Option II, in Python's floats: x, c and all c_i after each round."""
    x, c, controls, history = 0.0, 0.0, [0.0] * len(wells), []
    for round, cohort in enumerate(cohorts):
        eta, ends, changes = lr(round), [], []
        for i in cohort:
            (h, a), y = wells[i], x
            for _ in range(steps):
                y -= eta * (h * (y - a) - controls[i] + c)
            after = controls[i] - c + (x - y) / (steps * eta)
            ends.append(y)
            changes.append((i, after))
        c += sum(after - controls[i] for i, after in changes) / len(wells)
        for i, after in changes:
            controls[i] = after
        x += server_lr * sum(y - x for y in ends) / len(cohort)
        history.append((x, c, tuple(controls)))
    return history


def check_by_hand(method, **changes):
    """Every round of partial participation is the scalar twin's."""
    schedule = parse_schedule(changes.pop("lr_schedule", "constant"))
    server_lr = changes.pop("server_lr", 1.0)
    federation = make_wells(**PARTIAL, schedule=schedule, options=MethodOptions(server_lr=server_lr), **changes)
    cohorts = [sample_cohort(federation, round=round) for round in range(12)]
    assert len(set(cohorts)) > 3
    twin = by_hand(FIVE, cohorts, lr=lambda round: 0.05 * schedule.multiplier(round, rounds=12), server_lr=server_lr)
    for state, (x, c, controls) in zip(every_state(federation, method)[1:], twin, strict=True):
        assert abs(float(state.weights[WEIGHT]) - x) <= EXACT
        assert abs(float(state.server[KEY]) - c) <= EXACT
        for i, control in enumerate(controls):
            assert abs((float(state.clients[i][KEY]) if i in state.clients else 0.0) - control) <= EXACT


def check_mean_of_controls(method, *, start=None):
    """C is the mean of all N clients' c_i after every round."""
    federation = make_wells(**PARTIAL)
    for state in every_state(federation, method, start=start)[1:]:
        kept = [float(state.clients[i][KEY]) if i in state.clients else 0.0 for i in range(len(FIVE))]
        assert abs(float(state.server[KEY]) - sum(kept) / len(FIVE)) <= EXACT


def check_option_two(method, *, lr_schedule="constant"):
    """c_i⁺ = c_i − c + (x − y_i)/(Kη) for every client of every round, with this round's η and all K steps."""
    federation = make_wells(**PARTIAL, schedule=parse_schedule(lr_schedule))
    state = State(weights=federation.initial_weights)
    for round in range(12):
        eta = federation.settings.rule(round).lr
        updates = {}
        for i in sample_cohort(federation, round=round):
            update = method.train(
                state, i, federation=federation, plan=None, own=None, received=None, remaining=None, round=round
            )
            c_i = float(state.clients.get(i, {}).get(KEY, torch.zeros(1)))
            c = float(state.server.get(KEY, torch.zeros(1)))
            moved = float(state.weights[WEIGHT] - update.weights[WEIGHT])
            assert abs(float(update.client_state[KEY]) - (c_i - c + moved / (10 * eta))) <= EXACT
            updates[i] = update
        state = method.aggregate(state, updates, federation=federation, round=round)
        state = replace(state, clients=state.clients.updated({i: u.client_state for i, u in updates.items()}))


def check_quadratic(method):
    """Two clients, h = (1, 9), a = (0, 1), 10 steps at .05: the minimiser .9 of the mean, where FedAvg ends at .713."""
    assert end(make_wells(rounds=40), method) == pytest.approx(0.9, abs=1e-9)


CHECKS = {
    "by hand": check_by_hand,
    "by hand, a falling rate": lambda method: check_by_hand(method, lr_schedule="step:0.5@3,7"),
    "the mean of c_i": check_mean_of_controls,
    "Option II": check_option_two,
    "Option II, a falling rate": lambda method: check_option_two(method, lr_schedule="step:0.5@3,7"),
    "the quadratic": check_quadratic,
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_theorem(check):
    """Catches the versions below, each of which at least one of these checks refuses."""
    check(SCAFFOLD)


class SignFlipped(Scaffold):
    """G + c_i − c."""

    def full_stage(self, plain, state, client, *, federation):
        stage = super().full_stage(plain, state, client, federation=federation)
        given = stage.correction
        return replace(stage, correction=given and {name: -value for name, value in given.items()})


class DividedByTheCohort(Scaffold):
    """C ← c + (1/|S|)·Σ(c_i⁺ − c_i)."""

    def aggregate(self, state, updates, *, federation, round):
        fewer = replace(federation, clients=federation.clients[: len(updates)])
        return super().aggregate(state, updates, federation=fewer, round=round)


@dataclass(frozen=True)
class OptionTwo(Scaffold):
    """Option II with a number of steps and the rate of a round that need not be those that were taken."""

    steps: int = 10
    first_rate: bool = False

    def finish(self, update, state, client, *, steps, federation, round):
        right = super().finish(update, state, client, steps=steps, federation=federation, round=round)
        zero = torch.zeros(1, dtype=torch.float64)
        c_i, c = state.clients.get(client, {}).get(KEY, zero), state.server.get(KEY, zero)
        length = self.steps * federation.settings.rule(0 if self.first_rate else round).lr
        moved = (state.weights[WEIGHT] - update.weights[WEIGHT]) / length
        return replace(update, client_state={**right.client_state, KEY: c_i - c + moved})


class WithCorrection(Scaffold):
    """c_i⁺ of the corrected gradients."""

    def finish(self, update, state, client, *, steps, federation, round):
        right = super().finish(update, state, client, steps=steps, federation=federation, round=round)
        zero = torch.zeros(1, dtype=torch.float64)
        more = state.server.get(KEY, zero) - state.clients.get(client, {}).get(KEY, zero)
        return replace(update, client_state={**right.client_state, KEY: right.client_state[KEY] + more})


MUTANTS = {
    "sign flipped": (SignFlipped(), "the quadratic"),
    "sign flipped, by hand": (SignFlipped(), "by hand"),
    "c divided by |S|": (DividedByTheCohort(), "the mean of c_i"),
    "c divided by |S|, by hand": (DividedByTheCohort(), "by hand"),
    "K of one epoch": (OptionTwo(steps=1), "Option II"),
    "K of one epoch, the quadratic": (OptionTwo(steps=1), "the quadratic"),
    "divided by the first rate": (OptionTwo(first_rate=True), "Option II, a falling rate"),
    "divided by the first rate, by hand": (OptionTwo(first_rate=True), "by hand, a falling rate"),
    "gradients after correction": (WithCorrection(), "Option II"),
}


@pytest.mark.parametrize(("mutant", "check"), MUTANTS.values(), ids=MUTANTS)
def test_a_known_wrong_version_fails(mutant, check):
    """A run that diverges is refused by its weights that are not finite."""
    with pytest.raises((AssertionError, ValueError)):
        CHECKS[check](mutant)


def test_option_two_with_the_right_steps_and_rate_passes_every_check():
    """What the mutants above get wrong is what they are named for."""
    for name in ("by hand", "by hand, a falling rate", "Option II", "Option II, a falling rate", "the quadratic"):
        CHECKS[name](OptionTwo())


def test_control_variates_left_over_from_an_earlier_run_are_seen():
    """A mutant: c_i without the c that belongs to them. A run begins with neither, whatever ran before it."""
    earlier = every_state(make_wells(**PARTIAL), SCAFFOLD)
    start = State(weights=earlier[0].weights, clients=earlier[-1].clients)
    with pytest.raises(AssertionError):
        check_mean_of_controls(SCAFFOLD, start=start)
    again = every_state(make_wells(**PARTIAL), SCAFFOLD)
    assert_same_tensors(again[-1].weights, earlier[-1].weights)
    assert (len(again[0].clients), dict(again[0].server)) == (0, {})


@pytest.mark.parametrize("server_lr", [0.5, 1.5])
def test_the_servers_step_is_that_of_hand_work(server_lr):
    """Catches η_g left out, and η_g on c, which steps by 1/N alone."""
    check_by_hand(SCAFFOLD, server_lr=server_lr)


def test_records_do_not_weigh_in_the_mean_of_updates():
    """Catches FedAvg's weights: clients of 1 and 7 equal records end where clients of one each do."""
    assert end(make_wells(TWO, records=[1, 7]), SCAFFOLD) == pytest.approx(end(make_wells(TWO), SCAFFOLD), abs=EXACT)


@pytest.mark.parametrize("executor", ["serial", "batched"])
def test_every_executor_ends_at_the_minimiser(executor):
    assert end(make_wells(rounds=40), SCAFFOLD, executor=executor) == pytest.approx(0.9, abs=1e-9)
    assert end(make_wells(rounds=40), METHODS["fedavg"], executor=executor) == pytest.approx(0.713123, abs=1e-6)


@pytest.mark.parametrize("tail_steps", [0, 4, 10])
def test_sharing_before_scaffold_ends_at_the_minimiser_too(tail_steps):
    """With τ' = 0 to the bit; else tail steps on both records pull to .9. Catches c_i⁺ that counts the tail round in.

    The tail is the parameter, and each client's pool both records, so a tail step is one on the mean of both losses.
    """
    shared = end(make_wells(rounds=40, tail_steps=tail_steps), METHODS["scaffold+sharing"])
    assert shared == pytest.approx(0.9, abs=1e-9)
    if tail_steps == 0:
        assert shared == end(make_wells(rounds=40), SCAFFOLD)


def test_sharing_before_scaffold_is_hand_work_round_by_round():
    """Plain tail steps on the mean of both losses, then corrected ones; c_i⁺ is the mean gradient of the latter."""
    federation = make_wells(tail_steps=4, full_steps=6, rounds=5)
    x, c, controls = 0.0, 0.0, [0.0, 0.0]
    for state in every_state(federation, METHODS["scaffold+sharing"])[1:]:
        ends, means = [], []
        for i, (h, a) in enumerate(TWO):
            y, total = x, 0.0
            for _ in range(4):
                y -= 0.05 * (TWO[0][0] * (y - TWO[0][1]) + TWO[1][0] * (y - TWO[1][1])) / 2
            for _ in range(6):
                gradient = h * (y - a)
                total += gradient / 6
                y -= 0.05 * (gradient - controls[i] + c)
            ends.append(y)
            means.append(total)
        x, c, controls = sum(ends) / 2, c + sum(m - k for m, k in zip(means, controls, strict=True)) / 2, means
        assert float(state.weights[WEIGHT]) == pytest.approx(x, abs=EXACT)
        assert float(state.server[KEY]) == pytest.approx(c, abs=EXACT)


def test_the_first_round_is_fedavgs_bit_for_bit_where_clients_hold_as_many_records(digits):
    """Catches control variates that do not start at zero; the second round differs."""
    one, two = ({"rounds": rounds, "clients": 3, "cohort": 2} for rounds in (1, 2))
    ends = [every_state(make_tiny(digits, **one), METHODS[name])[-1].weights for name in ("scaffold", "fedavg")]
    assert_same_tensors(*ends)
    later = [every_state(make_tiny(digits, **two), METHODS[name])[-1].weights for name in ("scaffold", "fedavg")]
    assert not torch.equal(later[0]["out.weight"], later[1]["out.weight"])


def test_running_statistics_are_plain_means_that_no_control_variate_touches(digits):
    """With η_g = ½ parameters go half the way, buffers all of it. Catches c_i of buffers, and a step on them."""
    net = {"model_name": "own_nets:norm_and_dropout", "exchange_layer": "head"}
    federation = make_tiny(digits, rounds=1, **net, options=MethodOptions(server_lr=0.5))
    start, names = State(weights=federation.initial_weights), trained_names(federation.model)
    updates = {
        i: SCAFFOLD.train(start, i, federation=federation, plan=None, own=None, received=None, remaining=None, round=0)
        for i in (0, 1)
    }
    after = SCAFFOLD.aggregate(start, updates, federation=federation, round=0)
    assert set(after.server) == {CONTROL + name for name in names}
    for name, old in start.weights.items():
        mean = (updates[0].weights[name].double() + updates[1].weights[name].double()) / 2
        expected = (old + mean) / 2 if name in names else mean
        assert torch.allclose(after.weights[name].double(), expected.double(), rtol=0.0, atol=1e-7), name
    assert after.weights["tail.1.num_batches_tracked"].item() == 4
    assert not torch.equal(after.weights["tail.1.running_var"], start.weights["tail.1.running_var"])


def test_a_client_that_fails_leaves_c_the_mean_of_all_that_are_kept(digits):
    """Catches a failed client that is counted as c_i⁺ = 0."""
    federation = make_tiny(digits, clients=5, cohort=4, rounds=6)
    clients = list(federation.clients)
    clients[2] = replace(clients[2], labels=clients[2].labels + 90)
    federation = replace(federation, clients=tuple(clients))
    with make_executor("serial", federation, SCAFFOLD, tolerate_failures=True) as running:
        run = run_rounds(federation, SCAFFOLD, executor=running, start=begin_run(federation, ledger=None))
    assert {note.client for note in run.failures} == {2}
    assert list(run.state.clients) == [0, 1, 3, 4]
    for key, c in run.state.server.items():
        kept = torch.stack([run.state.clients[i][key].double() for i in run.state.clients])
        assert torch.allclose(c.double(), kept.sum(0) / 5, rtol=0.0, atol=1e-7), key


def test_what_a_client_keeps_of_its_releases_stays_beside_what_the_method_keeps(digits):
    """Catches a state that replaces the noise drawn once: a second draw for a record that is charged once alone."""
    federation = make_tiny(digits, clients=3, cohort=2, privacy=gaussian(noise="once", label_epsilon=2.0))
    method = METHODS["scaffold+sharing"]
    with make_executor("serial", federation, method) as running:
        begun = begin_run(federation, ledger=Ledger(p=2.0, radius=1.0))
        run = run_rounds(federation, method, executor=running, start=begun)
    assert len(run.state.clients) > 0
    for kept in run.state.clients.values():
        assert {"noised_inputs", "randomized_labels"} < set(kept)


def test_bytes_are_those_of_weights_and_control_variates_each_way(digits):
    """2 (P + buffers) + 2P a client: 4P where nothing but parameters is sent."""
    federation = make_tiny(digits, clients=3, cohort=2, rounds=3, tail_steps=0)
    with make_executor("serial", federation, SCAFFOLD) as running:
        run = run_rounds(federation, SCAFFOLD, executor=running, start=begin_run(federation, ledger=None))
    assert run.traffic.model == 3 * 2 * 4 * 610 * 4
    assert (run.traffic.activations, run.traffic.labels) == (0, 0)


@pytest.mark.parametrize(("method", "executor"), [("scaffold", "threads"), ("scaffold+sharing", "processes")])
def test_executors_give_the_same_run_to_the_bit(digits, method, executor):
    """With partial participation, momentum and decay. Catches c or c_i that a worker keeps or does not get."""
    assert_same_run(skewed_run(digits, METHODS[method]), skewed_run(digits, METHODS[method], executor=executor))


@pytest.mark.parametrize("method", ["scaffold", "scaffold+sharing"])
def test_a_run_that_goes_on_from_a_checkpoint_is_the_same_to_the_bit(digits, method, tmp_path):
    """Catches control variates, of clients or server, that a checkpoint drops."""
    assert_goes_on_from_a_checkpoint(digits, METHODS[method], folder=tmp_path)
