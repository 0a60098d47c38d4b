"""Table 2: times are paired by repeat and client, and the findings say no more than the interval allows."""

import math

import pytest
from scipy import stats

from asfl_privacy.reporting.exhibits import EXHIBITS
from asfl_privacy.reporting.exhibits.exhibit import Material
from asfl_privacy.reporting.exhibits.folder import read_material, write_exhibit
from asfl_privacy.reporting.exhibits.local_time import local_time_exhibit, ratio_of, tasks_of

INFO = {"title": "Local time", "command": "c", "commit": None, "started": "s", "config": {}, "versions": {}}


def timing(method, repeat, client, training, *, sharing=0.0, mech="none", **changes):
    return {
        "data": "digits",
        "model": "small-cnn",
        "method": method,
        "mech": mech,
        "exchange_layer": "conv1" if method == "asfl" else "",
        "device": "cpu",
        "repeat": repeat,
        "client": client,
        "records": 100,
        "seconds_sharing": sharing,
        "seconds_training": training,
        "seconds_certificate": None,
        **changes,
    }


def timings(relative, *, method, base=(0.02, 0.02, 0.04), sharing=0.0, **changes):
    """Training of each repeat and of three clients: what FedAvg takes, times the repeat's and the client's factor."""
    return [
        timing(method, repeat, client, factor * one, sharing=sharing * factor * one, **changes)
        for repeat, factor in enumerate(relative)
        for client, one in enumerate(base)
    ]


def shown(records):
    return local_time_exhibit(Material(info=INFO, tables={"timings": records}))


def test_a_client_is_compared_with_itself_and_a_slow_repeat_falls_on_both():
    """By hand: ASFL takes .8 of FedAvg's time for each client, in a repeat that is 10 times slower too, so .8 exactly.

    Catches: a ratio of medians over all rounds that are not paired, sharing left out of the total.
    """
    fedavg = timings([1.0, 10.0, 1.0], method="fedavg")
    asfl = timings([0.7, 7.0, 0.7], method="asfl", sharing=1 / 7)
    asfl = [one for one in asfl if (one["repeat"], one["client"]) != (2, 0)]  # the others' pairs stay what they are
    line = shown([*fedavg, *asfl]).table.lines[0]
    assert (line[0], line[4], line[5]) == ("ASFL, conv1", "0.800", "0.800 to 0.800")


def test_the_interval_is_students_over_repeats_on_the_logarithm():
    """By hand: the repeats' ratios are e^-.1, e^-.2, e^-.3, so e^-.2, s = .1, n = 3, and each of three clients counts once.

    Catches: clients counted as repeats (n = 9), a mean of ratios, an interval on the plain scale.
    """
    fedavg = timings([1.0] * 3, method="fedavg")
    asfl = timings([math.exp(-0.1), math.exp(-0.2), math.exp(-0.3)], method="asfl")
    task = tasks_of([*fedavg, *asfl])[0]
    found = ratio_of(task.contenders[1], task.baseline)
    half = float(stats.t.ppf(0.975, 2)) * 0.1 / math.sqrt(3)
    assert (found.value, found.low, found.high) == pytest.approx(
        [math.exp(x) for x in (-0.2, -0.2 - half, -0.2 + half)]
    )


def test_one_interrupted_client_moves_no_ratio():
    """Catches: a mean over clients."""
    fedavg, asfl = timings([1.0, 1.0], method="fedavg"), timings([0.9, 0.9], method="asfl")
    asfl[0]["seconds_training"] = 5.0
    assert shown([*fedavg, *asfl]).table.lines[0][4:] == ("0.900", "0.900 to 0.900")


def test_milliseconds_are_medians_of_their_own_columns():
    """By hand: sharing 1, 2, 9 ms and training 30, 10, 20 ms: medians 2, 20 and, of 31, 12, 29, 29."""
    parts = [(0.001, 0.030), (0.002, 0.010), (0.009, 0.020)]
    asfl = [timing("asfl", 0, client, own, sharing=shared) for client, (shared, own) in enumerate(parts)]
    lines = shown([*timings([1.0], method="fedavg"), *asfl]).table.lines
    assert next(line[1:4] for line in lines if line[0] == "ASFL, conv1") == ("2", "20", "29")


def three(asfl):
    return [
        *timings([1.0, 1.0, 1.0], method="fedavg"),
        *timings([0.95, 0.96, 0.97], method="scaffold"),
        *timings(asfl, method="asfl"),
    ]


@pytest.mark.parametrize(
    ("asfl", "order", "verdict", "won"),
    [
        ([0.8, 0.81, 0.82], ["ASFL, conv1", "SCAFFOLD", "FedAvg"], "below", 1),
        ([1.2, 1.21, 1.22], ["SCAFFOLD", "FedAvg", "ASFL, conv1"], "above", 0),
        ([0.5, 0.9, 1.6], ["ASFL, conv1", "SCAFFOLD", "FedAvg"], "not distinguishable at that confidence", 1),
    ],
)
def test_findings_hold_asfl_against_the_best_of_the_others(asfl, order, verdict, won):
    """Catches: a claim of the lowest time where another is lower, against FedAvg alone, or from the mean alone."""
    found = shown(three(asfl))
    assert [line[0] for line in found.table.lines] == order
    assert found.findings[0].startswith(f"digits, small-cnn: {order[0]} takes the least local time of 3 lines")
    assert "of the local time of SCAFFOLD, the lowest of the other methods" in found.findings[1]
    assert found.findings[1].endswith(f": {verdict}.")
    assert found.findings[-1] == f"ASFL takes the least local time of all methods on {won} of 1 data set."


def test_fedavg_itself_may_be_the_lowest():
    records = [*timings([1.0, 1.0], method="fedavg"), *timings([1.5, 1.6], method="moon")]
    found = shown(records)
    assert found.findings == ("digits, small-cnn: FedAvg takes the least local time of 2 lines.",)
    assert found.table.lines[0][4:] == ("1", "—")


def test_one_repeat_gives_no_interval_and_no_verdict():
    found = shown([*timings([1.0], method="fedavg"), *timings([0.5], method="asfl")])
    assert found.table.lines[0][4:] == ("0.500", "—")
    assert found.findings[1].endswith("one repeat, so nothing is known of the spread.")


def test_data_sets_are_compared_within_themselves_and_counted():
    """By hand: half the time on digits, twice on the other, where every time is 100 times as long."""
    other = {"data": "fashion-mnist"}
    records = [*timings([1.0, 1.0], method="fedavg"), *timings([0.5, 0.5], method="asfl")]
    records += [*timings([100.0, 100.0], method="fedavg", **other), *timings([200.0, 200.0], method="asfl", **other)]
    found = shown(records)
    assert [(line[0], line[1], line[5]) for line in found.table.lines] == [
        ("digits, small-cnn", "ASFL, conv1", "0.500"),
        ("digits, small-cnn", "FedAvg", "1"),
        ("fashion-mnist, small-cnn", "FedAvg", "1"),
        ("fashion-mnist, small-cnn", "ASFL, conv1", "2.000"),
    ]
    assert found.findings[-1].endswith("on 1 of 2 data sets.")
    assert set(found.figures) == {f"local_time_{number}.{kind}" for number in (1, 2) for kind in ("svg", "png")}


def test_noise_has_a_table_of_its_own_and_its_certificate_is_in_no_total():
    """By hand: 2 + 10 ms against FedAvg's 20 ms is .6; certificates of 7 and 9 ms have the median 8."""
    noised = [
        timing("asfl", repeat, 0, 0.010, sharing=0.002, mech="gaussian", seconds_certificate=seconds)
        for repeat, seconds in enumerate((0.007, 0.009))
    ]
    found = shown([*timings([1.0, 1.0], method="fedavg"), *noised])
    assert [line[0] for line in found.table.lines] == ["FedAvg"]
    (line,) = found.sections[1].lines
    assert line == ("ASFL, conv1, Gaussian", "2", "10", "12", "0.600", "0.600 to 0.600", "8")


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (timings([1.0], method="asfl"), "digits, small-cnn: no times of fedavg"),
        ([timing("fedavg", 0, 0, 0.0)], r"fedavg, repeat 0, client 0: sharing 0.0 s and training 0.0 s are no times"),
        ([timing("fedavg", 0, 0, None)], "training None s are no times"),
        ([timing("fedavg", 0, 0, 1.0)] * 2, "fedavg, repeat 0, client 0 is there twice"),
        ([timing("fedavg", 0, 0, 1.0), timing("asfl", 1, 0, 1.0)], "have no client's round in common"),
        ([], "timings.csv is missing or empty"),
    ],
)
def test_times_that_cannot_be_compared_are_refused(records, message):
    with pytest.raises(ValueError, match=message):
        shown(records)


def test_the_folder_renders_to_the_same_bytes_from_its_table_alone(tmp_path):
    assert EXHIBITS["local-time"].build is local_time_exhibit
    material = Material(info={**INFO, "exhibit": "local-time"}, tables={"timings": three([0.8, 0.81, 0.82])})
    write_exhibit(tmp_path, material)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.name for path in before} >= {"timings.csv", "table.tex", "local_time.svg", "local_time.png"}
    write_exhibit(tmp_path, read_material(tmp_path))
    assert {path: path.read_bytes() for path in before} == before
