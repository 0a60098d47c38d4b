"""The engines benchmark: all engines are given the same work, and one that did other work is never shown as a figure."""

import importlib
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from asfl_privacy.federated.streams import numpy_stream

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "benchmarks" / "engines"
NAMES = (
    "workload",
    "task_data",
    "races",
    "rows",
    "figure",
    "report",
    "environments",
    "operations",
    "engine_bare",
    "engine_ours",
    "run",
)
FACTS = {"command": "run", "commit": None, "started": "now", "config": {"repeats": 1}, "versions": {"python": "3"}}


@pytest.fixture(scope="module")
def scripts():
    """The scripts import each other by bare names, some of which another benchmark uses too."""
    others = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    sys.path.insert(0, str(FOLDER))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    finally:
        sys.path.remove(str(FOLDER))
        for name in NAMES:
            sys.modules.pop(name, None)
        sys.modules.update(others)


@pytest.fixture(scope="module")
def tiny(scripts):
    return scripts.workload.Task(data="digits", model="mlp-16", clients=6, cohort=4, rounds=3, full_steps=3)


def finished(scripts, folder, engine, *arguments):
    """The facts and weights that an engine leaves."""
    engine.main(folder, folder / "out", *arguments)
    facts = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    return facts, torch.load(folder / "out.pt", weights_only=True)


def test_streams_are_the_packages_own(scripts):
    """Catches: mini-batches that only look alike, which would let an engine do other work unseen."""
    mine = scripts.workload.stream(3, round=2, client=5, purpose="full steps")
    assert (
        mine.integers(10**9, size=8) == numpy_stream(3, round=2, client=5, purpose="full steps").integers(10**9, size=8)
    ).all()


@pytest.mark.parametrize("method", ["fedavg", "asfl"])
def test_the_bare_loop_ends_where_the_package_ends(scripts, tiny, tmp_path, method):
    """Catches: a wrong pairing, cut, weighting, initial weights or number of steps in either of the two loops."""
    tail_steps = 2 if method == "asfl" else 0
    task = scripts.task_data.prepare(tmp_path / "t", replace(tiny, method=method, tail_steps=tail_steps))
    bare, bare_weights = finished(scripts, tmp_path / "t", scripts.engine_bare)
    ours, our_weights = finished(scripts, tmp_path / "t", scripts.engine_ours, "serial", 1)
    assert bare["steps"] == ours["steps"] == task.rounds * task.cohort * task.num_steps
    initial = scripts.run.initial_of(tmp_path / "t")
    assert scripts.run.drift(our_weights, bare_weights, initial=initial) < 1e-4
    assert scripts.run.drift(our_weights, bare_weights, initial=bare_weights) > 0  # no way travelled: still a number
    assert ours["loss"] == pytest.approx(bare["loss"], rel=1e-4)
    assert len(bare["walls"]) == len(ours["walls"]) == task.rounds - 1


def test_the_plain_convolutional_network_is_the_packages_small_cnn(scripts):
    data = scripts.task_data.dataset_of("synthetic-28")
    task = scripts.workload.Task(data="synthetic-28", model="cnn")
    weights = scripts.task_data.plain_weights(scripts.task_data.federation_of(task, data).initial_weights)
    scripts.workload.build_network("cnn", input_shape=(1, 28, 28)).load_state_dict(weights)


def test_constants_of_the_first_block_are_the_data_sets(scripts):
    for name in ("digits", "synthetic-8"):
        data = scripts.task_data.dataset_of(name)
        assert (*data.mean, *data.std) == scripts.task_data.CONSTANTS[name]


@pytest.fixture
def floor(scripts):
    return scripts.rows.Row(
        race="engines",
        case="FedAvg",
        tool="bare loop",
        repeat=0,
        status=scripts.rows.OK,
        walls="1.0 2.0 3.0",
        cpu_s=2.0,
        once_s=1.0,
        peak_mib=100.0,
        accuracy=0.8,
        loss=0.5,
        steps=100,
    )


def test_a_run_that_did_other_work_is_marked(scripts, floor):
    """Catches: an engine that skips steps or clients shown as fast."""
    rows = scripts.rows
    same = replace(floor, tool="x", drift=1e-6)
    assert rows.judged(same, floor, num_steps=100) == same
    for change in ({"steps": 99}, {"drift": 0.05}, {"drift": math.nan}, {"loss": 0.6}, {"accuracy": 0.7}):
        assert rows.judged(replace(same, **change), floor, num_steps=100).status == rows.DIFFERS
    assert rows.judged(replace(floor, loss=math.nan), None, num_steps=100).status == rows.DIFFERS


def test_ratios_pair_runs_of_the_same_repeat_and_leave_marked_runs_out(scripts, floor):
    """Catches: medians divided by medians, and a marked run in a figure."""
    rows = scripts.rows
    slow_floor = replace(floor, repeat=1, walls="8.0", cpu_s=8.0)
    mine = [replace(floor, tool="x", walls="1.0"), replace(floor, tool="x", repeat=1, walls="8.0")]
    wrong = replace(floor, tool="x", repeat=2, walls="0.001", status=rows.DIFFERS, note="took 1 steps of 100")
    found = rows.summaries([floor, slow_floor, *mine, wrong], floor="bare loop")[1]
    assert (found.low, found.wall_ratio, found.high) == (0.5, 0.75, 1.0)
    assert found.status == rows.DIFFERS
    assert found.round_s == 4.5


def test_rows_survive_their_file(scripts, floor, tmp_path):
    rows = [floor, replace(floor, status=scripts.rows.MISSING, walls="", cpu_s=None, steps=None, note="no, not here")]
    scripts.rows.write_rows(tmp_path / "new" / "rows.csv", rows)
    assert scripts.rows.read_rows(tmp_path / "new" / "rows.csv") == rows
    (tmp_path / "other.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="other columns"):
        scripts.rows.read_rows(tmp_path / "other.csv")


def test_the_page_names_what_was_not_measured(scripts, floor):
    missing = replace(floor, tool="Flower, 1 actor", status=scripts.rows.MISSING, walls="", note="no --environments")
    page = scripts.report.report_of([floor, replace(floor, tool="ours, serial", walls="1.0"), missing], facts=FACTS)
    assert "| ours, serial | 1 | 0.50 |" in page
    assert "| Flower, 1 actor | not installed |" in page
    assert "Flower, 1 actor: **not installed**: no --environments" in page


def test_the_figures_are_images_that_repeat(scripts, floor):
    """Catches: dates and random ids in a generated file."""
    clients = replace(floor, race="clients", at=10.0)
    rows = [floor, replace(floor, tool="ours, serial", walls="1.0"), clients]
    for draw in (scripts.figure.draw_engines, scripts.figure.draw_scaling):
        assert draw(rows, image_format="svg") == draw(rows, image_format="svg")
        for some in (rows, [clients], [floor]):  # a race alone, as --only runs it
            assert draw(some, image_format="png").startswith(b"\x89PNG")


def test_every_race_compares_like_with_like(scripts):
    """Catches: a race whose entries take different numbers of steps, or whose rows cannot be told apart."""
    for quick in (True, False):
        for race in scripts.races.races(image="synthetic-28", quick=quick):
            assert len({entry.name for entry in race.entries}) == len(race.entries)
            sizes = {(e.task.num_steps, e.task.rounds, e.task.cohort, e.task.batch_size) for e in race.entries}
            assert len(sizes) == 1
            assert race.entries[0].task.rounds >= 2


def test_an_engine_that_fails_says_why_in_one_line(scripts):
    error = scripts.run.start(sys.executable, "-c", "raise SystemExit('no such thing')")
    assert error == "exit status 1: no such thing"


def test_the_clock_counts_the_processor_time_of_children_that_ended(scripts):
    """Catches: work of worker processes counted as free."""
    import subprocess

    before = scripts.workload.tree_seconds()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    assert scripts.workload.tree_seconds() - before >= 0.25


def test_the_arithmetic_of_a_round_is_that_counted_by_hand(scripts):
    """Per record of 28²: conv1 16·9·14², conv2 32·144·7², linear 1568·64 and 64·10 products, two operations each. A full
    step multiplies each thrice (forward, both gradients) but the first, whose inputs need none; a tail step likewise."""
    conv1, conv2, linear = 16 * 9 * 14**2, 32 * 144 * 7**2, 1568 * 64 + 64 * 10
    fedavg = scripts.workload.Task(data="fashion-mnist", model="cnn", full_steps=20)
    asfl = replace(fedavg, method="asfl", tail_steps=10, full_steps=10, exchange_layer="conv1")
    full, tail = 2 * conv1 + 3 * conv2 + 3 * linear, 2 * conv2 + 3 * linear
    counted = [scripts.operations.operations_of(task, input_shape=(1, 28, 28)) for task in (fedavg, asfl)]
    assert counted == [2 * 32 * 20 * full, 2 * 32 * (10 * full + 10 * tail + 5 * conv1)]
