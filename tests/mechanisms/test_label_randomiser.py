"""Labels: k-ary randomised response drawn in integers, once for each record."""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from asfl_privacy.mechanisms import label_randomiser
from asfl_privacy.mechanisms.label_randomiser import (
    NOT_DRAWN,
    randomize_labels,
    released_labels,
    remember_none,
    response_multiplier,
    response_probabilities,
    transition_matrix,
)

EPSILONS = [5e-324, 1e-300, 1e-37, 1e-17, 0.1, math.log(2.0), 1.0, 3.0, 8.0, 40.0, 88.0, 89.0, 700.0, 1e308]
CLASSES = [2, 3, 10, 1000, 2**31]


class Words:
    """A reproducible source that counts what it gave."""

    def __init__(self, seed=0):
        self.rng = np.random.Generator(np.random.Philox(seed))
        self.given = 0

    def words(self, n):
        self.given += n
        return self.rng.integers(2**64, size=n, dtype=np.uint64)


class Scripted:
    """A source that gives what it was told."""

    def __init__(self, *words):
        self.left = list(words)

    def words(self, n):
        now, self.left = self.left[:n], self.left[n:]
        return np.array(now, dtype=np.uint64)


@pytest.mark.parametrize("k", CLASSES)
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_the_odds_of_no_label_exceed_e_to_the_epsilon(k, epsilon):
    """Catches K rounded to nearest or up, and K left below 1/k, where the others would be favoured."""
    keep, other = response_probabilities(k, epsilon=epsilon)
    assert keep + (k - 1) * other == 1
    assert keep >= other > 0
    with mpmath.workdps(120):
        odds = mpmath.mpf((keep / other).numerator) / mpmath.mpf((keep / other).denominator)
        # e^ε − 1 keeps its digits where e^ε is 1 to 120 digits
        assert odds - 1 <= mpmath.expm1(mpmath.mpf(min(epsilon, 1e4)))


@pytest.mark.parametrize("k", [2, 3, 10, 1000])
@pytest.mark.parametrize("epsilon", [1e-9, 0.1, 1.0, 3.0, 8.0, 40.0])
def test_the_probabilities_are_those_of_the_formula(k, epsilon):
    keep, other = response_probabilities(k, epsilon=epsilon)
    with mpmath.workdps(60):
        exact = mpmath.exp(epsilon) / (mpmath.exp(epsilon) + k - 1)
        kept = mpmath.mpf(keep.numerator) / keep.denominator
        assert 0 <= exact - kept <= mpmath.mpf(2) ** -127
        assert float(other) == pytest.approx(float((1 - exact) / (k - 1)), rel=1e-12)


def test_the_exponential_is_a_lower_bound_at_every_size():
    for x in [0.0, 5e-324, 0.1, 0.5, 0.7, 1.0, 10.0, 100.0, 255.9, 256.0]:
        bound = label_randomiser._exp_down(x)
        with mpmath.workdps(300):
            error = mpmath.exp(x) - mpmath.mpf(bound.numerator) / bound.denominator
            assert 0 <= error <= mpmath.exp(x) * mpmath.mpf(2) ** -300


def test_a_tiny_epsilon_is_uniform_and_a_huge_one_keeps_all_but_one_in_two_to_the_128():
    assert response_probabilities(3, epsilon=1e-300) == (Fraction(1, 3), Fraction(1, 3))
    keep, _ = response_probabilities(2, epsilon=1e308)
    assert keep == 1 - Fraction(1, 2**128)
    labels = torch.arange(1000) % 10
    assert torch.equal(randomize_labels(labels, num_classes=10, epsilon=80.0, source=Words()), labels)


@pytest.mark.parametrize(
    ("k", "epsilon", "label"), [(2, 0.5, 0), (2, 3.0, 1), (10, 1.0, 0), (10, 1.0, 9), (10, 1e-300, 4), (1000, 5.0, 500)]
)
def test_draws_follow_the_exact_probabilities(k, epsilon, label):
    """Catches a wrong skip of the label itself, an other that is never drawn, swapped words, uniform over all k."""
    n = 200_000
    keep, other = response_probabilities(k, epsilon=epsilon)
    labels = torch.full((n,), label)
    noisy = randomize_labels(labels, num_classes=k, epsilon=epsilon, source=Words(k + label))
    expected = np.full(k, n * float(other))
    expected[label] = n * float(keep)
    assert chisquare(np.bincount(noisy.numpy(), minlength=k), expected).pvalue > 1e-4


def test_the_chi_square_would_see_a_keep_probability_two_percent_off():
    n, (keep, _) = 200_000, response_probabilities(10, epsilon=1.0)
    noisy = randomize_labels(torch.zeros(n, dtype=torch.int64), num_classes=10, epsilon=1.0, source=Words(10))
    counts = np.bincount(noisy.numpy(), minlength=10)
    wrong = np.full(10, n * (1 - 0.98 * float(keep)) / 9)
    wrong[0] = n * 0.98 * float(keep)
    assert chisquare(counts, wrong).pvalue < 1e-4


def test_the_threshold_is_compared_in_all_128_bits():
    """Catches a comparison of the high word alone, and < against ≤."""
    keep, _ = response_probabilities(2, epsilon=1.0)
    threshold = int(keep * 2**128)
    high, low = divmod(threshold, 2**64)
    draw = {"num_classes": 2, "epsilon": 1.0}
    label = torch.tensor([1])
    assert randomize_labels(label, **draw, source=Scripted(high, low - 1, 0)).item() == 1
    assert randomize_labels(label, **draw, source=Scripted(high, low, 0)).item() == 0
    assert randomize_labels(label, **draw, source=Scripted(high - 1, 2**64 - 1, 0)).item() == 1
    assert randomize_labels(label, **draw, source=Scripted(high + 1, 0, 0)).item() == 0


def test_words_past_the_last_multiple_are_drawn_again():
    """Catches a plain modulo: 2^64 = 3·6148914691236517205 + 1, so the last word would favour class 0 of the others."""
    last = 2**64 - 1
    lost = (last, last)  # above the threshold: an other label is due
    noisy = randomize_labels(torch.tensor([3]), num_classes=4, epsilon=0.5, source=Scripted(*lost, last, last, 1))
    assert noisy.item() == 1
    noisy = randomize_labels(torch.tensor([0]), num_classes=4, epsilon=0.5, source=Scripted(*lost, last - 1))
    assert noisy.item() == 3  # (2^64 − 2) mod 3 = 2, and label 0 is skipped


def test_type_and_device_of_the_labels_stay():
    labels = torch.tensor([0, 255], dtype=torch.uint8)
    noisy = randomize_labels(labels, num_classes=256, epsilon=1.0, source=Words())
    assert noisy.dtype == torch.uint8
    assert noisy.shape == (2,)
    assert len(randomize_labels(labels[:0], num_classes=256, epsilon=1.0, source=Scripted())) == 0


@pytest.mark.parametrize(
    ("labels", "k", "epsilon", "match"),
    [
        (torch.tensor([0]), 2, 0.0, "label epsilon is 0.0: it must be finite and > 0"),
        (torch.tensor([0]), 2, -1.0, "label epsilon"),
        (torch.tensor([0]), 2, math.inf, "label epsilon"),
        (torch.tensor([0]), 2, math.nan, "label epsilon"),
        (torch.tensor([0]), 1, 1.0, "num_classes is 1"),
        (torch.tensor([0]), 0, 1.0, "num_classes is 0"),
        (torch.tensor([0, 2]), 2, 1.0, "labels lie in 0 to 2"),
        (torch.tensor([-1, 1]), 2, 1.0, "labels lie in -1 to 1"),
        (torch.tensor([0.0]), 2, 1.0, "tensor of integers"),
        (torch.tensor([[0]]), 2, 1.0, "tensor of integers"),
        (torch.tensor([True]), 2, 1.0, r"type torch\.bool"),
        (torch.tensor([0], dtype=torch.uint8), 257, 1.0, r"type torch\.uint8"),
        ([0], 2, 1.0, "labels are list"),
    ],
)
def test_what_is_refused(labels, k, epsilon, match):
    with pytest.raises(ValueError, match=match):
        randomize_labels(labels, num_classes=k, epsilon=epsilon, source=Words())
    with pytest.raises(ValueError, match=match):
        released_labels(
            remember_none(9),
            positions=np.arange(len(labels)),
            labels=labels,
            num_classes=k,
            epsilon=epsilon,
            source=Words(),
        )


def test_a_source_that_gives_too_little_is_refused():
    """Catches broadcasting one word over all records."""
    for source in (Scripted(1), type("Floats", (), {"words": lambda self, n: np.zeros(n)})()):
        with pytest.raises(ValueError, match="source of randomness gave"):
            randomize_labels(torch.tensor([0, 1]), num_classes=2, epsilon=1.0, source=source)


def test_the_transition_matrix_holds_the_frequencies_of_draws():
    """Rows are true labels: catches a transpose only where the matrix is asymmetric, so the entries are counted."""
    T = transition_matrix(3, epsilon=1.5)
    assert T.dtype == torch.float64
    assert torch.allclose(T.sum(1), torch.ones(3, dtype=torch.float64), atol=1e-15)
    n = 100_000
    for label in range(3):
        noisy = randomize_labels(torch.full((n,), label), num_classes=3, epsilon=1.5, source=Words(label))
        assert chisquare(np.bincount(noisy.numpy(), minlength=3), T[label].numpy() * n).pvalue > 1e-4


@pytest.mark.parametrize("epsilon", [0.1, 0.3, 1.0, 3.0, 7.7, 1e-320, 1e300])
def test_the_ledgers_multiplier_never_stands_for_less_than_epsilon(epsilon):
    """Catches 1/ε rounded to nearest: its inverse could fall below ε."""
    assert 1 / Fraction(response_multiplier(epsilon)) >= Fraction(epsilon)
    assert response_multiplier(epsilon) == pytest.approx(min(1 / epsilon, 1.7976931348623157e308), rel=1e-15)


def test_no_record_is_ever_drawn_twice():
    """Catches a fresh draw a round, a draw of all labels each time, and a repeated position drawn twice."""
    rng, truth = np.random.default_rng(3), torch.from_numpy(np.random.default_rng(4).integers(10, size=200))
    state, first_seen, drawn_ever = remember_none(200), {}, []
    for _ in range(60):
        positions = rng.integers(200, size=17)
        source = Words(int(rng.integers(2**30)))
        done = released_labels(
            state, positions=positions, labels=truth[positions], num_classes=10, epsilon=0.5, source=source
        )
        if len(done.drawn) == 0:
            assert source.given == 0
        for position, label in zip(positions.tolist(), done.noisy.tolist(), strict=True):
            assert first_seen.setdefault(position, label) == label
        drawn_ever += done.drawn.tolist()
        state = done.remembered
    assert len(drawn_ever) == len(set(drawn_ever)) == len(first_seen)
    assert set(drawn_ever) == set(first_seen)
    assert all(int(state[position]) == label for position, label in first_seen.items())
    assert bool((state[[p for p in range(200) if p not in first_seen]] == NOT_DRAWN).all())


def test_remembered_labels_are_drawn_from_the_true_label_of_their_own_record():
    """Catches labels that are shuffled against their positions."""
    truth = torch.arange(50) % 7
    positions = np.array([40, 3, 17, 3, 0])
    done = released_labels(
        remember_none(50), positions=positions, labels=truth[positions], num_classes=7, epsilon=80.0, source=Words()
    )
    assert torch.equal(done.noisy, truth[positions])
    assert done.drawn.tolist() == [0, 3, 17, 40]


def test_the_state_passed_in_stays_as_it_was():
    before = remember_none(5)
    asked = {"labels": torch.tensor([1]), "num_classes": 3, "epsilon": 1.0, "source": Words()}
    done = released_labels(before, positions=np.array([2]), **asked)
    assert torch.equal(before, remember_none(5))
    assert done.remembered is not before
    unchanged = released_labels(done.remembered, positions=np.array([2]), **asked).remembered
    assert torch.equal(unchanged, done.remembered)


@pytest.mark.parametrize(
    ("state", "positions", "match"),
    [
        (remember_none(5), np.array([5]), "positions lie in 5 to 5"),
        (remember_none(5), np.array([-1]), "positions lie in -1 to -1"),
        (remember_none(5), np.array([0, 1]), "positions are int64 of shape"),
        (remember_none(5), np.array([0.0]), "positions are float64"),
        (torch.full((5,), 3), np.array([0]), "do not fit 3 classes"),
        (torch.zeros(5), np.array([0]), "do not fit 3 classes"),
    ],
)
def test_positions_and_states_that_do_not_fit_are_refused(state, positions, match):
    source = Words()
    with pytest.raises(ValueError, match=match):
        released_labels(state, positions=positions, labels=torch.tensor([1]), num_classes=3, epsilon=1.0, source=source)
    assert source.given == 0
