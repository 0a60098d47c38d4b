"""Client states: handles that never change, in memory and on disk alike."""

import json
import os
import pickle
import threading
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_disks import mounted_disk

from asfl_privacy.federated.client_states import DiskClientStates, MemoryClientStates


@pytest.fixture(params=["memory", "disk"])
def empty(request, tmp_path):
    return MemoryClientStates() if request.param == "memory" else DiskClientStates(tmp_path / "clients")


@pytest.fixture
def small_disk(tmp_path):
    with mounted_disk(tmp_path / "small") as folder:
        yield folder


def state_of(number, size=3):
    return {"control": torch.full((size,), float(number)), "steps": torch.tensor(number), "seen": torch.tensor(True)}


def plain(states):
    """All that a handle holds, as plain values."""
    return {client: {name: (v.dtype, v.tolist()) for name, v in state.items()} for client, state in states.items()}


def files(states):
    return sorted(path.name for path in states.folder.iterdir())


# Handles


def test_an_earlier_handle_keeps_what_it_held(empty):
    """Catches: one index shared by all handles, and a client's file overwritten."""
    first = empty.updated({3: state_of(1), 1: state_of(2)})
    second = first.updated({3: state_of(5), 7: state_of(6)})
    other = first.updated({3: state_of(8)})  # of the same age as the second
    assert plain(empty) == {}
    assert plain(first) == plain({3: state_of(1), 1: state_of(2)})
    assert plain(second) == plain({1: state_of(2), 3: state_of(5), 7: state_of(6)})
    assert plain(other) == plain({1: state_of(2), 3: state_of(8)})


def test_changes_in_place_reach_no_handle(empty):
    """Catches: keeping the tensors of the caller, handing out those that are kept."""
    given_state = state_of(1)
    states = empty.updated({0: given_state})
    given_state["control"].zero_()
    got = states[0]
    got["control"].add_(5.0)
    got["new"] = torch.zeros(1)
    assert plain(states) == plain({0: state_of(1)})


def test_the_mapping_of_those_that_keep_something(empty):
    """A client that keeps nothing is absent; numbers ascend, in whichever order they came: sums over them stay the same."""
    states = empty.updated({9: state_of(9), 2: state_of(2), 30: state_of(3), 4: {}})
    assert list(states) == [2, 9, 30]
    assert (len(states), 4 in states, 9 in states, "9" in states) == (3, False, True, False)
    assert states.get(4) is None
    with pytest.raises(KeyError):
        states[4]
    assert list(states.updated({9: {}, 5: {}})) == [2, 30]
    assert list(states) == [2, 9, 30]
    assert states == states
    assert states != states.updated({})
    with pytest.raises(TypeError):
        states[2] = {}


@pytest.mark.parametrize("client", [-1, True, "3", 1.0, "../3"])
def test_what_is_no_client_number_is_refused(empty, client):
    with pytest.raises(ValueError, match="clients are numbered by integers"):
        empty.updated({client: state_of(1)})


@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 30), st.dictionaries(st.integers(0, 4), st.integers(0, 3), max_size=3)), max_size=8
    ),
    kept=st.sets(st.integers(0, 8), max_size=3),
    cache_bytes=st.sampled_from([0, 400, 10**6]),
)
def test_memory_and_disk_agree_with_plain_dictionaries(tmp_path_factory, steps, kept, cache_bytes):
    """Any tree of updates, any handles kept. Catches: a handle that sees another's update, a file pruned too early."""
    disk = [DiskClientStates(tmp_path_factory.mktemp("states"), cache_bytes=cache_bytes)]
    memory, twin = [MemoryClientStates()], [{}]
    for parent, changes in steps:
        parent %= len(twin)
        states = {client: state_of(number) if number else {} for client, number in changes.items()}
        disk.append(disk[parent].updated(states))
        memory.append(memory[parent].updated(states))
        merged = twin[parent] | states
        twin.append({client: state for client, state in merged.items() if state})
    assert [plain(one) for one in disk] == [plain(one) for one in memory] == [plain(one) for one in twin]
    held = [disk[-1], *(disk[number] for number in kept if number < len(disk))]
    reopened = DiskClientStates.reopen(disk[-1].folder, json.loads(json.dumps(disk[-1].index)), cache_bytes=cache_bytes)
    held[0].prune(keep=held[1:])
    assert files(disk[0]) == sorted({name for one in held for name in one.index.values()})
    assert plain(reopened) == plain(twin[-1])
    for one in held:
        assert plain(one) == plain(twin[disk.index(one)])


# Files


def test_a_pickled_handle_is_small_and_reads_the_files_itself(tmp_path):
    """Catches: tensors that travel to every worker process."""
    states = DiskClientStates(tmp_path).updated({n: state_of(n, size=10_000) for n in range(20)})
    data = pickle.dumps(states)
    assert len(data) < 3000
    assert plain(pickle.loads(data)) == plain(states)
    again = pickle.loads(data).updated({0: state_of(77)})
    assert again[0]["steps"] == 77
    assert states[0]["steps"] == 0


def test_reopened_states_never_overwrite_what_a_killed_attempt_left(tmp_path):
    """A file of the next version that was cut short by a kill. Catches: trusting it, or writing over what is there."""
    states = DiskClientStates(tmp_path).updated({5: state_of(1)})
    index, before = states.index, (tmp_path / states.index[5]).read_bytes()
    stray = tmp_path / states.updated({5: state_of(2)}).index[5]
    stray.write_bytes(stray.read_bytes()[:40])
    again = DiskClientStates.reopen(tmp_path, index)
    updated = again.updated({5: state_of(2)})
    assert updated[5]["steps"] == 2
    assert updated.index[5] != stray.name
    assert (tmp_path / index[5]).read_bytes() == before
    (tmp_path / "notes.txt").write_text("kept")
    assert updated.prune(keep=[again]) == 1
    assert set(files(updated)) == {index[5], updated.index[5], "notes.txt"}


@pytest.mark.parametrize("damage", ["gone", "cut", "longer", "empty", "header"])
def test_a_file_that_is_not_whole_is_refused_when_reopened(tmp_path, damage):
    states = DiskClientStates(tmp_path).updated({5: state_of(1), 6: state_of(2)})
    path = tmp_path / states.index[6]
    data = path.read_bytes()
    changed = {"cut": data[:-1], "longer": data + b"\0", "empty": b"", "header": b"\xff" * 8 + data[8:]}
    path.unlink() if damage == "gone" else path.write_bytes(changed[damage])
    with pytest.raises(ValueError, match=path.name) as caught:
        DiskClientStates.reopen(tmp_path, states.index)
    assert "\n" not in str(caught.value)


def test_a_single_changed_bit_is_refused_when_read(tmp_path):
    """Catches: reading without the sum. Every byte of the last tensor."""
    states = DiskClientStates(tmp_path).updated({5: state_of(1)})
    path = tmp_path / states.index[5]
    data = path.read_bytes()
    for place in range(len(data) - 20, len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ValueError, match="damaged"):
            DiskClientStates.reopen(tmp_path, states.index)[5]
    path.write_bytes(data)
    assert plain(DiskClientStates.reopen(tmp_path, states.index)) == plain(states)


@pytest.mark.parametrize("name", ["../5.1.00000000.safetensors", "6.1.00000000.safetensors", "5.safetensors", ""])
def test_an_index_that_names_something_else_is_refused(tmp_path, name):
    (tmp_path / "clients").mkdir()
    with pytest.raises(ValueError, match="no name of a file of its own"):
        DiskClientStates.reopen(tmp_path / "clients", {"5": name})


def test_sync_brings_each_new_file_to_the_disk_once_and_then_the_folder(tmp_path, monkeypatch):
    """Catches: a checkpoint that names files which a power failure would empty."""
    synced, fsync = [], os.fsync

    def noted(descriptor):
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr("asfl_privacy.federated.client_states.os.fsync", noted)
    first = DiskClientStates(tmp_path).updated({n: state_of(n) for n in range(5)})
    second = first.updated({0: state_of(9)})
    assert synced == []
    second.sync()
    assert sorted(synced[:-1]) == sorted(tmp_path / name for name in second.index.values())
    assert synced[-1] == tmp_path
    second.sync()
    assert len(synced) == 6
    first.sync()
    assert synced[6:] == [tmp_path / first.index[0], tmp_path]


def test_memory_stays_within_the_cache(tmp_path):
    """100 states of 80 kB written and read through a cache of 200 kB. Catches: tensors or bytes kept by every handle."""
    tracemalloc.start()
    try:
        states = DiskClientStates(tmp_path, cache_bytes=200_000)
        state = {"x": torch.zeros(20_000)}
        before = tracemalloc.get_traced_memory()[0]
        for number in range(100):
            states = states.updated({number: state})
        for client in states:
            states[client]
        assert tracemalloc.get_traced_memory()[0] - before < 400_000
    finally:
        tracemalloc.stop()


def test_threads_may_read_and_share_the_cache(tmp_path):
    states = DiskClientStates(tmp_path, cache_bytes=2000).updated({n: state_of(n) for n in range(20)})
    wrong = []

    def read():
        wrong.extend(n for _ in range(20) for n in range(20) if int(states[n]["steps"]) != n)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_write_that_fails_changes_nothing_and_leaves_no_file(tmp_path, monkeypatch):
    """The second client of two cannot be kept. Catches: half an update, and files that nothing names."""
    states = DiskClientStates(tmp_path).updated({0: state_of(0)})
    before = files(states)
    with pytest.raises(ValueError, match="complex128"):
        states.updated({0: state_of(1), 1: {"x": torch.zeros(2, dtype=torch.complex128)}})
    assert files(states) == before
    assert plain(states) == plain({0: state_of(0)})


def test_a_full_disk_changes_nothing(small_disk):
    """A real file system of 1 MB. Catches: a file cut short that is taken for the state."""
    states = DiskClientStates(small_disk / "clients").updated({0: state_of(0, size=50_000)})
    before = files(states)
    with pytest.raises(OSError, match="No space left"):
        states.updated({1: state_of(1, size=50_000), 0: state_of(2, size=300_000)})
    assert files(states) == before
    assert plain(DiskClientStates.reopen(states.folder, states.index)) == plain({0: state_of(0, size=50_000)})
    assert states.updated({1: state_of(1, size=50_000)})[1]["steps"] == 1
