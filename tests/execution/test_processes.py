"""Worker processes: the serial executor's bits, its errors, and nothing left behind however anything ends."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from federations import gaussian, make_federation, make_tiny
from torch import nn

from asfl_privacy.accounting import Ledger
from asfl_privacy.execution import Failure, SerialExecutor, begin_run, run_rounds
from asfl_privacy.execution.executor import ClientFailedError, WorkerDiedError
from asfl_privacy.execution.processes import ProcessesExecutor
from asfl_privacy.execution.shared_region import Slots
from asfl_privacy.federated import METHODS, State

ASFL = METHODS["asfl"]
SIX = {"clients": 6, "cohort": 6}


def run(federation, executor):
    privacy = federation.privacy
    ledger = None if privacy is None else Ledger(p=privacy.p, radius=privacy.radius)
    with executor:
        return run_rounds(federation, ASFL, executor=executor, start=begin_run(federation, ledger=ledger))


def collect(executor, state, cohort, *, round=0):
    return executor.collect(state, cohort, plan=None, remaining=None, round=round)


def train(executor, state, collected, *, round=0):
    received = {client: collected[(client + 1) % len(collected)].payload for client in collected}
    return executor.train(
        state, tuple(collected), plan=None, collected=collected, received=received, remaining=None, round=round
    )


def same(first, second):
    return list(first) == list(second) and all(torch.equal(value, second[name]) for name, value in first.items())


def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def federation(digits):
    return make_tiny(digits, **SIX)


@pytest.fixture(scope="module")
def executor(federation):
    """Two workers that several tests use; a test that ends them starts its own."""
    with ProcessesExecutor(federation, ASFL, workers=2) as entered:
        yield entered


@pytest.fixture
def start_state(federation):
    return State(weights=federation.initial_weights)


def test_a_run_is_the_serial_one_in_whichever_order_clients_end(digits):
    """Dropout, batch norm, a frozen module, what clients keep, noise and labels, all at once; cohorts that change.

    Catches weights averaged in the order of completion, a client's state that stays behind in a worker, and layers that
    draw from what was drawn before.
    """
    own = {"model_name": "own_nets:norm_and_dropout", "exchange_layer": "head", "partition": "dirichlet:0.5"}
    federation = make_federation(digits, privacy=gaussian(noise="once", label_epsilon=3.0), **own)
    serial = run(federation, SerialExecutor(federation, ASFL))
    shuffled = run(federation, ProcessesExecutor(federation, ASFL, workers=2, shuffle=random.Random(3)))
    assert same(serial.state.weights, shuffled.state.weights)
    assert serial.ledger == shuffled.ledger
    assert [(e.accuracy, e.loss) for e in serial.evaluations] == [(e.accuracy, e.loss) for e in shuffled.evaluations]
    assert list(serial.state.clients) == list(shuffled.state.clients)
    for client, kept in serial.state.clients.items():
        assert same(kept, shuffled.state.clients[client])
    assert (serial.drawn, serial.drawn_remote, serial.traffic) == (
        shuffled.drawn,
        shuffled.drawn_remote,
        shuffled.traffic,
    )


def test_answers_come_in_the_order_of_the_cohort(executor, federation, start_state):
    cohort = (4, 0, 5, 1)
    assert list(collect(executor, start_state, cohort)) == list(cohort)


def kept_and_copied(executor, state):
    """All that six rounds return, and copies taken when they came; other weights each round."""
    kept, copies = [], []
    for round in range(6):
        collected = collect(executor, state, tuple(range(6)), round=round)
        updates = train(executor, state, collected, round=round)
        for tensors in (
            *(update.weights for update in updates.values()),
            *({"a": c.own.inputs} for c in collected.values()),
        ):
            kept.append(tensors)
            copies.append({name: value.clone() for name, value in tensors.items()})
        state = ASFL.aggregate(state, updates, federation=federation, round=round)
    return kept, copies


def test_what_was_returned_keeps_its_values_while_it_is_kept(executor, start_state):
    """A method may keep an update as it is. Catches memory that is written again while something views it."""
    assert all(same(first, second) for first, second in zip(*kept_and_copied(executor, start_state), strict=True))


def test_the_test_above_catches_slots_that_are_given_back_at_once(executor, start_state, monkeypatch):
    def lend_to_all(slots, offset):
        slots.give_back(offset)
        return slots.bytes_at(offset)

    monkeypatch.setattr(Slots, "lend", lend_to_all)
    assert not all(same(first, second) for first, second in zip(*kept_and_copied(executor, start_state), strict=True))


def test_a_refusal_is_the_serial_one_and_the_workers_go_on(executor, federation, start_state):
    """The first client of the cohort is named, whichever failed first."""
    spoilt = State(weights={name: value.clone() for name, value in start_state.weights.items()})
    spoilt.weights["body.1.weight"][:] = torch.nan
    texts = []
    for one in (SerialExecutor(federation, ASFL), executor):
        with pytest.raises(ValueError, match="round 7, client 3: activations are not finite") as caught:
            collect(one, spoilt, (3, 1, 2, 0), round=7)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert "Traceback (most recent call last)" in str(caught.value.__cause__)
    good = collect(executor, start_state, (0, 1), round=8)
    again = collect(SerialExecutor(federation, ASFL), start_state, (0, 1), round=8)
    assert torch.equal(good[1].payload.activations, again[1].payload.activations)


def test_any_other_exception_says_what_it_was_and_where(executor, start_state):
    with pytest.raises(ClientFailedError, match=r"^round 4, client 2: RuntimeError: Error\(s\) in loading") as caught:
        collect(executor, State(weights={"body.1.weight": torch.zeros(1)}), (2, 5), round=4)
    assert "load_weights" in caught.value.traceback


def test_a_client_never_sees_what_another_keeps(executor, federation, start_state):
    """Each is sent its own state: one that is spoilt fails its own client alone."""
    serial = SerialExecutor(federation, ASFL)
    state = State(
        weights=start_state.weights, clients=start_state.clients.updated({1: {"noised_inputs": torch.ones(3)}})
    )
    first, second = (collect(one, state, (0, 1, 2)) for one in (serial, executor))
    assert all(torch.equal(first[c].payload.activations, second[c].payload.activations) for c in range(3))


def test_it_works_inside_its_with_block_alone(federation, start_state):
    with pytest.raises(ValueError, match="use it inside one"):
        collect(ProcessesExecutor(federation, ASFL, workers=1), start_state, (0,))


@pytest.mark.parametrize("workers", [0, -1, 1.5, True])
def test_numbers_of_workers_that_make_no_sense_are_refused(federation, workers):
    with pytest.raises(ValueError, match="workers is"):
        ProcessesExecutor(federation, ASFL, workers=workers)


def test_a_network_that_cannot_be_sent_is_refused_in_one_line(digits):
    federation = make_tiny(digits)
    federation.model[0].hook = lambda: None
    with pytest.raises(ValueError, match=r"the network cannot be sent .*; .* use executor serial or threads") as caught:
        ProcessesExecutor(federation, ASFL, workers=1)
    assert "\n" not in str(caught.value)


def test_a_network_that_a_worker_cannot_import_is_refused_in_one_line(digits, monkeypatch):
    class Here(nn.Module):
        def forward(self, x):
            return x

    module = types.ModuleType("only_in_this_process")
    Here.__module__, Here.__qualname__, module.Here = module.__name__, "Here", Here
    monkeypatch.setitem(sys.modules, module.__name__, module)
    federation = make_tiny(digits)
    federation.model[0].append(Here())
    executor = ProcessesExecutor(federation, ASFL, workers=1)
    with pytest.raises(
        ValueError, match=r"cannot load .*only_in_this_process.* use executor serial or threads"
    ) as caught:
        executor.__enter__()
    assert "\n" not in str(caught.value)
    assert not executor._crew.workers


def test_dead_workers_are_replaced_where_failures_are_tolerated_and_end_the_run_where_not(
    digits, federation, start_state
):
    """Killed between phases, nothing is lost; in the middle, the client in work is; what was to come is not."""
    serial = collect(SerialExecutor(federation, ASFL), start_state, tuple(range(6)))
    with ProcessesExecutor(federation, ASFL, workers=2, tolerate_failures=True) as executor:
        victim = executor._crew.workers[0].pid
        os.kill(victim, signal.SIGSTOP)  # it has clients in work and does not end them
        timer = threading.Timer(1.0, os.kill, (victim, signal.SIGKILL))
        timer.start()
        answers = collect(executor, start_state, tuple(range(6)), round=0)
        timer.join()
        failures = {client: answer for client, answer in answers.items() if isinstance(answer, Failure)}
        assert list(failures) == [0]
        assert isinstance(failures[0].error, WorkerDiedError)
        assert failures[0].reason.startswith(
            f"round 0, client 0: WorkerDiedError: worker process {victim} died (SIGKILL"
        )
        good = [client for client in answers if client not in failures]
        assert good == [1, 2, 3, 4, 5]
        for client in good:
            assert torch.equal(answers[client].payload.activations, serial[client].payload.activations)
        executor._tolerate_failures = executor._crew._replaces = False
        pids = [worker.pid for worker in executor._crew.workers]
        os.kill(pids[1], signal.SIGKILL)
        wait_for(lambda: has_ended(pids[1]))
        with pytest.raises(WorkerDiedError, match=rf"worker process {pids[1]} died \(SIGKILL") as caught:
            collect(executor, start_state, tuple(range(6)), round=1)
        assert "\n" not in str(caught.value)
        assert all(has_ended(pid) for pid in pids)


SCRIPT = """
    from pathlib import Path
    from asfl_privacy.data import load_dataset
    from asfl_privacy.execution.processes import ProcessesExecutor
    from asfl_privacy.federated import METHODS, State
    from federations import make_tiny

    if __name__ == "__main__":
        federation = make_tiny(load_dataset("digits", root=Path("data")), full_steps=10**7)
        state = State(weights=federation.initial_weights)
        nothing = {"plan": None, "remaining": None, "round": 0}
        with ProcessesExecutor(federation, METHODS["asfl"], workers=1) as executor:
            collected = executor.collect(state, (0, 1), **nothing)
            print(*(worker.pid for worker in executor._crew.workers), flush=True)
            executor.train(state, (0, 1), collected=collected, received={}, **nothing)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for its processes")
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent_in_the_middle_of_their_work(tmp_path, signum):
    """Ten million steps are under way. Catches workers that notice only when they are done, and files that stay."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    folders = {"PYTHONPATH": str(Path(__file__).parents[1]), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        env=os.environ | folders,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 1
        assert not has_ended(pids[0])
        if signum == signal.SIGINT:
            os.killpg(parent.pid, signum)  # as a terminal does it: the workers get it too
        else:
            parent.kill()
        _, errors = parent.communicate(timeout=60)
        assert parent.returncode == -signum
        wait_for(lambda: all(has_ended(pid) for pid in pids))
    assert errors.count("Traceback") == (1 if signum == signal.SIGINT else 0)  # the parent's KeyboardInterrupt alone
    assert list(tmp_path.iterdir()) == [script]
