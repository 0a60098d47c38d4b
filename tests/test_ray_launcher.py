"""Cells on a Ray cluster: the rows and run folders of a process of one's own, and a failure costs its cell alone."""

import contextlib
import importlib.metadata
import os
import re
import signal
import threading
import time
import types
from pathlib import Path

import pytest

from asfl_privacy import ray_cluster, ray_launcher
from asfl_privacy.accounting import Journal
from asfl_privacy.cli.commands import run_command
from asfl_privacy.config import load_config
from asfl_privacy.federated import build_federation
from asfl_privacy.ray_cluster import check_machine, connected, worker_options
from asfl_privacy.run import training_settings
from asfl_privacy.shared_folder import SharedFolder, shared_folder
from asfl_privacy.sweep import SweepStoppedError, check_folder, claim_folder, prepare_sweep, run_sweep
from asfl_privacy.worker import DIED, run_cell, run_folder

try:
    import ray
except ImportError:
    ray = None

needs_ray = pytest.mark.skipif(ray is None, reason="ray is not installed: pip install 'asfl-privacy[ray]'")
TIMED = ("row.json", "metrics.csv")  # hold seconds
RUN_INFO = {"command": "test", "commit": None, "started": "2026-01-01", "config": {}, "versions": {}}
TINY = {
    "clients": 6, "cohort": 4, "rounds": 2, "tail_steps": 2, "full_steps": 2, "batch_size": 16, "seeds": 1,
    "partition": "iid", "placement": "input", "epsilon": ["16"], "evaluate_every": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster of this machine alone, whatever others run on it; its workers find modules in the folder given."""
    modules = tmp_path_factory.mktemp("modules")
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("RAY_ADDRESS", "local")
        patch.setenv("PYTHONPATH", str(modules))
        patch.syspath_prepend(str(modules))
        stack.enter_context(connected(ray))
        yield modules


def sweep(out: Path, data, *, workers: int = 1, journal: Path | None = None, resume: bool = False, **overrides: object):
    config = load_config(None, overrides=TINY | {"launcher": "ray"} | overrides)
    runs = prepare_sweep(config, data=data)
    rows = run_sweep(
        config, runs, data=data, out=out, workers=workers, resume=resume, run_info=RUN_INFO, journal=journal
    )
    return config, runs, rows


def but_seconds(row):
    return {name: value for name, value in row.items() if name != "seconds"}


@needs_ray
def test_rows_and_run_folders_are_those_of_this_process(cluster, digits, tmp_path):
    """Catches a worker with other data, other threads, another configuration, or a folder of its own."""
    config, runs, rows = sweep(tmp_path / "ray", digits, workers=2, journal=tmp_path / "data.journal")
    assert {run.cell.label.split("-")[1] for run in runs} == {"unnoised", "gaussian"}
    for index, (run, row) in enumerate(zip(runs, rows, strict=True)):
        folder = run_folder(tmp_path / "here", index, run)
        local = config.model_copy(update={"launcher": "local"})
        mine = run_cell(local, run, data=digits, folder=folder, journal=None, should_stop=lambda: False)
        assert row["status"] == "ok"
        assert but_seconds(row) == but_seconds(mine)
        theirs = run_folder(tmp_path / "ray", index, run)
        assert {file.name for file in theirs.iterdir()} == {file.name for file in folder.iterdir()}
        for file in folder.iterdir():
            if file.name not in TIMED:
                assert (theirs / file.name).read_bytes() == file.read_bytes(), file.name
    assert len(Journal.read(tmp_path / "data.journal").runs) == 1
    assert not list(tmp_path.rglob(".shared-*"))
    again = sweep(tmp_path / "ray", digits, resume=True, launcher="local")[2]  # nothing is left to run
    assert again == rows


FRAGILE = """
import os, time
from collections import OrderedDict
from pathlib import Path
import torch
from torch import nn

class Fragile(nn.Module):
    def __init__(self, acts):
        super().__init__()
        self.act = acts[int(torch.randint(len(acts), ()))]

    def forward(self, x):
        if self.training:
            self.act()
        return x

def boom():
    raise RuntimeError("boom")

def die():
    os._exit(9)

def go_on():
    pass

def tell():
    Path(__file__).with_name("started").touch()
    time.sleep(0.05)

def network(acts, num_classes):
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU())
    return nn.Sequential(OrderedDict(body=body, fragile=Fragile(acts), out=nn.Linear(8, num_classes)))

def mixed(*, input_shape, num_classes):
    return network([boom, die, go_on], num_classes)

def tells(*, input_shape, num_classes):
    return network([tell], num_classes)
"""


@needs_ray
def test_a_cell_that_fails_or_kills_its_worker_costs_no_other(cluster, digits, tmp_path):
    (cluster / "fragile_on_ray.py").write_text(FRAGILE)
    flags = {"model": "fragile_on_ray:mixed", "method": "fedavg", "epsilon": [], "mech": "none", "seed": 1, "seeds": 3}
    config, runs, rows = sweep(tmp_path, digits, **flags)
    reasons = {"boom": "RuntimeError: boom", "die": DIED, "go_on": ""}
    acts = []
    for index, (run, row) in enumerate(zip(runs, rows, strict=True)):
        settings = training_settings(config, run.cell)
        federation = build_federation(
            digits, model_name=config.model, partition=config.partition, settings=settings, privacy=None
        )
        acts.append(federation.model.fragile.act.__name__)
        assert (row["status"] == "ok") == (acts[-1] == "go_on")
        assert reasons[acts[-1]] in row["status"]
        folder = run_folder(tmp_path, index, run)
        assert folder.exists() == (acts[-1] == "go_on")
        trace = folder.with_name(f"{folder.name}.traceback.txt")
        assert trace.is_file() == (acts[-1] == "boom")
        assert acts[-1] != "boom" or "boom()" in trace.read_text() or "self.act()" in trace.read_text()
    assert set(acts) == set(reasons), "choose seeds with every fate"


@needs_ray
@pytest.mark.parametrize("wrong", ["No such file or directory", "what it writes there does not show here"])
def test_a_machine_that_does_not_share_the_folder_is_refused_in_one_line(cluster, digits, tmp_path, monkeypatch, wrong):
    """Catches a sweep whose run folders go to another machine's disk, where neither report nor resume finds them."""
    if wrong.startswith("No"):

        @contextlib.contextmanager
        def elsewhere(path, *, locks):
            yield SharedFolder(path=path / "elsewhere", token="0" * 32, locks=locks)

        monkeypatch.setattr(ray_launcher, "shared_folder", elsewhere)
    else:
        monkeypatch.setattr(ray_launcher, "has_answer", lambda folder, answer: False)
    with pytest.raises(ValueError, match=rf"does not share the folder {tmp_path}.* \({wrong}\)") as error:
        sweep(tmp_path / "out", digits, method="fedavg", epsilon=[], mech="none")
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "out").glob("cells/*"))


@needs_ray
def test_sigterm_ends_runs_between_two_rounds_and_the_sweep_can_go_on(cluster, digits, tmp_path):
    """Catches a stop that never arrives: the run would take a day."""
    (cluster / "slow_on_ray.py").write_text(FRAGILE)
    started = cluster / "started"

    def terminate() -> None:
        while not started.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=terminate)
    thread.start()
    flags = {"model": "slow_on_ray:tells", "method": "fedavg", "epsilon": [], "mech": "none", "rounds": 400_000}
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SweepStoppedError, match=r"^0 of 1 runs are done and kept in"):
        sweep(tmp_path / "out", digits, **flags)
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
    assert not list((tmp_path / "out").glob("cells/*/row.json"))
    assert not list(tmp_path.rglob(".shared-*"))
    check_folder(
        load_config(None, overrides=TINY | flags), out=tmp_path / "out", resume=True
    )  # other launchers may, too


def test_without_ray_one_line_says_what_to_install_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    monkeypatch.chdir(tmp_path)
    flags = ["--clients", "2", "--cohort", "2", "--rounds", "1", "--seeds", "1", "--mech", "none"]
    with pytest.raises(SystemExit) as left:
        run_command(["sweep", "--launcher", "ray", *flags, "--out", str(tmp_path / "out")])
    assert left.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "asfl-privacy: launcher ray: Ray is an extra that is not installed; run pip install 'asfl-privacy[ray]', or use "
        "launcher local"
    ]
    assert not list(tmp_path.iterdir())


def test_a_machine_with_another_version_is_refused(tmp_path, monkeypatch):
    with shared_folder(tmp_path, locks=False) as folder:
        versions = ray_cluster.package_versions()
        assert check_machine([folder], versions, answer="here") == ""
        wrong = check_machine([folder], versions | {"torch": "1.0"}, answer="here")
    mine = importlib.metadata.version("torch").partition("+")[0]
    assert f"has torch {mine} and the one that started the sweep 1.0" in wrong


@pytest.mark.parametrize(
    ("device", "resources", "gpus"),
    [
        ("cpu", {"CPU": 4, "GPU": 2}, 0),
        ("auto", {"CPU": 4}, 0),
        ("auto", {"CPU": 4, "GPU": 2}, 1),
        ("cuda", {"CPU": 4, "GPU": 1}, 1),
    ],
)
def test_a_worker_asks_for_one_cpu_one_thread_and_the_gpu_of_its_device(device, resources, gpus):
    options = worker_options(device, resources)
    assert (options["num_cpus"], options["num_gpus"]) == (1, gpus)
    assert options["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(("device", "resources"), [("cuda", {"CPU": 4}), ("cpu", {})])
def test_a_cluster_without_what_a_worker_needs_is_refused(device, resources):
    with pytest.raises(ValueError, match=r"the cluster has 0 [CG]PUs and a worker needs 1"):
        worker_options(device, resources)


@pytest.mark.parametrize("address", ["127.0.0.1:9", "127.0.0.1:port", "ray://127.0.0.1:10001"])
def test_a_cluster_that_is_not_there_is_refused_in_one_line(monkeypatch, address):
    """Catches a fall back to a local cluster, and minutes of attempts; no Ray is asked."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    nothing = types.SimpleNamespace(is_initialized=lambda: False)
    with pytest.raises(ValueError, match=re.escape(address)) as error, connected(nothing):
        raise AssertionError("connected")
    assert "\n" not in str(error.value)


def test_a_sweep_of_one_launcher_may_be_taken_up_by_another_but_no_other_field_changed(tmp_path):
    claim_folder(load_config(None, overrides=TINY | {"launcher": "ray"}), out=tmp_path / "out", resume=False)
    check_folder(load_config(None, overrides=TINY), out=tmp_path / "out", resume=True)
    with pytest.raises(ValueError, match="another configuration"):
        check_folder(load_config(None, overrides=TINY | {"rounds": 3}), out=tmp_path / "out", resume=True)
