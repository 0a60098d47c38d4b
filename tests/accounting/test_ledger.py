"""The ledger against hand values, a slow twin and its own copy on disk."""

import json
import math
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asfl_privacy.accounting import Ledger, composed_gaussian_epsilon, gaussian_noise_multiplier
from asfl_privacy.accounting.laplace import laplace_epsilon, laplace_noise_multiplier

GAUSSIAN = {"channel": "activations", "mechanism": "gaussian"}
LAPLACE = {"channel": "activations", "mechanism": "laplace"}


def slow_twin(events, *, delta):
    """ε per record, one record at a time, in exact rationals: (Gaussian alone, Laplace alone, both)."""
    totals = {}
    for mechanism, multiplier, records in events:
        for record in records:
            square, pure = totals.get(record, (Fraction(0), Fraction(0)))
            if mechanism == "gaussian":
                square += 1 / Fraction(multiplier) ** 2
            else:
                pure += 1 / Fraction(multiplier)
            totals[record] = square, pure
    found = {
        record: (composed_gaussian_epsilon(square, delta=delta).high if square else 0.0, float(pure))
        for record, (square, pure) in totals.items()
    }
    return (
        max((gaussian for gaussian, _ in found.values()), default=0.0),
        max((pure for _, pure in found.values()), default=0.0),
        max((gaussian + pure for gaussian, pure in found.values()), default=0.0),
    )


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
            st.sampled_from(["gaussian", "laplace"]),
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
        ledger.record(
            channel="activations", mechanism=mechanism, noise_multiplier=multiplier, round=number // 3, records=records
        )
    gaussian, pure, both = slow_twin(events, delta=1e-5)
    bracket = ledger.epsilon(delta=1e-5)
    assert bracket.high == pytest.approx(both, rel=1e-9)
    assert bracket.high >= both * (1 - 1e-15)
    assert bracket.low <= bracket.high
    if pure == 0.0:
        assert bracket.low == pytest.approx(gaussian, rel=1e-9)
    else:
        strongest = max(laplace_epsilon(1e-5, noise_multiplier=z) for kind, z, _ in events if kind == "laplace")
        assert bracket.low == pytest.approx(max(gaussian, strongest), rel=1e-9)
    assert bracket.delta == (1e-5 if gaussian else 0.0)
    counts = ledger.counts
    assert counts.releases == sum(len(records) for _, _, records in events)
    assert counts.records == len({record for _, _, records in events for record in records})


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


def test_pure_laplace_is_stated_at_delta_zero():
    """Catches: stating a sum of pure ε with the δ it was asked at, or the reduced ε with δ=0."""
    ledger = Ledger(p=1, radius=0.1)
    ledger.record(**LAPLACE, noise_multiplier=10.0, round=0, records=[1] * 100)
    pure, asked = ledger.epsilon(delta=0.0), ledger.epsilon(delta=0.05)
    assert (pure.low, pure.high, pure.delta) == (10.0, 10.0, 0.0)
    assert (asked.high, asked.delta, ledger.delta_used(0.05)) == (10.0, 0.0, 0.0)
    assert asked.low <= laplace_epsilon(0.05, noise_multiplier=10.0)
    assert ledger.largest_release(delta=0.05) == 0.1


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
        ({"mechanism": "uniform"}, "gaussian, laplace"),
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
        ({"p": 2, "radius": 0.1, "arithmetic": "exact"}, "ideal arithmetic"),
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


def reseal(path, change):
    """Rewrite a ledger's body with a valid checksum, so that only the values are wrong."""
    from asfl_privacy.accounting.storage import write_document

    body = json.loads(path.read_text())["body"]
    change(body)
    write_document(path, name="asfl-privacy ledger", version=1, body=body)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body["classes"][0].update(counts=[-1, 1]), "counts holds -1"),
        (lambda body: body["classes"][0].update(counts=[1]), "one count each"),
        (lambda body: body["classes"][0].update(counts=[0.5, 1.0]), "vector of integers"),
        (lambda body: body["classes"][0].update(records=[7, 3]), "sorted and distinct"),
        (lambda body: body["classes"][0].update(records=[3, 3]), "sorted and distinct"),
        (lambda body: body["classes"][0].update(noise_multiplier=-1.0), "noise_multiplier is -1.0"),
        (lambda body: body["classes"][0].update(noise_multiplier="10"), "noise_multiplier is '10'"),
        (lambda body: body["classes"][0].update(round=True), "round is True"),
        (lambda body: body["classes"][0].update(extra=1), "exactly"),
        (lambda body: body["classes"].append(body["classes"][0]), "occurs twice"),
        (lambda body: body.update(radius=-0.1), "radius is -0.1"),
        (lambda body: body.pop("p"), "keys"),
        (lambda body: body.update(classes={}), "keys"),
    ],
)
def test_a_ledger_with_a_wrong_value_is_refused(tmp_path, change, words):
    path = tmp_path / "ledger.json"
    ledger = Ledger(p=2, radius=0.1)
    ledger.record(**GAUSSIAN, noise_multiplier=10.0, round=0, records=[3, 7])
    ledger.save(path)
    reseal(path, change)
    with pytest.raises(ValueError, match=words) as caught:
        Ledger.load(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_thousand_rounds_of_two_thousand_records_are_counted_in_seconds():
    ledger = Ledger(p=2, radius=0.1)
    records = np.arange(2000)
    start = time.perf_counter()
    for number in range(1000):
        ledger.record(**GAUSSIAN, noise_multiplier=10.0 + number % 3, round=number, records=records)
    bracket = ledger.epsilon(delta=1e-5)
    assert time.perf_counter() - start < 10.0
    exact = 334 / Fraction(100) + 333 / Fraction(121) + 333 / Fraction(144)
    assert bracket == composed_gaussian_epsilon(exact, delta=1e-5)
