"""The property guess: reads what is there, and no more than the majority where nothing is."""

import math
import warnings

import pytest
import torch

from asfl_privacy.attacks import guess_property


def test_labels_are_read_from_clean_activations_and_not_through_enormous_noise(conv_head, digits):
    with torch.no_grad():
        known, attacked = conv_head(digits.train_inputs), conv_head(digits.test_inputs[:200])
    labels, truth = digits.train_labels, digits.test_labels[:200]
    clean = guess_property(known, labels, attacked, truth)
    assert clean.low > 0.8
    generator = torch.Generator().manual_seed(0)
    lost = guess_property(
        known + 1e4 * torch.randn(known.shape, generator=generator),
        labels,
        attacked + 1e4 * torch.randn(attacked.shape, generator=generator),
        truth,
    )
    assert lost.low <= 0.1  # ten classes of a tenth each
    assert lost.majority_rate == pytest.approx(0.1, abs=0.06)
    assert lost.num_records == 200


def test_a_truth_value_is_guessed_against_its_majority():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(400, 3, generator=generator)
    holds = rows[:, 1] > -1.0  # true for Φ(1) = .841
    made = guess_property(rows[:300], holds[:300], rows[300:], holds[300:])
    assert made.accuracy > 0.95
    assert made.majority_rate == pytest.approx(int(holds[300:].sum()) / 100)


def test_rows_without_information_give_the_majority():
    # Catches: a majority counted on the attacked records instead of the auxiliary ones.
    zeros = torch.zeros(40, 2)
    known = torch.tensor([0] * 30 + [1] * 10)
    made = guess_property(zeros, known, zeros, 1 - known)
    assert made.accuracy == made.majority_rate == 0.25


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({1: torch.zeros(20, dtype=torch.int64)}, "throughout"),
        ({1: torch.zeros(19, dtype=torch.int64)}, "one a record"),
        ({1: torch.zeros(20)}, "integer or a truth value"),
        ({2: torch.zeros(5, 3)}, "rows of shape"),
        ({0: torch.full((20, 2), math.nan)}, "NaN"),
    ],
)
def test_bad_property_input_is_refused_in_one_line(change, words):
    arguments = [torch.zeros(20, 2), torch.arange(20) % 2, torch.zeros(5, 2), torch.zeros(5, dtype=torch.int64)]
    for place, value in change.items():
        arguments[place] = value
    with pytest.raises(ValueError, match=words) as caught, warnings.catch_warnings():
        guess_property(*arguments)
    assert "\n" not in str(caught.value)
