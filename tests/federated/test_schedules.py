"""Learning rates over rounds against torch's schedulers, and what is refused."""

from dataclasses import replace

import pytest
import torch
from federations import make_tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from quadratic import TWO, WEIGHT, every_state, make_wells, plain_end

from asfl_privacy.federated import METHODS
from asfl_privacy.federated.schedules import CONSTANT, Schedule, parse_schedule


def torchs(make, *, lr, rounds):
    """The rate of each round as a scheduler of torch gives it, stepped once a round."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler, rates = make(optimizer), []
    for _ in range(rounds):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@settings(deadline=None)
@given(
    factor=st.sampled_from([0.1, 0.5, 0.97, 1.0]),
    at=st.lists(st.integers(1, 39), min_size=1, max_size=5, unique=True).map(sorted),
    lr=st.sampled_from([0.05, 1.0]),
)
def test_steps_are_torchs_multi_step_lr(factor, at, lr):
    """Catches a factor that comes a round early or late, or once only."""
    found = parse_schedule(f"step:{factor}@{','.join(map(str, at))}")
    expected = torchs(
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=at, gamma=factor), lr=lr, rounds=40
    )
    assert [lr * found.multiplier(round, rounds=40) for round in range(40)] == pytest.approx(expected, rel=1e-12)


@settings(deadline=None)
@given(rounds=st.integers(1, 60), lr=st.sampled_from([0.05, 1.0]))
def test_cosine_is_torchs_cosine_annealing_over_the_run(rounds, lr):
    """Catches a period of T − 1 rounds, whose last rate is 0, and a sine."""
    expected = torchs(
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=rounds), lr=lr, rounds=rounds
    )
    found = [lr * parse_schedule("cosine").multiplier(round, rounds=rounds) for round in range(rounds)]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert min(found) > 0


def test_constant_is_one_in_every_round():
    assert [CONSTANT.multiplier(round, rounds=9) for round in range(9)] == [1.0] * 9
    assert parse_schedule("constant") == CONSTANT == Schedule()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "linear",
        "Cosine",
        "step",
        "step:0.1",
        "step:0.1@",
        "step:@5",
        "step:0.1@5,5",
        "step:0.1@7,5",
        "step:0.1@0",
        "step:0.1@-1,4",
        "step:0.1@5.5",
        "step:0.1@5,",
        "step:0@5",
        "step:-0.1@5",
        "step:1.5@5",
        "step:nan@5",
        "step:inf@5",
        "ramp:0.1@5",
        "constant:0.1@5",
        "cosine:0.5@5",
    ],
)
def test_another_form_is_refused_with_the_forms_there_are(text):
    with pytest.raises(
        ValueError, match=r"is unknown; use constant, cosine, or step:FACTOR@ROUND.*e\.g\. step:0\.1@50,75"
    ):
        parse_schedule(text)


def test_a_factor_whose_powers_vanish_is_refused():
    """Catches a rate of exactly 0, by which FedVARP would divide and DP-SGD be refused in the middle of a run."""
    with pytest.raises(ValueError, match="step:1e-200@1,2"):
        parse_schedule("step:1e-200@1,2")
    assert parse_schedule("step:1e-100@1,2").multiplier(2, rounds=3) == pytest.approx(1e-200)


@pytest.mark.parametrize("text", ["constant", "cosine", "step:0.5@2,3"])
def test_local_steps_take_their_rounds_rate(text):
    """FedAvg on the quadratics in closed form. Catches the first round's rate in all rounds."""
    schedule = parse_schedule(text)
    states, x = every_state(make_wells(TWO, rounds=5, schedule=schedule), METHODS["fedavg"]), 0.0
    for round, state in enumerate(states[1:]):
        lr = 0.05 * schedule.multiplier(round, rounds=5)
        x = sum(plain_end(well, x, steps=10, lr=lr) for well in TWO) / 2
        assert float(state.weights[WEIGHT]) == pytest.approx(x, abs=1e-12)


def test_tail_steps_take_the_rate_too(digits):
    """A rate near 0 from round 1 on leaves the tail where round 0 put it."""
    still = Schedule("step", 1e-30, (1,))
    one, two = (
        every_state(make_tiny(digits, rounds=rounds, schedule=still, full_steps=0), METHODS["asfl"])[-1].weights
        for rounds in (1, 2)
    )
    assert torch.allclose(one["out.weight"], two["out.weight"], rtol=0.0, atol=1e-7)
    moving = make_tiny(digits, rounds=2, full_steps=0)
    assert moving.settings == replace(moving.settings, schedule=CONSTANT)
    assert not torch.allclose(
        one["out.weight"], every_state(moving, METHODS["asfl"])[-1].weights["out.weight"], atol=1e-4
    )
