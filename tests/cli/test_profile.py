"""`profile`: where a round's time goes, by figures that add up, and nothing left behind."""

import json

import pytest

from asfl_privacy.cli import main
from asfl_privacy.federated.stopwatch import PHASES

SIZES = ["--clients", "6", "--cohort", "4", "--tail-steps", "2", "--full-steps", "2", "--batch-size", "16"]
QUICK = [*SIZES, "--model", "federations:tiny_net", "--exchange-layer", "body", "--measure", "2"]
PRIVATE = ["--epsilon", "4", "--placement", "input", "--reproducible", "no"]
CLEAN = ["--mech", "none"]


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(capsys, *arguments):
    """Exit code, standard output and the lines of standard error."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err.strip().splitlines()


def profiled(capsys, *flags):
    code, out, errors = call(capsys, "profile", *QUICK, *flags, "--json")
    assert code == 0, errors
    return json.loads(out)


def phases(found):
    return {phase: found[f"seconds_{phase}"] for phase in PHASES}


def test_phases_and_other_make_up_the_wall_time_of_a_serial_round(capsys, workplace):
    """Catches a phase counted twice or beyond the measured rounds: `other` would be negative."""
    found = profiled(capsys, *PRIVATE, "--executor", "serial")
    spent = phases(found)
    assert min(spent.values()) > 0.0
    assert found["seconds_other"] >= 0.0
    assert sum(spent.values()) + found["seconds_other"] == pytest.approx(found["wall_seconds"], rel=1e-9)
    assert found["client_seconds"] <= found["clients_wall_seconds"] <= found["wall_seconds"]
    assert found["cpu_seconds"] > 0.0
    assert (found["executor"], found["device"]) == ("serial", "cpu")
    assert list(workplace.iterdir()) == []


@pytest.mark.parametrize("executor", ["threads", "processes", "batched"])
def test_clients_side_by_side_are_summed_and_told_apart_from_wall(capsys, executor):
    found = profiled(capsys, *PRIVATE, "--executor", executor, "--workers", "2")
    server = found["seconds_certificate"] + found["seconds_aggregate"] + found["seconds_evaluate"]
    assert found["seconds_other"] >= 0.0
    assert found["clients_wall_seconds"] + server + found["seconds_other"] <= found["wall_seconds"] * (1 + 1e-9)
    assert 0.0 < found["client_seconds"] < sum(phases(found).values())
    assert (found["peak_memory_workers_bytes"] is not None) == (executor == "processes")


def test_the_table_says_that_clients_worked_side_by_side(capsys):
    code, out, _ = call(capsys, "profile", *QUICK, *CLEAN, "--executor", "threads", "--workers", "2")
    assert code == 0
    assert "client seconds, summed over clients, in" in out


def test_a_phase_that_does_not_run_takes_no_time(capsys):
    """Catches seconds written under another phase's name."""
    fedavg = phases(profiled(capsys, *CLEAN, "--method", "fedavg", "--executor", "serial"))
    assert {name for name, value in fedavg.items() if value == 0.0} == {"head", "noise", "tail"}
    tail_only = phases(profiled(capsys, *CLEAN, "--full-steps", "0", "--executor", "serial"))
    assert tail_only["tail"] > 0.0


def test_bytes_of_a_round_are_those_of_training(capsys, workplace):
    """Catches a warm-up counted into the measured rounds. FedAvg: 610 float32 weights to and from four clients."""
    found = profiled(capsys, *CLEAN, "--method", "fedavg")
    assert found["bytes_model"] == 2 * 4 * 610 * 4
    assert found["bytes_activations"] == found["bytes_labels"] == 0
    shared = profiled(capsys, *CLEAN, "--partition", "iid")
    assert shared["bytes_activations"] == 4 * 16 * 8 * 4  # a batch of 16 from each of four clients, 8 float32 numbers
    assert shared["bytes_labels"] == 4 * 16
    flags = [flag for flag in QUICK if flag not in ("--measure",)][:-1]
    code, out, _ = call(
        capsys, "train", *flags, *CLEAN, "--partition", "iid", "--rounds", "2", "--out", "run", "--json"
    )
    assert code == 0
    row = json.loads(out)
    for channel in ("model", "activations", "labels"):
        assert row[f"bytes_{channel}"] == 2 * shared[f"bytes_{channel}"]


@pytest.mark.parametrize(
    ("measure", "every", "counts"), [(3, 2, (2, 4, 2)), (2, 1, (1, 2, 2)), (2, 10, (2, 2, 1)), (4, 4, (4, 4, 1))]
)
def test_evaluations_come_as_often_as_in_training(capsys, measure, every, counts):
    """Warm-up, measured rounds and evaluations among these, by hand; rounds of the configuration change nothing."""
    found = profiled(capsys, *CLEAN, "--measure", str(measure), "--evaluate-every", str(every), "--rounds", "1")
    assert (found["rounds_warm_up"], found["rounds_measured"], found["evaluations"]) == counts


def test_the_table_holds_the_phases_and_says_how_to_read_them(capsys):
    code, out, _ = call(capsys, "profile", *QUICK, *PRIVATE, "--executor", "serial")
    assert code == 0
    for words in (*PHASES, "other", "share", "CPU-seconds", "bytes a round: model", "executor serial on cpu"):
        assert words in out
    assert "measured: 2 rounds with 1 evaluations, after 2 of warm-up" in out
    assert "phases and other make up the wall time" in out


def test_a_trace_names_every_client_of_the_round_and_holds_no_values(capsys, workplace):
    profiled(capsys, *PRIVATE, "--trace", "round.json")
    assert [file.name for file in workplace.iterdir()] == ["round.json"]
    events = json.loads((workplace / "round.json").read_text())["traceEvents"]
    names = [event.get("name", "") for event in events if event.get("cat") == "user_annotation"]
    clients = {name for name in names if name.startswith("client ")}
    assert len(clients) == 4
    assert all(names.count(client) == 2 for client in clients)  # collect and train
    assert any(event.get("name") == "aten::addmm" for event in events)


def test_a_trace_is_not_written_over_anything_nor_into_nothing(capsys, workplace):
    (workplace / "kept.json").write_text("kept")
    for file, reason in (("kept.json", "is in use"), ("missing/round.json", "cannot be written")):
        code, _, errors = call(capsys, "profile", *QUICK, *CLEAN, "--trace", file)
        assert (code, len(errors)) == (2, 1)
        assert reason in errors[0]
    assert (workplace / "kept.json").read_text() == "kept"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--epsilon", "1", "4"], "profile runs one cell"),
        (["--seeds", "2"], "profile runs one seed"),
        (["--measure", "0", *CLEAN], "measure 0 must be a whole number from 1 on"),
        (["--executor", "torchrun", *CLEAN], "profile another executor"),
        (["--device", "nowhere"], "device"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(capsys, workplace, flags, words):
    code, out, errors = call(capsys, "profile", *QUICK, *flags)
    assert (code, out, len(errors)) == (2, "", 1)
    assert words in errors[0]
    assert list(workplace.iterdir()) == []


def test_a_run_that_fails_is_one_line_and_exit_1(capsys, workplace):
    code, out, errors = call(capsys, "profile", *QUICK, *CLEAN, "--lr", "1e12", "--measure", "5", "--json")
    assert (code, out) == (1, "")
    assert "run failed: round" in errors[-1]
    assert list(workplace.iterdir()) == []
