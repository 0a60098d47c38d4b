"""Checkpoints: a run goes on to the same bits, wherever it is killed; what is not whole is never taken for whole."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import sys
import warnings
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import gaussian, make_tiny
from small_disks import mounted_disk

from asfl_privacy.accounting import Ledger
from asfl_privacy.accounting.budget import RecordBudget
from asfl_privacy.accounting.filter import RecordFilter
from asfl_privacy.execution.charging import Account
from asfl_privacy.execution.checkpoint import CLIENTS_FOLDER, JSON_FILE, Checkpoint, read_checkpoint, write_checkpoint
from asfl_privacy.execution.progress import Evaluation, FailureNote, PlanFacts, Progress
from asfl_privacy.execution.release_log import LogPosition
from asfl_privacy.execution.rounds import begin_run, run_rounds
from asfl_privacy.execution.serial import SerialExecutor
from asfl_privacy.federated import METHODS, State, Traffic
from asfl_privacy.federated.client_states import DiskClientStates, MemoryClientStates

CONFIG = "asfl digits seed 0"


def account_of(number):
    ledger = Ledger(p=2.0, radius=1.0, clients=[0, 0, 1, 1], facts={"delta": 1e-5})
    ledger.record(
        channel="activations", mechanism="gaussian", noise_multiplier=0.1 + 0.2, round=number, records=[0, 0, 3]
    )
    guard = RecordFilter.within(RecordBudget(gaussian_budget=1.0, pure_budget=0.1), num_records=4)
    guard.charge([2], mechanism="gaussian", noise_multiplier=3.0)
    mask = np.array([True, False, False, number % 2 == 0])
    return Account(
        ledger=ledger, held_back=~mask, budget=guard, run_id="a run", kept={"labels": mask, "updates": ~mask}
    )


def progress_of(number, clients=None, *, account=True, size=4):
    """A run after `number` rounds in which every field has a value of its own."""
    weights = {"b.weight": torch.full((size, 2), number / 3), "a.bias": torch.tensor([-0.0, float("nan")])}
    states = {client: {"c/0": torch.full((size,), float(number + client))} for client in (1, 12)}
    evaluation = Evaluation(
        round=number,
        accuracy=1 / 3,
        loss=float("inf"),
        sensitivity=0.1,
        noise_scale=None,
        traffic=Traffic(1, 2, 3),
        seconds={"head": 0.1, "tail": 1e-300},
        peak_memory=12345,
        measures={"personal_accuracy": 1 / 7, "odd": float("-inf")},
    )
    return Progress(
        rounds_done=number,
        state=State(
            weights=weights,
            clients=(MemoryClientStates() if clients is None else clients).updated(states),
            server={"v": torch.tensor(number), "counts": torch.arange(3)},
        ),
        account=account_of(number) if account else None,
        evaluations=(
            evaluation,
            replace(evaluation, loss=0.1, accuracy=float("nan")),
            replace(evaluation, loss=None, accuracy=None, measures={}),
        ),
        largest_plan=PlanFacts(
            sensitivity=0.1, scale=np.float64(0.2), noise_stddev=1 / 3, rounding="included", certificate_method=None
        ),
        traffic=Traffic(2**60, 5, 6),
        drawn=np.int64(100),
        drawn_remote=25,
        failures=(FailureNote(round=1, client=2, phase="train", reason="it was\n”odd“"),),
        seconds=1.5,
    )


def tensors(mapping):
    return [(name, str(value.dtype), value.shape, value.numpy().tobytes()) for name, value in mapping.items()]


def plain(progress):
    """Everything in a run's progress, in values that can be compared; a field that is added later stands here too."""
    words = {field.name: repr(getattr(progress, field.name)) for field in fields(progress)}
    state, account = progress.state, progress.account
    words |= {
        "drawn": int(progress.drawn),
        "largest_plan": str(progress.largest_plan).replace("np.float64(0.2)", "0.2"),
        "state": [
            tensors(state.weights),
            tensors(state.server),
            [(c, tensors(state.clients[c])) for c in state.clients],
        ],
        "account": None
        if account is None
        else [
            account.run_id,
            account.held_back.tolist(),
            {channel: mask.tolist() for channel, mask in account.kept.items()},
            None if account.budget is None else account.budget.state(),
        ],
    }
    return words


def write(folder, progress, **named):
    return write_checkpoint(folder, progress, **({"fingerprint": CONFIG} | named))


def read(folder, **named):
    return read_checkpoint(folder, **({"fingerprint": CONFIG} | named))


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != CLIENTS_FOLDER)


# What is written is read


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("account", [False, True])
def test_everything_comes_back_to_the_last_bit(tmp_path, on_disk, account):
    """Catches: a field that is not stored, an order or a type that changes, infinities that JSON cannot hold."""
    clients = DiskClientStates(tmp_path / CLIENTS_FOLDER) if on_disk else None
    progress = progress_of(3, clients, account=account)
    write(tmp_path, progress, log=LogPosition(appends=7, digest="ab"))
    found = read(tmp_path)
    assert isinstance(found, Checkpoint)
    assert plain(found.progress) == plain(progress)
    assert (found.log, found.notes) == (LogPosition(appends=7, digest="ab"), ())
    assert type(found.progress.state.clients) is type(progress.state.clients)
    if account:
        assert found.progress.account.ledger == progress.account.ledger
        found.progress.account.held_back[0] = True  # the next rounds write into it
        found.progress.account.kept["labels"][0] = True


def test_a_run_that_keeps_nothing_comes_back(tmp_path):
    progress = Progress(rounds_done=0, state=State(weights={}), account=None)
    write(tmp_path / "new" / "folder", progress)
    assert plain(read(tmp_path / "new" / "folder").progress) == plain(progress)


def test_where_nothing_was_written_nothing_is_found(tmp_path):
    assert read(tmp_path / "none") is None
    (tmp_path / ".unfinished-x").mkdir()
    (tmp_path / "checkpoint-1").mkdir()
    assert read(tmp_path) is None


def test_only_the_newest_stays_with_the_client_files_it_names(tmp_path):
    """Catches: a disk that fills up, client files that are pruned from under the checkpoint."""
    clients = DiskClientStates(tmp_path / CLIENTS_FOLDER)
    for number in range(4):
        progress = progress_of(number, clients)
        clients = progress.state.clients
        write(tmp_path, progress)
    assert names(tmp_path) == ["checkpoint-000004"]
    assert sorted(path.name for path in clients.folder.iterdir()) == sorted(clients.index.values())
    assert plain(read(tmp_path).progress) == plain(progress)


def test_a_round_may_be_written_twice(tmp_path):
    """As after a resume from an earlier checkpoint. Catches: a rename that fails because the name is taken."""
    write(tmp_path, progress_of(5))
    write(tmp_path, progress_of(5, size=6))
    assert plain(read(tmp_path).progress) == plain(progress_of(5, size=6))


def test_client_states_elsewhere_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"client states lie in .* make them with DiskClientStates"):
        write(tmp_path / "run", progress_of(1, DiskClientStates(tmp_path / "other")))


# A run goes on


TWO_RELEASES = RecordBudget(gaussian_budget=0.6, pure_budget=1.0, excess_budget=1e-6, tail_budget=1e-12)


@pytest.mark.parametrize(
    "privacy",
    [
        None,
        {"label_epsilon": 1.0, "noise": "once", "budget": TWO_RELEASES},
        {"updates": "dp-fedavg", "update_multiplier": 3.0},
    ],
)
@pytest.mark.parametrize("stop", [1, 3])
def test_a_resumed_run_ends_with_the_bits_of_an_undisturbed_one(digits, tmp_path, privacy, stop):
    """Noise from the seed. Catches: kept draws, budgets, evaluations or totals that start anew."""

    def federation():
        return make_tiny(digits, privacy=None if privacy is None else gaussian(**privacy), rounds=4)

    def start(clients):
        fresh = federation()
        ledger = None if privacy is None else Ledger(p=2.0, radius=1.0)
        return begin_run(fresh, ledger=ledger, state=State(weights=fresh.initial_weights, clients=clients))

    def run(progress, after_round=lambda progress: None):
        fresh = federation()
        with SerialExecutor(fresh, METHODS["asfl"]) as executor:
            return run_rounds(fresh, METHODS["asfl"], executor=executor, start=progress, after_round=after_round)

    def checkpoint(progress):
        if progress.rounds_done == stop:
            write(tmp_path, progress)

    def bits(progress):
        timeless = tuple(replace(e, seconds={}, peak_memory=0) for e in progress.evaluations)
        return plain(replace(progress, seconds=0.0, evaluations=timeless))

    whole = run(start(MemoryClientStates()))
    run(start(DiskClientStates(tmp_path / CLIENTS_FOLDER)), after_round=checkpoint)  # as if it had died at its end
    resumed = run(read(tmp_path).progress)
    assert bits(resumed) == bits(whole)
    assert resumed.ledger == whole.ledger


# Kills


def write_until_killed(folder, progress, steps):
    """In a process of its own: SIGKILL at the file system's step number `steps`."""
    count = 0

    def hook(event, arguments):
        nonlocal count
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "os.chmod"):
            count += 1
            if count == steps:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    write(folder, progress)
    os._exit(0)


def test_a_kill_at_any_step_leaves_the_old_or_the_new_checkpoint(tmp_path, monkeypatch):
    """Before every call that opens, renames or removes. Catches: removing first, a folder that gets its name too early."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a kill loses nothing that was written; and it is faster
    write(tmp_path / "start", progress_of(1, DiskClientStates(tmp_path / "start" / CLIENTS_FOLDER)))
    found, steps, killed = [], 0, True
    while killed:
        steps += 1
        folder = tmp_path / str(steps)
        shutil.copytree(tmp_path / "start", folder)
        before = read(folder).progress
        second = progress_of(2, before.state.clients)
        allowed = [plain(before), plain(second)]
        process = multiprocessing.get_context("fork").Process(target=write_until_killed, args=(folder, second, steps))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads at a fork
            process.start()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        killed = process.exitcode != 0
        after = read(folder)
        assert plain(after.progress) in allowed
        assert after.notes == ()
        found.append(after.progress.rounds_done)
        if killed and steps % 5:
            continue
        third = progress_of(3, after.progress.state.clients)
        write(folder, third)
        assert len(names(folder)) == 1
        assert len(list((folder / CLIENTS_FOLDER).iterdir())) == 2
        assert plain(read(folder).progress) == plain(third)
    assert found == sorted(found)
    assert found.count(1) > 15
    assert found.count(2) > 5


# A full disk


def error_of(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return error
    return None


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path):
    """A real file system, filled to less and less room. Catches: half a checkpoint, an old one removed to make room."""
    with mounted_disk(tmp_path / "small") as disk:
        clients = DiskClientStates(disk / "run" / CLIENTS_FOLDER)
        first = progress_of(1, clients, size=3000)
        write(disk / "run", first)
        second = progress_of(2, first.state.clients, size=3000)
        failed = 0
        for room in range(0, 200, 8):
            filler = disk / "filler"
            free = shutil.disk_usage(disk).free
            filler.write_bytes(b"x" * max(0, free - room * 1024))
            error = error_of(write, disk / "run", second)
            filler.unlink()
            if error is None:
                break
            failed += 1
            assert "\n" not in str(error)
            assert "no checkpoint of round 2 can be written" in str(error)
            assert "No space left on device" in str(error)
            assert error.__cause__.errno == errno.ENOSPC
            assert names(disk / "run") == ["checkpoint-000001"]
            assert plain(read(disk / "run").progress) == plain(first)
        assert failed > 2
        assert plain(read(disk / "run").progress) == plain(second)


def test_an_error_at_any_flush_leaves_the_old_checkpoint_whole(tmp_path, monkeypatch):
    """Every fsync fails once. Catches: an error that is swallowed, and what it leaves behind."""
    clients = DiskClientStates(tmp_path / CLIENTS_FOLDER)
    first = progress_of(1, clients)
    write(tmp_path, first)
    fsync, failures = os.fsync, 0
    for number in range(1, 100):
        second, count = progress_of(2, read(tmp_path).progress.state.clients), 0

        def failing(descriptor, number=number):
            nonlocal count
            count += 1
            if count == number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing)
            error = error_of(write, tmp_path, second)
        if error is None:
            break
        failures += 1
        found = read(tmp_path)
        assert plain(found.progress) == plain(first) or plain(found.progress) == plain(second)
        assert not [name for name in names(tmp_path) if name.startswith(".")]
    assert failures >= 9  # two client files, their folder, six files, the folder: at least one flush each
    assert plain(read(tmp_path).progress) == plain(second)


def test_files_reach_the_disk_before_the_folder_gets_its_name(tmp_path, monkeypatch):
    """As a power failure asks. Catches: any flush left out, or one that comes after what depends on it."""
    synced, fsync = [], os.fsync

    def noted(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        named = sorted(entry.name for entry in tmp_path.glob("checkpoint-*"))
        synced.append((path.relative_to(tmp_path).as_posix(), path.name, named))
        fsync(descriptor)

    progress = progress_of(1, DiskClientStates(tmp_path / CLIENTS_FOLDER))
    monkeypatch.setattr(os, "fsync", noted)
    path = write(tmp_path, progress)
    *files, scratch, folder = synced
    assert folder == (".", tmp_path.name, ["checkpoint-000001"])
    assert scratch[0].startswith(".unfinished-")
    assert "/" not in scratch[0]
    assert all(named == [] for _, _, named in (*files, scratch))
    flushed = {name for _, name, _ in files}
    assert flushed >= {CLIENTS_FOLDER, *progress.state.clients.index.values()}
    assert flushed >= {entry.name for entry in path.iterdir()} - {JSON_FILE}
    assert [name for _, name, _ in files if name.startswith(f".{JSON_FILE}")] == [files[-1][1]]


# Damage


def both(folder):
    """Two whole checkpoints, as a kill between the new one's name and the old one's removal leaves them."""
    write(folder, progress_of(1))
    shutil.copytree(folder / "checkpoint-000001", folder / "aside")
    path = write(folder, progress_of(2))
    (folder / "aside").rename(folder / "checkpoint-000001")
    return path


FILES = (
    *(JSON_FILE, "weights.safetensors", "server.safetensors", "clients.safetensors"),
    *("ledger.json", "masks.safetensors", "account.json"),
)


def test_these_are_all_the_files(tmp_path):
    assert sorted(path.name for path in both(tmp_path).iterdir()) == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["gone", "cut", "empty", "bit", "last bit"])
def test_a_damaged_checkpoint_is_never_used(tmp_path, name, damage):
    """The one before is taken and said so; where there is none, the run is refused. Catches: any file without a sum."""
    path = both(tmp_path) / name
    data = path.read_bytes()
    middle = len(data) // 2
    changed = {
        "cut": data[:-2],
        "empty": b"",
        "bit": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "last bit": data[:-1] + bytes([data[-1] ^ 1]),  # of a tensor: nothing but the sum can tell
    }
    path.unlink() if damage == "gone" else path.write_bytes(changed[damage])
    found = read(tmp_path)
    assert plain(found.progress) == plain(progress_of(1))
    (note,) = found.notes
    assert "checkpoint-000002 is damaged" in note
    assert "goes on from checkpoint-000001, after round 1" in note
    assert "\n" not in note
    shutil.rmtree(tmp_path / "checkpoint-000001")
    with pytest.raises(ValueError, match=r"checkpoint-000002 is damaged .* restore a copy") as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


def test_after_a_damaged_one_the_run_can_be_saved_again(tmp_path):
    (both(tmp_path) / "weights.safetensors").unlink()
    found = read(tmp_path)
    write(tmp_path, replace(found.progress, rounds_done=2))
    assert read(tmp_path).progress.rounds_done == 2
    assert names(tmp_path) == ["checkpoint-000003"]


def test_a_lost_client_file_is_damage_too(tmp_path):
    progress = progress_of(1, DiskClientStates(tmp_path / CLIENTS_FOLDER))
    write(tmp_path, progress)
    (tmp_path / CLIENTS_FOLDER / progress.state.clients.index[12]).unlink()
    with pytest.raises(ValueError, match=r"damaged .*12\.1\.[0-9a-f]{8}\.safetensors cannot be read"):
        read(tmp_path)


def test_another_configuration_or_version_is_refused_and_not_passed_over(tmp_path):
    """An older whole one is there. Catches: going back behind rounds that were done, and adding up two configurations."""
    path = both(tmp_path)
    with pytest.raises(ValueError, match=r"another configuration .*'asfl digits seed 0' where 'other'"):
        read(tmp_path, fingerprint="other")
    words = json.loads((path / JSON_FILE).read_text())
    (path / JSON_FILE).write_text(json.dumps(words | {"version": 2}))
    with pytest.raises(ValueError, match="has version 2: this program reads version 1"):
        read(tmp_path)


def test_no_file_is_a_pickle(tmp_path, monkeypatch):
    """Catches: a checkpoint that runs code when it is read."""

    def refuse(*arguments, **named):
        raise AssertionError("unpickled")

    write(tmp_path, progress_of(1))
    for name in ("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "numpy.load"):
        monkeypatch.setattr(name, refuse)
    assert plain(read(tmp_path).progress) == plain(progress_of(1))
