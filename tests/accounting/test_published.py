"""PixelDP's published noise: the written values, and how far its claim is from the truth."""

import math

import pytest

from asfl_privacy.accounting import gaussian_delta, gaussian_epsilon, gaussian_noise_multiplier
from asfl_privacy.accounting.published import published_noise_multiplier


def test_the_formula_gives_the_written_values(golden, agrees):
    """The column "classic", by hand. Catches: 1.25 under the root only, log10, δ and ε swapped."""
    for row in golden["calibration"]:
        found = published_noise_multiplier("gaussian", epsilon=row["epsilon"], delta=row["delta"])
        assert agrees(found, row.get("classic", row.get("classic_formula"))), row


def test_what_is_claimed_from_epsilon_one_on_can_be_false(golden, agrees):
    """δ at the claimed ε is 3.4e-4 at ε = 16 and .59 at ε = 50, not 1e-5. Catches: the claim taken for the truth."""
    rows = [row for row in golden["calibration"] if "classic_true_delta" in row]
    assert len(rows) == 2
    for row in rows:
        z = published_noise_multiplier("gaussian", epsilon=row["epsilon"], delta=row["delta"])
        assert agrees(gaussian_delta(row["epsilon"], noise_multiplier=z), row["classic_true_delta"])
        assert gaussian_epsilon(row["delta"], noise_multiplier=z) > 1.15 * row["epsilon"]
        assert z < gaussian_noise_multiplier(row["epsilon"], delta=row["delta"])


def test_laplace_is_the_proven_formula():
    assert published_noise_multiplier("laplace", epsilon=4.0, delta=0.0) == 0.25
    assert published_noise_multiplier("laplace", epsilon=0.5, delta=1e-5) == 2.0


@pytest.mark.parametrize(
    ("mechanism", "epsilon", "delta", "words"),
    [
        ("uniform", 1.0, 1e-5, "mechanism"),
        ("gaussian", 0.0, 1e-5, "epsilon"),
        ("gaussian", math.nan, 1e-5, "epsilon"),
        ("gaussian", math.inf, 1e-5, "epsilon"),
        ("gaussian", 1.0, 0.0, "delta"),
        ("gaussian", 1.0, 1.0, "delta"),
        ("laplace", -1.0, 0.0, "epsilon"),
    ],
)
def test_values_out_of_range_are_refused_in_one_line(mechanism, epsilon, delta, words):
    with pytest.raises(ValueError, match=words) as caught:
        published_noise_multiplier(mechanism, epsilon=epsilon, delta=delta)
    assert "\n" not in str(caught.value)
