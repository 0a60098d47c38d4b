"""Data of the user's own: what is taken, and what is said of what is not."""

from pathlib import Path

import pytest

from asfl_privacy.data import load_dataset

OWN = """
import numpy as np
from asfl_privacy.data import make_dataset

def pair():
    x = np.random.default_rng(0).random((12, 1, 8, 8))
    return (x, np.arange(12) % 2), (x, np.arange(12) % 2)

def dataset():
    return make_dataset("theirs", train=pair()[0], test=pair()[1], num_classes=4, mean=(0.25,))

def grouped():
    return make_dataset("theirs", train=pair()[0], test=pair()[1], train_groups=np.arange(12) // 5)

constant = pair()
broken = {"x": 1}

def fails():
    raise KeyError("no such file")
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_data_module.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize("name", ["pair", "constant", "dataset"])
def test_own_data_by_module_and_name(name):
    data = load_dataset(f"own_data_module:{name}", root=Path("data"))
    assert data.num_records == 12
    assert data.name == f"own_data_module:{name}"
    assert data.num_classes == (4 if name == "dataset" else 2)


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    ("reference", "match"),
    [
        ("own_data_module:broken", "gives a dict"),
        ("own_data_module:fails", "KeyError"),
        ("own_data_module:absent", "has no 'absent'"),
        ("no_such_module_here:x", "ModuleNotFoundError"),
        ("own_data_module:", "not module:name"),
        ("digit", "use one of digits, fashion-mnist, mnist5k, cifar10, cifar100, femnist"),
    ],
)
def test_own_data_that_is_wrong_gets_one_line(reference, match):
    with pytest.raises(ValueError, match=match) as caught:
        load_dataset(reference, root=Path("data"))
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("own_module")
def test_own_data_keep_their_groups():
    """Catches groups that are lost when a user's data set is checked again."""
    data = load_dataset("own_data_module:grouped", root=Path("data"))
    assert data.train_groups.tolist() == [0] * 5 + [1] * 5 + [2] * 2
    assert load_dataset("own_data_module:pair", root=Path("data")).train_groups is None
