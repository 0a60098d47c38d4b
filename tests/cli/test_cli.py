"""The command line: right numbers, and one clear line with exit code 2 for whatever is wrong."""

import json
import math
import os
import re
import subprocess
import sys

import pytest
import torch

from asfl_privacy.cli import main
from asfl_privacy.cli.flags import spread_lists
from asfl_privacy.config import SweepConfig

TINY = [
    "--clients",
    "6",
    "--cohort",
    "4",
    "--rounds",
    "2",
    "--tail-steps",
    "2",
    "--full-steps",
    "2",
    "--batch-size",
    "16",
]


def call(capsys, *arguments):
    """Exit code, standard output and the lines of standard error."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err.strip().splitlines()


def numbers(capsys, *arguments):
    code, out, _ = call(capsys, *arguments, "--json")
    assert code == 0
    return json.loads(out)


def test_calibrate_gives_the_golden_gaussian(capsys):
    """privacy.md §1: σ/Δ = 3.7306 at (1, 1e-5); the classic formula is 4.8448·… at ε below 1."""
    found = numbers(capsys, "calibrate", "--mech", "gaussian", "--epsilon", "1", "--delta", "1e-5")
    assert found["noise_stddev"] == pytest.approx(3.7306, abs=5e-5)
    assert {"noise_stddev", "noise_multiplier", "method"} <= set(found)
    doubled = numbers(capsys, "calibrate", "--epsilon", "1", "--sensitivity", "2")
    assert doubled["noise_stddev"] == pytest.approx(2 * found["noise_stddev"], rel=1e-12)
    classic = numbers(capsys, "calibrate", "--epsilon", "0.1", "--method", "classic")
    assert classic["noise_multiplier"] == pytest.approx(math.sqrt(2 * math.log(1.25e5)) / 0.1, rel=1e-12)


def test_calibrate_gives_laplace_its_scale(capsys):
    found = numbers(capsys, "calibrate", "--mech", "laplace", "--epsilon", "4", "--sensitivity", "2")
    assert found["scale"] == 0.5
    assert found["noise_stddev"] == pytest.approx(math.sqrt(0.5), rel=1e-12)


def test_calibrate_for_a_whole_run_never_overspends(capsys):
    """privacy.md §1: 18.98 for a total of ε = 8 over 1,000 releases."""
    found = numbers(capsys, "calibrate", "--total-epsilon", "8", "--releases", "1000")
    assert found["noise_multiplier"] == pytest.approx(18.98, abs=5e-3)
    assert found["epsilon_total"] <= 8.0


@pytest.mark.parametrize(
    ("z", "releases", "epsilon"), [(1, 100, 91.82), (1, 1000, 633.9), (10, 100, 4.377), (50, 1000, 2.594)]
)
def test_account_gives_the_golden_gaussian_compositions(capsys, z, releases, epsilon):
    """privacy.md §3."""
    found = numbers(capsys, "account", "--noise-multiplier", str(z), "--releases", str(releases), "--delta", "1e-5")
    assert float(f"{found['epsilon']:.4g}") == epsilon
    assert found["epsilon_low"] <= found["epsilon"] <= found["epsilon_high"]
    assert {"epsilon", "epsilon_low", "epsilon_high", "delta", "method"} <= set(found)


def test_account_sums_laplace_at_delta_zero(capsys):
    found = numbers(capsys, "account", "--mech", "laplace", "--noise-multiplier", "10", "--releases", "100")
    assert found["epsilon"] == pytest.approx(10.0, rel=1e-12)
    assert found["delta"] == 0.0


def test_account_reads_the_ledger_that_train_wrote(capsys, tmp_path):
    out = tmp_path / "run"
    row = numbers(capsys, "train", *TINY, "--epsilon", "4", "--placement", "input", "--out", str(out))
    found = numbers(capsys, "account", str(out / "ledger.json"))
    assert found["epsilon"] == row["epsilon_total"]
    assert numbers(capsys, "account", str(out / "ledger.json"), "--delta", "1e-8")["epsilon"] > row["epsilon_total"]
    anyone = numbers(capsys, "account", str(out / "ledger.json"), "--distance", "inf")
    assert anyone["epsilon"] == row["epsilon_whole_record"]


def test_account_takes_the_delta_of_the_run_beside_the_ledger(capsys, tmp_path):
    """Catches the total at another δ than the run's table states."""
    out = tmp_path / "run"
    arguments = ["--epsilon", "4", "--delta", "1e-9", "--placement", "input", "--out", str(out)]
    row = numbers(capsys, "train", *TINY, *arguments)
    found = numbers(capsys, "account", str(out / "ledger.json"))
    assert (found["epsilon"], found["delta"]) == (row["epsilon_total"], 1e-9)


def test_version(capsys):
    code, out, _ = call(capsys, "--version")
    assert code == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", out)


def test_training_that_diverges_is_a_failed_run_and_not_bad_input(capsys, workplace):
    flags = ["--mech", "none", "--lr", "1e9", "--rounds", "5", "--out", "run"]
    code, _, errors = call(capsys, "train", *TINY, *flags)
    assert (code, len(errors)) == (1, 1)
    assert "lower lr" in errors[0]
    assert list(workplace.iterdir()) == []


def test_bound_gives_a_certificate_above_what_search_finds(capsys):
    found = numbers(capsys, "bound", "--exchange-layer", "conv1", "--p", "1", "--q", "2", "--search")
    assert {"value", "p", "q", "lower_bound", "tightness", "method", "slack", "layers", "seconds"} <= set(found)
    assert found["value"] >= found["lower_bound"] > 0
    assert [layer["kind"] for layer in found["layers"]] == ["scaling", "conv2d", "relu"]


def test_train_writes_its_folder_and_refuses_to_write_over_it(capsys, tmp_path):
    out = tmp_path / "run"
    arguments = ["train", *TINY, "--mech", "none", "--out", str(out)]
    assert call(capsys, *arguments)[0] == 0
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    code, _, errors = call(capsys, *arguments)
    assert (code, len(errors)) == (2, 1)
    assert "is in use" in errors[0]
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


MODELS = """
from collections import OrderedDict
from torch import nn

def batch_norm(*, input_shape, num_classes):
    conv = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU())
    return nn.Sequential(OrderedDict(conv=conv, out=nn.Sequential(nn.Flatten(), nn.Linear(72, num_classes))))

def too_wide(*, input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, num_classes))

def asserts(*, input_shape, num_classes):
    class Picky(nn.Module):
        def forward(self, x):
            assert x.shape[1] == 3, "three channels"
            return x

    return nn.Sequential(OrderedDict(picky=Picky(), out=nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))))

def leaves(*, input_shape, num_classes):
    raise SystemExit(3)

def untrained(*, input_shape, num_classes):
    return nn.Sequential(OrderedDict(a=nn.Flatten(), b=nn.Linear(64, num_classes))).requires_grad_(False)

def bare_tail(*, input_shape, num_classes):
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
    return nn.Sequential(OrderedDict(body=body, out=nn.Softplus()))

def odd_name(*, input_shape, num_classes):
    return nn.Sequential(OrderedDict({"a\\nb": nn.Flatten(), "out": nn.Linear(64, num_classes)}))

def fails_in_training(*, input_shape, num_classes):
    class Fragile(nn.Module):
        def forward(self, x):
            if self.training:
                raise RuntimeError("boom")
            return x

    return nn.Sequential(OrderedDict(body=nn.Flatten(), mid=Fragile(), out=nn.Linear(64, num_classes)))

def complex_data():
    import numpy as np
    return (np.zeros((4, 1, 8, 8), complex), np.arange(4)), (np.zeros((4, 1, 8, 8)), np.arange(4))

def data_that_leaves():
    raise SystemExit(3)

def jumping(*, input_shape, num_classes):
    body = nn.Sequential(nn.Flatten(), nn.Threshold(0.1, 20.0))
    return nn.Sequential(OrderedDict(body=body, out=nn.Linear(64, num_classes)))
"""


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """An empty working directory with a module of unsuitable models."""
    (tmp_path / "unfit_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


BAD = [
    (["--epsilon", "0"], "epsilon 0 must be"),
    (["--epsilon", "-1"], "epsilon -1 must be"),
    (["--epsilon", "nan"], "epsilon nan must be"),
    (["--epsilon"], "epsilon"),
    (["--total-epsilon", "0"], "total_epsilon 0 must be"),
    (["--delta", "1"], "delta 1 must lie"),
    (["--delta", "2"], "delta 2 must lie"),
    (["--delta", "0"], "delta 0 must lie"),
    (["--radius", "0"], "radius 0 must be"),
    (["--radius", "any"], "radius any needs a clip"),
    (["--seeds", "-1"], "seeds -1 must be"),
    (["--seed", "-1"], "seed -1 must be"),
    (["--cohort", "21"], "cohort 21 must lie in 1 to 20"),
    (["--epsilons", "1"], "No such option"),
    (["extra"], "extra"),
    (["--config", "absent.toml"], "absent.toml"),
    (["--data", "digit"], "use one of digits"),
    (["--model", "resnet"], "use one of lenet"),
    (["--model", "unfit_models:batch_norm"], "BatchNorm2d in train mode"),
    (["--model", "unfit_models:too_wide"], "does not fit data digits"),
    (["--model", "unfit_models:jumping", "--placement", "exchange"], "hreshold"),
    (["--model", "unfit_models:asserts"], "three channels"),
    (["--model", "unfit_models:leaves"], "SystemExit"),
    (["--model", "unfit_models:untrained"], "no parameter to train"),
    (["--model", "unfit_models:bare_tail"], "a tail without parameters"),
    (["--model", "unfit_models:odd_name"], "must be printable"),
    (["--data", "unfit_models:complex_data"], "complex128"),
    (["--data", "unfit_models:data_that_leaves"], "SystemExit"),
    (["--mech", "none", "--epsilon", "1"], "epsilon has no effect with mech none"),
    (["--method", "fedavg", "--epsilon", "1"], "epsilon has no effect with method fedavg"),
    (["--method", "splitfed-v1", "--epsilon", "1"], "so that no private run is possible"),
    (["--method", "scaffold", "--epsilon", "1"], "which adds no noise"),
    (["--method", "scaffold", "--updates", "dp-fedavg", "--total-epsilon", "8"], "control variates too"),
    (["--method", "fedpvr", "--mech", "none", "--corrected-from", "conv9"], "names no block"),
    (["--method", "fedproto", "--mech", "none", "--share", "yes"], "use share no"),
    (["--method", "asfl", "--mu", "2"], "mu 2.0 has no effect with method asfl"),
    (["--lr-schedule", "step:2@5"], "use constant, cosine, or step"),
    (["--momentum", "1"], "momentum 1 must lie in 0 to 1"),
    (["--evaluate-on", "validation", "--ledger", "digits.ledger"], "could not be added up"),
    (["--placement", "after:conv7"], "after:conv7"),
    (["--exchange-layer", "conv7"], "use auto or one of"),
    (["--noise", "once", "--placement", "exchange"], "noise once"),
    (["--partition", "dirichlet:1e-9", "--clients", "500"], "use a larger A or fewer clients"),
    (["--clients", "5000"], "clients 5000"),
    (["--device", "cuda:7"], "device"),
    (["--workers", "0"], "workers 0"),
    (["--out", "/dev/null/reports"], "cannot be written"),
    (["--resume"], "there is no"),
]


@pytest.mark.parametrize(("flags", "match"), BAD, ids=[" ".join(flags) for flags, _ in BAD])
def test_bad_input_to_sweep_is_one_line_exit_2_and_nothing_written(capsys, workplace, flags, match):
    code, out, errors = call(capsys, "sweep", *flags)
    assert code == 2, errors
    assert len(errors) == 1, errors
    assert errors[0].startswith("asfl-privacy: ")
    assert match in errors[0]
    assert "Traceback" not in out
    assert list(workplace.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["train", "--epsilon", "1", "4"], "epsilon 1.0, 4.0: train runs one cell"),
        (["train"], "train runs one cell but the flags give 7"),
        (["train", "--seeds", "2", "--epsilon", "1"], "seeds 2: train runs one seed"),
        (["train", "--epsilon", "1", "--out", "/dev/null/run"], "cannot be written"),
        (["calibrate"], "--epsilon of one release or --total-epsilon"),
        (["calibrate", "--epsilon", "0", "--delta", "1e-5", "--sensitivity", "0"], "sensitivity"),
        (["calibrate", "--epsilon", "1", "--method", "classic"], "classic"),
        (["calibrate", "--epsilon", "16", "--method", "classic"], "classic"),
        (["calibrate", "--epsilon", "-1"], "epsilon"),
        (["calibrate", "--epsilon", "1", "--delta", "1"], "delta"),
        (["calibrate", "--mech", "gumbel", "--epsilon", "1"], "gumbel"),
        (["calibrate", "--epsilon", "x"], "--epsilon"),
        (["account"], "either a ledger file or --noise-multiplier"),
        (["account", "absent.json"], "absent.json"),
        (["account", "--noise-multiplier", "0"], "noise_multiplier"),
        (["account", "--noise-multiplier", "1", "--releases", "0"], "releases 0"),
        (["account", "--noise-multiplier", "1", "--delta", "1"], "delta"),
        (["account", "--noise-multiplier", "1", "--distance", "0.5"], "distance"),
        (["bound", "--p", "3"], "p '3' is no norm"),
        (["bound", "--model", "unfit_models:batch_norm"], "BatchNorm2d in train mode"),
        (["bound", "--model", "unfit_models:jumping"], "hreshold"),
        (["bound", "--seed", "-1"], "seed -1"),
        (["swep"], "swep"),
    ],
    ids=" ".join,
)
def test_bad_input_to_other_commands_is_one_line_exit_2_and_nothing_written(capsys, workplace, arguments, match):
    code, _, errors = call(capsys, *arguments)
    assert code == 2, errors
    assert len(errors) == 1, errors
    assert match in errors[0]
    assert list(workplace.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("command", ["sweep", "train"])
def test_a_device_that_is_not_there_is_refused_before_anything_is_written(capsys, workplace, command):
    code, _, errors = call(capsys, command, "--device", "cuda", "--epsilon", "4", "--out", "deep/down/out")
    assert (code, len(errors)) == (2, 1)
    assert "device 'cuda' is not on this machine" in errors[0]
    assert list(workplace.iterdir()) == []


@pytest.mark.parametrize("content", ["radius = true", "clip = true", "seeds = false", "data = " + "[" * 20_000])
def test_a_config_file_of_the_wrong_kind_is_one_line(capsys, workplace, content):
    (workplace / "sweep.toml").write_text(content)
    code, _, errors = call(capsys, "sweep", "--config", "sweep.toml")
    assert (code, len(errors)) == (2, 1), errors


def test_every_digit_of_a_radius_is_kept(capsys, tmp_path):
    """Catches a radius cut to six digits, whose run could not be resumed or repeated."""
    arguments = ["--epsilon", "4", "--placement", "input", "--radius", "0.1234567", "--json"]
    first = json.loads(call(capsys, "train", *TINY, *arguments, "--out", str(tmp_path / "run"))[1])
    assert first["radius"] == first["sensitivity"] == 0.1234567
    again = call(
        capsys, "train", "--config", str(tmp_path / "run" / "config.toml"), "--json", "--out", str(tmp_path / "b")
    )
    assert {**json.loads(again[1]), "seconds": 0} == {**first, "seconds": 0}


def test_infinite_figures_are_json(capsys, tmp_path):
    arguments = ["--epsilon", "4", "--placement", "input", "--norm", "inf", "--json"]
    code, out, _ = call(capsys, "train", *TINY, *arguments, "--out", str(tmp_path / "run"))
    assert code == 0
    assert json.loads(out, parse_constant=pytest.fail)["p"] == "inf"


def test_an_existing_empty_folder_is_filled(capsys, workplace):
    """A mounted volume, or the working directory itself."""
    code, _, errors = call(capsys, "train", *TINY, "--mech", "none", "--out", ".")
    assert code == 0, errors
    assert sorted(file.name for file in workplace.iterdir()) == [
        "checkpoint.safetensors",
        "config.toml",
        "metrics.csv",
        "row.json",
    ]


def test_a_model_that_fails_in_training_is_one_line_exit_1_and_a_kept_traceback(capsys, workplace):
    flags = ["--model", "unfit_models:fails_in_training", "--mech", "none", "--exchange-layer", "body", "--out", "run"]
    code, _, errors = call(capsys, "train", *TINY, *flags)
    assert (code, len(errors)) == (1, 1)
    assert "run failed: round 0, client" in errors[0]
    assert "RuntimeError: boom" in errors[0]
    assert [file.name for file in workplace.iterdir()] == ["run.traceback.txt"]


def test_printed_figures_never_claim_more_than_was_proven(capsys):
    """Catches rounding to nearest: 1.5 asked, z = 2.58256372036…, and its first ten digits spend more."""
    shown = dict(line.split(None, 1) for line in call(capsys, "calibrate", "--epsilon", "1.5")[1].splitlines())
    exact = numbers(capsys, "calibrate", "--epsilon", "1.5")
    assert float(shown["noise_multiplier"]) == exact["noise_multiplier"]
    spent = dict(
        line.split(None, 1)
        for line in call(capsys, "account", "--noise-multiplier", shown["noise_multiplier"])[1].splitlines()
    )
    assert float(spent["epsilon"]) <= 1.5


def test_a_terminal_that_cannot_show_greek_letters_does_not_cost_the_run(tmp_path):
    command = [sys.executable, "-m", "asfl_privacy", "train", *TINY, "--epsilon", "4", "--placement", "input"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "run")], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr


def test_every_configuration_field_is_a_flag_of_the_same_name(capsys):
    for command in ("sweep", "train"):
        code, out, _ = call(capsys, command, "--help")
        assert code == 0
        flags = set(re.findall(r"--[a-z-]+", out))
        assert {f"--{name.replace('_', '-')}" for name in SweepConfig.model_fields} <= flags


@pytest.mark.parametrize(
    ("given", "spread"),
    [
        (["sweep", "--epsilon", "1", "4"], ["sweep", "--epsilon", "1", "--epsilon", "4"]),
        (["sweep", "--epsilon=1,4", "--out", "x"], ["sweep", "--epsilon", "1", "--epsilon", "4", "--out", "x"]),
        (["sweep", "--epsilon", "-1"], ["sweep", "--epsilon", "-1"]),
        (["sweep", "--lr", "1", "2"], ["sweep", "--lr", "1", "2"]),
        (["sweep", "--epsilon"], ["sweep", "--epsilon"]),
        (["sweep", "--epsilon", "--out", "x"], ["sweep", "--epsilon", "--out", "x"]),
        (["calibrate", "--epsilon", "1", "4"], ["calibrate", "--epsilon", "1", "4"]),
        ([], []),
    ],
)
def test_grid_flags_take_several_values(given, spread):
    assert spread_lists(given) == spread


def test_no_command_shows_help_and_exits_2(capsys):
    code, out, _ = call(capsys)
    assert code == 2
    assert "sweep" in out


def test_a_private_fedavg_run_is_never_trained_without_noise(tmp_path, capsys):
    """Catches: `train --method fedavg --updates dp-fedavg` that picks the unnoised reference beside it."""
    flags = ["--method=fedavg", "--updates=dp-fedavg", "--total-epsilon=8", "--clients=2", "--cohort=2", "--rounds=1"]
    with pytest.raises(SystemExit) as left:
        main(
            [
                "train",
                *flags,
                "--tail-steps=1",
                "--full-steps=1",
                "--partition=iid",
                "--out",
                str(tmp_path / "run"),
                "--json",
            ]
        )
    assert left.value.code == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["mech"], row["updates"]) == ("gaussian", "dp-fedavg")
    assert 7.9 < row["epsilon_total"] <= 8.0
    assert (tmp_path / "run" / "ledger.json").is_file()
