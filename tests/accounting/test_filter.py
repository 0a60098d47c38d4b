"""Individual filters: no record is ever released past its budget, and none is refused within it."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asfl_privacy.accounting.budget import TOLERANCE
from asfl_privacy.accounting.filter import RecordFilter
from asfl_privacy.accounting.ledger import Ledger

MECHANISMS = st.sampled_from(["gaussian", "laplace", "randomized-response"])


def charge_of(mechanism: str, noise_multiplier: float) -> Fraction:
    return 1 / Fraction(noise_multiplier) ** (2 if mechanism == "gaussian" else 1)


class ExactFilter:
    """The slow, obvious twin: one exact rational per record and budget."""

    def __init__(self, num_records, budgets):
        self.budgets = budgets
        self.spent = [{key: Fraction(0) for key in budgets} for _ in range(num_records)]

    def charge(self, record, mechanism, noise_multiplier):
        key = "gaussian" if mechanism == "gaussian" else "pure"
        self.spent[record][key] += charge_of(mechanism, noise_multiplier)

    def would_spend(self, record, mechanism, noise_multiplier):
        key = "gaussian" if mechanism == "gaussian" else "pure"
        return self.spent[record][key] + charge_of(mechanism, noise_multiplier), self.budgets[key]


@settings(max_examples=150, deadline=None)
@given(
    budgets=st.tuples(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3)),
    steps=st.lists(
        st.tuples(MECHANISMS, st.floats(0.03, 300.0), st.lists(st.integers(0, 3), min_size=1, max_size=6)), max_size=25
    ),
)
def test_no_sequence_of_releases_exceeds_a_budget_and_none_within_it_is_refused(budgets, steps):
    """Against exact rationals. Catches: charges rounded down, a tolerance larger than declared, budgets swapped,
    a record named twice and charged once."""
    guard = RecordFilter(4, gaussian_budget=budgets[0], pure_budget=budgets[1])
    twin = ExactFilter(4, {"gaussian": Fraction(budgets[0]), "pure": Fraction(budgets[1])})
    for mechanism, z, records in steps:
        mask = guard.admit(records, mechanism=mechanism, noise_multiplier=z)
        for record, admitted in zip(records, mask, strict=True):
            spent, budget = twin.would_spend(record, mechanism, z)
            if spent <= budget:
                assert admitted
            if admitted:
                assert spent <= budget * (1 + TOLERANCE)
                twin.charge(record, mechanism, z)
        if mask.any():
            guard.charge(np.asarray(records)[mask], mechanism=mechanism, noise_multiplier=z)


@pytest.mark.parametrize(
    "parts", [[0.1] * 10, [0.1, 0.9], [0.3, 0.3, 0.4], [1 / 3] * 3, [0.7, 0.1, 0.2], [1e-5] * 10**5]
)
def test_a_budget_of_one_may_be_spent_in_parts(parts):
    """The parts given as ε or μ² and turned into float multipliers. Catches: sums that are refused by rounding."""
    for mechanism, power in [("laplace", 1), ("gaussian", 2)]:
        guard = RecordFilter(1, gaussian_budget=1.0, pure_budget=1.0)
        if len(parts) > 1000:
            guard.charge([0] * len(parts), mechanism=mechanism, noise_multiplier=(1 / parts[0]) ** (1 / power))
        else:
            for part in parts:
                guard.charge([0], mechanism=mechanism, noise_multiplier=(1 / part) ** (1 / power))
        with pytest.raises(ValueError, match="past the budget is refused"):
            guard.charge([0], mechanism=mechanism, noise_multiplier=1e4)


def test_many_small_charges_at_the_very_end_stay_within_the_tolerance():
    """1.9 of the smallest units each, after one charge close to the end. Catches: charges rounded down or to nearest."""
    first, small = 1 / (1 + 2.0**-40 - 2.0**-44), 2.0**60 / 1.9
    guard = RecordFilter(1, pure_budget=1.0)
    guard.charge([0], mechanism="laplace", noise_multiplier=first)
    fits = int(guard.admit(np.zeros(200_000, dtype=int), mechanism="laplace", noise_multiplier=small).sum())
    assert 10_000 < fits < 200_000
    assert 1 / Fraction(first) + fits / Fraction(small) <= 1 + TOLERANCE


@pytest.mark.parametrize("excess", [2.0**-39, 2.0**-35, 2.0**-30, 2.0**-20])
def test_what_exceeds_the_tolerance_is_refused(excess):
    """Catches: a tolerance larger than the total counts."""
    guard = RecordFilter(1, gaussian_budget=1.0, pure_budget=1.0)
    assert not guard.admit([0], mechanism="laplace", noise_multiplier=1 / (1 + excess))[0]
    assert not guard.admit([0], mechanism="gaussian", noise_multiplier=math.sqrt(1 / (1 + excess)))[0]
    guard.charge([0], mechanism="laplace", noise_multiplier=2.0)
    assert not guard.admit([0], mechanism="laplace", noise_multiplier=1 / (0.5 + excess))[0]
    assert guard.admit([0], mechanism="laplace", noise_multiplier=1 / (0.5 + 2.0**-45))[0]


def test_the_ledger_of_all_that_was_admitted_is_within_the_preset_total():
    """Catches: a total of the budget without its tolerance, or of something else than what is charged."""
    generator = np.random.default_rng(0)
    guard = RecordFilter(50, gaussian_budget=0.5, pure_budget=0.8)
    ledger = Ledger(p=2, radius=1.0)
    for round_number in range(60):
        mechanism = ("gaussian", "laplace")[round_number % 2]
        z = float(generator.choice([3.0, 5.0, 8.0]))
        records = generator.integers(0, 50, size=40)
        mask = guard.admit(records, mechanism=mechanism, noise_multiplier=z)
        if mask.any():
            guard.charge(records[mask], mechanism=mechanism, noise_multiplier=z)
            ledger.record(
                channel="activations",
                mechanism=mechanism,
                noise_multiplier=z,
                round=round_number,
                records=records[mask],
            )
    assert guard.num_exhausted("gaussian", 3.0) > 25
    assert guard.num_exhausted("laplace", 3.0) > 25
    assert ledger.epsilon(delta=1e-5).low <= guard.total(delta=1e-5)


def test_a_record_named_several_times_counts_several_times():
    """Catches: charging the distinct ids."""
    guard = RecordFilter(3, gaussian_budget=1.0)
    fixed = {"mechanism": "gaussian", "noise_multiplier": 2.0}  # 1/4 each
    assert guard.admit([1, 1, 2, 1, 1, 1, 0, 1], **fixed).tolist() == [True] * 5 + [False, True, False]
    guard.charge([1, 1, 1], **fixed)
    with pytest.raises(ValueError, match="1 of 2 records would exceed"):
        guard.charge([1, 0, 1], **fixed)
    assert guard.admit([0, 0, 0, 0, 1], **fixed).all()  # the refused call charged nothing


def test_a_decision_depends_on_the_own_past_alone():
    """Catches: a decision for the whole call, which would tell one record's past through another."""
    generator = np.random.default_rng(1)
    guard, alone = RecordFilter(20, pure_budget=1.0), RecordFilter(20, pure_budget=1.0)
    for _ in range(30):
        z = float(generator.uniform(2.0, 20.0))
        records = generator.permutation(20)[:10]
        mask = guard.admit(records, mechanism="laplace", noise_multiplier=z)
        if mask.any():
            guard.charge(records[mask], mechanism="laplace", noise_multiplier=z)
        if 7 in records:
            assert alone.admit([7], mechanism="laplace", noise_multiplier=z)[0] == mask[records == 7][0]
            if mask[records == 7][0]:
                alone.charge([7], mechanism="laplace", noise_multiplier=z)


def test_sampler_errors_draw_on_their_own_budgets():
    """Catches: excess or tails that go uncharged; they never fit into a budget of 0."""
    lattice = {"mechanism": "gaussian", "noise_multiplier": 100.0, "epsilon_excess": 1e-9, "tail_probability": 1e-15}
    assert not RecordFilter(1, gaussian_budget=1.0).admit([0], **lattice)[0]
    assert not RecordFilter(1, gaussian_budget=1.0, excess_budget=1.0).admit([0], **lattice)[0]
    guard = RecordFilter(1, gaussian_budget=1.0, excess_budget=1e-8, tail_budget=3e-15)
    guard.charge([0, 0, 0], **lattice)
    assert not guard.admit([0], **lattice)[0]  # the tail budget is spent
    assert guard.num_exhausted("gaussian", 100.0, epsilon_excess=1e-9, tail_probability=1e-15) == 1
    assert guard.admit([0], mechanism="gaussian", noise_multiplier=100.0)[0]


def test_releases_already_sent_count_beyond_the_budget():
    guard = RecordFilter(2, gaussian_budget=1.0)
    guard.count_past([0, 0, 0], mechanism="gaussian", noise_multiplier=1.5)
    guard.count_past([0] * 100 + [1], mechanism="gaussian", noise_multiplier=1e-200)
    assert guard.admit([0, 1], mechanism="gaussian", noise_multiplier=1e9).tolist() == [False, False]
    assert guard.num_exhausted("gaussian", 1e100) == 2
    assert RecordFilter.from_state(guard.state()).num_exhausted("gaussian", 1e100) == 2


def test_huge_and_tiny_charges_are_neither_lost_nor_wrapped():
    """Catches: a charge that rounds to 0 units, a product that overflows 63 bits."""
    guard = RecordFilter(1, pure_budget=1.0)
    assert not guard.admit([0], mechanism="laplace", noise_multiplier=5e-324)[0]
    assert not guard.admit([0] * 5, mechanism="laplace", noise_multiplier=0.9999)[0]
    guard.charge([0] * 1000, mechanism="laplace", noise_multiplier=1e300)
    guard.charge([0], mechanism="laplace", noise_multiplier=1.0)
    assert not RecordFilter(1).admit([0], mechanism="laplace", noise_multiplier=1e300)[0]


def test_the_state_goes_through_json_and_spending_goes_on():
    guard = RecordFilter(1000, gaussian_budget=Fraction(1, 3), pure_budget=0.1)
    fixed = {"mechanism": "gaussian", "noise_multiplier": 3.0}
    guard.charge(np.arange(0, 1000, 3), **fixed)
    again = RecordFilter.from_state(json.loads(json.dumps(guard.state())))
    assert again.budget == guard.budget
    for _ in range(3):
        mask = guard.admit(np.arange(1000), **fixed)
        assert np.array_equal(mask, again.admit(np.arange(1000), **fixed))
        guard.charge(np.flatnonzero(mask), **fixed)
        again.charge(np.flatnonzero(mask), **fixed)
        if guard.num_exhausted("gaussian", 3.0) == 1000:
            break
    assert again.state() == guard.state()


def test_a_damaged_state_is_refused():
    state = RecordFilter(3, pure_budget=1.0).state()
    for change in (
        {"version": 2},
        {"num_records": 4},
        {"budgets": {"pure_budget": "nan"}},
        {"spent": {}},
        {"spent": state["spent"] | {"pure_budget": "!!"}},
        {"spent": state["spent"] | {"pure_budget": RecordFilter(2).state()["spent"]["pure_budget"]}},
    ):
        with pytest.raises(ValueError, match="filter state is not valid"):
            RecordFilter.from_state(state | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"records": []}, "records must be a non-empty vector"),
        ({"records": [0.0]}, "records must be a non-empty vector"),
        ({"records": [3]}, "records holds 3: ids lie in 0…2"),
        ({"records": [-1]}, "records holds -1"),
        ({"mechanism": "uniform"}, "mechanism is 'uniform'"),
        ({"noise_multiplier": math.nan}, "noise_multiplier is nan"),
        ({"noise_multiplier": math.inf}, "noise_multiplier is inf"),
        ({"noise_multiplier": 0.0}, "noise_multiplier is 0.0"),
        ({"epsilon_excess": -1e-9}, "epsilon_excess is -1e-09"),
        ({"tail_probability": math.nan}, "tail_probability is nan"),
    ],
)
def test_bad_values_are_refused_and_charge_nothing(change, words):
    guard = RecordFilter(3, pure_budget=1.0)
    before = guard.state()
    arguments = {"records": [0], "mechanism": "laplace", "noise_multiplier": 2.0} | change
    for method in (guard.admit, guard.charge, guard.count_past):
        with pytest.raises(ValueError, match=words) as caught:
            method(**arguments)
        assert "\n" not in str(caught.value)
    assert guard.state() == before
