"""`bound` end to end: what it prints is what `sensitivity` proves, and whatever is wrong is one line and exit code 2."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import sensitivity
from asfl_privacy.cli import main
from asfl_privacy.data import load_dataset
from asfl_privacy.models import build_model, split_model

MODELS = """
from torch import nn

def head():
    return nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.GELU(), nn.Flatten(), nn.Linear(2 * 16, 3))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.act = nn.ReLU()
        self.cut = nn.Threshold(0.1, 20.0)
        self.out = nn.Linear(2 * 64, 3)

    def forward(self, x):
        return self.out(self.cut(self.act(self.conv(x))).flatten(1))

def net(input_shape):
    assert input_shape == (1, 10, 10)
    return Net()

class Shuffled(nn.Module):
    def __init__(self):
        super().__init__()
        self.second = nn.Linear(3, 2)
        self.first = nn.Linear(4, 3)

    def forward(self, x):
        return 2.0 * self.second(self.first(x))

shuffled = Shuffled

class Rescaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(3, 2)

    def forward(self, x):
        x = self.first(x)
        x.mul_(10.0)
        return self.second(x)

rescaled = Rescaled

class Leaves(nn.Module):
    def forward(self, x):
        raise SystemExit(3)

def leaves():
    return Leaves()

def jump():
    return nn.Sequential(nn.Linear(4, 4), nn.Threshold(0.1, 20.0))

def network(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, num_classes))

def fails(input_shape):
    raise RuntimeError("boom\\nand more")

def no_module():
    return 3

a_number = 3
"""
FAST = ["--method", "fast", "--no-search"]


@pytest.fixture(autouse=True)
def _models(tmp_path, monkeypatch):
    (tmp_path / "bound_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["bound", *arguments])
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err.strip().splitlines()


def numbers(capsys, *arguments):
    code, out, errors = call(capsys, *arguments, "--json")
    assert (code, errors) == (0, [])
    return json.loads(out)


def built(name, *, seed=0):
    return build_model(name, data=load_dataset("digits", root=Path("data")), seed=seed)


def test_the_value_is_that_of_certify_on_the_split_head(capsys):
    found = numbers(capsys, "--until", "conv1", "--p", "1", "--q", "2", "--seed", "3", "--method", "fast")
    head = split_model(built("small-cnn", seed=3), "conv1").head.eval()
    certificate = sensitivity.certify(head, p=1, q=2, input_shape=(1, 8, 8), method="fast")
    assert found["value"] == certificate.value
    assert list(found)[:3] == ["value", "p", "q"]
    assert {"lower_bound", "tightness", "method", "slack", "layers", "seconds"} <= set(found)
    assert found["exchange_layer"] == "conv1"
    assert 0 < found["lower_bound"] <= found["value"]
    assert found["tightness"] == found["value"] / found["lower_bound"] >= 1.0


def test_the_table_names_the_operator_of_the_largest_norm_as_the_bottleneck(capsys):
    """Shares are parts of the growth: logarithms of the norms above 1, which add up to that of their product."""
    found = numbers(capsys, *FAST)
    values = [layer["value"] for layer in found["layers"]]
    assert [layer["name"] for layer in found["layers"]] == ["normalize", "conv1.0", "conv1.1", "conv2.0", "conv2.1"]
    assert [layer["bottleneck"] for layer in found["layers"]] == [value == max(values) for value in values]
    growth = math.log(math.prod(value for value in values if value > 1.0))
    for layer in found["layers"]:
        assert layer["share"] == pytest.approx(max(0.0, math.log(layer["value"])) / growth, abs=1e-4)
    code, out, _ = call(capsys, *FAST)
    (marked,) = [line for line in out.splitlines() if "bottleneck" in line]
    assert code == 0
    assert marked.split()[0] == found["layers"][values.index(max(values))]["name"]
    assert str(max(values)) in marked  # every digit


def test_no_search_leaves_the_lower_bound_out(capsys):
    found = numbers(capsys, *FAST)
    assert (found["lower_bound"], found["tightness"]) == (None, None)
    out = call(capsys, *FAST)[1]
    assert "tightness" not in out
    assert "tightness" in call(capsys, "--method", "fast", "--until", "conv1")[1]


def test_a_factory_without_classes_gives_a_head_that_is_bounded_whole(capsys):
    found = numbers(capsys, "--model", "bound_models:head", "--input-shape", "1,10,10", "--seed", "5", *FAST)
    import bound_models

    torch.manual_seed(5)
    head = bound_models.head()
    assert found["value"] == sensitivity.certify(head, p=2, q=2, input_shape=(1, 10, 10), method="fast").value
    assert found["exchange_layer"] is None
    cut = numbers(
        capsys, "--model", "bound_models:head", "--input-shape", "1,10,10", "--until", "1", "--seed", "5", *FAST
    )
    assert cut["value"] == sensitivity.certify(head[:2], p=2, q=2, input_shape=(1, 10, 10), method="fast").value


def test_a_factory_with_classes_gives_a_network_that_is_split(capsys):
    found = numbers(capsys, "--model", "bound_models:network", *FAST)
    assert found["exchange_layer"] == "2"
    assert [layer["kind"] for layer in found["layers"]] == ["linear", "relu"]


def test_a_built_in_network_takes_an_input_shape_in_place_of_data(capsys):
    found = numbers(capsys, "--model", "lenet", "--input-shape", "1,28,28", "--until", "conv1", *FAST)
    assert next(layer["value"] for layer in found["layers"] if layer["name"] == "normalize") == 1.0


def test_a_box_reaches_certify(capsys):
    """Catches a flag that is lost: only on a box is the rounding of the forward pass bounded, and inside the slack."""
    arguments = ["--model", "lenet", "--until", "conv1", "--method", "fast"]
    assert numbers(capsys, *arguments, "--no-search")["slack"] == 0.0
    boxed = numbers(capsys, *arguments, "--box", "0,1")
    head = split_model(built("lenet"), "conv1").head.eval()
    expected = sensitivity.certify(head, p=2, q=2, input_shape=(1, 8, 8), input_box=(0.0, 1.0), method="fast")
    assert (boxed["value"], boxed["slack"]) == (expected.value, expected.slack)
    assert boxed["slack"] > 0.0
    assert boxed["lower_bound"] <= boxed["value"]


def test_all_norms_gives_nine_norms_for_each_block_that_can_end_the_head(capsys):
    found = numbers(capsys, "--all-norms", "--method", "fast")
    assert [row["exchange_layer"] for row in found["all_norms"]] == ["normalize", "conv1", "conv2", "fc1"]
    net = built("small-cnn")
    for row in found["all_norms"][:2]:
        head = split_model(net, row["exchange_layer"]).head.eval()
        assert len(row["norms"]) == 9
        for pair, value in row["norms"].items():
            p, q = pair.split(",")
            assert (
                value == sensitivity.certify(head, p=float(p), q=float(q), input_shape=(1, 8, 8), method="fast").value
            )
    upto = numbers(capsys, "--all-norms", "--method", "fast", "--until", "conv1")
    assert upto["all_norms"] == found["all_norms"][:2]


def test_all_norms_shows_a_refusal_in_its_row_and_goes_on(capsys):
    arguments = ["--model", "bound_models:net", "--input-shape", "1,10,10", "--all-norms", "--method", "fast"]
    rows = numbers(capsys, *arguments)["all_norms"]
    assert [row["exchange_layer"] for row in rows] == ["conv", "act", "cut", ""]
    assert [row["refused"] is None for row in rows] == [True, True, False, False]
    assert "'cut'" in rows[2]["refused"]
    import bound_models

    torch.manual_seed(0)
    head = bound_models.Net()
    chain = nn.Sequential(head.conv, head.act)
    expected = sensitivity.certify(chain, p=1, q=2, input_shape=(1, 10, 10), method="fast").value
    assert rows[1]["norms"]["1,2"] == expected
    code, out, _ = call(capsys, *arguments)
    assert code == 0
    shown = [float(cell) for cell in next(line for line in out.splitlines() if line.startswith("act")).split()[1:]]
    for cell, value in zip(shown, rows[1]["norms"].values(), strict=True):
        assert value * (1 - 1e-9) <= cell <= value * 1.001  # rounded up
    assert "refused" in next(line for line in out.splitlines() if line.startswith("cut"))
    assert "(whole): head layer 'cut'" in out


def test_children_that_do_not_run_in_their_order_are_no_exchange_layers(capsys):
    """Catches a head made of the children as they are listed: second before first would not even run."""
    arguments = ["--model", "bound_models:shuffled", "--input-shape", "4"]
    rows = numbers(capsys, *arguments, "--all-norms", "--method", "fast")["all_norms"]
    assert [row["exchange_layer"] for row in rows] == ["first", "second", ""]
    assert rows[2]["norms"]["1,1"] == pytest.approx(2.0 * rows[1]["norms"]["1,1"], rel=1e-9)


def test_a_piped_table_is_not_cut_off_and_has_no_colours(capsys):
    out = call(capsys, *FAST)[1]
    assert "\x1b" not in out
    assert "…" not in out


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--model", "bound_models:jump", "--input-shape", "4"], "hreshold"),
        (["--model", "bound_models:jump", "--input-shape", "4", "--all-norms", "--until", "7"], "'7' is no block"),
        (["--model", "bound_models:head", "--input-shape", "1,10,10", "--until", "conv9"], "'conv9' is no block"),
        (["--model", "bound_models:fails", "--input-shape", "4"], "boom"),
        (["--model", "bound_models:no_module", "--input-shape", "4"], "gives a int"),
        (["--model", "bound_models:a_number", "--input-shape", "4"], "must be a function"),
        (["--model", "bound_models:absent", "--input-shape", "4"], "has no 'absent'"),
        (["--model", "no_such_module:f", "--input-shape", "4"], "no_such_module"),
        (["--model", "resnet", "--input-shape", "1,8,8"], "use one of lenet"),
        (["--model", "lenet", "--input-shape", "28"], "do not fit the built-in network lenet"),
        (["--model", "bound_models:head", "--input-shape", "1,2,2"], "does not run on a batch"),
        (["--input-shape", "0"], "input shape '0'"),
        (["--input-shape", "1,x"], "input shape '1,x'"),
        (["--input-shape", ""], "input shape ''"),
        (["--data", "digits", "--input-shape", "1,28,28"], "is not that of data digits"),
        (["--p", "3"], "p '3' is no norm"),
        (["--method", "best"], "use auto, fast, product"),
        (["--method", "product", "--p", "1", "--q", "2"], "product"),
        (["--budget", "0"], "budget 0.0"),
        (["--budget", "nan"], "budget nan"),
        (["--box", "1,0"], "box '1,0'"),
        (["--box", "nan,1"], "box 'nan,1'"),
        (["--box", "0,1", "--all-norms"], "no effect with --all-norms"),
        (["--seed", "-1"], "seed -1"),
        (["--until", "conv7"], "conv7"),
        (["--tightness"], "No such option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_and_exit_2(capsys, arguments, match):
    code, out, errors = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert len(errors) == 1, errors
    assert match in errors[0]


def test_a_value_written_to_between_two_children_ends_the_chain(capsys):
    """A head that ended at the second child would leave out the factor of ten between them."""
    code, _, errors = call(capsys, "--model", "bound_models:rescaled", "--input-shape", "4", "--until", "second", *FAST)
    assert code == 2
    assert "use one of first" in errors[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "small-cnn", "--input-shape", "1,999999,999999"], "the factory failed"),
        (["--model", "bound_models:leaves", "--input-shape", "4"], "SystemExit"),
        (["--all-norms", "--method", "product"], "needs p = q"),
    ],
)
def test_networks_that_cannot_be_and_methods_that_do_not_fit_are_one_line(capsys, arguments, words):
    code, out, errors = call(capsys, *arguments, "--no-search")
    assert (code, out, len(errors)) == (2, "", 1)
    assert words in errors[0]
