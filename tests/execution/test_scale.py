"""Ten thousand clients of which fifty train a round: memory stays flat, also with a model-sized state for each client."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")

RUN = """
import json, sys, tempfile
import numpy as np, torch
from pathlib import Path
sys.path[:0] = [{tests!r}]
from federations import gaussian
from stateful_method import Momentum
from asfl_privacy.accounting import Ledger
from asfl_privacy.data.dataset import make_dataset
from asfl_privacy.execution import begin_run, run_rounds
from asfl_privacy.execution.checkpoint import CLIENTS_FOLDER, write_checkpoint
from asfl_privacy.execution.choice import make_executor
from asfl_privacy.federated import METHODS, State, TrainingSettings, build_federation
from asfl_privacy.federated.client_states import DiskClientStates

torch.set_num_threads(1)
rng = np.random.default_rng(0)
inputs, labels = rng.random((60_000, 1, 8, 8), dtype=np.float32), rng.integers(10, size=60_000)
data = make_dataset("digits-size", train=(inputs, labels), test=(inputs[:500], labels[:500]))
settings = TrainingSettings(clients=10_000, cohort=50, rounds=30, tail_steps=1, full_steps=1, batch_size=8, lr=0.05,
                            seed=0, evaluate_every=10, exchange_layer="conv2")
method = {{"asfl": METHODS["asfl"], "momentum": Momentum()}}[{method!r}]
federation = build_federation(data, model_name="small-cnn", partition={partition!r}, settings=settings,
                              privacy=gaussian(noise="once"))
resident = []

def after_round(progress):
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident.append(pages * 4096)
    if progress.rounds_done % 10 == 0:
        write_checkpoint(Path(folder), progress, fingerprint="scale")

with tempfile.TemporaryDirectory() as folder:
    state = State(weights=federation.initial_weights, clients=DiskClientStates(Path(folder) / CLIENTS_FOLDER))
    start = begin_run(federation, ledger=Ledger(p=2.0, radius=1.0), state=state)
    with make_executor("serial", federation, method) as executor:
        result = run_rounds(federation, method, executor=executor, start=start, after_round=after_round)
    touched = len(result.state.clients)
print(json.dumps({{"resident": resident, "peak": result.evaluations[-1].peak_memory, "touched": touched}}))
"""


@pytest.mark.parametrize(("method", "partition"), [("asfl", "iid"), ("momentum", "dirichlet:100")])
def test_memory_is_flat_over_the_rounds_of_ten_thousand_clients(method, partition):
    """Catches a state of every client in memory: 1,400 clients keep a network of 150 kB each, 210 MB in all."""
    program = RUN.format(tests=str(Path(__file__).parents[1]), method=method, partition=partition)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["touched"] > 1_300
    assert found["peak"] <= 1.5 * 2**30
    first, last = max(found["resident"][:10]), max(found["resident"][-10:])
    assert last <= first + 70 * 2**20  # the cache of client states holds 64 MiB at most
