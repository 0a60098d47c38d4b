"""A folder counts as shared only if the token is read, the answer arrives, and locks hold: each failure is found."""

import multiprocessing
import shutil
from dataclasses import replace

import pytest

from asfl_privacy.shared_folder import SharedFolder, check_folder_from, has_answer, shared_folder


def _look(folder: SharedFolder, answers: object) -> None:
    answers.put(check_folder_from(folder, "other"))


def seen_elsewhere(folder: SharedFolder) -> str:
    """What another process finds."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=_look, args=(folder, answers))
    process.start()
    process.join()
    return answers.get()


@pytest.mark.parametrize("locks", [False, True])
def test_a_shared_folder_is_accepted_and_left_as_it_was(tmp_path, locks):
    with shared_folder(tmp_path, locks=locks) as folder:
        assert not has_answer(folder, "other")
        assert seen_elsewhere(folder) == ""
        assert has_answer(folder, "other")
    assert not list(tmp_path.iterdir())


def test_a_folder_of_the_same_name_on_another_disk_is_refused(tmp_path):
    (tmp_path / "here").mkdir()
    with shared_folder(tmp_path / "here", locks=False) as folder:
        assert check_folder_from(replace(folder, path=tmp_path / "nowhere"), "other") == "No such file or directory"
        (tmp_path / "there").mkdir()
        assert check_folder_from(replace(folder, path=tmp_path / "there"), "other") == "No such file or directory"
        shutil.copy(folder.token_file, tmp_path / "there")
        (tmp_path / "there" / folder.token_file.name).write_text("of another sweep")
        assert check_folder_from(replace(folder, path=tmp_path / "there"), "other") == "its files there are others"


def test_an_answer_that_does_not_arrive_is_noticed(tmp_path):
    """Catches a check that trusts a read: a machine may see a copy of the folder that it writes to alone."""
    (tmp_path / "here").mkdir()
    (tmp_path / "copy").mkdir()
    with shared_folder(tmp_path / "here", locks=False) as folder:
        shutil.copy(folder.token_file, tmp_path / "copy")
        assert check_folder_from(replace(folder, path=tmp_path / "copy"), "other") == ""
        assert not has_answer(folder, "other")


def test_locks_that_do_not_reach_the_other_machine_are_noticed(tmp_path):
    """Two machines that could both lock a ledger could lose charges. Catches a check that never tries the lock."""
    (tmp_path / "here").mkdir()
    (tmp_path / "copy").mkdir()
    with shared_folder(tmp_path / "here", locks=True) as folder:
        shutil.copy(folder.token_file, tmp_path / "copy")
        assert "locks taken elsewhere do not hold" in check_folder_from(
            replace(folder, path=tmp_path / "copy"), "other"
        )
