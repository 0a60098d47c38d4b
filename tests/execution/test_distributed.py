"""Runs on ranks end with the bits of serial ones; payloads go from rank to rank, and no rank waits for one that is gone.

Run as a program, this file is one process of several: two ranks do every scenario, then three, the last of which dies.
"""

import os
import pickle
import socket
import subprocess
import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from federations import gaussian, make_federation
from stateful_method import Momentum

from asfl_privacy.accounting import Ledger
from asfl_privacy.accounting.budget import RecordBudget
from asfl_privacy.data import load_dataset
from asfl_privacy.execution import SerialExecutor, begin_run, run_rounds
from asfl_privacy.execution.distributed import RankedExecutor, init_ranks, is_torchrun, serve
from asfl_privacy.execution.executor import ClientFailedError, WorkerDiedError
from asfl_privacy.execution.rank_channel import Channel
from asfl_privacy.federated import METHODS
from asfl_privacy.federated.methods import ASFL

TINY = {"model_name": "federations:tiny_net", "exchange_layer": "body", "rounds": 2}
DROPOUT = {"model_name": "own_nets:norm_and_dropout", "exchange_layer": "head", "partition": "iid"}


@dataclass(frozen=True)
class Keeps(ASFL):
    """Everything that can be kept is, in both phases and on the server, and moves the weights."""

    name: str = "keeps"

    def collect(self, state, client, **options):
        collected = super().collect(state, client, **options)
        before = state.clients.get(client, {"asked": torch.tensor(0)})
        return replace(collected, client_state={**before, "asked": before["asked"] + 1})

    def train(self, state, client, **options):
        update = super().train(state, client, **options)
        kept, server = state.clients[client], state.server.get("drift", torch.zeros(()))
        moved = update.weights["out.bias"] + 0.01 * kept["asked"] + server
        return replace(
            update,
            weights=update.weights | {"out.bias": moved},
            client_state={**kept, "last": moved.double()} if client != 1 else None,
        )

    def aggregate(self, state, updates, *, federation, round):
        after = super().aggregate(state, updates, federation=federation, round=round)
        drift = state.server.get("drift", torch.zeros(())) + 0.001 * len(updates)
        return replace(after, server={"drift": drift})


@dataclass(frozen=True)
class Fails(ASFL):
    """One client fails in one phase, in the run's second round."""

    client: int = 3
    phase: str = "train"
    kind: type[Exception] = ArithmeticError
    name: str = "fails"

    def _fail(self, phase, client, round):
        if (phase, round) == (self.phase, 1) and client >= self.client:
            raise self.kind(f"client {client} is\nbroken")

    def collect(self, state, client, **options):
        self._fail("collect", client, options["round"])
        return super().collect(state, client, **options)

    def train(self, state, client, **options):
        self._fail("train", client, options["round"])
        return super().train(state, client, **options)


class OddError(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


@dataclass(frozen=True)
class FailsOddly(Fails):
    def _fail(self, phase, client, round):
        if phase == "train" and client == 3:
            raise OddError("this", "that")


@dataclass(frozen=True)
class SeesShapes(ASFL):
    """Route sees stand-ins alone, of every client."""

    name: str = "sees shapes"

    def route(self, payloads, **options):
        assert all(payload.activations.is_meta and payload.labels.is_meta for payload in payloads.values())
        return super().route(payloads, **options)


@dataclass(frozen=True)
class Rewrites(ASFL):
    name: str = "rewrites"

    def route(self, payloads, **options):
        return super().route({c: replace(payload, num_bytes=1) for c, payload in payloads.items()}, **options)


@dataclass(frozen=True)
class Notes(ASFL):
    """Notes in a file whoever trains, and whether it received anything but tensors, labels, sender and size."""

    folder: str = ""
    name: str = "notes"

    def train(self, state, client, **options):
        received = options["received"]
        bare = received is None or (not received.charges and not len(received.records))
        (Path(self.folder) / f"{client} {bare}").touch()
        return super().train(state, client, **options)


@dataclass(frozen=True)
class Ends(ASFL):
    """The process of one client ends, or its user interrupts it."""

    client: int = 0
    interrupted: bool = False
    name: str = "ends"

    def train(self, state, client, **options):
        if client == self.client and self.interrupted:
            raise KeyboardInterrupt
        if client == self.client:
            os._exit(9)
        return super().train(state, client, **options)


class NoJournal:
    """A journal whose disk is full."""

    def append_all(self, run_id, events):
        raise OSError("no space left")


FILTER = {"budget": RecordBudget(gaussian_budget=0.3, excess_budget=1e-6, tail_budget=1e-12)}  # one release at z = 2
SAME = {  # name: (federation, method); each must end with the serial run's bits
    "asfl": ({"cohort": 5}, METHODS["asfl"]),
    "fedavg": (TINY, METHODS["fedavg"]),
    "input noise": (TINY | {"cohort": 5, "privacy": gaussian()}, METHODS["asfl"]),
    "exchange noise and labels": (
        TINY | {"privacy": gaussian(placement="exchange", label_epsilon=2.0)},
        METHODS["asfl"],
    ),
    "noise kept": (
        TINY | {"rounds": 3, "privacy": gaussian(noise="once", own="released", label_epsilon=1.0)},
        METHODS["asfl"],
    ),
    "a filter": (TINY | {"rounds": 3, "cohort": 6, "privacy": gaussian(**FILTER)}, METHODS["asfl"]),
    "dp-sgd": (
        TINY | {"cohort": 3, "privacy": gaussian(updates="dp-sgd", update_multiplier=4.0)},
        METHODS["asfl"],
    ),
    "dp-fedavg": (TINY | {"privacy": gaussian(updates="dp-fedavg", update_multiplier=3.0)}, METHODS["fedavg"]),
    "dropout": (DROPOUT | {"rounds": 2}, METHODS["asfl"]),
    "momentum": (TINY | {"rounds": 3}, Momentum()),
    "everything kept": (TINY | {"rounds": 3}, Keeps()),
}
SAME_OF_THREE = {
    "two of six": (TINY | {"cohort": 2, "rounds": 4, "privacy": gaussian()}, METHODS["asfl"]),
    "five of six": (TINY | {"cohort": 5}, Keeps()),
}
FAILING = {
    "an error": (TINY | {"cohort": 6}, Fails()),
    "a refusal": (TINY | {"cohort": 6}, Fails(client=1, phase="collect", kind=ValueError)),
    "an odd error": (TINY | {"cohort": 6}, FailsOddly()),
    "another payload": (TINY, Rewrites()),
}
TOLERANT = {
    "lost in train": (TINY | {"cohort": 6}, Fails(client=4)),
    "lost in collect": (TINY | {"cohort": 6}, Fails(client=5, phase="collect", kind=ValueError)),
}


WAIT = timedelta(minutes=4)
"""So that a test in which ranks wait for each other in vain ends; what it says then is not what is expected."""


def run_of(options, method, digits, *, make_executor, journal=None, tolerate_failures=False):
    """What a run has come to, or what it raised."""
    federation = make_federation(digits, **options)
    privacy = federation.privacy
    ledger = None if privacy is None else Ledger(p=privacy.p, radius=privacy.radius)
    start = begin_run(federation, ledger=ledger, journal=journal)
    try:
        with make_executor(federation, method, tolerate_failures=tolerate_failures) as executor:
            return outcome_of(run_rounds(federation, method, executor=executor, start=start))
    except Exception as error:
        return {"error": type(error), "text": str(error), "traceback": getattr(error, "traceback", None)}


def outcome_of(progress):
    """All that two runs must have in common."""
    state = progress.state
    return {
        "weights": state.weights,
        "server": dict(state.server),
        **{f"client {client}": dict(state.clients[client]) for client in state.clients},
        "evaluations": [replace(one, seconds={}, peak_memory=0) for one in progress.evaluations],
        "phases": [sorted(one.seconds) for one in progress.evaluations],
        "ledger": progress.ledger,
        "totals": (progress.traffic, progress.drawn, progress.drawn_remote, progress.held_back),
        "plan": progress.largest_plan,
        "failures": progress.failures,
    }


def be_a_rank(rank, folder, ports):
    """One process: two ranks, two of which the first is interrupted, and three of which the last one ends."""
    torch.set_num_threads(1)
    digits = load_dataset("digits", root=Path("data"))
    told = {}

    def do(name, options, method, **more):
        if rank == 0:
            told[name] = run_of(options, method, digits, make_executor=RankedExecutor, **more)
            return
        try:
            told[name] = serve(make_federation(digits, **options), method)
        except WorkerDiedError as error:
            told[name] = str(error)

    def two():
        for name, (options, method) in (SAME | FAILING).items():
            do(name, options, method)
        for name, (options, method) in TOLERANT.items():
            do(name, options, method, tolerate_failures=True)
        do("stand-ins", TINY, SeesShapes())
        do("other seeds", TINY | {"seed": rank}, METHODS["asfl"])
        private = TINY | {"rounds": 1, "cohort": 6, "privacy": gaussian()}
        for name, journal in (("uncharged", NoJournal()), ("charged", None)):
            (folder / name).mkdir(exist_ok=True)
            do(name, private, Notes(folder=str(folder / name)), journal=journal)

    def interrupted():
        do("interrupted", TINY | {"cohort": 6}, Ends(client=2, interrupted=True))

    def three():
        for name, (options, method) in SAME_OF_THREE.items():
            do(name, options, method)
        do("ended", TINY | {"cohort": 6}, Ends(client=5))
        (folder / f"{rank}.pickle").write_bytes(pickle.dumps(told))

    for size, port, work in zip((2, 2, 3), ports, (two, interrupted, three), strict=True):
        if rank < size:
            variables = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in variables.items()})
            try:
                with init_ranks("cpu", timeout=WAIT):
                    work()
            except KeyboardInterrupt:
                told["interrupted"] = "here"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each rank that did not end tells of every scenario, with the folder of notes."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-W", "error", __file__, str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ports = [str(port) for port in free_ports(3)]
    ranks = [subprocess.Popen([*command, str(rank), *ports], env=environment) for rank in range(3)]
    try:
        codes = [rank.wait(timeout=600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0, 9]
    return folder, *(pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(2))


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def assert_same(first, second):
    assert list(first) == list(second)
    for name, value in first.items():
        if isinstance(value, dict):
            assert list(value) == list(second[name])
            for key, tensor in value.items():
                assert tensor.dtype == second[name][key].dtype
                assert torch.equal(tensor, second[name][key]), (name, key)
        else:
            assert value == second[name], name


@pytest.mark.parametrize("name", [*SAME, *SAME_OF_THREE])
def test_ranks_end_with_the_bits_of_the_serial_run(digits, told, name):
    """Catches answers in the order of ranks, a payload handed to another client, state or a plan that is not passed on,
    tensors that lose a type or a bit on the way, and (two of six on three ranks) a rank without clients that is asked."""
    options, method = (SAME | SAME_OF_THREE)[name]
    assert_same(run_of(options, method, digits, make_executor=SerialExecutor), told[1][name])
    assert told[2][name] is None


@pytest.mark.parametrize("name", TOLERANT)
def test_a_tolerant_run_loses_the_same_clients_for_the_same_reasons(digits, told, name):
    options, method = TOLERANT[name]
    serial = run_of(options, method, digits, make_executor=SerialExecutor, tolerate_failures=True)
    assert len(serial["failures"]) >= 1
    assert_same(serial, told[1][name])


def test_a_refusal_is_the_serial_runs_own_line(digits, told):
    """Clients 1 to 5 refuse, on both ranks: catches the first failure to arrive, or rank 0's own, in place of client 1's."""
    serial = run_of(*FAILING["a refusal"], digits, make_executor=SerialExecutor)
    assert serial["error"] is ValueError
    assert serial["text"].startswith("round 1, client 1: ")
    assert told[1]["a refusal"] == serial


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("an error", "round 1, client 3: ArithmeticError: client 3 is broken"),
        ("an odd error", "round 0, client 3: OddError: this and that"),
    ],
)
def test_an_error_on_a_rank_is_named_with_its_traceback(told, name, reason):
    """Catches exceptions that are pickled: this one cannot be made again, and its rank would end."""
    raised = told[1][name]
    assert (raised["error"], raised["text"]) == (ClientFailedError, reason)
    assert raised["traceback"].startswith("on rank 1:\nTraceback")
    assert "in _fail" in raised["traceback"]


def test_ranks_serve_on_after_a_run_that_failed(told):
    """Catches a rank that waits for orders that never come, or ends with the run of rank 0."""
    assert all(told[2][name] is None for name in (*FAILING, *TOLERANT, "other seeds", "uncharged", "charged"))


def test_nothing_is_sent_that_could_not_be_charged(told):
    """Catches payloads that are exchanged with the collect phase: then clients of the other rank would hold them."""
    folder, rank_0, _ = told
    assert rank_0["uncharged"]["error"] is OSError
    assert list((folder / "uncharged").iterdir()) == []
    assert {path.name for path in (folder / "charged").iterdir()} == {f"{client} True" for client in range(6)}


def test_no_payloads_values_reach_rank_0_for_routing(told):
    """Catches payloads that are sent by way of rank 0, those of its own clients too."""
    assert "weights" in told[1]["stand-ins"]


def test_a_method_that_changes_payloads_on_their_way_is_refused(told):
    """Its changes would be lost: what travels is what lies on the sender's rank."""
    assert told[1]["another payload"]["error"] is ValueError
    assert "delivers another payload of client" in told[1]["another payload"]["text"]


def test_ranks_of_another_configuration_are_refused_by_what_differs(told):
    assert told[1]["other seeds"]["error"] is ValueError
    assert "rank 1 has another settings and partition and network than rank 0" in told[1]["other seeds"]["text"]


def test_a_rank_that_ends_ends_all_with_one_line(told):
    """Catches ranks that wait until a time-out: a closed connection is noticed at once."""
    _, rank_0, rank_1 = told
    assert rank_0["ended"]["error"] is WorkerDiedError
    for line in (rank_0["ended"]["text"], rank_1["ended"]):
        assert "does not answer" in line
        assert "--resume" in line
        assert "Timed out" not in line
        assert "\n" not in line
    assert rank_0["ended"]["text"].startswith("rank 2 ")
    assert rank_1["ended"].startswith("rank 0 ")


def test_ranks_end_when_rank_0_is_interrupted_within_a_phase(told):
    assert told[1]["interrupted"] == "here"
    assert told[2]["interrupted"].startswith("rank 0 does not answer")
    assert "Timed out" not in told[2]["interrupted"]


@pytest.fixture
def alone(monkeypatch):
    """One rank, in this process."""
    variables = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports(1)[0]}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    assert is_torchrun()
    with init_ranks("cpu", timeout=WAIT) as ranks:
        yield ranks


def test_one_rank_alone_is_a_serial_run(digits, alone):
    options, method = SAME["everything kept"]
    serial, ranked = (run_of(options, method, digits, make_executor=one) for one in (SerialExecutor, RankedExecutor))
    assert_same(serial, ranked)


@pytest.mark.parametrize("interrupted", [True, False])
def test_ranks_are_told_to_stop_unless_a_phase_is_under_way(digits, alone, monkeypatch, interrupted):
    """In the middle of a phase they listen for nothing: rank 0 would wait for them until the time-out."""
    said, broadcast = [], Channel.broadcast
    monkeypatch.setattr(Channel, "broadcast", lambda self, value: said.append(value) or broadcast(self, value))
    method = Ends(client=2, interrupted=True) if interrupted else METHODS["fedavg"]
    try:
        run_of(TINY | {"cohort": 6, "rounds": 1}, method, digits, make_executor=RankedExecutor)
    except KeyboardInterrupt:
        assert interrupted
    assert [order.phase for order in said[1:]] == ["collect", "train"] + ["stop"] * (not interrupted)


def test_what_collect_did_not_give_is_refused(digits, alone):
    """The values lie on the ranks: a changed answer would be ignored without a word."""
    federation, method = make_federation(digits, **TINY), METHODS["asfl"]
    state, cohort = begin_run(federation, ledger=None).state, (0, 1)
    asked = {"plan": None, "remaining": None, "round": 0}
    with RankedExecutor(federation, method) as executor:
        collected = {c: replace(one) for c, one in executor.collect(state, cohort, **asked).items()}
        with pytest.raises(ValueError, match=r"round 0, client 0: this is not what collect gave.*pass"):
            executor.train(state, cohort, collected=collected, received={}, **asked)


def test_without_torchrun_the_executor_says_how_to_start_it(digits, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not is_torchrun()
    with pytest.raises(ValueError, match=r"RANK, WORLD_SIZE.* not set.*torchrun --nproc-per-node 2"), init_ranks("cpu"):
        pass
    with pytest.raises(ValueError, match="start with torchrun"):
        RankedExecutor(make_federation(digits, **TINY), METHODS["asfl"])


def test_ranks_train_on_cpu_or_cuda_alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match="use --device cpu"), init_ranks("mps"):
        pass
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "99")
    with pytest.raises(ValueError, match="99 ranks on a machine with"), init_ranks("cuda"):
        pass


if __name__ == "__main__":
    be_a_rank(int(sys.argv[2]), Path(sys.argv[1]), sys.argv[3:])
