"""Attacks on runs: what is attacked is a release of the run's own, of records that nobody trained on."""

import csv
import dataclasses
import io
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from asfl_privacy import run_attack
from asfl_privacy.accounting import Ledger, gaussian_epsilon
from asfl_privacy.attacks import Effort
from asfl_privacy.cells import make_cells
from asfl_privacy.config import load_config
from asfl_privacy.run import execute_run, prepare_run
from asfl_privacy.run_attack import attack_csv, attack_json, attack_run
from asfl_privacy.run_folder import read_run

TINY = {
    "clients": 6, "cohort": 4, "rounds": 2, "tail_steps": 2, "full_steps": 2, "batch_size": 64, "seeds": 1,
    "partition": "iid", "placement": "input", "exchange_layer": "conv1",
}  # fmt: skip
EFFORT = Effort(
    inversion_steps=40, restarts=0, decoder_steps=10, search_steps=5, membership_pairs=2, membership_trials=300
)


def trained(folder, digits, **overrides):
    config = load_config(None, overrides=TINY | overrides)
    (cell,) = [
        cell
        for cell in make_cells(config)
        if (cell.method, cell.target is None) == (config.method[0], not config.epsilon)
    ]
    execute_run(config, prepare_run(config, cell, data=digits), data=digits, folder=folder)
    return read_run(folder)


@pytest.fixture(scope="module")
def strong(tmp_path_factory, digits):
    """A run at ε = 1 per release."""
    return trained(tmp_path_factory.mktemp("runs") / "strong", digits, epsilon=[1.0])


@pytest.fixture(scope="module")
def attacked(strong):
    return attack_run(strong, num_records=6, seed=3, effort=EFFORT)


@pytest.fixture
def asked(monkeypatch):
    """Everything that `attack_release` is called with, nothing attacked."""
    seen = {}

    def record(release, view, **arguments):
        seen.update(arguments, release=release, view=view)
        raise InterruptedError

    monkeypatch.setattr(run_attack, "attack_release", record)

    def ask(run, **arguments):
        with pytest.raises(InterruptedError):
            attack_run(run, **{"seed": 0, **arguments})
        return dict(seen)

    return ask


def test_noise_at_a_small_epsilon_hides_what_is_rebuilt_without_it(attacked):
    row = attacked.row()
    assert row["psnr_without_noise"] > row["psnr_with_noise"] + 10.0
    assert row["ssim_without_noise"] > row["ssim_with_noise"] + 0.2
    assert (row["records"], row["auxiliary_records"], row["breach"]) == (6, 593, "no")


def test_no_training_record_is_looked_at(strong, attacked):
    # Catches: auxiliary or attacked records taken from the training set, or from a client.
    data = strong.federation.data
    spoilt = dataclasses.replace(
        data,
        train_inputs=torch.full_like(data.train_inputs, math.nan),
        train_labels=torch.zeros_like(data.train_labels),
    )
    nan = [dataclasses.replace(c, inputs=torch.full_like(c.inputs, math.nan)) for c in strong.federation.clients]
    federation = dataclasses.replace(strong.federation, data=spoilt, clients=tuple(nan))
    again = attack_run(dataclasses.replace(strong, federation=federation), num_records=6, seed=3, effort=EFFORT)
    assert again.figures() == attacked.figures()
    assert np.array_equal(again.result.best.records, attacked.result.best.records)


def test_the_attacker_never_holds_a_record_that_it_attacks(strong, asked):
    # Catches: attacked records left among the auxiliary ones.
    places = {row.numpy().tobytes(): place for place, row in enumerate(strong.data.test_inputs)}
    found = asked(strong, num_records=40)
    held, own = ([places[row.numpy().tobytes()] for row in found[name]]
                 for name in ("held_out_inputs", "auxiliary_inputs"))  # fmt: skip
    assert len(set(held)) == 40
    assert not set(held) & set(own)
    assert len(set(held) | set(own)) == len(strong.data.test_inputs)
    assert torch.equal(found["held_out_labels"], strong.data.test_labels[held])
    assert torch.equal(found["auxiliary_labels"], strong.data.test_labels[own])
    other = asked(strong, num_records=40, seed=1)
    assert not torch.equal(other["held_out_inputs"], found["held_out_inputs"])


def test_what_is_attacked_has_the_noise_of_the_run_drawn_afresh_and_repeatably(strong, asked):
    # Catches: another scale than the plan's, clean activations, one draw used twice, the system's source.
    found, again = asked(strong), asked(strong)
    records = strong.data.test_inputs[:200]
    head = strong.federation.split.head
    with torch.no_grad():
        clean = head(records)
    first, second = found["release"](records), found["release"](records)
    assert torch.equal(again["release"](records), first)
    assert not torch.equal(first, second)
    assert torch.allclose(found["view"].expected(records), clean, atol=1e-6)
    # at placement input behind a linear view, the noise is read off where it is added
    plan = dataclasses.replace(strong.plan, placement="input")
    noise = run_attack.apply_release(
        plan, nn.Sequential(nn.Identity()).eval(), records, source=run_attack.SeededSource(b"attack|0")
    )
    residual = (noise - records).double()
    assert float(residual.std()) == pytest.approx(strong.plan.noise_stddev, rel=0.03)
    with torch.no_grad():
        assert torch.allclose(head(noise), first, atol=1e-5)


def test_epsilon_beside_it_is_that_of_one_release(strong, attacked):
    # By the closed form from σ alone: neighbours are 1 apart, any two of 64 pixels in [0, 1] at most 8; truncation onto
    # the lattice moves both a little further apart. Catches: a total, ε at another δ, the two figures swapped.
    assert strong.ledger.counts.max_releases_per_record == 2
    stddev = strong.plan.noise_stddev
    near, far = (gaussian_epsilon(1e-5, noise_multiplier=stddev / distance) for distance in (1.0, 8.0))
    assert near <= attacked.epsilon_release <= 1.01 * near
    assert far <= attacked.epsilon_any_two <= 1.01 * far
    assert attacked.row()["noise_stddev"] == stddev


def with_ledger(run, *, noise_multiplier, whole):
    ledger = Ledger(p=run.ledger.p, radius=run.ledger.radius)
    ledger.record(
        channel="activations",
        mechanism="gaussian",
        noise_multiplier=noise_multiplier,
        whole_record_multiplier=whole,
        round=0,
        records=[0],
    )
    return dataclasses.replace(run, ledger=ledger)


def test_a_ledger_that_claims_too_little_is_refuted(strong, attacked):
    # Catches: a bound from the plan instead of the ledger, a breach that is never compared.
    assert attacked.breaches == ()
    small = with_ledger(strong, noise_multiplier=1000.0, whole=1000.0)
    effort = dataclasses.replace(EFFORT, inversion_steps=1, decoder_steps=1, membership_trials=2000)
    found = attack_run(small, num_records=2, seed=0, effort=effort)
    (line,) = found.breaches
    assert "neighbours are told apart" in line
    assert found.row()["breach"] == "yes"
    assert found.result.neighbours.low > found.result.neighbours.bound


def test_two_records_under_a_head_that_was_never_released_under_get_its_own_epsilon(strong, asked):
    # Catches: a false breach where the last head tells records apart better than those of the ledger.
    due = gaussian_epsilon(1e-5, noise_multiplier=strong.plan.whole_record_multiplier)
    z = strong.plan.noise_multiplier
    higher, lower = (
        asked(with_ledger(strong, noise_multiplier=z, whole=whole))["epsilon_any_two"] for whole in (z, 0.1)
    )
    assert higher == pytest.approx(due, rel=1e-4)
    assert lower > 2 * due


def test_records_that_any_two_are_neighbours_of_are_told_apart_by_one_claim(tmp_path, digits, asked):
    run = trained(tmp_path / "any", digits, epsilon=[2.0], radius="any", clip=4.0, placement="exchange")
    found = asked(run)
    assert (found["radius"], found["epsilon"]) == (None, None)
    assert found["epsilon_any_two"] == pytest.approx(2.0, rel=1e-6)
    assert found["view"].clip == 4.0
    assert found["view"].noise_is_last
    z = 100.0  # a claim fixed before the run is put to the test as it stands
    small = asked(with_ledger(run, noise_multiplier=z, whole=None))["epsilon_any_two"]
    assert small == pytest.approx(gaussian_epsilon(1e-5, noise_multiplier=z), rel=1e-6)


def test_a_run_without_noise_is_attacked_on_clean_activations(tmp_path, digits):
    run = trained(tmp_path / "clean", digits, mech="none")
    found = attack_run(run, num_records=2, seed=0, effort=dataclasses.replace(EFFORT, decoder_steps=2))
    row = found.row()
    assert row["psnr_without_noise"] > row["psnr_mean_record"] + 10.0
    assert found.result.any_two.advantage == 1.0
    blank = ("epsilon_release", "noise_stddev", "psnr_with_noise", "neighbours_advantage", "property_accuracy", "delta")
    assert {row[name] for name in blank} == {None}
    assert found.breaches == ()


def test_runs_that_share_nothing_and_bad_values_are_refused(tmp_path, digits, strong):
    fedavg = trained(tmp_path / "fedavg", digits, method="fedavg", mech="none")
    empty = dataclasses.replace(strong, ledger=Ledger(p=2, radius=1.0))
    for run, arguments, words in (
        (fedavg, {}, "nothing to attack"),
        (empty, {}, "nothing to attack"),
        (strong, {"num_records": 590}, "at most 589"),
        (strong, {"num_records": 0}, "records"),
        (strong, {"seed": -1}, "seed"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            attack_run(run, **{"seed": 0, **arguments})
        assert "\n" not in str(caught.value)


def test_json_and_csv_hold_every_figure_and_no_path(attacked, tmp_path):
    text = attack_json([attacked])

    def refuse(word):
        raise AssertionError(word)

    (run,) = json.loads(text, parse_constant=refuse)["runs"]
    assert run["epsilon_release"] == attacked.epsilon_release
    assert {one["attack"] for one in run["attacks"]["reconstructions"]} >= {"inversion", "decoder"}
    assert "/" not in text
    (line,) = csv.DictReader(io.StringIO(attack_csv([attacked])))
    assert list(line) == list(attacked.row())
    assert float(line["psnr_with_noise"]) == attacked.row()["psnr_with_noise"]
    unknown = dataclasses.replace(attacked, epsilon_any_two=math.inf)
    assert json.loads(attack_json([unknown]), parse_constant=refuse)["runs"][0]["epsilon_release_any_two"] == "inf"


def test_blocks_that_work_in_place_leave_the_records_as_they_are():
    head = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten()).eval()
    records = torch.tensor([[[-1.0, 2.0]]], requires_grad=True)
    view = run_attack._view(None, head)
    view.expected(records).sum().backward()
    assert records.tolist() == [[[-1.0, 2.0]]]
    assert records.grad.tolist() == [[[0.0, 1.0]]]
