"""The recipes' data sets and networks from the command line; what is missing is one line and exit code 2."""

import csv
import json
import urllib.error

import numpy as np
import pytest
from torchvision.datasets import cifar

from asfl_privacy.accounting import Ledger
from asfl_privacy.cli import main

SIZES = [
    "--clients",
    "3",
    "--cohort",
    "2",
    "--rounds",
    "1",
    "--tail-steps",
    "2",
    "--full-steps",
    "1",
    "--batch-size",
    "4",
]
OWN = """
import numpy as np
from asfl_privacy.data import make_dataset

def cifar_like():
    rng = np.random.default_rng(0)
    x, y = rng.random((24, 3, 32, 32)), np.arange(24) % 10
    return make_dataset("tiny", train=(x, y), test=(x[:4], y[:4]), num_classes=10, train_groups=np.arange(24) // 5)
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    (tmp_path / "recipe_data.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def call(capsys, *arguments):
    """Exit code, standard output and the lines of standard error."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err.strip().splitlines()


def test_layers_compares_the_cuts_of_a_resnet_on_colour_images(capsys):
    """16·32·32 floats a record behind conv1, half of them from block4 on, 64 behind the pool; a byte a label."""
    flags = ["--data", "recipe_data:cifar_like", "--model", "resnet20", "--mech", "none", *SIZES]
    code, out, _ = call(capsys, "layers", *flags, "--json")
    assert code == 0
    found = {layer["exchange_layer"]: layer for layer in json.loads(out)}
    records = 4  # τ'/2 mini-batches of 4
    assert found["conv1"]["activation_bytes"] == found["block3"]["activation_bytes"] == records * 16 * 32 * 32 * 4
    assert found["block4"]["activation_bytes"] == records * 32 * 16 * 16 * 4
    assert found["pool"]["activation_bytes"] == records * 64 * 4
    assert found["block4"]["is_automatic"]


def test_a_private_run_by_writer_accounts_for_the_drawn_writers_alone(capsys, workplace):
    """24 records of five writers, three of them clients: at least 15 records are somebody's, and none else is released."""
    flags = ["--data", "recipe_data:cifar_like", "--partition", "natural", "--epsilon", "4", "--placement", "input"]
    code, _, errors = call(capsys, "train", *flags, *SIZES, "--out", "run")
    assert code == 0, errors
    ledger = Ledger.load(workplace / "run" / "ledger.json")
    clients = np.asarray(ledger.clients)
    assert np.bincount(clients)[:3].min() >= 4
    assert (clients == 3).any()
    released = {int(record) for event in ledger.event_classes for record in ledger.releases_of(event)[0]}
    assert released
    assert all(clients[record] < 3 for record in released)


def test_a_sweep_on_mnist5k_has_a_row_for_each_cell(capsys, workplace):
    flags = ["--data", "mnist5k", "--mech", "gaussian", "--epsilon", "16", "--seeds", "1", "--workers", "1"]
    code, _, errors = call(capsys, "sweep", *flags, *SIZES, "--out", "report")
    assert code == 0, errors
    with (workplace / "report" / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["data"] for row in rows} == {"mnist5k"}
    assert {row["status"] for row in rows} == {"ok"}
    assert len(rows) == 3  # the cell and its two references


def no_network(*arguments, **keywords):
    raise urllib.error.URLError("no route to host")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data", "cifar10"], "nothing readable in data/cifar-10-batches-py and no download"),
        (["--data", "cifar100", "--data-root", "sets"], "nothing readable in sets/cifar-100-python and no download"),
        (["--data", "femnist", "--data-root", "sets"], "no .json file in sets/femnist/train"),
        (["--data", "digits", "--partition", "natural"], "partition natural needs data that say whose each record is"),
        (["--data", "recipe_data:cifar_like", "--partition", "natural", "--clients", "6"], "must be at most 5"),
        (["--data", "digits", "--model", "vgg11"], "from 17×17 on"),
        (["--data", "recipe_data:cifar_like", "--model", "resnet20-bn"], "conv1.1 is BatchNorm2d in train mode"),
    ],
)
def test_what_does_not_fit_is_one_line_and_exit_2_and_nothing_is_written(capsys, workplace, monkeypatch, flags, words):
    monkeypatch.setattr(cifar, "download_and_extract_archive", no_network)
    code, out, errors = call(capsys, "train", *SIZES, "--mech", "none", *flags)
    assert (code, out, len(errors)) == (2, "", 1), errors
    assert words in errors[0]
    assert list(workplace.iterdir()) == []
