"""Networks with blocks that keep, share or draw: the same run under every executor, or one clear refusal."""

import pytest
import torch
from executor_contract import assert_same_run
from federations import make_federation

from asfl_privacy.execution import begin_run, run_rounds
from asfl_privacy.execution.choice import choose_executor, make_executor
from asfl_privacy.federated import METHODS

SIZES = {"exchange_layer": "head", "partition": "iid", "evaluate_every": 1, "lr": 0.05}


def a_run(digits, name, executor, *, workers=3, evaluation_threads=1):
    federation = make_federation(digits, model_name=f"odd_nets:{name}", **SIZES)
    with make_executor(executor, federation, METHODS["asfl"], workers=workers) as running:
        start = begin_run(federation, ledger=None)
        return run_rounds(
            federation, METHODS["asfl"], executor=running, start=start, evaluation_threads=evaluation_threads
        )


@pytest.mark.parametrize("name", ["last", "count", "running", "unsaved_statistics", "mask", "shares_parameter"])
def test_what_blocks_keep_does_not_make_executors_differ(digits, name):
    """Catches evaluation on the network that trains (test records would reach training), statistics that pile up in
    a scratch network, and a mask with infinities that an average calls diverged."""
    serial = a_run(digits, name, "serial")
    assert_same_run(serial, a_run(digits, name, "threads", evaluation_threads=3))
    assert_same_run(serial, a_run(digits, name, "threads", workers=1))


def test_processes_agree_on_a_network_that_remembers(digits):
    assert_same_run(a_run(digits, "last", "serial"), a_run(digits, "last", "processes", workers=2))


def test_a_network_that_draws_in_evaluation_draws_the_same_each_time(digits):
    first = a_run(digits, "always_drops", "serial", evaluation_threads=2)
    torch.rand(7)
    assert_same_run(first, a_run(digits, "always_drops", "serial"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shares_memory", r"tail\.0\.weight and tail\.1\.weight share memory .*; tie weights by assigning the same"),
        ("extra", "keeps an extra state, .*; keep it in buffers"),
        ("complex_buffer", r"tail\.0\.z is torch\.complex64; .*two buffers"),
    ],
)
def test_what_copies_and_averages_would_change_is_refused(digits, name, words):
    with pytest.raises(ValueError, match=words):
        make_federation(digits, model_name=f"odd_nets:{name}", **SIZES)


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_a_network_that_no_seed_reaches_is_refused(digits, executor):
    federation = make_federation(digits, model_name="odd_nets:draws_from_numpy", **SIZES)
    with pytest.raises(ValueError, match="global generator of numpy, which no seed of the run reaches"):
        make_executor(executor, federation, METHODS["asfl"], workers=2)


def test_a_network_that_fails_on_some_records_fails_in_training_and_not_in_the_choice(digits):
    """Whether a run starts must not depend on the number of workers."""
    federation = make_federation(digits, model_name="own_nets:norm_and_dropout", exchange_layer="head")
    federation.model.tail[0].register_forward_pre_hook(_fails)
    for workers in (1, 2):
        choose_executor("auto", federation, METHODS["fedavg"], workers=workers)
        make_executor("serial", federation, METHODS["fedavg"], workers=workers)


def _fails(module, inputs):
    raise RuntimeError("marked")
