"""Tables beside rows.csv: what is read is what was written, and anything else is refused with its line."""

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asfl_privacy.reporting.records import TABLES, read_records, write_records

KINDS = {
    str: st.text('aé,"ε ', max_size=5),
    int: st.integers(-(10**9), 10**9),
    float: st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)),
}


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), table=st.sampled_from(sorted(TABLES)))
def test_a_table_is_read_back_bit_for_bit(data, table, tmp_path_factory):
    record = st.fixed_dictionaries({column: KINDS[kind] for column, kind in TABLES[table].items()})
    records = data.draw(st.lists(record, max_size=3))
    path = tmp_path_factory.mktemp("records") / "table.csv"
    write_records(path, records, table=table)
    assert read_records(path, table=table) == records


LAYER = {"data": "digits", "model": "lenet", "exchange_layer": "conv1", "automatic": "no"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"more": "x"}, "its columns are data, model, exchange_layer, automatic"),
        ({"data": 1}, "data is 1: it holds str"),
        ({"data": "a\nb"}, "one printable line"),
    ],
)
def test_what_is_no_record_of_the_table_is_not_written(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        write_records(tmp_path / "layers.csv", [{**LAYER, **changes}], table="layers")
    assert not (tmp_path / "layers.csv").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf, True])
def test_only_finite_numbers_are_kept(value, tmp_path):
    record = {"method": "asfl", "lr": value, "options": "", "accuracy": None, "seeds": 1}
    with pytest.raises(ValueError, match="lr is"):
        write_records(tmp_path / "trials.csv", [record], table="trials")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data,model\n", "another header"),
        ("data,model,exchange_layer,automatic\na,b,c\n", "line 2 has 3 cells"),
        ("", "another header"),
    ],
)
def test_a_damaged_table_is_refused(text, message, tmp_path):
    path = tmp_path / "layers.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_records(path, table="layers")


def test_a_number_that_cannot_be_read_is_named_with_its_line(tmp_path):
    path = tmp_path / "trials.csv"
    path.write_text("method,lr,options,accuracy,seeds\nasfl,fast,,0.5,1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 2: could not convert"):
        read_records(path, table="trials")
