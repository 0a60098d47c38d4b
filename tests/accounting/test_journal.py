"""The journal of a data set: nothing that was answered for is lost, whatever is killed, cut or done at the same time."""

import math
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asfl_privacy.accounting import journal_file
from asfl_privacy.accounting.budget import RecordBudget
from asfl_privacy.accounting.journal import Journal, is_journal
from asfl_privacy.accounting.ledger import Ledger

FACTS = {"p": 2, "radius": 0.1, "data_digest": "ab" * 32, "num_records": 100}
GAUSSIAN = {"channel": "activations", "mechanism": "gaussian", "noise_multiplier": 10.0}
EVERY_KIND = [
    GAUSSIAN | {"round": 0, "records": [3, 7, 3], "whole_record_multiplier": 1.0},
    GAUSSIAN | {"round": 1, "records": [9], "sampler": "lattice", "epsilon_excess": 1e-9, "tail_probability": 1e-15},
    GAUSSIAN | {"round": 1, "records": [0], "sampler": "seeded"},
    {"channel": "activations", "mechanism": "laplace", "noise_multiplier": 0.1 + 0.2, "round": 2, "records": [0, 99]},
    {
        "channel": "labels",
        "mechanism": "randomized-response",
        "noise_multiplier": 1.0,
        "num_classes": 10,
        "round": 0,
        "records": list(range(100)),
    },
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "data.journal"


@pytest.fixture
def journal(path):
    return Journal.open(path, **FACTS)


def ledger_of(*releases, **facts):
    ledger = Ledger(**({"p": 2, "radius": 0.1} | facts))
    for release in releases:
        ledger.record(**release)
    return ledger


def run_python(program: str, *arguments: object) -> subprocess.CompletedProcess:
    """Run a program that knows FACTS, GAUSSIAN and Journal in a process of its own, to its end."""
    running = start_python(program, *arguments)
    output, errors = running.communicate()
    return subprocess.CompletedProcess(running.args, running.returncode, output, errors)


def start_python(program: str, *arguments: object) -> subprocess.Popen:
    start = (
        "import os, signal, sys, numpy as np\n"
        "from asfl_privacy.accounting.journal import Journal\n"
        "from asfl_privacy.accounting.budget import RecordBudget\n"
        f"FACTS, GAUSSIAN = {FACTS!r}, {GAUSSIAN!r}\n"
    )
    command = [sys.executable, "-c", start + program, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# What is written is read


@pytest.mark.parametrize("facts", [{}, {"radius": "any"}, {"p": math.inf}, {"p": 1, "radius": 1e-300}])
def test_the_journal_gives_the_ledger_of_its_releases_to_the_last_bit(path, facts):
    """Catches: a field that is not stored, a count lost, a float rounded."""
    releases = [dict(release) for release in EVERY_KIND]
    if facts.get("radius") == "any":
        del releases[0]["whole_record_multiplier"]
    journal = Journal.open(path, **FACTS | facts)
    for release in releases:
        journal.append("one", **release)
    expected = ledger_of(*releases, **facts)
    assert journal.ledger() == Journal.read(path).ledger() == expected
    assert Journal.open(path, **FACTS | facts).spent(delta=1e-5) == expected.epsilon(delta=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    appends=st.lists(
        st.lists(
            st.tuples(st.integers(0, 2), st.lists(st.integers(0, 99), min_size=1, max_size=30)), min_size=1, max_size=3
        ),
        max_size=5,
    )
)
def test_any_records_in_any_order_come_back(tmp_path_factory, appends):
    """Catches: ids that are sorted away, counts of repeated ids lost, releases of one class in one append lost."""
    journal = Journal.open(tmp_path_factory.mktemp("journal") / "data.journal", **FACTS)
    releases = [[GAUSSIAN | {"round": number, "records": ids} for number, ids in one] for one in appends]
    for one in releases:
        journal.append_all("run", one)
    assert journal.ledger() == ledger_of(*(release for one in releases for release in one))


def test_runs_add_up_and_can_be_told_apart(journal):
    """Two runs that release the same record in the same round. Catches: one class overwriting the other's."""
    journal.append("first", **GAUSSIAN, round=0, records=[3, 7])
    journal.append("second", **GAUSSIAN, round=0, records=[3])
    journal.append("first", **GAUSSIAN, round=1, records=[3])
    expected = Ledger(p=2, radius=0.1)
    for number, records in ((0, [3, 7, 3]), (1, [3])):
        expected.record(**GAUSSIAN, round=number, records=records)
    assert journal.ledger() == expected
    assert journal.ledger(["second"]) == ledger_of(GAUSSIAN | {"round": 0, "records": [3]})
    assert list(journal.runs) == ["first", "second"]
    assert [(one.records, one.releases) for one in journal.runs.values()] == [(2, 3), (1, 1)]
    with pytest.raises(ValueError, match="run 'third' is not in"):
        journal.ledger(["third"])


def test_facts_of_numpy_are_taken(path):
    facts = FACTS | {"num_records": np.int64(100), "radius": np.float64(0.1), "p": np.int64(2)}
    assert Journal.open(path, **facts).facts == Journal.open(path, **FACTS).facts


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data_digest": "ab" * 31}, "data_digest is 'ab"),
        ({"data_digest": "AB" * 32}, "data_digest is 'AB"),
        ({"num_records": 0}, "num_records is 0"),
        ({"radius": math.nan}, "radius is nan"),
        ({"p": 3}, "p is 3"),
    ],
)
def test_bad_facts_make_no_file(path, change, words):
    with pytest.raises(ValueError, match=words):
        Journal.open(path, **FACTS | change)
    assert not path.exists()


def test_a_journal_sees_what_another_one_appends(journal, path):
    other = Journal.open(path, **FACTS)
    journal.append("a", **GAUSSIAN, round=0, records=[1])
    other.append("b", **GAUSSIAN, round=0, records=[1])
    journal.append("a", **GAUSSIAN, round=1, records=[1])
    assert journal.ledger() == other.ledger()
    assert journal.ledger().counts.releases == 3


def test_a_hundred_rounds_of_sixty_thousand_records_stay_small(path):
    """Random halves of a data set, and whole ones. Catches: ids written out (some 35 MB)."""
    generator = np.random.default_rng(0)
    journal = Journal.open(path, **FACTS | {"num_records": 60_000})
    for number in range(10):
        journal.append("half", **GAUSSIAN, round=number, records=np.flatnonzero(generator.random(60_000) < 0.5))
        journal.append("all", **GAUSSIAN, round=number, records=np.arange(60_000))
    assert path.stat().st_size < 4_000_000 / 10


# The file


def test_the_file_is_marked_and_for_its_owner_alone(journal, path):
    assert "private: do not share" in path.read_text().splitlines()[0]
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"p": 1}, "made for p 2.0, not 1.0"),
        ({"radius": 0.2}, "made for radius 0.1, not 0.2"),
        ({"radius": "any"}, "made for radius 0.1, not 'any'"),
        ({"num_records": 99}, "made for num_records 100, not 99"),
        ({"data_digest": "cd" * 32}, f"made for data_digest '{'ab' * 32}', not '{'cd' * 32}'"),
    ],
)
def test_a_journal_of_something_else_is_refused_and_untouched(journal, path, change, words):
    """Catches: adding up what has another unit, or another data set's records."""
    before = path.read_bytes()
    with pytest.raises(ValueError, match=words) as caught:
        Journal.open(path, **FACTS | change)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


def test_other_files_are_refused_in_one_line_and_untouched(tmp_path):
    ledger_of(EVERY_KIND[0]).save(tmp_path / "ledger.json")
    (tmp_path / "text").write_text("private notes\n")
    (tmp_path / "no-newline").write_text("7")
    (tmp_path / "zeros").write_bytes(b"\0" * 500)
    (tmp_path / "folder").mkdir()
    Journal.open(tmp_path / "real", **FACTS)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "loose").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    newer = (tmp_path / "real").read_bytes()[65:-1].replace(b'"version": 1', b'"version": 2')
    (tmp_path / "newer").write_bytes(journal_file._line("", newer))
    files = {name: (tmp_path / name).read_bytes() for name in ("ledger.json", "text", "no-newline", "zeros", "newer")}
    for name, words in {
        "ledger.json": "is no asfl-privacy journal",
        "text": "is no asfl-privacy journal",
        "no-newline": "is no asfl-privacy journal",
        "zeros": "is no asfl-privacy journal",
        "newer": "has version 2",
        "folder": "is no regular file",
        "pipe": "is no regular file",
        "link": "is a symbolic link",
        "loose": "is a symbolic link",
    }.items():
        for use in (lambda file: Journal.open(file, **FACTS), Journal.read):
            with pytest.raises(ValueError, match=words) as caught:
                use(tmp_path / name)
            assert "\n" not in str(caught.value)
    assert files == {name: (tmp_path / name).read_bytes() for name in files}
    assert not (tmp_path / "nowhere").exists()
    told = {name for name in [*(file.name for file in tmp_path.iterdir()), "missing"] if is_journal(tmp_path / name)}
    assert told == {"real", "link", "newer"}


def test_a_link_put_there_at_the_last_moment_is_not_followed(tmp_path, monkeypatch):
    """Catches: opening what a link points to, in spite of the check before."""
    (tmp_path / "link").symlink_to("elsewhere")
    monkeypatch.setattr(type(tmp_path), "is_symlink", lambda self: False)
    with pytest.raises(OSError, match="cannot be written"):
        Journal.open(tmp_path / "link", **FACTS)
    assert not (tmp_path / "elsewhere").exists()


def test_a_missing_folder_or_file_is_one_line(tmp_path):
    with pytest.raises(OSError, match="cannot be written") as caught:
        Journal.open(tmp_path / "none" / "data.journal", **FACTS)
    assert "\n" not in str(caught.value)
    with pytest.raises(OSError, match="cannot be read"):
        Journal.read(tmp_path / "data.journal")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_line(path, monkeypatch):
    real = os.open

    def deny(file, flags, *rest, **more):
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied", str(file))
        return real(file, flags, *rest, **more)

    monkeypatch.setattr(os, "open", deny)
    with pytest.raises(OSError, match=r"cannot be written \(Permission denied\)") as caught:
        Journal.open(path, **FACTS)
    assert "\n" not in str(caught.value)
    assert not path.exists()


def test_without_locks_nothing_is_written(path, monkeypatch):
    """Catches: appending unlocked where the system has no flock."""
    monkeypatch.setattr(journal_file, "fcntl", None)
    with pytest.raises(ValueError, match="no flock"):
        Journal.open(path, **FACTS)
    assert not path.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"records": []}, "records must be a non-empty vector"),
        ({"records": [100]}, "records holds 100: the data set's ids are 0…99"),
        ({"records": [-1]}, "records holds -1"),
        ({"noise_multiplier": math.nan}, "noise_multiplier is nan"),
        ({"noise_multiplier": 0.0}, "noise_multiplier is 0.0"),
        ({"mechanism": "uniform"}, "mechanism is 'uniform'"),
        ({"epsilon_excess": math.inf}, "epsilon_excess is inf"),
        ({"run_id": ""}, "run_id is ''"),
        ({"run_id": "two\nlines"}, "run_id is 'two"),
    ],
)
def test_bad_values_charge_nothing(journal, path, change, words):
    """Also as the second of two releases. Catches: writing the first before checking the second."""
    before = path.read_bytes()
    good = GAUSSIAN | {"round": 0, "records": [1]}
    run_id = change.get("run_id", "run")
    release = good | {name: value for name, value in change.items() if name != "run_id"}
    for use in (
        lambda: journal.append(run_id, **release),
        lambda: journal.append_all(run_id, [good, release]),
        lambda: journal.append_admitted(run_id, [good, release], budget=RecordBudget(gaussian_budget=1.0)),
    ):
        with pytest.raises(ValueError, match=words):
            use()
    with pytest.raises(ValueError, match="releases is empty"):
        journal.append_all("run", [])
    assert path.read_bytes() == before


# Crashes

KILLED = """
path, point = sys.argv[1:]
journal = Journal.open(path, **FACTS)
write, fsync = os.write, os.fsync

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def killing_write(descriptor, data):
    if point == "before write":
        die()
    if point.startswith("mid-write"):
        write(descriptor, bytes(data)[: int(point.split()[1])])
        die()
    done = write(descriptor, data)
    if point == "before fsync":
        die()
    return done

def killing_fsync(descriptor):
    fsync(descriptor)
    if point == "after fsync":
        die()

os.write, os.fsync = killing_write, killing_fsync
journal.append("killed", **GAUSSIAN, round=5, records=[1, 2, 4])
write(1, b"sent")
"""


@pytest.mark.parametrize(
    ("point", "charged"),
    [
        ("before write", {False}),
        ("mid-write 70", {False}),
        ("before fsync", {True, False}),
        ("after fsync", {True}),
        ("never", {True}),
    ],
)
def test_a_crash_charges_what_may_have_been_sent_and_loses_nothing_before(journal, path, point, charged):
    """Killed by SIGKILL at each point. Catches: returning before fsync, a torn line that hides those before or after it,
    a torn line that is glued to the next."""
    journal.append("before", **GAUSSIAN, round=0, records=[1])
    done = run_python(KILLED, path, point)
    assert done.returncode == (0 if point == "never" else -signal.SIGKILL), done.stderr
    before = GAUSSIAN | {"round": 0, "records": [1]}
    killed = GAUSSIAN | {"round": 5, "records": [1, 2, 4]}
    found = Journal.read(path).ledger()
    assert found in [ledger_of(before, killed) if yes else ledger_of(before) for yes in charged]
    if done.stdout == "sent":
        assert found == ledger_of(before, killed)
    assert (done.stdout == "sent") == (point == "never")
    # both the journal that was open all the time and a new one go on
    journal.append("after", **GAUSSIAN, round=9, records=[8])
    Journal.open(path, **FACTS).append("later", **GAUSSIAN, round=9, records=[9])
    found.record(**GAUSSIAN, round=9, records=[8, 9])
    assert Journal.read(path).ledger() == found == journal.ledger()


def test_a_first_line_cut_short_is_refused_and_an_empty_file_completed(path):
    """Every length. Catches: a file cut down to a piece of its first line that starts a fresh account without a word."""
    Journal.open(path, **FACTS)
    whole = path.read_bytes()
    path.write_bytes(b"")
    Journal.open(path, **FACTS)
    assert path.read_bytes() == whole
    for length in range(1, len(whole), 17):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="is no asfl-privacy journal"):
            Journal.read(path)
        with pytest.raises(ValueError, match="ends inside its first line"):
            Journal.open(path, **FACTS)
        assert path.read_bytes() == whole[:length]


def test_a_reader_says_that_a_last_line_was_cut_short(journal, path):
    journal.append("a", **GAUSSIAN, round=0, records=[1, 2, 4])
    assert not Journal.read(path).is_cut
    path.write_bytes(path.read_bytes() + b"half a line")
    assert Journal.read(path).is_cut


def test_every_torn_last_line_is_ignored_by_readers_and_removed_by_the_next_append(journal, path):
    """Cut at every length, and with blocks that never reached the disk. Catches: a reader that refuses or counts it."""
    journal.append("a", **GAUSSIAN, round=0, records=[1, 2, 4])
    kept = path.read_bytes()
    journal.append("b", **GAUSSIAN, round=1, records=[1, 2, 4])
    whole = path.read_bytes()
    last = whole[len(kept) :]
    torn = [last[:length] for length in range(1, len(last), 11)] + [last[:-1]]
    torn += [last[:40] + b"\0" * 100 + last[140:], b"\0" * len(last), last[:90] + b"\0" * 30]
    for tail in torn:
        path.write_bytes(kept + tail)
        reader = Journal.read(path)
        assert reader.ledger() == ledger_of(GAUSSIAN | {"round": 0, "records": [1, 2, 4]})
        assert path.read_bytes() == kept + tail
        reader.append("b", **GAUSSIAN, round=1, records=[1, 2, 4])
        assert path.read_bytes() == whole


def test_damage_anywhere_is_refused_and_named(journal, path):
    """One digit of each line changed, lines dropped, swapped and doubled. Catches: an unchecked line, checksums that do
    not bind a line to the one before it, a damaged last line taken for a torn one."""
    for number in range(3):
        journal.append("a", **GAUSSIAN, round=number, records=[1, 2, 4])
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = {
        f"line {at + 1} is damaged": [*lines[:at], lines[at].replace(b"1", b"3", 1), *lines[at + 1 :]]
        for at in range(1, 4)
    }
    for words, content in [
        *damaged.items(),
        ("line 1 is damaged", [lines[0].replace(b"100", b"200"), *lines[1:]]),
        ("line 2 is damaged", [lines[0], *lines[2:]]),
        ("line 2 is damaged", [lines[0], lines[2], lines[1], lines[3]]),
        ("line 3 is damaged", [*lines[:2], *lines[1:]]),
        ("line 3 is damaged", [*lines[:2], b"\n", *lines[2:]]),
        ("line 4 is damaged", [*lines[:3], lines[3].replace(b'"round":2', b'"round":1')]),
    ]:
        path.write_bytes(b"".join(content))
        for use in (lambda: Journal.open(path, **FACTS), lambda: Journal.read(path)):
            with pytest.raises(ValueError, match=words) as caught:
                use()
            assert "\n" not in str(caught.value)
        assert path.read_bytes() == b"".join(content)


def test_a_file_that_was_replaced_or_shortened_meanwhile_is_refused(journal, path):
    """Catches: a copy from before put back, so that charges vanish while a run goes on."""
    journal.append("a", **GAUSSIAN, round=0, records=[1])
    early = path.read_bytes()
    journal.append("a", **GAUSSIAN, round=1, records=[1])
    late = path.read_bytes()
    path.write_bytes(early)
    with pytest.raises(ValueError, match="replaced or shortened"):
        journal.append("a", **GAUSSIAN, round=2, records=[1])
    path.write_bytes(late)
    journal.append("a", **GAUSSIAN, round=2, records=[1])
    other = path.with_name("other")
    other.write_bytes(early)
    other.replace(path)
    with pytest.raises(ValueError, match="replaced or shortened"):
        journal.ledger()
    path.unlink()
    with pytest.raises(OSError, match="cannot be written"):
        journal.append("a", **GAUSSIAN, round=3, records=[1])


FULL = """
import resource
journal = Journal.open(sys.argv[1], **FACTS)
before = open(sys.argv[1], "rb").read()
for room in (0, 1, 100):
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, resource.RLIM_INFINITY))
    try:
        journal.append("full", **GAUSSIAN, round=1, records=np.arange(0, 100, 3) ** 2 % 97)
    except OSError as error:
        print(error, open(sys.argv[1], "rb").read() == before, sep="; unchanged: ")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.append("full", **GAUSSIAN, round=1, records=[1])
"""


def test_a_full_disk_leaves_the_file_as_it_was(journal, path):
    """A limit on the file's size, so that the write stops in the middle. Catches: a half written line that stays."""
    journal.append("a", **GAUSSIAN, round=0, records=[1])
    done = run_python(FULL, path)
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr
    assert all("cannot be written (File too large)" in line and line.endswith("unchanged: True") for line in lines)
    assert journal.ledger().counts.releases == 2


def test_a_failed_fsync_or_an_interrupt_charges_nothing(journal, path, monkeypatch):
    before = path.read_bytes()
    for failure in (OSError(5, "Input/output error"), KeyboardInterrupt()):

        def fail(descriptor, failure=failure):
            raise failure

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(type(failure)):
                journal.append("a", **GAUSSIAN, round=0, records=[1])
        assert path.read_bytes() == before
    journal.append("a", **GAUSSIAN, round=0, records=[1])
    assert journal.ledger().counts.releases == 1


def test_a_disk_that_fills_up_while_the_file_is_made_leaves_no_file(path, monkeypatch):
    def fail(descriptor, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(OSError, match=r"cannot be written \(No space left on device\)"):
        Journal.open(path, **FACTS)
    assert not path.exists()


# At the same time

WRITER = """
path, name, rounds = sys.argv[1:]
for number in range(int(rounds)):
    Journal.open(path, **FACTS).append(name, **GAUSSIAN, round=number, records=[number % 100, 1, int(name)])
"""


def test_processes_that_append_at_the_same_time_lose_nothing(path):
    """Four processes make the file and append together. Catches: no lock, a lock taken after the end was read."""
    running = [start_python(WRITER, path, name, 25) for name in range(4)]
    errors = [one.communicate()[1] for one in running]
    assert [one.returncode for one in running] == [0] * 4, errors
    expected = Ledger(p=2, radius=0.1)
    for number in range(25):
        for name in range(4):
            expected.record(**GAUSSIAN, round=number, records=[number % 100, 1, name])
    journal = Journal.open(path, **FACTS)
    found = journal.ledger()
    assert set(journal.runs) == {"0", "1", "2", "3"}
    assert found.counts == expected.counts
    assert found.epsilon(delta=1e-5) == expected.epsilon(delta=1e-5)


def test_threads_and_forked_children_exclude_each_other(journal, path):
    """Catches: a descriptor kept open, whose lock a child would share."""

    def work(name):
        for number in range(20):
            journal.append(name, **GAUSSIAN, round=number, records=[5])

    threads = [threading.Thread(target=work, args=(f"thread {index}",)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    forking = """
journal = Journal.open(sys.argv[1], **FACTS)
children = []
for index in range(3):
    child = os.fork()
    if child == 0:
        for number in range(20):
            journal.append(f"child {index}", **GAUSSIAN, round=number, records=[5])
        os._exit(0)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
"""
    done = run_python(forking, path)
    assert done.returncode == 0, done.stderr
    assert journal.ledger().counts.max_releases_per_record == 120
    assert len(journal.runs) == 6


# Budgets


def test_an_append_within_a_budget_counts_every_run_and_refuses_whole(journal, path):
    """μ² = .01 each, a budget of .03. Catches: counting the own run alone, or writing the part that fits."""
    budget = RecordBudget(gaussian_budget=0.03)
    journal.append_within("first", [GAUSSIAN | {"round": 0, "records": [1, 2]}], budget=budget)
    Journal.open(path, **FACTS).append("second", **GAUSSIAN, round=0, records=[1])
    journal.append_within("first", [GAUSSIAN | {"round": 1, "records": [1]}], budget=budget)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="1 of 2 records would exceed their budget"):
        journal.append_within("third", [GAUSSIAN | {"round": 0, "records": [1, 2]}], budget=budget)
    with pytest.raises(ValueError, match="1 of 1 records would exceed their budget"):
        journal.append_within("third", [GAUSSIAN | {"round": i, "records": [2, 2]} for i in range(2)], budget=budget)
    assert path.read_bytes() == before
    assert journal.filter(budget).num_exhausted("gaussian", 10.0) == 1
    assert journal.spent(delta=1e-5).high <= budget.total(delta=1e-5)


def test_admitted_records_are_charged_and_the_others_left_out(journal):
    """Catches: a mask that is not what was charged, a second release that does not see the first."""
    budget = RecordBudget(gaussian_budget=0.02, pure_budget=1.0)
    journal.append("other", **GAUSSIAN, round=0, records=[0, 0, 1])
    laplace = {"channel": "activations", "mechanism": "laplace", "noise_multiplier": 1.0, "round": 0, "records": [0]}
    releases = [GAUSSIAN | {"round": number, "records": [2, 1, 0]} for number in (1, 2, 3)]
    masks = journal.append_admitted("own", [*releases, laplace], budget=budget)
    assert [mask.tolist() for mask in masks] == [[True, True, False], [True, False, False], [False] * 3, [True]]
    assert journal.ledger(["own"]) == ledger_of(
        GAUSSIAN | {"round": 1, "records": [1, 2]}, GAUSSIAN | {"round": 2, "records": [2]}, laplace
    )
    size = journal.path.stat().st_size
    masks = journal.append_admitted("own", releases[:1], budget=budget)
    assert not masks[0].any()
    assert journal.path.stat().st_size == size


def test_a_failed_append_does_not_use_up_the_budget(journal, monkeypatch):
    """Catches: a filter that remembers a charge which never reached the disk."""
    budget = RecordBudget(gaussian_budget=0.01)
    release = GAUSSIAN | {"round": 0, "records": [1]}

    def fail(descriptor):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output error"):
            journal.append_within("run", [release], budget=budget)
    journal.append_within("run", [release], budget=budget)
    with pytest.raises(ValueError, match="would exceed"):
        journal.append_within("run", [release], budget=budget)


GREEDY = """
path, name = sys.argv[1:]
budget = RecordBudget(gaussian_budget=0.2)
charged = 0
for number in range(15):
    masks = Journal.open(path, **FACTS).append_admitted(
        name, [GAUSSIAN | {"round": number, "records": [1, 2, 3]}], budget=budget
    )
    charged += int(masks[0].sum())
print(charged)
"""


def test_processes_that_compete_for_a_budget_never_exceed_it_together(path):
    """Three processes want 15 releases each of records that have 20. Catches: checking before the lock is held."""
    running = [start_python(GREEDY, path, name) for name in range(3)]
    charged = sum(int(one.communicate()[0]) for one in running)
    assert charged == 60
    assert Journal.read(path).ledger().counts.max_releases_per_record == 20
