"""Fashion-MNIST: where it is looked for, in which order, and what is said when it is not there."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from asfl_privacy.data import fashion_mnist, load_dataset
from asfl_privacy.data.fashion_mnist import FASHION_MNIST_FILES


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
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FASHION_MNIST", tmp_path / "debian")
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
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FASHION_MNIST", tmp_path / "nowhere")
    assert load_dataset("fashion-mnist", root=tmp_path / "root").num_records == 10


def test_missing_fashion_mnist_says_what_to_install_in_one_line(tmp_path, monkeypatch):
    from torchvision.datasets import FashionMNIST

    def no_network(self):
        Path(self.raw_folder).mkdir(parents=True)  # as torchvision does before it downloads
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz:\nmirror refused")

    monkeypatch.setattr(fashion_mnist, "DEBIAN_FASHION_MNIST", tmp_path / "nowhere")
    monkeypatch.setattr(FashionMNIST, "download", no_network)
    with pytest.raises(ValueError, match="apt-get install dataset-fashion-mnist") as caught:
        load_dataset("fashion-mnist", root=tmp_path / "root")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_incomplete_package_names_the_file(tmp_path, monkeypatch):
    write_idx_files(tmp_path / "debian")
    (tmp_path / "debian" / "t10k-labels-idx1-ubyte.gz").unlink()
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FASHION_MNIST", tmp_path / "debian")
    with pytest.raises(ValueError, match=r"t10k-labels-idx1-ubyte.gz cannot be read"):
        load_dataset("fashion-mnist", root=tmp_path / "root")


def test_a_truncated_package_file_is_one_line(tmp_path, monkeypatch):
    write_idx_files(tmp_path / "debian")
    images = tmp_path / "debian" / "train-images-idx3-ubyte.gz"
    images.write_bytes(images.read_bytes()[:1000])
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FASHION_MNIST", tmp_path / "debian")
    with pytest.raises(ValueError, match="reinstall with apt-get") as caught:
        load_dataset("fashion-mnist", root=tmp_path / "root")
    assert "\n" not in str(caught.value)


def test_an_empty_folder_of_a_failed_download_does_not_hide_the_package(tmp_path, monkeypatch):
    write_idx_files(tmp_path / "debian")
    (tmp_path / "root" / "FashionMNIST" / "raw").mkdir(parents=True)
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FASHION_MNIST", tmp_path / "debian")
    assert load_dataset("fashion-mnist", root=tmp_path / "root").num_records == 10
