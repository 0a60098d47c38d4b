"""Runs that are stopped and go on: the same bits, one clear line, and a ledger that never counts less than was sent."""

import errno
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from asfl_privacy.accounting import Ledger
from asfl_privacy.cells import make_cells
from asfl_privacy.config import load_config
from asfl_privacy.execution import RunStoppedError, rounds
from asfl_privacy.execution.checkpoint import read_checkpoint
from asfl_privacy.folder_lock import FolderInUseError, locked
from asfl_privacy.metrics import reproducible_part
from asfl_privacy.run import execute_run, prepare_run
from asfl_privacy.unfinished import UnfinishedRunError, is_resumable, unfinished_folder

TINY = {
    "clients": "6", "cohort": "4", "rounds": "6", "tail_steps": "2", "full_steps": "2", "batch_size": "16", "seeds": "1",
    "evaluate_every": "2", "partition": "iid", "placement": "input", "epsilon": "4", "checkpoint_every": "2",
}  # fmt: skip
FILTERED = {
    "epsilon": None, "total_epsilon": "12", "filter": "individual", "labels": "randomized:2", "noise": "once",
    "updates": "dp-fedavg", "update_clip": "0.01",
}  # fmt: skip


def run(data, folder, *, stop_before=None, **overrides):
    words = {key: value for key, value in {**TINY, **overrides}.items() if value is not None}
    options = {name: words.pop(name) for name in ("resume", "on_note", "workers") if name in words}
    config = load_config(None, overrides=words)
    cell = make_cells(config)[-1]
    asked = iter(range(10_000))
    return execute_run(
        config,
        prepare_run(config, cell, data=data),
        data=data,
        folder=folder,
        should_stop=lambda: stop_before is not None and next(asked) >= stop_before,
        **options,
    )


def content(folder):
    row = json.loads((folder / "row.json").read_text())
    row["row"].pop("seconds")
    row.pop("sha256")
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in ("row.json", "metrics.csv")}
    return {**files, "row": row, "metrics": reproducible_part((folder / "metrics.csv").read_text())}


@pytest.mark.parametrize("stop_before", [1, 2, 5])
@pytest.mark.parametrize("changes", [{}, FILTERED, {"method": "fedavg", "mech": "none", "epsilon": None}])
@pytest.mark.parametrize("executor", ["serial", "batched"])
def test_a_stopped_run_goes_on_to_the_same_bits(digits, tmp_path, stop_before, changes, executor):
    """Catches state that is not in the checkpoint: what clients keep, the filter, evaluations, bytes."""
    changes = {**changes, "executor": executor}
    run(digits, tmp_path / "calm", **changes)
    with pytest.raises(RunStoppedError, match=f"after {stop_before} of 6 rounds"):
        run(digits, tmp_path / "cut", stop_before=stop_before, **changes)
    assert not (tmp_path / "cut").exists()
    assert is_resumable(tmp_path / "cut")
    notes = []
    run(digits, tmp_path / "cut", resume=True, on_note=notes.append, **changes)
    assert f"resumed after round {stop_before} of 6" in notes
    assert content(tmp_path / "cut") == content(tmp_path / "calm")
    assert not unfinished_folder(tmp_path / "cut").exists()


class Killed(BaseException):
    """Stands for whatever ends a process at once."""


@pytest.mark.parametrize("place", ["deliver", "charge"])
@pytest.mark.parametrize("at", [3, 8, 11])
def test_what_was_sent_before_a_kill_is_in_the_ledger_that_goes_on(digits, tmp_path, monkeypatch, place, at):
    """With noise from the system's source: every release of both attempts, by hand from what was delivered.

    Catches a ledger that goes on from its checkpoint and forgets what was sent since, and one that charges after it sends.
    """
    delivered = np.zeros(digits.num_records, dtype=int)
    calls = iter(range(10_000))
    deliver, charge = rounds.deliver, rounds.charge

    def counted(deliveries):
        if place == "deliver" and next(calls) == at // 2:
            raise Killed
        for delivery in deliveries:
            np.add.at(delivered, delivery.payload.records, 1)
        return deliver(deliveries)

    def charged(*arguments, **named):
        if place == "charge" and next(calls) == at:
            raise Killed
        charge(*arguments, **named)

    changes = {"reproducible": "no", "checkpoint_every": "2", "evaluate_every": "6", "last_evaluations": "1"}
    with monkeypatch.context() as patched:
        patched.setattr(rounds, "deliver", counted)
        patched.setattr(rounds, "charge", charged)
        with pytest.raises(Killed):
            run(digits, tmp_path / "run", **changes)
    with monkeypatch.context() as patched:
        patched.setattr(rounds, "deliver", counted if place == "charge" else lambda d: _counting(d, delivered, deliver))
        run(digits, tmp_path / "run", resume=True, **changes)
    counted_of = np.zeros(digits.num_records, dtype=int)
    ledger = Ledger.load(tmp_path / "run" / "ledger.json")
    for event in ledger.event_classes:
        records, releases = ledger.releases_of(event)
        counted_of[records] += releases
    assert (counted_of >= delivered).all()
    unsent = int((counted_of - delivered).sum())
    assert unsent <= 4 * 16  # at most the one round that was charged and not sent


def _counting(deliveries, delivered, deliver):
    for delivery in deliveries:
        np.add.at(delivered, delivery.payload.records, 1)
    return deliver(deliveries)


@pytest.mark.parametrize("mech", ["gaussian", "laplace"])
def test_a_filter_holds_records_back_whose_label_was_sent_twice(digits, tmp_path, monkeypatch, mech):
    """Killed after a delivery, the round's labels are drawn and charged anew; who cannot pay for both is held back.

    Catches a filter that is asked for the activations alone: the run would be refused at every resume.
    """
    changes = {
        "mech": mech, "epsilon": None, "total_epsilon": "8", "filter": "individual", "labels": "randomized:1",
        "reproducible": "no", "clients": "2", "cohort": "2", "batch_size": "400", "rounds": "3", "checkpoint_every": "1",
    }  # fmt: skip
    deliver, calls = rounds.deliver, iter(range(100))

    def die(deliveries):
        if next(calls) == 1:
            raise Killed
        return deliver(deliveries)

    with monkeypatch.context() as patched:
        patched.setattr(rounds, "deliver", die)
        with pytest.raises(Killed):
            run(digits, tmp_path / "run", **changes)
    outcome = run(digits, tmp_path / "run", resume=True, **changes)
    assert outcome.row["epsilon_total"] <= 8.0
    calm = run(digits, tmp_path / "calm", **changes)
    assert outcome.row["held_back"] >= calm.row["held_back"]


def test_what_is_kept_beside_a_folder_is_found_when_the_folder_appears(digits, tmp_path):
    """Catches a run that silently starts anew and forgets what it has sent."""
    with pytest.raises(RunStoppedError):
        run(digits, tmp_path / "cut", stop_before=3, reproducible="no")
    (tmp_path / "cut").mkdir()
    notes = []
    run(digits, tmp_path / "cut", resume=True, reproducible="no", on_note=notes.append)
    assert "resumed after round 3 of 6" in notes
    (tmp_path / "both" / ".unfinished").mkdir(parents=True)
    (tmp_path / "both.unfinished").mkdir()
    for place in (tmp_path / "both" / ".unfinished", tmp_path / "both.unfinished"):
        (place / "start.json").write_text("{}")
    with pytest.raises(UnfinishedRunError, match="both hold an unfinished run"):
        run(digits, tmp_path / "both", resume=True)


def test_a_kill_while_the_run_folder_is_filled_costs_nothing(digits, tmp_path, monkeypatch):
    """An existing folder (a mount) is filled file by file; what was there before the kill is written anew."""
    from asfl_privacy import run_files

    out, replace, calls = tmp_path / "mount", os.replace, iter(range(100))
    out.mkdir()

    def die(source, target):
        if next(calls) == 3:
            raise Killed
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(run_files.os, "replace", die)
        with pytest.raises(Killed):
            run(digits, out)
    assert not (out / "row.json").exists()
    run_files.check_writable(out)
    run(digits, out, resume=True)
    run(digits, tmp_path / "calm")
    assert content(out) == content(tmp_path / "calm")


def test_a_run_that_was_begun_is_not_begun_again_by_mistake(digits, tmp_path):
    with pytest.raises(RunStoppedError):
        run(digits, tmp_path / "cut", stop_before=3)
    with pytest.raises(UnfinishedRunError, match=r"cut\.unfinished holds a run .* add --resume .*or delete the folder"):
        run(digits, tmp_path / "cut")


def test_a_run_goes_on_only_as_it_began(digits, tmp_path):
    """Another learning rate, or sums in another order, would give the bits of neither run."""
    with pytest.raises(RunStoppedError):
        run(digits, tmp_path / "cut", stop_before=3, executor="serial")
    before = (unfinished_folder(tmp_path / "cut") / "config.toml").read_bytes()
    asked = {
        r"begun with lr 0\.1, and lr 0\.05 is asked": {"lr": "0.05", "executor": "serial"},
        "begun with sums one by one, and sums batched is asked": {"executor": "batched"},
        "begun with rounds 6, and rounds 7 is asked": {"rounds": "7", "executor": "serial"},
    }
    for words, changes in asked.items():
        with pytest.raises(UnfinishedRunError, match=words):
            run(digits, tmp_path / "cut", resume=True, **changes)
    assert (unfinished_folder(tmp_path / "cut") / "config.toml").read_bytes() == before
    run(digits, tmp_path / "cut", resume=True, executor="threads", workers=2)


def test_a_run_that_failed_before_anything_was_kept_leaves_nothing(digits, tmp_path):
    with pytest.raises(ValueError, match="diverged"):
        run(digits, tmp_path / "bad", lr="1e9", checkpoint_every="5")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_stops_the_run_and_keeps_the_checkpoint_before(digits, tmp_path, monkeypatch):
    """The second checkpoint finds no room; catches one that is removed before the next is whole."""
    from asfl_privacy.execution import checkpoint

    written, encode = iter(range(100)), checkpoint.encode_tensors

    def full(tensors):
        if next(written) >= 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return encode(tensors)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "encode_tensors", full)
        with pytest.raises(OSError, match=r"no checkpoint of round 4 .*No space left"):
            run(digits, tmp_path / "run", mech="none", epsilon=None)
    notes = []
    run(digits, tmp_path / "run", mech="none", epsilon=None, resume=True, on_note=notes.append)
    assert "resumed after round 2 of 6" in notes
    run(digits, tmp_path / "calm", mech="none", epsilon=None)
    assert content(tmp_path / "run") == content(tmp_path / "calm")


def test_two_processes_do_not_write_one_run(digits, tmp_path):
    place = unfinished_folder(tmp_path / "run")
    place.mkdir()
    with locked(place, refusal="busy"), pytest.raises(FolderInUseError, match="being written by another process"):
        run(digits, tmp_path / "run", resume=True)
    run(digits, tmp_path / "run")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_leaves_a_resumable_run_and_one_clear_line(tmp_path, number):
    """The command line, in a process of its own: exit code 130 and what to do next; nothing is said after SIGKILL."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items() if name != "rounds"]
    command = [sys.executable, "-m", "asfl_privacy", "train", *words, "--rounds=2000", f"--out={tmp_path / 'run'}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("round 4 "):
                break
        os.kill(process.pid, number)
        said = process.communicate(timeout=120)[1]
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130
        assert said.startswith("asfl-privacy: interrupted: stopped after ")
        assert "go on with the same command and --resume" in said
        assert said.count("\n") == 1
    (kept,) = [path for path in unfinished_folder(tmp_path / "run").iterdir() if path.name.startswith("checkpoint-")]
    fingerprint = json.loads((kept / "checkpoint.json").read_text())["body"]["fingerprint"]
    found = read_checkpoint(kept.parent, fingerprint=fingerprint)
    assert found.progress.rounds_done >= 2
