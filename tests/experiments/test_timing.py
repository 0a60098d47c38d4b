"""Table 2's measuring: all that a client does counts, each method on the same clients, and timing changes nothing."""

import sys
from dataclasses import dataclass, replace

import pytest
import torch
from federations import make_federation, make_tiny

from asfl_privacy.execution import run_serially
from asfl_privacy.federated import METHODS, local_training, sharing
from asfl_privacy.federated.methods import FedAvg, fedproto, moon
from asfl_privacy.reporting.exhibits.exhibit import Material
from asfl_privacy.reporting.exhibits.local_time import local_time_exhibit
from asfl_privacy.reporting.records import read_records, write_records

ALL = ["fedavg", "asfl", "scaffold", "fedproto", "moon", "fedpvr", "fedvarp", "splitfed-v1", "splitfed-v2"]
FIELDS = {
    "data": "digits",
    "partition": "dirichlet:0.5",
    "clients": 4,
    "cohort": 3,
    "tail_steps": 2,
    "full_steps": 1,
    "batch_size": 8,
}


@pytest.fixture
def timing(paper):
    return paper("timing")


class Clock:
    """Stands still but for what is told to take time."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def charge(self, monkeypatch, place, name, cost):
        """Have a function take time, by its arguments."""
        original = getattr(place, name)

        def charged(*arguments, **options):
            self.now += cost(*arguments, **options)
            return original(*arguments, **options)

        monkeypatch.setattr(place, name, charged)


def contender(timing, federation, method, **name):
    labels = {"data": "d", "model": "m", "method": method.name, "mech": "none", "exchange_layer": "", "device": "cpu"}
    return timing.Contender(federation=federation, method=method, name={**labels, **name})


def one_of_each(timing, digits, methods=ALL, **changes):
    return [contender(timing, make_federation(digits, **changes), METHODS[name]) for name in methods]


@pytest.mark.parametrize("method", [*ALL, "scaffold+sharing"])
def test_timing_changes_nothing(timing, digits, method):
    """The ordinary run is the twin. Catches: SplitFed V2's extra turn kept, or a draw from a stream of the run."""
    twin = run_serially(make_federation(digits, rounds=3), METHODS[method], ledger=None)
    others = one_of_each(timing, digits, ["moon", method], rounds=3)
    records, (_, found) = timing.time_rounds(others, warm_up=1, repeats=2, seed=0)
    assert found.rounds_done == twin.rounds_done == 3
    assert len(records) == 2 * 2 * 4
    for kept, expected in [(found.state.weights, twin.state.weights), (found.state.server, twin.state.server)]:
        assert set(kept) == set(expected)
        assert all(torch.equal(value, expected[name]) for name, value in kept.items())
    assert list(found.state.clients) == list(twin.state.clients)
    for client, kept in twin.state.clients.items():
        assert all(torch.equal(value, found.state.clients[client][name]) for name, value in kept.items())


def test_everything_a_client_computes_counts_and_nothing_of_the_server(timing, digits, monkeypatch):
    """By hand, of τ' = 4 and τ = 3: a step takes 1 s, FedProto's class means 100, each of MOON's two frozen networks 10,
    ASFL's forward pass to share 1,000; averages, which are the server's, 10,000, but for the one in SplitFed V2's turn.

    Catches: SplitFed V2's steps left out, which its clients take while the server aggregates; FedProto's and MOON's work
    outside of the steps left out; the server's work counted; sharing counted as training.
    """
    clock = Clock()
    clock.charge(monkeypatch, local_training, "run_steps", lambda *_, num_steps, **__: num_steps)
    clock.charge(monkeypatch, fedproto, "frozen_pass", lambda *_, **__: 100.0)
    clock.charge(monkeypatch, moon, "_frozen_blocks", lambda *_, **__: 10.0)
    clock.charge(monkeypatch, sharing, "run_stateless", lambda *_, **__: 1_000.0)
    clock.charge(
        monkeypatch, sys.modules["asfl_privacy.federated.phases"], "average_weights", lambda *_, **__: 10_000.0
    )
    records, _ = timing.time_rounds(one_of_each(timing, digits), warm_up=1, repeats=1, seed=0, clock=clock)
    found = {one["method"]: (one["seconds_sharing"], one["seconds_training"]) for one in records}
    plain = dict.fromkeys(ALL, (0.0, 7.0))
    assert found == {**plain, "asfl": (1_000.0, 7.0), "fedproto": (0.0, 107.0), "moon": (0.0, 27.0)}
    assert len(records) == len(ALL) * 4


@dataclass(frozen=True)
class Slow(FedAvg):
    """FedAvg that takes a time of its own."""

    clock: object = None
    seconds: float = 0.0

    def train(self, *arguments, **options):
        self.clock.now += self.seconds
        return super().train(*arguments, **options)


def test_methods_of_known_times_come_out_in_their_order(timing, digits):
    """By hand: 2, 1 and 3 s a client. Catches: one method's time booked on another whose turn it was not."""
    clock, federation = Clock(), make_tiny(digits, rounds=5)
    known = {"fedavg": 2.0, "quick": 1.0, "slow": 3.0}
    timed = [
        contender(timing, federation.replica(), Slow(name=name, clock=clock, seconds=seconds))
        for name, seconds in known.items()
    ]
    records, _ = timing.time_rounds(timed, warm_up=1, repeats=4, seed=0, clock=clock)
    assert all(one["seconds_training"] == known[one["method"]] for one in records)
    table = local_time_exhibit(Material(info={"title": "t"}, tables={"timings": records})).table
    assert [(line[0], line[4]) for line in table.lines] == [("quick", "0.500"), ("FedAvg", "1"), ("slow", "1.500")]


def test_every_round_has_everybodys_turn_and_the_order_is_drawn_anew(timing, digits):
    """Catches: one method's rounds all at once, or the same method always first."""
    turns = []

    @dataclass(frozen=True)
    class Noted(FedAvg):
        def route(self, payloads, *, federation, round):
            turns.append((round, self.name))
            return super().route(payloads, federation=federation, round=round)

    federation = make_tiny(digits, rounds=8)
    names = ["a", "b", "c"]
    timed = [contender(timing, federation.replica(), Noted(name=name)) for name in names]
    timing.time_rounds(timed, warm_up=2, repeats=6, seed=0)
    rounds = [turns[first : first + 3] for first in range(0, len(turns), 3)]
    assert [{number for number, _ in turn} for turn in rounds] == [{number} for number in range(8)]
    assert all(sorted(name for _, name in turn) == names for turn in rounds)
    assert len({turn[0][1] for turn in rounds}) > 1


def test_the_state_that_is_timed_is_one_that_rounds_have_left(timing, digits, monkeypatch):
    """Catches: rounds timed from the initial state, where SCAFFOLD corrects nothing and FedProto pulls nowhere."""
    corrected, pulled = [], []
    before = local_training.run_steps

    def noted(*arguments, correction, objective, **options):
        corrected.append(correction is not None)
        pulled.append(objective is not None and objective is not fedproto._no_pull)
        return before(*arguments, correction=correction, objective=objective, **options)

    monkeypatch.setattr(local_training, "run_steps", noted)
    for method, kept in (("scaffold", corrected), ("fedproto", pulled)):
        kept.clear()
        timing.time_rounds(one_of_each(timing, digits, [method]), warm_up=1, repeats=1, seed=0)
        assert kept == [False] * 4 + [True] * 4


def test_each_method_repeat_and_client_has_one_record_and_all_have_the_same_clients(timing, tmp_path):
    options = {"methods": ALL, "lr": 0.05, "exchange_layers": ["conv1", "fc1"], "noised": ["asfl"], "repeats": 2}
    threads = torch.get_num_threads()
    records = timing.measure(FIELDS, options, runs=None).tables["timings"]
    assert torch.get_num_threads() == threads
    keys = [tuple(one[k] for k in ("method", "mech", "exchange_layer", "repeat", "client")) for one in records]
    assert len(keys) == len(set(keys)) == (len(ALL) + 3) * 2 * FIELDS["cohort"]
    assert {key[:3] for key in keys if key[0] == "asfl"} == {
        ("asfl", mech, layer) for mech in ("none", "gaussian") for layer in ("conv1", "fc1")
    }
    held = {name: {(r, c) for *who, r, c in keys if who[0] == name} for name in ALL}
    assert all(pairs == held["fedavg"] for pairs in held.values())
    assert all((one["seconds_sharing"] > 0.0) == (one["method"] == "asfl") for one in records)
    assert all((one["seconds_certificate"] is not None) == (one["mech"] == "gaussian") for one in records)
    write_records(tmp_path / "timings.csv", records, table="timings")
    assert read_records(tmp_path / "timings.csv", table="timings") == records


def test_contenders_share_the_clients_and_take_the_rates_they_were_given(timing):
    rates = {"fedavg": {"lr": 0.2}, "asfl": {"lr": 0.3, "exchange_layer": "fc1"}}
    options = {"methods": list(rates), "rates": rates, "lr": 0.1}
    fedavg, asfl = timing.contenders(FIELDS, options, rounds=2)
    assert fedavg.federation.clients is asfl.federation.clients
    assert fedavg.federation.model is not asfl.federation.model
    assert [one.federation.settings.lr for one in (fedavg, asfl)] == [0.2, 0.3]
    assert [one.name["exchange_layer"] for one in (fedavg, asfl)] == ["", "fc1"]


def test_what_fails_names_its_method(timing, digits):
    federation = make_tiny(digits)
    bad = replace(federation, settings=replace(federation.settings, lr=0.0))
    with pytest.raises(ValueError, match="fedvarp: round 0, client 0: learning rate of round 0 is 0"):
        timing.time_rounds([contender(timing, bad, METHODS["fedvarp"])], warm_up=1, repeats=1, seed=0)


def test_a_run_of_fewer_rounds_than_are_timed_is_refused(timing, digits):
    with pytest.raises(ValueError, match="asfl: its run has 3 rounds and 4 are timed"):
        timing.time_rounds(one_of_each(timing, digits, ["asfl"], rounds=3), warm_up=1, repeats=3, seed=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["asfl"]}, "methods lack fedavg"),
        ({"noised": ["scaffold"]}, "noised scaffold: it is not timed or shares no activations"),
        ({"noised": ["scaffold+sharing"]}, "noised scaffold.sharing: it is not timed"),
        ({"repeats": 0}, "repeats 0 must be a whole number from 1 on"),
        ({"warm_up": 0}, "warm_up 0 must be a whole number from 1 on"),
    ],
)
def test_options_that_would_measure_nothing_are_refused(timing, options, message):
    """Catches: no warm-up, where the first timed round would be one in which nothing is corrected yet."""
    with pytest.raises(ValueError, match=message):
        timing.measure(FIELDS, {"methods": ["fedavg", "scaffold"], "lr": 0.1, **options}, runs=None)
