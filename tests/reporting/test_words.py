import math

import pytest

from asfl_privacy.reporting.cells import gather_cells
from asfl_privacy.reporting.words import how_to_read, radius_in_words


@pytest.mark.parametrize(
    ("radius", "p", "words"),
    [
        (1.0, 2.0, "pixel difference has ℓ2 norm at most 1 (the root of the summed squared pixel differences)"),
        (0.5, 1.0, "pixel difference has ℓ1 norm at most 0.5 (the sum of the absolute pixel differences)"),
        (0.1, math.inf, "pixel difference has ℓ∞ norm at most 0.1 (the largest single pixel difference)"),
    ],
)
def test_a_radius_is_said_in_pixels(radius, p, words):
    sentence = radius_in_words(radius, p)
    assert words in sentence
    assert "a pixel runs from 0 to 1" in sentence


@pytest.mark.parametrize(("radius", "p"), [(1.0, None), (None, 2.0), (None, None)])
def test_a_radius_without_norm_promises_nothing(radius, p):
    assert "read no promise" in radius_in_words(radius, p)


def test_every_unit_of_the_grid_is_explained(gaussian, unnoised):
    rows = [unnoised(), gaussian(), gaussian(radius=2.0), gaussian(radius="any", noise="once")]
    entries = dict(how_to_read(gather_cells(rows)))
    assert "at most 1 (" in entries["Unit"]
    assert "at most 2 (" in entries["Unit"]
    assert "any two images whatsoever" in entries["Unit"]
    assert "sharing noised inputs" in entries["Noise once"]
    assert "no privacy promise" in entries["No noise"]


def test_a_grid_without_noise_explains_no_epsilon(unnoised):
    assert [term for term, _ in how_to_read(gather_cells([unnoised()]))] == [
        "Runs",
        "MB sent",
        "Points below",
        "No noise",
    ]


def test_personal_accuracy_is_explained_where_it_is_shown(fedavg, unnoised):
    own = fedavg(method="fedproto", accuracy=None, personal_accuracy=0.75)
    entries = dict(how_to_read(gather_cells([own, unnoised()])))
    assert "not to be compared with accuracy" in entries["Personal accuracy"]
