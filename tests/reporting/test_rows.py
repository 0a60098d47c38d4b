import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asfl_privacy.reporting.rows import COLUMNS, PRIVACY_COLUMNS, complete_row, failed_status, read_rows, write_rows

# design.md, the paragraph on rows.csv, in its order.
DESIGN = """status, method, data, partition, clients, cohort, model, mech, target_epsilon, target_total_epsilon, delta,
radius, p, q, placement, noise, own, exchange_layer, sensitivity, noise_scale, noise_stddev, epsilon_release,
epsilon_total, delta_total, epsilon_whole_record, accuracy, seed, rounds, tail_steps, full_steps, remote_fraction, lr,
bytes_model, bytes_activations, bytes_labels, seconds"""
ADDED = """labels updates calibration reproducible update_multiplier epsilon_claimed epsilon_client epsilon_activations
epsilon_labels epsilon_updates held_back options personal_accuracy prototype_accuracy_local prototype_accuracy_all"""


def test_the_columns_are_those_of_the_design():
    design = tuple(DESIGN.replace("\n", " ").replace(" ", "").split(","))
    assert COLUMNS[: len(design)] == design
    assert COLUMNS[len(design) :] == tuple(ADDED.split())


def test_rows_come_back_bit_for_bit(tmp_path, grid, gaussian):
    grid.append(gaussian(seed=7, radius="any", p=math.inf, epsilon_total=math.inf, model='odd, "quoted" näme'))
    path = tmp_path / "rows.csv"
    write_rows(path, grid)
    assert read_rows(path) == [complete_row(row) for row in grid]


@given(value=st.floats(min_value=0.0, max_value=1.0), seconds=st.floats(min_value=0.0, allow_infinity=False))
def test_no_float_changes_on_the_way_through_the_file(tmp_path_factory, value, seconds):
    # Catches: "%g" or round(…) in place of repr.
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    row = {"status": "ok", "method": "asfl", "mech": "none", "seed": 3, "accuracy": value, "seconds": seconds}
    write_rows(path, [row])
    (back,) = read_rows(path)
    assert (back["accuracy"], back["seconds"]) == (value, seconds)


def test_numpy_and_python_numbers_give_the_same_bytes(tmp_path, gaussian):
    plain = gaussian(clients=10, target_epsilon=4, p=2)
    numpy_scalars = gaussian(clients=np.int64(10), target_epsilon=np.float64(4.0), p="2")
    write_rows(tmp_path / "a.csv", [plain])
    write_rows(tmp_path / "b.csv", [numpy_scalars])
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    assert b"\r" not in (tmp_path / "a.csv").read_bytes()


def test_reference_rows_are_blank_where_privacy_has_no_meaning(tmp_path, unnoised):
    write_rows(tmp_path / "rows.csv", [unnoised()])
    header, line = (tmp_path / "rows.csv").read_text().splitlines()
    cells = dict(zip(header.split(","), line.split(","), strict=True))
    assert {cells[column] for column in PRIVACY_COLUMNS} == {""}


@pytest.mark.parametrize("column", PRIVACY_COLUMNS)
def test_a_run_without_noise_cannot_claim_privacy(unnoised, gaussian, column):
    # Catches: dropping the check, so that an unnoised row shows an ε.
    added = {"labels": "clear", "updates": "dp-sgd", "calibration": "paper", "reproducible": "yes", "held_back": 3}
    value = ({**gaussian(), "target_total_epsilon": 8.0} | added).get(column, 1.0)
    with pytest.raises(ValueError, match=f"mech none has {column}.*leave it blank"):
        complete_row(unnoised(**{column: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon_total": math.nan}, "epsilon_total is nan"),
        ({"accuracy": math.nan}, "accuracy is nan"),
        ({"epsilon_release": -1.0}, "epsilon_release is -1.0"),
        ({"noise_stddev": math.inf}, "noise_stddev is infinite"),
        ({"accuracy": 91.3}, "accuracy is 91.3: it lies between 0 and 1"),
        ({"delta": 1.5}, "delta is 1.5"),
        ({"radius": 0.0}, "radius is 0"),
        ({"radius": "all"}, "radius is 'all'"),
        ({"p": 3}, "p is 3: norms are 1, 2 or inf"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1.0}, "seed is 1.0: it counts"),
        ({"seed": True}, "seed is True"),
        ({"seed": None}, "seed is blank"),
        ({"accuracy": None}, "accuracy is blank"),
        ({"accuracy": None, "prototype_accuracy_all": 0.5}, "accuracy is blank"),
        ({"personal_accuracy": 91.3}, "personal_accuracy is 91.3: it lies between 0 and 1"),
        ({"method": ""}, "method is blank"),
        ({"status": "fine"}, "status is 'fine'"),
        ({"status": None}, "status is None"),
        ({"status": "failed: two\nlines"}, "one printable line"),
        ({"model": 3}, "model is 3: it holds text"),
        ({"sensitivity": "1"}, "sensitivity is '1': it holds a number"),
        ({"epsilon": 1.0}, "unknown column 'epsilon'"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(tmp_path, gaussian, changes, message):
    path = tmp_path / "rows.csv"
    with pytest.raises(ValueError, match=message) as refusal:
        write_rows(path, [gaussian(), gaussian(**changes)])
    assert "\n" not in str(refusal.value)
    assert not list(tmp_path.iterdir())


def test_a_personal_accuracy_stands_for_a_global_one_that_does_not_exist(tmp_path, fedavg):
    # Catches: personal accuracy written into the global column, where it would be compared with FedAvg's.
    write_rows(tmp_path / "rows.csv", [fedavg(method="fedproto", accuracy=None, personal_accuracy=0.75)])
    (row,) = read_rows(tmp_path / "rows.csv")
    assert (row["accuracy"], row["personal_accuracy"], row["prototype_accuracy_local"]) == (None, 0.75, None)


def test_a_refused_write_keeps_the_old_file(tmp_path, gaussian):
    path = tmp_path / "rows.csv"
    write_rows(path, [gaussian()])
    before = path.read_bytes()
    with pytest.raises(ValueError):
        write_rows(path, [gaussian(), gaussian(accuracy=math.nan)])
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.csv"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: "", "is empty"),
        (lambda text: text[:-3], "ends inside a line"),
        (lambda text: text.rsplit(",", 1)[0] + "\n", "line 2 has 50 cells: a run has 51"),
        (lambda text: text.replace("\n", ",1\n").replace("_all,1", "_all"), "line 2 has 52 cells"),
        (lambda text: text.replace(",epsilon_total", ""), "lacks the column 'epsilon_total'"),
        (lambda text: text.replace("_all\n", "_all,hours\n"), "unknown column 'hours'"),
        (lambda text: text.replace("status,method", "method,status"), "another order"),
        (lambda text: text.replace("30.0", "3O.0"), "line 2: epsilon_total is '3O.0': it holds a number"),
        (lambda text: text.replace("30.0", "nan"), "line 2: epsilon_total is nan"),
        (lambda text: text.replace(",20,4,6,", ",20.5,4,6,"), "line 2: rounds is '20.5': it holds a whole number"),
        (lambda text: text.replace("digits", '"digits'), "is no CSV file"),
        (lambda text: text + "\n", "line 3 has 0 cells"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, gaussian, damage, message):
    path = tmp_path / "rows.csv"
    write_rows(path, [gaussian()])
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    with pytest.raises(ValueError, match=message) as refusal:
        read_rows(path)
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "rows.csv").write_bytes(b"\xff\xfe\x00\n")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_rows(tmp_path / "rows.csv")


@given(st.text(max_size=40))
def test_any_reason_makes_a_status_that_can_be_written(reason):
    # Catches: a failed run whose message loses the whole file.
    row = {"status": failed_status(reason), "method": "asfl", "mech": "gaussian", "seed": 0}
    assert complete_row(row)["status"] == row["status"]
