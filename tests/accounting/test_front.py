"""The front against domination by its definition."""

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asfl_privacy.accounting.front import worst_candidates
from asfl_privacy.accounting.totals import PureClass


def pure(mechanism, multiplier, num_classes=None):
    z = Fraction(multiplier)
    return PureClass(mechanism=mechanism, num_classes=num_classes, strongest=z, weakest=z)


CLASSES = (
    pure("laplace", 1),
    pure("laplace", 3),
    pure("laplace", 9),
    pure("randomized-response", 1, 2),
    pure("randomized-response", 1, 10),
)
FAMILIES = ((0, 1, 2), (3,), (4,))


def dominates(square, counts, other_square, other_counts):
    """Every release of the other has one of its own here, at least as strong and of the same family."""
    if square < other_square:
        return False
    for family in FAMILIES:
        for place in range(len(family)):
            strong = family[: place + 1]
            if sum(counts[index] for index in strong) < sum(other_counts[index] for index in strong):
                return False
    return True


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 2.0]), st.tuples(*[st.integers(0, 3)] * len(CLASSES))),
        min_size=1,
        max_size=25,
    ),
    st.sampled_from([1, 3, 24]),
)
def test_every_record_is_dominated_by_a_candidate(records, most):
    """Catches: dropping a record that is the worst in one mechanism only; a group's maximum over part of the group."""
    squares = np.array([square for square, _ in records])
    counts = np.array([row for _, row in records])
    found = worst_candidates(squares, counts, classes=CLASSES, most=most)
    assert found[0].is_real
    assert len(found) <= most + 4
    for square, row in records:
        assert any(dominates(candidate.square, candidate.counts, square, row) for candidate in found)
    for candidate in found:
        assert min(candidate.counts) >= 0
        if candidate.is_real:
            assert (candidate.square, candidate.counts) in {(square, tuple(row)) for square, row in records}


def test_the_worst_of_one_mechanism_is_the_only_candidate():
    """60,000 records with one multiplier need one composition."""
    counts = np.random.default_rng(0).integers(0, 100, size=(60_000, 1))
    (worst,) = worst_candidates(np.zeros(60_000), counts, classes=(pure("laplace", 5),))
    assert worst.counts == (99,)
