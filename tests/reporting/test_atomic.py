from pathlib import Path

import pytest

from asfl_privacy.reporting.atomic import write_atomic


def test_a_failed_replacement_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    # Catches: writing straight into the file.
    path = tmp_path / "run.json"
    write_atomic(path, "old\n")

    def refuse(self, target):
        assert target == path
        assert self.read_bytes() == b"new\n"
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, "new\n")
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("run.json", "old\n")]


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "none" / "run.json", b"")
