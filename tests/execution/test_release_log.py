"""The log of releases: wherever a run is killed, the ledger that it goes on with counts all that was sent."""

import copy
import os
import random
from collections import Counter

import numpy as np
import pytest

from asfl_privacy.accounting import Journal, Ledger
from asfl_privacy.accounting.budget import RecordBudget
from asfl_privacy.accounting.filter import RecordFilter
from asfl_privacy.execution.release_log import LOG_FILE, LogPosition, ReleaseLog, count_logged

NUM_RECORDS, NUM_DISKS = 12, 12
FACTS = {"p": 2.0, "radius": 1.0, "data_digest": "ab" * 32, "num_records": NUM_RECORDS}
BUDGET = RecordBudget(gaussian_budget=2.0, pure_budget=3.0)  # eight Gaussian releases at z = 2: some records run out


def release_of(round_number, records, *, sampler="lattice", channel="activations"):
    kind = {"mechanism": "gaussian", "noise_multiplier": 2.0, "epsilon_excess": 0.0, "tail_probability": 0.0}
    if channel == "labels":
        kind |= {"mechanism": "randomized-response", "noise_multiplier": 1.0, "num_classes": 10}
    return kind | {"channel": channel, "round": round_number, "records": np.asarray(records), "sampler": sampler}


def counts(ledger):
    """(round, channel, record) → releases."""
    found = Counter()
    for event in ledger.event_classes:
        for record, number in zip(*ledger.releases_of(event), strict=True):
            found[event.round, event.channel, int(record)] += int(number)
    return found


@pytest.fixture
def path(tmp_path):
    return tmp_path / LOG_FILE


@pytest.fixture
def log(path):
    return ReleaseLog.open(path, **FACTS)


# Random kills, against a list of everything that was ever sent


class KilledError(Exception):
    """Stands for kill -9: nothing in memory is left."""


class Disk:
    """What survives: the log's file, and the last checkpoint; `sent` is the twin, which no kill can touch."""

    def __init__(self, path, *, sampler, seed):
        self.path, self.sampler = path, sampler
        self.random = random.Random(seed)
        self.sent = []  # (attempt, round, channel, record), as often as it was sent
        self.appended = Counter()
        self.attempts = 0
        self.checkpoint = {
            "rounds_done": 0,
            "ledger": Ledger(p=2.0, radius=1.0),
            "budget": RecordFilter.within(BUDGET, num_records=NUM_RECORDS),
            "kept": np.zeros(NUM_RECORDS, dtype=bool),
            "log": LogPosition(),
        }

    def may_die(self, share=0.08):
        if self.random.random() < share:
            raise KilledError


def exchange(disk, log, now, releases):
    """Log, charge, send, and die anywhere between."""
    releases = [one for one in releases if len(one["records"])]
    if not releases:
        return
    disk.may_die()
    if disk.random.random() < 0.06:  # inside the append: a part of the line is on the disk
        before = disk.path.read_bytes()
        before = before[: before.rfind(b"\n") + 1]
        log.append(releases)
        line = disk.path.read_bytes()[len(before) :]
        disk.path.write_bytes(before + line[: disk.random.randrange(len(line))])
        raise KilledError
    log.append(releases)
    for one in releases:
        disk.appended.update((one["round"], one["channel"], int(record)) for record in one["records"])
    disk.may_die()
    for one in releases:
        now["ledger"].record(**one)
        cost = {k: one[k] for k in ("mechanism", "noise_multiplier", "epsilon_excess", "tail_probability")}
        now["budget"].charge(one["records"], **cost)
        if one["channel"] == "labels":
            now["kept"][one["records"]] = True
    disk.may_die()
    for one in releases:
        disk.sent += [(disk.attempts, one["round"], one["channel"], int(record)) for record in one["records"]]
    disk.may_die()


def attempt(disk, rounds, *, replay, vary=False):
    """From the checkpoint to the end, or to a kill; labels are drawn once and kept, activations drawn every round."""
    disk.attempts += 1
    now = copy.deepcopy(disk.checkpoint)
    log = ReleaseLog.open(disk.path, **FACTS)
    count_logged(replay(log, now), ledger=now["ledger"], budget=now["budget"])
    check_nothing_is_missing(disk, now, log)
    disk.may_die()
    for number in range(now["rounds_done"], rounds):
        draw = np.random.default_rng((number, disk.attempts if vary else 0))
        wanted = draw.choice(NUM_RECORDS, size=5, replace=False)
        left = now["budget"].remaining(mechanism="gaussian", noise_multiplier=2.0)
        shared = wanted[left[wanted] > 0]
        new = shared[~now["kept"][shared]]
        open_labels = now["budget"].remaining(mechanism="randomized-response", noise_multiplier=1.0)
        new = new[open_labels[new] > 0]
        one_by_one = [release_of(number, [record], sampler=disk.sampler) for record in shared]
        labels = release_of(number, new, sampler=disk.sampler, channel="labels")
        exchange(disk, log, now, [*one_by_one, labels])
        now["rounds_done"] = number + 1
        count_logged(log.unrepeated(rounds_done=number + 1), ledger=now["ledger"], budget=now["budget"])
        if number % 2:
            disk.may_die()
            disk.checkpoint = copy.deepcopy(now | {"log": log.position})
            disk.may_die()
    return now


def check_nothing_is_missing(disk, now, log):
    """ledger ≥ sent; where the seed's bits leave again, of the rounds that will not be executed again, once each."""
    counted = counts(now["ledger"])
    if disk.sampler == "lattice":
        sent = Counter(what[1:] for what in disk.sent)
        assert counted >= sent
        assert counted == counts(Journal.read(log.path).ledger()) if log.position.appends else not counted
    else:
        assert counted >= Counter(what for what in {one[1:] for one in disk.sent} if what[0] < now["rounds_done"])


def replay(log, now):
    return log.replay_after(now["log"], rounds_done=now["rounds_done"])


def run_to_the_end(disk, rounds, **choices):
    while True:
        try:
            return attempt(disk, rounds, **({"replay": replay} | choices))
        except KilledError:
            continue


def test_with_fresh_noise_every_attempt_is_counted_exactly_once(tmp_path):
    """Random kills between every two writes. Catches: a replay left out or doubled, kept labels that are not drawn again."""
    killed = 0
    for seed in range(NUM_DISKS):
        disk = Disk(tmp_path / f"{seed}.journal", sampler="lattice", seed=seed)
        done = run_to_the_end(disk, 8)
        counted, sent = counts(done["ledger"]), Counter(what[1:] for what in disk.sent)
        assert counted >= sent
        assert counted == counts(Journal.read(disk.path).ledger()) >= disk.appended
        spent = Counter()
        for (_, channel, record), number in counted.items():
            spent[channel, record] += number
        left = done["budget"].remaining(mechanism="gaussian", noise_multiplier=2.0)
        assert all(left[r] <= max(0, 8 - spent["activations", r]) for r in range(NUM_RECORDS))
        killed += disk.attempts - 1
    assert killed > 2 * NUM_DISKS


def test_with_noise_from_the_seed_the_end_is_that_of_an_undisturbed_run(tmp_path):
    """The same bits leave again. Catches: counting them twice, a filter that has spent what will be spent again."""
    undisturbed = Disk(tmp_path / "quiet.journal", sampler="seeded", seed=0)
    undisturbed.may_die = lambda share=0.0: None
    undisturbed.random.random = lambda: 1.0
    expected = attempt(undisturbed, 8, replay=replay)
    for seed in range(NUM_DISKS):
        disk = Disk(tmp_path / f"{seed}.journal", sampler="seeded", seed=seed)
        done = run_to_the_end(disk, 8)
        assert done["ledger"] == expected["ledger"]
        assert done["budget"].state() == expected["budget"].state()
        assert counts(done["ledger"]) == Counter({what[1:] for what in disk.sent})


def test_what_does_not_leave_again_is_not_forgotten(tmp_path):
    """From the seed too, other records leave when other clients fail. Catches: taking the repeated round for the old."""
    for seed in range(NUM_DISKS):
        disk = Disk(tmp_path / f"{seed}.journal", sampler="seeded", seed=seed)
        done = run_to_the_end(disk, 8, vary=True)
        assert counts(done["ledger"]) >= Counter({what[1:] for what in disk.sent})


def test_what_left_before_an_earlier_resume_is_not_forgotten_either(path, log):
    """First attempt: rounds 0 and 1; second: round 0 and a checkpoint; third: another round 1. Catches: looking for what
    must leave again only behind the checkpoint's position."""
    for number, record in ((0, 1), (1, 2)):
        log.append([release_of(number, [record], sampler="seeded")])
    second = ReleaseLog.open(path, **FACTS)
    assert second.replay_after(LogPosition(), rounds_done=0) == []
    second.append([release_of(0, [1], sampler="seeded")])
    assert second.unrepeated(rounds_done=1) == []
    third = ReleaseLog.open(path, **FACTS)
    assert third.replay_after(second.position, rounds_done=1) == []
    third.append([release_of(1, [3], sampler="seeded")])
    assert [(one["round"], one["records"].tolist()) for one in third.unrepeated(rounds_done=2)] == [(1, [2])]
    assert third.unrepeated(rounds_done=2) == []


@pytest.mark.parametrize(
    "wrong",
    [
        lambda log, now: [],
        lambda log, now: log.replay_after(now["log"], rounds_done=now["rounds_done"])[1:],
        lambda log, now: log.replay_after(log.position, rounds_done=now["rounds_done"]),
        lambda log, now: [r for r in replay(log, now) if r["round"] > now["rounds_done"]],
        lambda log, now: log.replay_after(LogPosition(), rounds_done=0),
    ],
)
def test_the_twin_finds_a_wrong_replay(tmp_path, wrong):
    """Mutants: nothing, all but the first, from the end, from a round too late, and everything twice."""

    def all_runs():
        for seed in range(NUM_DISKS):
            run_to_the_end(Disk(tmp_path / f"{seed}.journal", sampler="lattice", seed=seed), 8, replay=wrong)

    with pytest.raises(AssertionError):
        all_runs()


# The file


def test_releases_come_back_with_every_fact(path, log):
    """Catches: a fact that is lost on the way, releases of one class counted once, other classes put together."""
    full = release_of(3, [4, 4, 1]) | {
        "whole_record_multiplier": 0.5,
        "epsilon_excess": 1e-9,
        "tail_probability": 1e-15,
    }
    update = release_of(3, [7], channel="updates") | {"client_multiplier": 1.5, "whole_record_multiplier": None}
    releases = [full, release_of(3, [2], channel="labels"), update, full | {"records": np.array([1])}]
    log.append(releases)
    expected = Ledger(p=2.0, radius=1.0)
    for one in releases:
        expected.record(**one)
    found = Ledger(p=2.0, radius=1.0)
    again = ReleaseLog.open(path, **FACTS)
    count_logged(again.replay_after(LogPosition(), rounds_done=0), ledger=found, budget=None)
    assert found == expected == Journal.read(path).ledger()
    assert len(path.read_text().splitlines()) == 2


def test_what_is_over_the_budget_is_counted_and_exhausts_the_record(log):
    """Catches: a resume that is refused because charging past the budget is."""
    guard = RecordFilter.within(RecordBudget(gaussian_budget=0.5), num_records=NUM_RECORDS)
    ledger = Ledger(p=2.0, radius=1.0)
    log.append([release_of(0, [3, 3, 3, 5])])
    count_logged(log.replay_after(LogPosition(), rounds_done=0), ledger=ledger, budget=guard)
    assert guard.remaining(mechanism="gaussian", noise_multiplier=2.0)[[3, 5, 6]].tolist() == [0, 1, 2]
    assert ledger.counts.releases == 4


def test_a_log_that_lacks_what_the_checkpoint_knew_is_refused(path, log):
    """Whole lines cut off, and another log in its place. Catches: a position that is only a number."""
    for number in range(3):
        log.append([release_of(number, [number])])
    position, lines = log.position, path.read_bytes().splitlines(keepends=True)
    assert ReleaseLog.open(path, **FACTS).replay_after(position, rounds_done=3) == []
    path.write_bytes(b"".join(lines[:3]))
    with pytest.raises(ValueError, match="does not hold the 3 appends") as caught:
        ReleaseLog.open(path, **FACTS).replay_after(position, rounds_done=3)
    assert "\n" not in str(caught.value)
    path.unlink()
    other = ReleaseLog.open(path, **FACTS)
    for number in range(4):
        other.append([release_of(number, [5])])
    with pytest.raises(ValueError, match="does not hold the 3 appends"):
        other.replay_after(position, rounds_done=3)


@pytest.mark.parametrize(
    ("releases", "words"),
    [
        ([], "releases is empty"),
        ([release_of(0, [1]), release_of(0, [NUM_RECORDS])], "records holds 12: .* 0…11"),
        ([release_of(0, [1]) | {"noise_multiplier": float("nan")}], "noise_multiplier"),
        ([release_of(0, [1]), release_of(-1, [1])], "round is -1"),
    ],
)
def test_what_is_refused_writes_nothing(path, log, releases, words):
    before = path.read_bytes()
    with pytest.raises(ValueError, match=words):
        log.append(releases)
    assert path.read_bytes() == before
    assert log.position == LogPosition()


def test_a_log_of_other_data_is_refused(path, log):
    with pytest.raises(ValueError, match="was made for data_digest"):
        ReleaseLog.open(path, **(FACTS | {"data_digest": "cd" * 32}))
    with pytest.raises(ValueError, match="attempt is ''"):
        ReleaseLog.open(path, **FACTS, attempt="")


def test_attempts_can_be_told_apart(path, log):
    log.append([release_of(0, [1])])
    ReleaseLog.open(path, **FACTS, attempt="second").append([release_of(0, [2])])
    runs = list(Journal.read(path).runs)
    assert runs[0].startswith("attempt ")
    assert runs[1] == "second"


def test_a_line_is_on_the_disk_when_append_returns(log, monkeypatch):
    """Catches: answering before the file was flushed."""
    order = []
    monkeypatch.setattr("asfl_privacy.accounting.journal_file.os.fsync", lambda descriptor: order.append("fsync"))
    log.append([release_of(0, [1])])
    order.append("returned")
    assert order == ["fsync", "returned"]


def test_a_new_log_that_is_killed_at_its_making_can_be_opened_again(tmp_path, monkeypatch):
    """Catches: a first line cut short under the log's own name, which nobody could tell from a log that lost its lines."""
    real = "asfl_privacy.accounting.journal_file._write_line"

    def cut(descriptor, line, *, size, cut):
        os.write(descriptor, line[:50])
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(real, cut)
        with pytest.raises(KilledError):
            ReleaseLog.open(tmp_path / LOG_FILE, **FACTS)
    assert not (tmp_path / LOG_FILE).exists()
    ReleaseLog.open(tmp_path / LOG_FILE, **FACTS).append([release_of(0, [1])])
