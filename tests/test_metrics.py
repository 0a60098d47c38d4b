"""metrics.csv: the columns, every digit, and what two runs of one seed are compared by."""

import csv
import io
from dataclasses import replace

import pytest
from federations import gaussian, make_tiny
from hypothesis import given
from hypothesis import strategies as st

from asfl_privacy.accounting import Ledger
from asfl_privacy.execution import Evaluation, ThreadsExecutor, begin_run, run_rounds, run_serially
from asfl_privacy.federated import METHODS, Traffic
from asfl_privacy.metrics import MEASURED, REPRODUCIBLE, figures, headline, metrics_csv, reproducible_part

ASKED = [
    "round,accuracy,loss,sensitivity,noise_scale,bytes_model,bytes_activations,bytes_labels",
    "seconds_head,seconds_certificate,seconds_noise,seconds_exchange,seconds_tail,seconds_full,seconds_aggregate",
    "seconds_evaluate,peak_memory_bytes",
]
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def parsed(text):
    return list(csv.DictReader(io.StringIO(text)))


def privately(digits):
    federation = make_tiny(digits, privacy=gaussian(), evaluate_every=2)
    return federation, Ledger(p=2.0, radius=1.0)


def test_the_columns_are_the_issues_in_order():
    assert metrics_csv([]) == ",".join(ASKED) + "\n"
    assert ",".join(REPRODUCIBLE) == ASKED[0]
    assert ",".join(MEASURED) == ",".join(ASKED[1:])


def test_a_line_by_hand_blank_where_there_is_nothing_to_say():
    first = Evaluation(round=2, accuracy=0.5, loss=1.5, sensitivity=None, noise_scale=None)
    second = Evaluation(
        round=4,
        accuracy=0.75,
        loss=0.1,
        sensitivity=2.0,
        noise_scale=8.5,
        traffic=Traffic(model=7, activations=8, labels=9),
        seconds={"tail": 0.25, "head": 0.5},
        peak_memory=1024,
    )
    lines = metrics_csv([first, second]).splitlines()
    assert lines[1] == "2,0.5,1.5,,,0,0,0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,"
    assert lines[2] == "4,0.75,0.1,2.0,8.5,7,8,9,0.5,0.0,0.0,0.0,0.25,0.0,0.0,0.0,1024"


def test_a_methods_own_measures_are_columns_where_there_are_any_and_runs_are_compared_by_them():
    """Catches a global accuracy of a method that has none, and measures that two runs are not compared by."""
    plain = Evaluation(round=1, accuracy=0.5, loss=1.5, sensitivity=None, noise_scale=None, seconds={"full": 2.0})
    own = replace(plain, round=2, accuracy=None, loss=None, measures={"personal_accuracy": 0.1 + 0.2})
    heading, *lines = metrics_csv([plain, own]).splitlines()
    assert heading == ",".join([ASKED[0], "personal_accuracy", *ASKED[1:]])
    assert lines[0].startswith("1,0.5,1.5,,,0,0,0,,0.0,")
    assert lines[1].startswith("2,,,,,0,0,0,0.30000000000000004,0.0,")
    assert reproducible_part(metrics_csv([own])).splitlines() == [ASKED[0] + ",personal_accuracy", lines[1][:31]]
    assert lines[1][:31].endswith(",0.30000000000000004")
    assert headline(figures(own)) == "personal accuracy 30.0 %"
    assert headline(figures(plain)) == "accuracy 50.0 %"
    assert headline({"accuracy": None}) == "no accuracy"


@given(FLOATS, FLOATS, FLOATS, st.integers(0, 2**62))
def test_no_digit_is_lost(loss, scale, seconds, sent):
    """Catches figures cut to some digits, by which two different runs would look alike."""
    one = Evaluation(
        round=1,
        accuracy=1 / 3,
        loss=loss,
        sensitivity=scale,
        noise_scale=scale,
        traffic=Traffic(model=sent),
        seconds={"full": seconds},
    )
    (line,) = parsed(metrics_csv([one]))
    assert (float(line["loss"]), float(line["noise_scale"]), float(line["sensitivity"])) == (loss, scale, scale)
    assert (float(line["seconds_full"]), int(line["bytes_model"])) == (seconds, sent)


def test_the_reproducible_part_is_the_same_under_other_executors_and_the_rest_is_not_compared(digits):
    """Catches a measurement among the columns that runs are compared by, which no two runs would pass."""
    texts = []
    for workers in (None, 1, 2):
        federation, ledger = privately(digits)
        if workers is None:
            texts.append(metrics_csv(run_serially(federation, METHODS["asfl"], ledger=ledger).evaluations))
            continue
        with ThreadsExecutor(federation, METHODS["asfl"], workers=workers) as executor:
            start = begin_run(federation, ledger=ledger)
            done = run_rounds(federation, METHODS["asfl"], executor=executor, start=start)
        texts.append(metrics_csv(done.evaluations))
    parts = [reproducible_part(text) for text in texts]
    assert parts[0] == parts[1] == parts[2]
    assert len({*texts}) == 3
    assert [line["round"] for line in parsed(parts[0])] == ["2", "3"]
    assert all(float(line["noise_scale"]) > 0 for line in parsed(parts[0]))
    federation, ledger = make_tiny(digits, privacy=gaussian(), evaluate_every=2, seed=1), Ledger(p=2.0, radius=1.0)
    other = metrics_csv(run_serially(federation, METHODS["asfl"], ledger=ledger).evaluations)
    assert reproducible_part(other) != parts[0]


def test_the_phases_of_a_serial_run_are_disjoint_parts_of_its_wall_time(digits):
    """Catches a phase timed inside another, whose time would count twice."""
    federation, ledger = privately(digits)
    done = run_serially(federation, METHODS["asfl"], ledger=ledger)
    spent = [value for line in done.evaluations for value in line.seconds.values()]
    assert min(spent) > 0.0
    assert sum(spent) <= done.seconds
    assert {f"seconds_{phase}" for phase in done.evaluations[0].seconds} == set(MEASURED) - {"peak_memory_bytes"}


def test_bytes_are_so_far_and_never_shrink(digits):
    federation, ledger = privately(digits)
    done = run_serially(federation, METHODS["asfl"], ledger=ledger)
    model = [figures(one)["bytes_model"] for one in done.evaluations]
    per_round = 2 * 2 * 610 * 4  # to and from two clients, 610 float32 parameters
    assert model == [2 * per_round, 3 * per_round]


def test_text_of_another_file_is_refused():
    with pytest.raises(ValueError, match=r"no column 'bytes_model', which every run writes; give"):
        reproducible_part("round,accuracy,loss,sensitivity,noise_scale\n2,0.5,1.0,,\n")
