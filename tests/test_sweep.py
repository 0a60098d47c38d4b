"""Sweeps on real worker processes: the same rows however they were run, and nothing lost."""

import contextlib
import csv
import json
import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asfl_privacy.config import load_config
from asfl_privacy.data import load_dataset
from asfl_privacy.reporting import read_rows
from asfl_privacy.sweep import SweepStoppedError, claim_folder, prepare_sweep, run_sweep

RUN_INFO = {"command": "test", "commit": None, "started": "2026-01-01", "config": {}, "versions": {}}
TINY = {
    "clients": 6, "cohort": 4, "rounds": 2, "tail_steps": 2, "full_steps": 2, "batch_size": 16, "seeds": 2,
    "partition": "iid", "placement": "input", "epsilon": ["1", "16"], "evaluate_every": 1,
}  # fmt: skip


def sweep(out: Path, *, workers: int = 2, resume: bool = False, **overrides: object):
    config = load_config(None, overrides=TINY | overrides)
    data = load_dataset("digits", root=Path("data"))
    runs = prepare_sweep(config, data=data)
    seen = []
    rows = run_sweep(
        config, runs, data=data, out=out, workers=workers, resume=resume, run_info=RUN_INFO, on_progress=seen.append
    )
    return rows, seen


def rows_but_seconds(folder: Path):
    with (folder / "rows.csv").open(newline="") as file:
        return [{key: value for key, value in row.items() if key != "seconds"} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small sweep on two workers."""
    folder = tmp_path_factory.mktemp("sweep") / "two-workers"
    rows, seen = sweep(folder)
    return folder, rows, seen


def test_a_sweep_leaves_rows_report_table_curve_and_provenance(finished):
    folder, rows, seen = finished
    figures = [f"figures/privacy_utility.{ending}" for ending in ("svg", "png")]
    for name in ["rows.csv", "report.md", "report.html", "table.tex", "run.json", *figures]:
        assert (folder / name).stat().st_size > 0, name
    assert [row["status"] for row in rows] == ["ok"] * 8
    assert read_rows(folder / "rows.csv") == rows
    assert [progress.done for progress in seen] == list(range(1, 9))
    assert seen[-1].seconds_left == 0.0
    page = (folder / "report.html").read_text()
    for words in ("collude", "Labels", "Model updates", "REPRODUCE ONLY, no guarantee", "ℓ2"):
        assert words in page, words


def test_one_worker_gives_the_same_rows_as_two(finished, tmp_path):
    sweep(tmp_path / "one", workers=1)
    assert rows_but_seconds(tmp_path / "one") == rows_but_seconds(finished[0])


def test_a_finished_sweep_is_not_run_again_on_resume(finished):
    folder, rows, _ = finished
    before = (folder / "rows.csv").read_bytes()
    again, seen = sweep(folder, resume=True)
    assert seen == []
    assert again == rows
    assert (folder / "rows.csv").read_bytes() == before


def test_missing_runs_alone_are_run_on_resume(finished, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(finished[0], copy)
    cells = sorted((copy / "cells").iterdir())
    for folder in (cells[1], cells[6]):
        shutil.rmtree(folder)
    (copy / "rows.csv").unlink()
    _, seen = sweep(copy, resume=True)
    assert len(seen) == 2
    assert rows_but_seconds(copy) == rows_but_seconds(finished[0])


def test_a_folder_of_another_sweep_is_left_alone(finished, tmp_path):
    folder = finished[0]
    config = load_config(None, overrides=TINY)
    with pytest.raises(ValueError, match="add --resume"):
        claim_folder(config, out=folder, resume=False)
    with pytest.raises(ValueError, match="another configuration"):
        claim_folder(load_config(None, overrides=TINY | {"rounds": 3}), out=folder, resume=True)
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="is not empty and holds no sweep"):
        claim_folder(config, out=tmp_path, resume=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_damaged_run_record_is_named_and_not_overwritten(finished, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(finished[0], copy)
    record = sorted((copy / "cells").iterdir())[0] / "row.json"
    record.write_text(record.read_text()[:40])
    with pytest.raises(ValueError, match=r"is no finished run of this sweep .* delete the folder and resume"):
        sweep(copy, resume=True)


def test_a_kept_run_is_checked_against_its_ledger_and_its_files(finished, tmp_path):
    """Catches a resume that trusts an edited ε, a truncated file, or another cell's folder."""
    import hashlib
    import shutil

    def spoil_row(cell):
        record = json.loads((cell / "row.json").read_text())
        record["row"]["epsilon_total"] = 0.001
        (cell / "row.json").write_text(json.dumps(record))

    def spoil_ledger_and_digest(cell):
        other = sorted((finished[0] / "cells").iterdir())[-1]
        shutil.copy(other / "ledger.json", cell / "ledger.json")
        record = json.loads((cell / "row.json").read_text())
        record["sha256"]["ledger.json"] = hashlib.sha256((cell / "ledger.json").read_bytes()).hexdigest()
        (cell / "row.json").write_text(json.dumps(record))

    def swap(cell):
        other = sorted((finished[0] / "cells").iterdir())[-1]
        shutil.rmtree(cell)
        shutil.copytree(other, cell)

    spoilers = [
        spoil_row,
        spoil_ledger_and_digest,
        swap,
        lambda cell: (cell / "ledger.json").unlink(),
        lambda cell: (cell / "statement.md").write_text("# Privacy statement\n\nAll is well."),
        lambda cell: (cell / "checkpoint.safetensors").write_bytes(
            (cell / "checkpoint.safetensors").read_bytes()[:100]
        ),
    ]
    for number, spoil in enumerate(spoilers):
        copy = tmp_path / str(number)
        shutil.copytree(finished[0], copy)
        spoil(sorted((copy / "cells").iterdir())[4])
        with pytest.raises(ValueError, match="delete the folder and resume"):
            sweep(copy, resume=True)


def test_a_run_folder_without_its_mark_is_set_aside_and_the_run_done_again(finished, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(finished[0], copy)
    cell = sorted((copy / "cells").iterdir())[2]
    (cell / "row.json").unlink()
    rows, seen = sweep(copy, resume=True)
    assert [progress.row["status"] for progress in seen] == ["ok"]
    assert len(rows) == 8
    assert len(list((copy / "cells").glob("*.set-aside-*"))) == 1
    assert rows_but_seconds(copy) == rows_but_seconds(finished[0])


def test_a_sweep_without_noise_says_that_nothing_is_protected(tmp_path):
    """Catches a report without warnings, which would look safer than a noised one."""
    sweep(tmp_path / "out", mech="none", epsilon=[], seeds=1)
    page = (tmp_path / "out" / "report.md").read_text()
    assert "Nothing is promised." in page
    assert page.count("Runs without noise protect nothing") >= 2
    assert "private was released" not in page


def test_the_statement_shown_is_of_the_seed_with_the_largest_total(finished):
    folder, rows, _ = finished
    strictest = [row for row in rows if row["target_epsilon"] == 1.0]
    worst = max(strictest, key=lambda row: row["epsilon_total"])
    page = (folder / "report.md").read_text()
    assert f"its seed with the largest total: {worst['seed']}" in page
    kept = next(folder.glob(f"cells/*eps1-*seed{worst['seed']}/statement.md")).read_text()
    total = next(line for line in kept.splitlines() if line.startswith("- Total"))
    assert total in page


def test_two_sweeps_never_write_one_folder_at_once(finished):
    fcntl = pytest.importorskip("fcntl")
    with (finished[0] / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="being written by another sweep"):
            sweep(finished[0], resume=True)


FRAGILE = """
import os
from collections import OrderedDict
import torch
from torch import nn

class Fragile(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act = act if torch.rand(1).item() < 0.5 else None

    def forward(self, x):
        if self.training and self.act is not None:
            self.act()
        return x

def boom():
    raise RuntimeError("boom")

def die():
    os._exit(9)

def network(act, num_classes):
    fragile = Fragile(act)
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU())
    return nn.Sequential(OrderedDict(body=body, fragile=fragile, out=nn.Linear(8, num_classes)))

def raises(*, input_shape, num_classes):
    return network(boom, num_classes)

def dies(*, input_shape, num_classes):
    return network(die, num_classes)
"""


@pytest.fixture
def fragile_model(tmp_path, monkeypatch):
    (tmp_path / "fragile_model_module.py").write_text(FRAGILE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("fragile_model")
@pytest.mark.parametrize(("factory", "reason"), [("raises", "RuntimeError: boom"), ("dies", "worker process died")])
def test_a_failed_run_is_reported_and_the_rest_go_on(tmp_path, factory, reason):
    """By seed, some networks fail in training and some do not; whether a run failed follows from its seed alone."""
    grid = {"method": "fedavg", "epsilon": []} if factory == "dies" else {"exchange_layer": "body", "epsilon": ["4"]}
    rows, _ = sweep(tmp_path / "out", model=f"fragile_model_module:{factory}", seeds=4, **grid)
    failed = {row["seed"] for row in rows if row["status"] != "ok"}
    assert 0 < len(failed) < 4
    for row in rows:
        assert (row["seed"] in failed) == (row["status"] != "ok")
        assert row["status"] == "ok" or reason in row["status"]
    if factory == "raises":
        assert all("round 0, client" in row["status"] for row in rows if row["status"] != "ok")
        traces = list((tmp_path / "out" / "cells").glob("*.traceback.txt"))
        assert len(traces) == sum(row["status"] != "ok" for row in rows)
        assert all("boom()" in trace.read_text() or "self.act()" in trace.read_text() for trace in traces)
    assert "boom" in (tmp_path / "out" / "report.md").read_text() or factory == "dies"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_goes_on_to_the_same_rows(finished, tmp_path, how):
    out = tmp_path / "out"
    flags = [f"--{name.replace('_', '-')}={','.join(v) if isinstance(v, list) else v}" for name, v in TINY.items()]
    command = [sys.executable, "-m", "asfl_privacy", "sweep", *flags, "--workers", "1", "--out", str(out)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(out.glob("cells/*/row.json")) and time.monotonic() < deadline and child.poll() is None:
        time.sleep(0.02)
    child.send_signal(how)
    _, errors = child.communicate(timeout=120)
    kept = len(list(out.glob("cells/*/row.json")))
    assert child.returncode == 130, errors
    assert errors.strip().splitlines() == [
        f"asfl-privacy: interrupted: {kept} of 8 runs are done and kept in {out}; "
        "go on with the same command and --resume"
    ]
    assert 1 <= kept < 8
    assert not list(out.glob("cells/.unfinished*"))
    assert not (out / "rows.csv").exists()
    if how == signal.SIGTERM:
        return
    done = subprocess.run([*command, "--resume", "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 8
    assert rows_but_seconds(out) == rows_but_seconds(finished[0])


def test_an_interrupt_between_two_rows_says_what_is_kept_too(tmp_path):
    """The signal can come while a row is shown, outside the pool; workers must be stopped then as well."""

    def interrupt(progress):
        raise KeyboardInterrupt

    config, data = load_config(None, overrides=TINY), load_dataset("digits", root=Path("data"))
    runs, out = prepare_sweep(config, data=data), tmp_path / "out"
    with pytest.raises(SweepStoppedError, match=r"^[1-7] of 8 runs are done and kept in"):
        run_sweep(config, runs, data=data, out=out, workers=1, resume=False, run_info=RUN_INFO, on_progress=interrupt)
    assert not multiprocessing.active_children()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found in /proc")
def test_workers_end_with_a_killed_parent_and_keep_their_runs(tmp_path):
    """Catches workers that live on: they would hold the runs that the resumed sweep wants to go on with."""
    out = tmp_path / "out"
    flags = [f"--{name.replace('_', '-')}={','.join(v) if isinstance(v, list) else v}" for name, v in TINY.items()]
    command = [sys.executable, "-m", "asfl_privacy", "sweep", *flags, "--rounds=100000", "--workers=2", f"--out={out}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as parent:
        wait_until(lambda: len(list(out.glob("cells/*.unfinished/start.json"))) == 2)
        workers = children_of(parent.pid)
        time.sleep(1.0)
        parent.kill()
    assert workers
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    assert len(list(out.glob("cells/*.unfinished/checkpoint-*/checkpoint.json"))) == 2


def wait_until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children_of(parent):
    """The worker processes of a process, without the standard library's resource tracker."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_child = int((path / "stat").read_text().rpartition(")")[2].split()[1]) == parent
            if is_child and "resource_tracker" not in (path / "cmdline").read_text():
                found.append(int(path.name))
    return found
