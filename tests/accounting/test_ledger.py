"""The ledger against hand values, a slow twin and its own copy on disk."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asfl_privacy.accounting import Ledger, LossEvent, compose, composed_gaussian_epsilon, gaussian_noise_multiplier
from asfl_privacy.accounting.laplace import laplace_epsilon, laplace_noise_multiplier

GAUSSIAN = {"channel": "activations", "mechanism": "gaussian"}
LAPLACE = {"channel": "activations", "mechanism": "laplace"}
LABELS = {"channel": "labels", "mechanism": "randomized-response", "num_classes": 10}


def slow_twin(events, *, delta):
    """One record at a time, one loss per release: (Gaussian alone, basic sums, bracket's low end, its high end)."""
    losses = {}
    for mechanism, multiplier, records in events:
        num_classes = 10 if mechanism == "randomized-response" else None
        loss = LossEvent(mechanism=mechanism, noise_multiplier=multiplier, count=1, num_classes=num_classes)
        for record in records:
            losses.setdefault(record, []).append(loss)
    found = []
    for mine in losses.values():
        square = sum(
            (1 / Fraction(loss.noise_multiplier) ** 2 for loss in mine if loss.mechanism == "gaussian"), Fraction(0)
        )
        pure = sum((1 / Fraction(loss.noise_multiplier) for loss in mine if loss.mechanism != "gaussian"), Fraction(0))
        gaussian = composed_gaussian_epsilon(square, delta=delta).high if square else 0.0
        bracket = compose(mine, delta=delta)
        found.append((gaussian, gaussian + float(pure), bracket.low, bracket.high))
    return tuple(max(column) for column in zip(*found, strict=True)) if found else (0.0, 0.0, 0.0, 0.0)


def test_composition_agrees_with_the_written_values(golden, agrees):
    for row in golden["composition"]:
        ledger = Ledger(p=2, radius=0.1)
        for number in range(row["num_releases"]):
            ledger.record(**GAUSSIAN, noise_multiplier=row["noise_multiplier"], round=number, records=[5, 9])
        bracket = ledger.epsilon(delta=1e-5)
        assert agrees(bracket.high, row["epsilon"])
        assert bracket.low <= bracket.high <= bracket.low * (1 + 1e-9)
        assert bracket.delta == 1e-5


def test_a_mixed_ledger_keeps_the_strong_releases():
    """[(1, ×100), (100, ×1)] → at least 91.8. Catches: averaging multipliers, or keeping the last one only."""
    ledger = Ledger(p=2, radius=0.1)
    ledger.record(**GAUSSIAN, noise_multiplier=1.0, round=0, records=[3] * 100)
    ledger.record(**GAUSSIAN, noise_multiplier=100.0, round=1, records=[3])
    assert 91.8 <= ledger.epsilon(delta=1e-5).low <= 91.9


def test_the_scales_agree_with_the_written_values(golden, agrees):
    """Catches: composing at kR with z·k, or capping below the distance asked."""
    ledger = Ledger(p=2, radius=0.1)
    multiplier = gaussian_noise_multiplier(1.0, delta=1e-5)
    ledger.record(**GAUSSIAN, noise_multiplier=multiplier, round=0, records=[0])
    for row in golden["scales"]:
        assert agrees(ledger.epsilon(delta=1e-5, distance=row["distance"]).high, row["epsilon"]), row
        assert agrees(ledger.largest_release(delta=1e-5, distance=row["distance"]), row["epsilon"]), row


def test_once_costs_one_release(golden, agrees):
    """z=10: .341 for one release, 4.377 for a hundred."""
    ledger = Ledger(p=2, radius=0.1)
    ledger.record(**GAUSSIAN, noise_multiplier=10.0, round=0, records=np.arange(50))
    assert agrees(ledger.epsilon(delta=1e-5).high, ".341")


@settings(max_examples=60, deadline=None)
@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(["gaussian", "laplace", "randomized-response"]),
            st.sampled_from([0.7, 1.0, 3.0, 11.0, 40.0]),
            st.lists(st.integers(0, 6), min_size=1, max_size=5),
        ),
        max_size=12,
    )
)
def test_the_total_is_the_largest_over_records_of_all_their_releases(events):
    """Catches: the mean over records, a maximum over classes instead of a sum, dropped duplicates."""
    ledger = Ledger(p=2, radius=0.1)
    for number, (mechanism, multiplier, records) in enumerate(events):
        kind = LABELS if mechanism == "randomized-response" else {"channel": "activations", "mechanism": mechanism}
        ledger.record(**kind, noise_multiplier=multiplier, round=number // 3, records=records)
    gaussian, basic, low, high = slow_twin(events, delta=1e-5)
    bracket = ledger.epsilon(delta=1e-5)
    assert low * (1 - 1e-9) <= bracket.high <= min(high, basic) * (1 + 1e-6)
    assert bracket.low <= bracket.high
    assert low * (1 - 2e-3) - 1e-6 <= bracket.low <= high * (1 + 1e-9)
    assert bracket.delta in ((1e-5,) if gaussian else (0.0, 1e-5))
    if bracket.delta == 0.0:
        assert bracket.high >= basic * (1 - 1e-15)
    counts = ledger.counts
    assert counts.releases == sum(len(records) for _, _, records in events)
    assert counts.records == len({record for _, _, records in events for record in records})
    if gaussian == basic:
        assert bracket.low == pytest.approx(gaussian, rel=1e-9)


def test_many_different_multipliers_round_outward():
    """More multipliers than are summed exactly. Catches: dropping the error bound of the float sum."""
    rng = np.random.default_rng(0)
    multipliers = rng.uniform(1.0, 9.0, size=200)
    for kind, power in ((GAUSSIAN, 2), (LAPLACE, 1)):
        ledger = Ledger(p=2, radius=0.1)
        for number, multiplier in enumerate(multipliers):
            ledger.record(**kind, noise_multiplier=float(multiplier), round=number, records=[0, 1])
        exact = sum(1 / Fraction(float(multiplier)) ** power for multiplier in multipliers)
        if power == 2:
            inner = composed_gaussian_epsilon(exact, delta=1e-5)
            bracket = ledger.epsilon(delta=1e-5)
            assert bracket.low <= inner.low
            assert inner.high <= bracket.high <= inner.high * (1 + 1e-9)
        else:
            bracket = ledger.epsilon(delta=0.0)
            assert Fraction(bracket.low) <= exact <= Fraction(bracket.high)
            assert bracket.high - bracket.low <= 1e-9 * bracket.high


def test_pure_ledgers_are_sums_at_delta_zero_and_less_above():
    """100 × ε0=.1: basic 10 at δ=0; PLD 4.220 at δ=1e-5. Catches: the δ of the one beside the ε of the other."""
    ledger = Ledger(p=1, radius=0.1)
    ledger.record(**LAPLACE, noise_multiplier=10.0, round=0, records=[1] * 100)
    pure, asked = ledger.epsilon(delta=0.0), ledger.epsilon(delta=1e-5)
    assert (pure.low, pure.high, pure.delta) == (10.0, 10.0, 0.0)
    assert 4.2202 <= asked.low <= asked.high <= 4.2206
    assert (asked.delta, ledger.delta_used(1e-5), ledger.delta_used(0.0)) == (1e-5, 1e-5, 0.0)
    assert ledger.largest_release(delta=0.05) == 0.1
    single = Ledger(p=1, radius=0.1)
    single.record(**LAPLACE, noise_multiplier=10.0, round=0, records=[1])
    assert single.epsilon(delta=0.01).high == laplace_epsilon(0.01, noise_multiplier=10.0)


def test_labels_drawn_once_join_the_activations():
    """Activations 4.377 and a remembered ε=1 label: 5.03, not 5.38; 100 fresh draws of it alone: 37.2."""
    ledger = Ledger(p=2, radius=0.1)
    ledger.record(**GAUSSIAN, noise_multiplier=10.0, round=0, records=[4] * 100)
    ledger.record(**LABELS, noise_multiplier=1.0, round=0, records=[4])
    assert round(ledger.epsilon(delta=1e-5).high, 2) == 5.03
    assert round(ledger.epsilon(delta=1e-5, channel="activations").high, 3) == 4.377
    alone = ledger.epsilon(delta=0.0, channel="labels")
    assert (alone.high, alone.delta) == (1.0, 0.0)
    assert 0.99 <= ledger.epsilon(delta=1e-5, channel="labels").low <= 1.0
    fresh = Ledger(p=2, radius=0.1)
    fresh.record(**LABELS, noise_multiplier=1.0, round=0, records=[4] * 100)
    assert round(fresh.epsilon(delta=1e-5).high, 1) == 37.2
    assert fresh.epsilon(delta=1e-5, distance=math.inf) == fresh.epsilon(delta=1e-5)
    assert ledger.counts_of("labels").releases == 1
    assert ledger.counts_of("updates").records == 0
    assert ledger.epsilon(delta=1e-5, channel="updates").high == 0.0
    assert ledger.largest_release(delta=1e-5, channel="labels") == 1.0


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_multipliers=st.sampled_from([1, 3, 30]))
def test_many_records_with_different_histories_are_all_covered(seed, num_multipliers):
    """Hundreds of incomparable records. Catches: a dominating record that misses one, or one that is far too large."""
    rng = np.random.default_rng(seed)
    ledger, losses = Ledger(p=2, radius=0.1), {}
    for number in range(30):
        z = 3.0 + number % num_multipliers
        members = rng.choice(100, size=20, replace=False)
        kind = (LAPLACE, LABELS, GAUSSIAN)[number % 3]
        ledger.record(**kind, noise_multiplier=z, round=number, records=members)
        num_classes = 10 if kind is LABELS else None
        loss = LossEvent(mechanism=kind["mechanism"], noise_multiplier=z, count=1, num_classes=num_classes)
        for record in members:
            losses.setdefault(int(record), []).append(loss)
    brackets = [compose(mine, delta=1e-5) for mine in losses.values()]
    low, high = max(bracket.low for bracket in brackets), max(bracket.high for bracket in brackets)
    found = ledger.epsilon(delta=1e-5)
    assert low <= found.high <= high * 1.35
    assert 0.75 * low <= found.low <= high


def test_the_sampler_error_of_every_release_is_charged():
    """By hand: 10 releases with e=.001 on top of the ideal ε at δ·e^(−.005); 5 records have fewer."""
    exact, drawn = Ledger(p=2, radius=0.1), Ledger(p=2, radius=0.1)
    for ledger, values in ((exact, {}), (drawn, {"sampler": "lattice", "epsilon_excess": 1e-3})):
        ledger.record(**GAUSSIAN, noise_multiplier=10.0, round=0, records=[0] * 10 + [1, 2], **values)
    expected = exact.epsilon(delta=1e-5 * math.exp(-0.005)).high + 0.01
    found = drawn.epsilon(delta=1e-5)
    assert expected * (1 - 1e-12) <= found.high <= expected * (1 + 1e-9)
    assert found.low == pytest.approx(exact.epsilon(delta=1e-5 * math.exp(0.005)).low - 0.01, rel=1e-9)
    one = exact.largest_release(delta=1e-5 * math.exp(-0.0005)) + 1e-3
    assert drawn.largest_release(delta=1e-5) == pytest.approx(one, rel=1e-9)
    assert exact.epsilon(delta=1e-5).high < found.high
    tailed = Ledger(p=1, radius=0.1)
    tailed.record(**LAPLACE, noise_multiplier=2.0, round=0, records=[0] * 4, sampler="lattice", tail_probability=1e-9)
    assert (
        tailed.epsilon(delta=1e-5).high
        >= compose(
            [LossEvent(mechanism="laplace", noise_multiplier=2.0, count=4)], delta=1e-5 - 4e-9 * math.exp(1.9)
        ).low
    )
    for question in (tailed.epsilon, tailed.largest_release):
        with pytest.raises(ValueError, match="tail probability, which only a delta can cover"):
            question(delta=0.0)
    assert tailed.epsilon(delta=1e-5).delta == 1e-5
    assert tailed.epsilon(delta=1e-9).high == math.inf


def test_what_drew_the_noise_is_known():
    """Catches: a seeded draw among others that the ledger forgets."""
    ledger = Ledger(p=2, radius=0.1)
    assert (ledger.samplers, ledger.is_reproducible) == ((), False)
    for sampler, reproducible in (("lattice", False), ("float", False), ("seeded", True), ("lattice", True)):
        ledger.record(**GAUSSIAN, noise_multiplier=1.0, round=0, records=[0], sampler=sampler)
        assert ledger.is_reproducible is reproducible
    assert ledger.samplers == ("float", "lattice", "seeded")


def test_a_client_is_charged_for_all_its_records():
    """By hand: client 0 has 3 activations at z=3 and 2 labels; client 1 has 2 of one record. Catches: the maximum record."""
    ledger = Ledger(p=2, radius=0.1, clients=[0, 0, 1, 0])
    ledger.record(**GAUSSIAN, noise_multiplier=3.0, round=0, records=[0, 1, 3])
    ledger.record(**GAUSSIAN, noise_multiplier=3.0, round=1, records=[2, 2])
    assert ledger.epsilon(delta=1e-5, unit="client") == composed_gaussian_epsilon(Fraction(3, 9), delta=1e-5)
    assert ledger.epsilon(delta=1e-5) == composed_gaussian_epsilon(Fraction(2, 9), delta=1e-5)
    ledger.record(**LABELS, noise_multiplier=1.0, round=0, records=[0, 1])
    joint = compose(
        [
            LossEvent(mechanism="gaussian", noise_multiplier=3.0, count=3),
            LossEvent(mechanism="randomized-response", noise_multiplier=1.0, count=2, num_classes=10),
        ],
        delta=1e-5,
    )
    assert joint.low <= ledger.epsilon(delta=1e-5, unit="client").high <= joint.high * (1 + 1e-9)


def test_client_totals_need_the_client_of_every_record():
    ledger = Ledger(p=2, radius=0.1)
    ledger.record(**GAUSSIAN, noise_multiplier=3.0, round=0, records=[5])
    with pytest.raises(ValueError, match="does not know whose the records are"):
        ledger.epsilon(delta=1e-5, unit="client")
    ledger.clients = np.zeros(5, dtype=np.int32)
    with pytest.raises(ValueError, match="record 5 has no client"):
        ledger.epsilon(delta=1e-5, unit="client")
    for bad in ([-1], [0.5], [], [2**40]):
        with pytest.raises(ValueError, match="clients"):
            ledger.clients = bad
    with pytest.raises(ValueError, match="record, client"):
        ledger.epsilon(delta=1e-5, unit="device")
    with pytest.raises(ValueError, match="activations, labels, updates"):
        ledger.epsilon(delta=1e-5, channel="gradients")


def test_every_class_answers_for_its_round():
    ledger = Ledger(p=2, radius=0.1)
    for number in range(3):
        for part in ([9, 4], [4]):
            ledger.record(**GAUSSIAN, noise_multiplier=3.0, round=number, records=part)
    ids, counts = ledger.releases_of(ledger.event_classes[1])
    assert (ledger.event_classes[1].round, ids.tolist(), counts.tolist()) == (1, [4, 9], [2, 1])
    with pytest.raises(ValueError, match="no such class"):
        Ledger(p=2, radius=0.1).releases_of(ledger.event_classes[1])


def test_facts_are_plain_and_kept(tmp_path):
    facts = {"delta": 1e-5, "words": ["a", None, True], "inner": {"n": 3}}
    ledger = Ledger(p=2, radius="any", facts=facts, clients=np.arange(300) % 7)
    ledger.save(tmp_path / "ledger.json")
    back = Ledger.load(tmp_path / "ledger.json")
    assert back == ledger
    assert back.facts == facts
    assert back.clients.tolist() == ledger.clients.tolist()
    assert back != Ledger(p=2, radius="any", facts={**facts, "delta": 2e-5}, clients=ledger.clients)
    assert back != Ledger(p=2, radius="any", facts=facts)
    for bad in ({"a": math.nan}, {"a": (1,)}, {1: 2}, {"a": np.float64(1.0)}, {"a": object()}, [1], "text"):
        with pytest.raises(ValueError, match="plain JSON values"):
            ledger.facts = bad
    facts["late"] = math.inf
    with pytest.raises(ValueError, match="plain JSON values"):
        ledger.save(tmp_path / "ledger.json")
    assert Ledger.load(tmp_path / "ledger.json") == back


def test_a_budget_spent_in_two_parts_is_not_overrun_by_rounding():
    ledger = Ledger(p=1, radius=0.1)
    for number, part in enumerate((0.1, 0.9)):
        ledger.record(**LAPLACE, noise_multiplier=laplace_noise_multiplier(part), round=number, records=[1])
    assert ledger.epsilon(delta=0.0).high == 1.0


def test_any_two_records_use_the_whole_record_multiplier():
    """Catches: extrapolating z/k past what two records of the box can differ by, and taking unknown for protected."""
    known, unknown = Ledger(p=2, radius=0.1), Ledger(p=2, radius=0.1)
    known.record(**GAUSSIAN, noise_multiplier=10.0, round=0, records=[0], whole_record_multiplier=2.0)
    unknown.record(**GAUSSIAN, noise_multiplier=10.0, round=0, records=[0])
    at_two = composed_gaussian_epsilon(Fraction(1, 4), delta=1e-5).high
    assert known.epsilon(delta=1e-5, distance=math.inf).high == at_two
    assert known.epsilon(delta=1e-5, distance=1000.0).high == at_two
    assert known.epsilon(delta=1e-5, distance=4.0).high == composed_gaussian_epsilon(Fraction(16, 100), delta=1e-5).high
    assert unknown.epsilon(delta=1e-5, distance=math.inf).high == math.inf
    assert unknown.epsilon(delta=1e-5, distance=1000.0).high > at_two


def test_radius_any_is_the_same_at_every_distance():
    ledger = Ledger(p=2, radius="any")
    ledger.record(**GAUSSIAN, noise_multiplier=3.0, round=0, records=[0])
    figures = {ledger.epsilon(delta=1e-5, distance=distance).high for distance in (1.0, 2.0, 50.0, math.inf)}
    assert len(figures) == 1
    with pytest.raises(ValueError, match="with radius any"):
        ledger.record(**GAUSSIAN, noise_multiplier=3.0, round=0, records=[0], whole_record_multiplier=1.0)


def test_an_empty_ledger_has_spent_nothing():
    ledger = Ledger(p="inf", radius=0.1)
    assert ledger.epsilon(delta=1e-5).high == 0.0
    assert ledger.largest_release(delta=1e-5) == 0.0
    assert (ledger.p, ledger.counts.releases, ledger.channels) == (math.inf, 0, ())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier is 0.0"),
        ({"noise_multiplier": -1.0}, "noise_multiplier is -1.0"),
        ({"noise_multiplier": math.nan}, "noise_multiplier is nan"),
        ({"noise_multiplier": math.inf}, "noise_multiplier is inf"),
        ({"whole_record_multiplier": math.nan}, "whole_record_multiplier is nan"),
        ({"whole_record_multiplier": 2.0}, "cannot exceed noise_multiplier"),
        ({"mechanism": "uniform"}, "gaussian, laplace, randomized-response"),
        ({"mechanism": "randomized-response", "num_classes": 10}, "covers labels alone"),
        ({"sampler": "dice"}, "lattice, float, seeded"),
        ({"epsilon_excess": math.nan}, "epsilon_excess is nan"),
        ({"tail_probability": 1.0}, "tail_probability is 1.0"),
        ({"channel": "gradients"}, "activations, labels, updates"),
        ({"round": -1}, "round is -1"),
        ({"round": 1.0}, "round is 1.0"),
        ({"records": []}, "records must be a non-empty vector"),
        ({"records": [0.0, 1.0]}, "vector of integers"),
        ({"records": [[0, 1]]}, "vector of integers"),
        ({"records": [True]}, "vector of integers"),
        ({"records": [-1]}, "holds -1"),
        ({"records": ["a"]}, "vector of integers"),
    ],
)
def test_bad_records_are_refused_and_change_nothing(change, words):
    ledger = Ledger(p=2, radius=0.1)
    values = {**GAUSSIAN, "noise_multiplier": 1.0, "round": 0, "records": [0]} | change
    with pytest.raises(ValueError, match=words) as caught:
        ledger.record(**values)
    assert "\n" not in str(caught.value)
    assert ledger == Ledger(p=2, radius=0.1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"p": 3, "radius": 0.1}, "p is 3"),
        ({"p": 2, "radius": 0.0}, "radius is 0.0"),
        ({"p": 2, "radius": math.inf}, "radius is inf"),
        ({"p": 2, "radius": "all"}, "radius is 'all'"),
        ({"p": 2, "radius": 0.1, "privacy_unit": "one client"}, "privacy_unit"),
    ],
)
def test_unknown_units_and_relations_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Ledger(**arguments)


@pytest.mark.parametrize("distance", [0.5, 0.0, -1.0, math.nan, -math.inf])
def test_distances_below_the_radius_are_refused(distance):
    """Δ(kR) ≤ k·Δ(R) fails for k < 1 once a certificate has slack."""
    with pytest.raises(ValueError, match="distance is"):
        Ledger(p=2, radius=0.1).epsilon(delta=1e-5, distance=distance)


def test_gaussian_totals_need_a_delta():
    ledger = Ledger(p=2, radius=0.1)
    ledger.record(**GAUSSIAN, noise_multiplier=1.0, round=0, records=[0])
    for question in (ledger.epsilon, ledger.largest_release):
        with pytest.raises(ValueError, match=r"delta is 0\.0"):
            question(delta=0.0)


def test_a_ledger_read_back_and_extended_equals_the_one_kept_in_memory(tmp_path):
    """Catches: writing rounded numbers, losing counts, merging classes on load."""
    kept = Ledger(p="inf", radius=1 / 3)
    for number in range(5):
        kept.record(**GAUSSIAN, noise_multiplier=1 / 7 + number, round=number, records=[1, 5, 5, 9])
        kept.record(
            **LAPLACE, noise_multiplier=math.pi, round=number, records=np.array([5, 2]), whole_record_multiplier=0.1
        )
    kept.save(tmp_path / "ledger.json")
    back = Ledger.load(tmp_path / "ledger.json")
    assert back == kept
    for ledger in (kept, back):
        ledger.record(**GAUSSIAN, noise_multiplier=1 / 7, round=0, records=[5])
    assert back == kept
    assert back.epsilon(delta=1e-5) == kept.epsilon(delta=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.json"]


def reseal(path, change, *, version):
    """Rewrite a ledger's body with a valid checksum, so that only the values are wrong."""
    from asfl_privacy.accounting.storage import write_document

    body = json.loads(path.read_text())["body"]
    change(body)
    write_document(path, name="asfl-privacy ledger", version=version, body=body)


FIRST_VERSION = {
    "p": 2,
    "radius": 0.1,
    "privacy_unit": "one record (example-level, local)",
    "arithmetic": "ideal arithmetic",
    "heads_note": Ledger(p=2, radius=0.1).heads_note,
    "classes": [
        {
            "channel": "activations",
            "mechanism": "gaussian",
            "noise_multiplier": 10.0,
            "round": 0,
            "whole_record_multiplier": 0.5,
            "records": [3, 7],
            "counts": [1, 4],
        }
    ],
}
"""A body of version 1, as the first release of the format documented it."""


def test_a_file_of_version_one_is_read_as_float_noise(tmp_path):
    """Catches: an old file refused, or taken for exact."""
    path = tmp_path / "ledger.json"
    path.write_text(json.dumps({"body": FIRST_VERSION}))
    reseal(path, lambda body: None, version=1)
    ledger = Ledger(p=2, radius=0.1)
    ledger.record(**GAUSSIAN, noise_multiplier=10.0, round=0, records=[3, 7, 7, 7, 7], whole_record_multiplier=0.5)
    back = Ledger.load(path)
    assert back == ledger
    assert back.samplers == ("float",)
    back.save(path)
    assert json.loads(path.read_text())["version"] == 2
    assert Ledger.load(path) == ledger


COMMON = [
    (lambda body: body["classes"][0].update(noise_multiplier=-1.0), "noise_multiplier is -1.0"),
    (lambda body: body["classes"][0].update(noise_multiplier="10"), "noise_multiplier is '10'"),
    (lambda body: body["classes"][0].update(round=True), "round is True"),
    (lambda body: body["classes"][0].update(extra=1), "exactly"),
    (lambda body: body["classes"].append(body["classes"][0]), "occurs twice"),
    (lambda body: body.update(radius=-0.1), "radius is -0.1"),
    (lambda body: body.pop("p"), "keys"),
    (lambda body: body.update(surplus=1), "keys"),
    (lambda body: body.update(classes={}), "classes must be a list"),
]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *COMMON,
        (lambda body: body["classes"][0].update(counts=[-1, 1]), "counts holds -1"),
        (lambda body: body["classes"][0].update(counts=[1]), "one count each"),
        (lambda body: body["classes"][0].update(counts=[0.5, 1.0]), "vector of integers"),
        (lambda body: body["classes"][0].update(records=[7, 3]), "sorted and distinct"),
        (lambda body: body["classes"][0].update(records=[3, 3]), "sorted and distinct"),
        (lambda body: body.update(arithmetic="exact"), "ideal arithmetic"),
        (lambda body: body["classes"][0].update(sampler="lattice"), "exactly"),
    ],
)
def test_a_file_of_version_one_with_a_wrong_value_is_refused(tmp_path, change, words):
    path = tmp_path / "ledger.json"
    path.write_text(json.dumps({"body": FIRST_VERSION}))
    reseal(path, change, version=1)
    with pytest.raises(ValueError, match=words) as caught:
        Ledger.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *COMMON,
        (lambda body: body["classes"][0]["records"].update(counts=-1), "counts is -1"),
        (lambda body: body["classes"][0]["records"].update(length=3), "exactly 2 integers"),
        (lambda body: body["classes"][0].update(records=[3, 7]), "exactly start, length, gaps and counts"),
        (lambda body: body["classes"][0].update(sampler="dice"), "lattice, float, seeded"),
        (lambda body: body["classes"][0].update(tail_probability=-1.0), "tail_probability is -1.0"),
        (lambda body: body.update(clients=[0, 1]), "clients must be null"),
        (lambda body: body.update(facts=[]), "facts is a list"),
        (lambda body: body.update(arithmetic="ideal arithmetic"), "keys"),
    ],
)
def test_a_ledger_with_a_wrong_value_is_refused(tmp_path, change, words):
    path = tmp_path / "ledger.json"
    ledger = Ledger(p=2, radius=0.1)
    ledger.record(**GAUSSIAN, noise_multiplier=10.0, round=0, records=[3, 7])
    ledger.save(path)
    reseal(path, change, version=2)
    with pytest.raises(ValueError, match=words) as caught:
        Ledger.load(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_thousand_rounds_of_many_records_are_counted_exactly(tmp_path):
    """Also in any order and with repetitions; the file takes less than a byte a release."""
    ledger, rng = Ledger(p=2, radius=0.1), np.random.default_rng(0)
    for number in range(1000):
        records = rng.permutation(2000)[: 2000 - number % 2]
        ledger.record(**GAUSSIAN, noise_multiplier=10.0 + number % 3, round=number, records=records)
    bracket = ledger.epsilon(delta=1e-5)
    exact = 334 / Fraction(100) + 333 / Fraction(121) + 333 / Fraction(144)
    assert bracket == composed_gaussian_epsilon(exact, delta=1e-5)
    assert ledger.counts.releases == 1_999_500
    ledger.save(tmp_path / "ledger.json")
    assert (tmp_path / "ledger.json").stat().st_size < 1_999_500
    assert Ledger.load(tmp_path / "ledger.json") == ledger


def test_more_multipliers_than_are_told_apart_round_outward():
    """400 Laplace multipliers of one record among many ids. Catches: merging them at the weaker end."""
    ledger = Ledger(p=1, radius=0.1)
    for number in range(400):
        ledger.record(**LAPLACE, noise_multiplier=20.0 + number, round=number, records=[70_000, number % 3])
    losses = [LossEvent(mechanism="laplace", noise_multiplier=20.0 + number, count=1) for number in range(400)]
    exact, found = compose(losses, delta=1e-5), ledger.epsilon(delta=1e-5)
    assert exact.low <= found.high <= exact.high * 1.05
    assert exact.low * 0.95 <= found.low <= exact.high


def test_hundreds_of_calls_for_one_class_all_count():
    """Catches: keeping the last columns only when many are added up."""
    ledger = Ledger(p=2, radius=0.1)
    for number in range(200):
        ledger.record(**GAUSSIAN, noise_multiplier=3.0, round=0, records=[number % 5, 7])
    assert ledger.counts.releases == 400
    assert ledger.counts.max_releases_per_record == 200
    assert ledger.releases_of(ledger.event_classes[0])[1].tolist() == [40, 40, 40, 40, 40, 200]
