"""Whole runs: the invariants that tie ASFL, FedAvg, noise and the ledger together."""

import math

import numpy as np
import pytest
import torch
from federations import gaussian, make_federation, make_tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asfl_privacy.accounting import Ledger, gaussian_epsilon
from asfl_privacy.accounting.budget import RecordBudget
from asfl_privacy.execution import RunStoppedError, run_serially
from asfl_privacy.federated import METHODS


def run(federation, method="asfl", **options):
    privacy = federation.privacy
    ledger = None if privacy is None else Ledger(p=2.0, radius=privacy.radius)
    return run_serially(federation, METHODS[method], ledger=ledger, **options)


def same_weights(first, second):
    return all(torch.equal(value, second.state.weights[name]) for name, value in first.state.weights.items())


def test_asfl_without_tail_steps_is_fedavg_bit_for_bit(digits):
    asfl = run(make_federation(digits, tail_steps=0, full_steps=5))
    fedavg = run(make_federation(digits, tail_steps=0, full_steps=5), "fedavg")
    assert same_weights(asfl, fedavg)
    assert asfl.traffic == fedavg.traffic
    assert asfl.traffic.activations == 0


def test_asfl_without_tail_steps_releases_nothing_even_with_noise_on(digits):
    asfl = run(make_federation(digits, tail_steps=0, privacy=gaussian()))
    assert asfl.ledger.epsilon(delta=1e-5).high == 0.0
    assert same_weights(asfl, run(make_federation(digits, tail_steps=0), "fedavg"))


def test_fedavg_takes_the_whole_step_budget_and_asfl_splits_it(digits):
    asfl, fedavg = run(make_federation(digits)), run(make_federation(digits), "fedavg")
    assert not same_weights(asfl, fedavg)
    assert fedavg.remote_fraction == 0.0
    assert same_weights(fedavg, run(make_federation(digits, tail_steps=0, full_steps=7), "fedavg"))


def test_the_same_seed_gives_the_same_run_and_another_seed_another(digits):
    first, second, other = (run(make_federation(digits, seed=seed, privacy=gaussian())) for seed in (0, 0, 1))
    assert same_weights(first, second)
    assert [e.accuracy for e in first.evaluations] == [e.accuracy for e in second.evaluations]
    assert not same_weights(first, other)


def test_a_run_is_the_same_whatever_was_drawn_from_global_generators_before(digits):
    """Catches code that draws from torch's or numpy's global generator; dropout may, under a seed of its own."""
    first = run(make_federation(digits))
    torch.rand(17)
    np.random.default_rng().random()
    torch.manual_seed(123)
    state = torch.random.get_rng_state()
    assert same_weights(first, run(make_federation(digits)))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_noise_changes_no_other_draw_of_the_run(digits):
    """Almost no noise gives almost the clean run: pairs, records and mini-batches are the same ones."""
    clean = run(make_federation(digits))
    quiet = run(make_federation(digits, privacy=gaussian(noise_multiplier=1e-4)))
    for name, value in clean.state.weights.items():
        assert torch.allclose(value, quiet.state.weights[name], atol=0.02), name


def test_alpha_is_a_quarter_where_tail_and_full_steps_are_equal(digits):
    """(τ'/2)/(τ'+τ): equal payloads of equal clients, so half of the tail's records are remote in expectation."""
    result = run(make_federation(digits, partition="iid", tail_steps=10, full_steps=10, rounds=4))
    assert result.remote_fraction == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize(("cohort", "payloads"), [(1, 0), (2, 2), (3, 3), (4, 4), (5, 5)])
def test_bytes_are_counted_by_channel(digits, cohort, payloads):
    """Hand work: 2P a client and round; 32 records of 512 float32, and 32 labels of one byte, a payload."""
    federation = make_federation(digits, cohort=cohort, rounds=2, partition="iid")
    result = run(federation)
    parameters = sum(p.numel() for p in federation.model.parameters()) + 2  # and the two normalisation constants
    assert result.traffic.model == 2 * cohort * 2 * parameters * 4
    assert result.traffic.activations == 2 * payloads * 32 * 512 * 4
    assert result.traffic.labels == 2 * payloads * 32


def releases_by_hand(federation, rounds):
    """Counts of every record from the streams alone, without the executor."""
    from asfl_privacy.federated import sample_cohort
    from asfl_privacy.federated.streams import numpy_stream

    counts = np.zeros(federation.data.num_records, dtype=int)
    for round in range(rounds):
        for client in sample_cohort(federation, round=round):
            holder = federation.clients[client]
            rng = numpy_stream(0, round=round, client=client, purpose="share")
            drawn = rng.choice(holder.num_records, size=min(32, holder.num_records), replace=False)
            counts[holder.records[drawn]] += 1
    return counts


def test_the_ledger_counts_every_release_of_every_record(digits, tmp_path):
    """Catches a ledger that counts rounds, or clients, in place of a record's own releases."""
    federation = make_federation(digits, privacy=gaussian(), rounds=5)
    result = run(federation)
    counts = np.zeros(digits.num_records, dtype=int)
    result.ledger.save(tmp_path / "ledger.json")
    read = Ledger.load(tmp_path / "ledger.json")
    assert read == result.ledger
    for event in read.event_classes:
        records, released = read.releases_of(event)
        counts[records] += released
    expected = releases_by_hand(federation, 5)
    assert np.array_equal(counts, expected)
    largest = int(expected.max())
    assert largest >= 2
    composed = gaussian_epsilon(1e-5, noise_multiplier=2.0 / math.sqrt(largest))
    assert result.ledger.epsilon(delta=1e-5).high == pytest.approx(composed, rel=1e-9)


@pytest.mark.parametrize("rounds", [1, 6])
def test_noise_once_totals_one_release_over_any_number_of_rounds(digits, rounds):
    """Catches a ledger that counts re-used noise again, and one that misses the first release."""
    federation = make_federation(digits, privacy=gaussian(noise="once"), rounds=rounds)
    result = run(federation)
    single = gaussian_epsilon(1e-5, noise_multiplier=2.0)
    assert result.ledger.epsilon(delta=1e-5).high == pytest.approx(single, rel=1e-9)
    assert result.ledger.counts.max_releases_per_record == 1
    assert result.ledger.counts.records == int((releases_by_hand(federation, rounds) > 0).sum())


def test_a_cohort_of_one_exchanges_nothing_and_spends_nothing(digits):
    result = run(make_federation(digits, cohort=1, privacy=gaussian()))
    assert result.ledger.counts.releases == 0
    assert result.ledger.epsilon(delta=1e-5).high == 0.0
    assert result.remote_fraction == 0.0


def test_the_ledger_is_in_the_units_of_what_was_noised(digits):
    """At placement input two records of the box differ by at most √64 = 8, eight times R = 1.

    On the lattice σ lies in [2Δ, 2Δ(1 + 2^-10)(1 + 2^-9)], and truncation takes the 8 to at most 8 + 2^-10.
    """
    result = run(make_federation(digits, privacy=gaussian(), rounds=1))
    whole = result.ledger.epsilon(delta=1e-5, distance=math.inf).high
    weakest, strongest = (2.0 * (1 + 2**-10) * (1 + 2**-9) / 8.0), 2.0 / (8.0 + 2**-10)
    least, most = (gaussian_epsilon(1e-5, noise_multiplier=z) for z in (weakest, strongest))
    assert least <= whole <= most
    assert most < 1.005 * least


def test_a_run_without_noise_has_no_account(digits):
    """Catches an empty ledger, whose total of 0 would call clean activations private."""
    assert run(make_federation(digits)).ledger is None
    with pytest.raises(ValueError, match="must not have one"):
        run_serially(make_federation(digits), METHODS["asfl"], ledger=Ledger(p=2.0, radius=1.0))
    with pytest.raises(ValueError, match="needs a ledger"):
        run_serially(make_federation(digits, privacy=gaussian()), METHODS["asfl"], ledger=None)


@pytest.mark.parametrize(("every", "expected"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (9, [5])])
def test_evaluation_happens_every_k_rounds_and_after_the_last(digits, every, expected):
    result = run(make_federation(digits, rounds=5, evaluate_every=every), "fedavg")
    assert [e.round for e in result.evaluations] == expected


def test_a_refusal_names_round_and_client(digits):
    with pytest.raises(ValueError, match=r"^round \d+(, client \d+)?: .*(diverged|not finite)"):
        run(make_federation(digits, lr=1e9, rounds=20))


def test_a_run_stops_between_rounds_when_asked(digits):
    answers = iter([False, False, True])
    with pytest.raises(RunStoppedError, match="after 2 of 3 rounds"):
        run(make_federation(digits), should_stop=lambda: next(answers))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cohort=st.integers(1, 6), tail_steps=st.integers(0, 3), full_steps=st.integers(0, 2), batch=st.integers(1, 400))
def test_any_sizes_run_to_the_end(digits, cohort, tail_steps, full_steps, batch):
    federation = make_federation(
        digits, cohort=cohort, tail_steps=tail_steps, full_steps=full_steps, batch_size=batch, rounds=1, lr=0.01
    )
    result = run(federation)
    assert 0.0 <= result.evaluations[-1].accuracy <= 1.0
    assert 0.0 <= result.remote_fraction <= 1.0


EVERY_CHANNEL = {"label_epsilon": 1.0, "updates": "dp-fedavg", "update_multiplier": 4.0}


@pytest.mark.parametrize("changes", [{}, {"noise": "once"}, {"own": "released", "placement": "exchange"}])
def test_a_seeded_run_repeats_bit_for_bit_and_one_with_the_systems_noise_does_not(digits, changes):
    """Catches: one channel whose noise ignores the seed, or whose noise keeps to it when it must not."""
    runs = {
        reproducible: [
            run(make_tiny(digits, privacy=gaussian(**EVERY_CHANNEL, **changes, reproducible=reproducible)))
            for _ in range(2)
        ]
        for reproducible in (True, False)
    }
    first, again = runs[True]
    assert same_weights(first, again)
    assert first.ledger == again.ledger
    assert first.ledger.samplers == ("seeded",)
    one, two = runs[False]
    assert not any(torch.equal(value, two.state.weights[name]) for name, value in one.state.weights.items())
    assert one.ledger.samplers == ("lattice",)
    assert one.ledger.channels == ("activations", "labels", "updates")
    # what is counted depends on no noise
    totals = [result.ledger.epsilon(delta=1e-3).high for result in (first, one, two)]
    assert totals == [totals[0]] * 3


def by_channel(ledger, channel, num_records=48):
    counts = np.zeros(num_records, dtype=int)
    for event in ledger.event_classes:
        if event.channel == channel:
            records, released = ledger.releases_of(event)
            counts[records] += released
    return counts


def room_for(*, releases=0, z=2.0, steps=0, update_z=4.0):
    """A budget for so many releases and noised steps, whatever their sampler's error."""
    square = (releases / z**2 + steps / update_z**2) * (1 + 2**-48)
    return RecordBudget(gaussian_budget=square, excess_budget=1e-6, tail_budget=1e-12)


def test_records_past_their_budget_are_not_released_and_training_goes_on(digits):
    """All records are shared each round, and two releases fit. Catches: a budget per round, a run that stops or skips."""
    privacy = gaussian(budget=room_for(releases=2))
    free, held = (run(make_tiny(digits, privacy=p, batch_size=24, rounds=5)) for p in (gaussian(), privacy))
    assert by_channel(free.ledger, "activations").tolist() == [5] * 48
    assert by_channel(held.ledger, "activations").tolist() == [2] * 48
    assert {event.round for event in held.ledger.event_classes} == {0, 1}
    assert held.held_back == 48
    assert free.held_back == 0
    assert held.ledger.epsilon(delta=1e-5).high <= privacy.budget.total(delta=1e-5)
    assert len(held.evaluations) == 5
    assert held.traffic.labels == 2 * 48
    assert 0.0 < held.remote_fraction < free.remote_fraction


def test_a_filter_is_individual(digits):
    """One release fits: whoever was shared is out, and the others follow. Catches: one count for all records."""
    federation = make_tiny(digits, privacy=gaussian(budget=room_for(releases=1)), rounds=2)
    result = run(federation)
    assert by_channel(result.ledger, "activations").max() == 1
    assert result.ledger.counts.releases == 2 * 2 * 8  # other records in the second round, as many
    assert result.held_back == 2 * 8  # those of the first round; the others were never refused


def test_records_that_were_never_refused_are_not_called_held_back(digits):
    """Two releases fit and two rounds ran: all was used, none was missed. Catches: spent taken for held back, by which
    a statement says of every record that it "was not used" any more."""
    result = run(make_tiny(digits, privacy=gaussian(budget=room_for(releases=2)), batch_size=24, rounds=2))
    assert by_channel(result.ledger, "activations").tolist() == [2] * 48
    assert result.held_back == 0


def test_noised_steps_leave_out_records_past_their_budget(digits):
    """Three steps fit. Catches: steps beyond the filter, a filter per phase or per round, updates that it does not see."""
    privacy = gaussian(
        noise="once",
        updates="dp-sgd",
        update_multiplier=4.0,
        budget=room_for(releases=1, steps=3),
    )
    result = run(make_tiny(digits, privacy=privacy, batch_size=24, rounds=3, full_steps=2, tail_steps=2))
    steps = by_channel(result.ledger, "updates")
    assert by_channel(result.ledger, "activations").tolist() == [1] * 48
    assert steps.tolist() == [3] * 48
    assert result.held_back == 48
    assert result.ledger.epsilon(delta=1e-5).high <= privacy.budget.total(delta=1e-5)
    assert len(result.evaluations) == 3
    # the kept noise of a record is charged already, so its activation is sent in all three rounds
    assert result.traffic.labels == 3 * 48


def test_a_client_that_delivers_nothing_but_trains_on_its_own_release_is_charged(digits):
    """Its tail, and so its update, is computed from that release. Catches: charging what is delivered alone."""
    alone = run(make_tiny(digits, cohort=1, rounds=1, privacy=gaussian(own="released", label_epsilon=1.0)))
    assert by_channel(alone.ledger, "activations").sum() == 8
    assert by_channel(alone.ledger, "labels").sum() == 8
    assert alone.traffic.activations == 0
    clean = run(make_tiny(digits, cohort=1, rounds=1, privacy=gaussian(label_epsilon=1.0)))
    assert clean.ledger.counts.releases == 0


def test_a_label_is_charged_in_the_round_in_which_its_answer_first_leaves(digits):
    """Catches: a charge where the label is drawn though nothing was delivered, and none when it leaves later."""
    result = run(make_tiny(digits, batch_size=24, cohort=1, clients=2, rounds=1, privacy=gaussian(label_epsilon=1.0)))
    assert result.ledger.counts.releases == 0
    more = run(make_tiny(digits, batch_size=24, rounds=3, privacy=gaussian(label_epsilon=1.0)))
    assert by_channel(more.ledger, "labels").tolist() == [1] * 48
    assert by_channel(more.ledger, "activations").tolist() == [3] * 48
    assert more.ledger.epsilon(delta=0.0, channel="labels").high == pytest.approx(1.0, rel=1e-9)
