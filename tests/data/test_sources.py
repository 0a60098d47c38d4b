"""Where data comes from, and what is said when it is not there."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from asfl_privacy.data import load_dataset, sources
from asfl_privacy.data.sources import FASHION_MNIST_FILES


def test_digits_are_all_1797_records_in_pixel_units(digits):
    assert digits.num_records + len(digits.test_labels) == 1797
    assert digits.input_shape == (1, 8, 8)
    assert float(digits.train_inputs.min()) == 0.0
    assert float(digits.train_inputs.max()) == 1.0
    assert sorted(set(digits.test_labels.tolist())) == list(range(10))


def test_the_held_out_digits_are_the_same_in_every_process(digits):
    again = load_dataset("digits", root=Path("elsewhere"))
    assert torch.equal(again.test_inputs, digits.test_inputs)


def test_no_digit_is_both_trained_on_and_tested(digits):
    from sklearn.datasets import load_digits

    everything = torch.from_numpy(load_digits().images / 16.0).float().flatten(1)
    split = torch.cat([digits.train_inputs, digits.test_inputs]).flatten(1)
    assert torch.equal(torch.sort(everything, dim=0).values, torch.sort(split, dim=0).values)


def write_idx_files(folder: Path) -> None:
    """Fashion-MNIST's file format at a tenth of a thousandth of its size."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in FASHION_MNIST_FILES:
        if "images" in name:
            body = struct.pack(">iiii", 2051, 10, 28, 28) + rng.integers(0, 256, 10 * 784, dtype=np.uint8).tobytes()
        else:
            body = struct.pack(">ii", 2049, 10) + bytes(range(10))
        (folder / f"{name}.gz").write_bytes(gzip.compress(body))


def test_fashion_mnist_is_read_from_the_debian_package(tmp_path, monkeypatch):
    write_idx_files(tmp_path / "debian")
    monkeypatch.setattr(sources, "DEBIAN_FASHION_MNIST", tmp_path / "debian")
    data = load_dataset("fashion-mnist", root=tmp_path / "root")
    assert data.input_shape == (1, 28, 28)
    assert data.train_labels.tolist() == list(range(10))
    assert float(data.train_inputs.max()) <= 1.0
    assert not (tmp_path / "root").exists()


def test_a_torchvision_folder_comes_before_the_package(tmp_path, monkeypatch):
    write_idx_files(tmp_path / "debian")
    raw = tmp_path / "root" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for name in FASHION_MNIST_FILES:
        (raw / name).write_bytes(gzip.decompress((tmp_path / "debian" / f"{name}.gz").read_bytes()))
    monkeypatch.setattr(sources, "DEBIAN_FASHION_MNIST", tmp_path / "nowhere")
    assert load_dataset("fashion-mnist", root=tmp_path / "root").num_records == 10


def test_missing_fashion_mnist_says_what_to_install_in_one_line(tmp_path, monkeypatch):
    from torchvision.datasets import FashionMNIST

    def no_network(self):
        Path(self.raw_folder).mkdir(parents=True)  # as torchvision does before it downloads
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz:\nmirror refused")

    monkeypatch.setattr(sources, "DEBIAN_FASHION_MNIST", tmp_path / "nowhere")
    monkeypatch.setattr(FashionMNIST, "download", no_network)
    with pytest.raises(ValueError, match="apt-get install dataset-fashion-mnist") as caught:
        load_dataset("fashion-mnist", root=tmp_path / "root")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_incomplete_package_names_the_file(tmp_path, monkeypatch):
    write_idx_files(tmp_path / "debian")
    (tmp_path / "debian" / "t10k-labels-idx1-ubyte.gz").unlink()
    monkeypatch.setattr(sources, "DEBIAN_FASHION_MNIST", tmp_path / "debian")
    with pytest.raises(ValueError, match=r"t10k-labels-idx1-ubyte.gz cannot be read"):
        load_dataset("fashion-mnist", root=tmp_path / "root")


def test_a_truncated_package_file_is_one_line(tmp_path, monkeypatch):
    write_idx_files(tmp_path / "debian")
    images = tmp_path / "debian" / "train-images-idx3-ubyte.gz"
    images.write_bytes(images.read_bytes()[:1000])
    monkeypatch.setattr(sources, "DEBIAN_FASHION_MNIST", tmp_path / "debian")
    with pytest.raises(ValueError, match="reinstall with apt-get") as caught:
        load_dataset("fashion-mnist", root=tmp_path / "root")
    assert "\n" not in str(caught.value)


def test_an_empty_folder_of_a_failed_download_does_not_hide_the_package(tmp_path, monkeypatch):
    write_idx_files(tmp_path / "debian")
    (tmp_path / "root" / "FashionMNIST" / "raw").mkdir(parents=True)
    monkeypatch.setattr(sources, "DEBIAN_FASHION_MNIST", tmp_path / "debian")
    assert load_dataset("fashion-mnist", root=tmp_path / "root").num_records == 10


OWN = """
import numpy as np
from asfl_privacy.data import make_dataset

def pair():
    x = np.random.default_rng(0).random((12, 1, 8, 8))
    return (x, np.arange(12) % 2), (x, np.arange(12) % 2)

def dataset():
    return make_dataset("theirs", train=pair()[0], test=pair()[1], num_classes=4, mean=(0.25,))

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
        ("digit", "use one of digits, fashion-mnist"),
    ],
)
def test_own_data_that_is_wrong_gets_one_line(reference, match):
    with pytest.raises(ValueError, match=match) as caught:
        load_dataset(reference, root=Path("data"))
    assert "\n" not in str(caught.value)
