"""Documents on disk: whole or refused."""

import json
import os

import pytest

from asfl_privacy.accounting.storage import read_document, read_versions, write_document

NAME = "test document"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "document.json"
    write_document(path, name=NAME, version=1, body={"z": 0.1 + 0.2, "list": [1, 2], "none": None})
    return path


def test_a_document_reads_back_to_the_last_bit(path):
    assert read_document(path, name=NAME, version=1) == {"z": 0.1 + 0.2, "list": [1, 2], "none": None}


def test_every_truncation_is_refused(path):
    """Catches: accepting a half-written file."""
    text = path.read_text()
    for length in range(0, len(text) - 2, 7):
        path.write_text(text[:length])
        with pytest.raises(ValueError, match="corrupted or truncated"):
            read_document(path, name=NAME, version=1)


def test_a_changed_digit_is_refused(path):
    """Catches: reading the body without comparing its checksum."""
    path.write_text(path.read_text().replace("[1,2]", "[1,3]"))
    with pytest.raises(ValueError, match="does not match its sha256"):
        read_document(path, name=NAME, version=1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "is no test document"),
        ('{"format":"test document","version":1,"sha256":"","body":{"a":NaN}}', "NaN is not a number"),
        ('{"format":"test document","version":1,"sha256":"","body":{"a":1,"a":2}}', "twice"),
        ('{"format":"other","version":1}', "is no test document"),
        ('{"format":"test document","version":2}', "has version 2"),
        ('{"format":"test document","version":true}', "has version True"),
        ('{"format":"test document","version":1,"body":[]}', "has keys"),
        ("\u0000", "corrupted"),
    ],
)
def test_other_files_are_refused_in_one_line(path, text, words):
    path.write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        read_document(path, name=NAME, version=1)
    assert "\n" not in str(caught.value)


def test_a_failed_write_leaves_the_old_file(path, monkeypatch):
    """Catches: writing in place."""
    before = path.read_text()

    def fail(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_document(path, name=NAME, version=1, body={"new": 1})
    assert path.read_text() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_nan_is_not_written(path):
    before = json.loads(path.read_text())
    with pytest.raises(ValueError, match="Out of range"):
        write_document(path, name=NAME, version=1, body={"bad": float("nan")})
    assert json.loads(path.read_text()) == before


def test_several_versions_can_be_read_and_no_other(path):
    assert read_versions(path, name=NAME, versions=(1, 2)) == (1, read_document(path, name=NAME, version=1))
    with pytest.raises(ValueError, match="this program reads version 2 or 3"):
        read_versions(path, name=NAME, versions=(2, 3))
