"""Event classes: which values belong together, and the multiplier at a distance."""

import math
from fractions import Fraction

import pytest

from asfl_privacy.accounting.event import EventClass, check_vector, make_event, multiplier_at

FIXED = {"round_number": 0, "whole_record_multiplier": None, "radius": 0.1}
GAUSSIAN = {"channel": "activations", "mechanism": "gaussian", "noise_multiplier": 10.0}
LABELS = {"channel": "labels", "mechanism": "randomized-response", "noise_multiplier": 0.5, "num_classes": 10}


def test_an_event_keeps_what_it_was_given():
    event = make_event(
        **{**FIXED, "round_number": 7}, **GAUSSIAN, sampler="lattice", epsilon_excess=0.25, tail_probability=1e-9
    )
    assert event == EventClass(
        channel="activations",
        mechanism="gaussian",
        noise_multiplier=10.0,
        round=7,
        sampler="lattice",
        epsilon_excess=0.25,
        tail_probability=1e-9,
    )


@pytest.mark.parametrize("distance", [1.0, 2.0, 1e9, math.inf])
@pytest.mark.parametrize("radius", [0.1, "any"])
def test_randomised_response_has_its_multiplier_at_every_distance(distance, radius):
    """Catches: dividing ε of the labels by the distance, or calling it unknown for any two records."""
    event = make_event(**{**FIXED, "radius": radius}, **LABELS)
    assert multiplier_at(event, distance) == Fraction(1, 2)
    assert multiplier_at(EventClass(**LABELS, round=0), distance) == Fraction(1, 2)


def test_noise_weakens_with_distance_down_to_the_whole_record():
    event = make_event(**{**FIXED, "whole_record_multiplier": 4.0}, **GAUSSIAN)
    assert [multiplier_at(event, k) for k in (1.0, 2.0, 5.0, math.inf)] == [10, 5, 4, 4]
    assert multiplier_at(make_event(**FIXED, **GAUSSIAN), math.inf) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({**LABELS, "channel": "activations"}, "covers labels alone"),
        ({**LABELS, "channel": "updates"}, "covers labels alone"),
        ({**LABELS, "num_classes": None}, "num_classes is None"),
        ({**LABELS, "num_classes": 1}, "num_classes is 1"),
        ({**LABELS, "num_classes": 10.0}, r"num_classes is 10\.0"),
        ({**LABELS, "num_classes": True}, "num_classes is True"),
        ({**LABELS, "whole_record_multiplier": 0.25}, "for randomised response"),
        ({"num_classes": 10}, "has no classes"),
        ({"mechanism": "laplace", "num_classes": 2}, "has no classes"),
        ({"sampler": "urandom"}, "lattice, float, seeded"),
        ({"epsilon_excess": -1e-9}, "epsilon_excess is -1e-09"),
        ({"epsilon_excess": math.nan}, "epsilon_excess is nan"),
        ({"epsilon_excess": math.inf}, "epsilon_excess is inf"),
        ({"tail_probability": -1e-9}, "tail_probability is -1e-09"),
        ({"tail_probability": math.nan}, "tail_probability is nan"),
        ({"tail_probability": 1.0}, r"tail_probability is 1\.0"),
        ({"client_multiplier": 5.0}, "belongs to channel updates"),
        ({"channel": "updates", "client_multiplier": 11.0}, "cannot exceed noise_multiplier"),
        ({"channel": "updates", "client_multiplier": math.nan}, "client_multiplier is nan"),
        ({"radius": "any", "whole_record_multiplier": 1.0}, "with radius any"),
    ],
)
def test_values_that_do_not_belong_together_are_refused_in_one_line(change, words):
    with pytest.raises(ValueError, match=words) as caught:
        make_event(**{**FIXED, **GAUSSIAN, **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", [[], [[1]], [0.5], ["a"], [2**60], [-1], [2**64], None])
def test_vectors_of_anything_but_small_integers_are_refused(bad):
    with pytest.raises(ValueError, match="records"):
        check_vector("records", bad, minimum=0)
