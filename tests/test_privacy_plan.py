"""The plan of a run's privacy: no combination of channels spends more than was asked, and little less."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from federations import few_records

from asfl_privacy.accounting import Ledger, gaussian_epsilon, gaussian_noise_multiplier
from asfl_privacy.cells import make_cells
from asfl_privacy.config import load_config
from asfl_privacy.execution import run_serially
from asfl_privacy.federated import METHODS, build_federation
from asfl_privacy.federated.settings import TrainingSettings
from asfl_privacy.run import clients_of_records, execute_run, prepare_run

TOTAL, DELTA = 4.0, 1e-3
SIZES = {
    "clients": "2", "cohort": "2", "rounds": "2", "tail_steps": "2", "full_steps": "1", "batch_size": "8", "seeds": "1",
    "evaluate_every": "2", "partition": "iid", "model": "federations:tiny_net", "exchange_layer": "body",
    "placement": "input", "reproducible": "no",
}  # fmt: skip


@pytest.fixture(scope="module")
def few(digits):
    return few_records(digits)


def configured(**overrides):
    """The configuration and its private cells."""
    asked = {**SIZES, "total_epsilon": str(TOTAL), "delta": str(DELTA), **overrides}
    config = load_config(None, overrides={key: value for key, value in asked.items() if value is not None})
    return config, [cell for cell in make_cells(config) if cell.target is not None]


def privacy_of(data, method="asfl", **overrides):
    config, cells = configured(**overrides)
    (cell,) = [cell for cell in cells if cell.method == method]
    return prepare_run(config, cell, data=data).privacy


def federation_of(data, privacy=None, **overrides):
    """Two clients of 24 records each, the sizes those of the configuration."""
    config, _ = configured(**overrides)
    names = ("clients", "cohort", "rounds", "tail_steps", "full_steps", "lr", "batch_size", "seed")
    settings = TrainingSettings(**{name: getattr(config, name) for name in names}, exchange_layer="body")
    return build_federation(data, model_name=config.model, partition="iid", settings=settings, privacy=privacy)


def ledger_of(data, method="asfl", **overrides):
    """The ledger of the whole run, beside its plan and its result."""
    privacy = privacy_of(data, method, **overrides)
    ledger = Ledger(p=privacy.p, radius=privacy.radius)
    result = run_serially(federation_of(data, privacy, **overrides), METHODS[method], ledger=ledger)
    return ledger, privacy, result


GRID = list(product(("gaussian", "laplace"), ("none", "dp-sgd", "dp-fedavg"), ("clear", "randomized:1")))


@pytest.mark.parametrize(("mech", "updates", "labels"), GRID)
def test_without_a_filter_no_run_spends_more_than_its_total(few, mech, updates, labels):
    """Every record takes part in all it can: all are shared each round and enter every step (batches of all 24).

    Catches: labels left out of the plan, steps counted once a round, tail steps forgotten, δ split or used twice.
    """
    delta = None if (mech, updates) == ("laplace", "none") else str(DELTA)
    ledger, privacy, _ = ledger_of(few, mech=mech, updates=updates, labels=labels, batch_size="24", delta=delta)
    spent = ledger.epsilon(delta=DELTA if delta else 0.0).high
    # a bracket of two channels is planned to within a thousandth; a tail step on 48 rows leaves some records out
    assert spent <= TOTAL
    assert spent >= (0.8 if updates == "dp-sgd" else 0.998) * TOTAL
    channels = {"activations"} | ({"labels"} if labels != "clear" else set())
    assert set(ledger.channels) == channels | ({"updates"} if updates != "none" else set())
    assert ledger.samplers == ("lattice",)
    assert ledger.counts_of("activations").max_releases_per_record == 2
    if labels != "clear":
        assert ledger.counts_of("labels").max_releases_per_record == 1
        assert ledger.epsilon(delta=0.0, channel="labels").high <= 1.0 + 1e-12
    if updates == "dp-fedavg":
        assert ledger.counts_of("updates").max_releases_per_record == 2
    assert privacy.budget is None


@pytest.mark.parametrize("updates", ["dp-sgd", "dp-fedavg"])
@pytest.mark.parametrize("mech", ["gaussian", "laplace"])
def test_fedavg_spends_its_whole_total_on_updates(few, mech, updates):
    """2 rounds of τ' + τ = 3 steps are 6 releases, or 2 updates. Catches: τ alone, a share kept for activations."""
    ledger, privacy, _ = ledger_of(few, "fedavg", mech=mech, updates=updates, batch_size="24")
    assert ledger.channels == ("updates",)
    assert ledger.mechanisms == ("gaussian",)
    count = 6 if updates == "dp-sgd" else 2
    assert ledger.counts.max_releases_per_record == count
    spent = ledger.epsilon(delta=DELTA).high
    assert 0.998 * TOTAL <= spent <= TOTAL
    due = gaussian_noise_multiplier(TOTAL, delta=DELTA, num_releases=count)
    assert due <= privacy.update_multiplier <= 1.001 * due
    ledger.clients = clients_of_records(federation_of(few))
    client = ledger.epsilon(delta=DELTA, unit="client").high
    if updates == "dp-fedavg":  # one release covers whatever changes in the client
        assert client == pytest.approx(spent, rel=1e-9)
    else:  # 24 records shift each of six sums by 2C each: z/24
        due = gaussian_epsilon(DELTA, noise_multiplier=privacy.update_multiplier / 24 / math.sqrt(6))
        assert client == pytest.approx(due, rel=1e-6)


@pytest.mark.parametrize("mech", ["gaussian", "laplace"])
@pytest.mark.parametrize("updates", ["none", "dp-sgd", "dp-fedavg"])
def test_with_a_filter_no_record_spends_more_and_training_goes_on(few, mech, updates):
    """Planned for one release and three steps of many more. Catches: a filter of some channels, a budget not asked."""
    delta = None if (mech, updates) == ("laplace", "none") else str(DELTA)
    options = {"labels": "randomized:1", "filter": "individual", "planned_releases": "1", "rounds": "4", "delta": delta}
    if updates == "dp-sgd":
        options["planned_steps"] = "3"
    ledger, privacy, result = ledger_of(few, mech=mech, updates=updates, batch_size="24", **options)
    at = DELTA if delta else 0.0
    assert 0.9 * TOTAL <= privacy.budget.total(delta=at) <= TOTAL
    spent = ledger.epsilon(delta=at).high
    assert 0.5 * TOTAL <= spent <= privacy.budget.total(delta=at) <= TOTAL
    assert ledger.counts_of("labels").max_releases_per_record == 1
    assert result.held_back > 0
    assert [evaluation.round for evaluation in result.evaluations] == [1, 2, 3, 4]
    rounds = {event.round for event in ledger.event_classes if event.channel == "activations"}
    assert rounds <= {0, 1}  # a channel may use what another leaves
    assert all(bool(torch.isfinite(value).all()) for value in result.state.weights.values())


@pytest.mark.parametrize(
    ("own", "labels", "method", "planned"),
    [
        ("clean", "clear", "asfl", 2 * 3),
        ("released", "randomized:1", "asfl", 2 * 1),
        ("released", "clear", "asfl", 2 * 3),  # the labels themselves are not released
        ("clean", "clear", "fedavg", 2 * 3),
    ],
)
def test_planned_steps_are_all_that_read_unreleased_data(few, own, labels, method, planned):
    """τ' = 2, τ = 1, two rounds. Catches: tail steps on released activations planned for, raw ones or labels left out."""
    assert privacy_of(few, method, updates="dp-sgd", own=own, labels=labels).planned_steps == planned


def test_a_filter_plans_without_a_tail_round_too(few):
    """A full step takes 8 of 24 records, two rounds: 2/3 in the mean, so 1. Catches: a division by no shared records."""
    privacy = privacy_of(few, filter="individual", updates="dp-sgd", tail_steps="0")
    assert (privacy.planned_releases, privacy.planned_steps) == (None, 1)


def test_a_filter_plans_for_half_more_than_the_mean(few):
    """By hand: 8 of 24 records a round are shared, 6 rounds: 2 releases in the mean, so 3. A full step takes 8 of 24;
    a tail step 8 of 16, of which 8 are own rows: 1/3 · 1/2. So 2 · (1/3 + 1/6) = 1 a round, 6 in a run, 9 planned."""
    options = {"filter": "individual", "updates": "dp-sgd", "rounds": "6", "full_steps": "2"}
    privacy = privacy_of(few, **options)
    assert (privacy.planned_releases, privacy.planned_steps) == (3, 9)
    asked = privacy_of(few, **options, planned_releases="5", planned_steps="7")
    assert (asked.planned_releases, asked.planned_steps) == (5, 7)
    sampled = privacy_of(few, **options, clients="4", cohort="2")  # 12 records a client, half of the rounds
    assert sampled.planned_releases == math.ceil(1.5 * 6 * 0.5 * 8 / 12)


@pytest.mark.parametrize(("mech", "delta"), [("gaussian", str(DELTA)), ("laplace", None)])
def test_a_planned_release_is_never_lost_to_the_samplers_error(few, mech, delta):
    """Every record is shared in each of 3 planned rounds, under heads that change: none may be held back before.

    Catches: a budget for the sampler's error taken from the first head's tables, which later ones exceed though the
    noise fits.
    """
    ledger, privacy, _ = ledger_of(
        few,
        mech=mech,
        delta=delta,
        batch_size="24",
        placement="exchange",
        filter="individual",
        planned_releases="3",
        rounds="3",
        lr="0.5",
    )
    assert privacy.planned_releases == 3
    assert (ledger.counts.records, ledger.counts.releases) == (48, 3 * 48)


@pytest.mark.parametrize("mech", ["gaussian", "laplace"])
@pytest.mark.parametrize("placement", ["input", "exchange"])
@pytest.mark.parametrize("epsilon", ["0.5", "16"])
def test_one_release_spends_no_more_than_was_asked(few, mech, placement, epsilon):
    """Catches: the sampler's error on top of a multiplier that uses up ε."""
    delta = str(DELTA) if mech == "gaussian" else None
    config, (cell,) = configured(mech=mech, placement=placement, total_epsilon=None, epsilon=epsilon, delta=delta)
    row = execute_run(config, prepare_run(config, cell, data=few), data=few, folder=None).row
    assert row["epsilon_release"] <= float(epsilon)
    assert row["epsilon_release"] >= (1 - 1e-9) * float(epsilon)


def test_pixeldps_calibration_is_the_published_formula_and_its_row_shows_both(few):
    """√(2 ln(1.25/δ))/ε at ε = 16, δ = 1e-5 is .3028, worth 18.9. Catches: the claim in the column of the truth."""
    config, (cell,) = configured(
        calibration="paper", total_epsilon=None, epsilon="16", delta="1e-5", clip="1.0", radius="any"
    )
    run = prepare_run(config, cell, data=few)
    assert run.privacy.noisy_training
    assert run.privacy.noise_multiplier == pytest.approx(0.3028, abs=5e-5)
    outcome = execute_run(config, run, data=few, folder=None)
    assert outcome.row["epsilon_claimed"] == 16.0
    assert 18.5 < outcome.row["epsilon_release"] < 19.5
    assert "not proven" in outcome.statement


def test_labels_that_use_up_the_total_are_refused_in_one_line(few):
    with pytest.raises(ValueError, match="nothing is left") as caught:
        privacy_of(few, labels="randomized:5")
    assert "\n" not in str(caught.value)


def test_noise_once_is_planned_for_one_release(few):
    """z for one release, whatever T. Catches: T releases of one draw, √T too much noise."""
    once = privacy_of(few, noise="once", rounds="9")
    due = gaussian_noise_multiplier(TOTAL, delta=DELTA)
    assert due <= once.noise_multiplier <= due * (1 + 1e-9)
    assert once.planned_releases == 1


def test_a_plan_rests_on_sizes_and_weights_and_on_no_record(few):
    """Catches: noise calibrated on private values: other records, the same plan."""
    other = replace(few, train_inputs=1.0 - few.train_inputs)
    options = {"updates": "dp-sgd", "filter": "individual", "placement": "exchange", "labels": "randomized:1"}
    assert privacy_of(few, **options) == privacy_of(other, **options)
