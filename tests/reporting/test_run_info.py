import datetime
import json
import math
from pathlib import PurePosixPath

import pytest

from asfl_privacy.reporting.run_info import REQUIRED, flatten, plain_run_info, to_json

INFO = {"command": "c", "commit": None, "started": datetime.date(2026, 1, 2), "config": {}, "versions": {}}


def test_the_record_is_sorted_json_that_any_reader_takes():
    info = plain_run_info({**INFO, "config": {"norm": math.inf, "data": PurePosixPath("a/b"), "grid": (1, 2.5)}})
    text = to_json(info)
    assert "Infinity" not in text
    assert text.endswith("}\n")
    back = json.loads(text)
    assert list(back) == sorted(back)
    assert back["config"] == {"norm": "inf", "data": "a/b", "grid": [1, 2.5]}
    assert back["started"] == "2026-01-02"


@pytest.mark.parametrize("key", REQUIRED)
def test_a_report_without_provenance_is_refused(key):
    with pytest.raises(ValueError, match=f"run_info lacks '{key}'"):
        plain_run_info({name: value for name, value in INFO.items() if name != key})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": {"lr": math.nan}}, "config.lr is NaN"),
        ({"config": {"model": object()}}, "config.model is a object"),
        ({"config": "x"}, "maps names to values"),
        ({"x": [1, {2, 3}]}, "x.1 is a set"),
    ],
)
def test_what_json_cannot_hold_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        plain_run_info({**INFO, **changes})


def test_nested_settings_become_dotted_names():
    assert flatten({"a": {"b": {"c": [True, None]}}, "d": []}) == [("a.b.c", "yes, not set"), ("d", "none")]
