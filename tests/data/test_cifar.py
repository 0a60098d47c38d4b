"""CIFAR: torchvision's own files are read as they are, and a failed download leaves nothing."""

import hashlib
import pickle
import urllib.error
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import CIFAR10, CIFAR100, cifar

from asfl_privacy.data import load_dataset

SETS = {
    "cifar10": (CIFAR10, "labels", "label_names", 10),
    "cifar100": (CIFAR100, "fine_labels", "fine_label_names", 100),
}


@pytest.fixture(params=sorted(SETS))
def files(request, tmp_path, monkeypatch):
    """(name, folder, images by file, labels by file): the real format, two records a file, and checksums to match."""
    source, key, names, num_classes = SETS[request.param]
    folder = tmp_path / "root" / source.base_folder
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    images, labels = {}, {}

    def write(file, content):
        (folder / file).write_bytes(pickle.dumps(content))
        return [file, hashlib.md5((folder / file).read_bytes()).hexdigest()]

    def write_batch(file):
        images[file] = rng.integers(0, 256, (2, 3072), dtype=np.uint8)
        labels[file] = rng.integers(0, num_classes, 2).tolist()
        return write(file, {"data": images[file], key: labels[file], "coarse_labels": [0, 0]})

    for parts in ("train_list", "test_list"):
        monkeypatch.setattr(source, parts, [write_batch(file) for file, _ in getattr(source, parts)])
    file, checksum = write(source.meta["filename"], {names: [str(i) for i in range(num_classes)]})
    monkeypatch.setattr(source, "meta", {"filename": file, "key": names, "md5": checksum})
    return request.param, folder, images, labels


def no_network(url, root, filename, md5):
    """As torchvision fails: it makes the folder, and may have written a part of the archive."""
    Path(root).mkdir(parents=True, exist_ok=True)
    (Path(root) / filename).write_bytes(b"a part")
    raise urllib.error.URLError("no route to host")


def test_each_pixel_and_label_is_where_the_file_has_it(files):
    """The format: rows of 1,024 red, then green, then blue bytes, row by row. Catches channels last, and sides swapped."""
    name, folder, images, labels = files
    data = load_dataset(name, root=folder.parent)
    source, _, _, num_classes = SETS[name]
    assert (data.input_shape, data.num_classes, data.input_box) == ((3, 32, 32), num_classes, (0.0, 1.0))
    for inputs, kept, parts in (
        (data.train_inputs, data.train_labels, source.train_list),
        (data.test_inputs, data.test_labels, source.test_list),
    ):
        assert kept.tolist() == [label for file, _ in parts for label in labels[file]]
        rows = np.concatenate([images[file] for file, _ in parts])
        for record, channel, row, column in ((0, 0, 0, 1), (1, 1, 1, 0), (1, 2, 31, 5)):
            expected = rows[record, 1024 * channel + 32 * row + column] / 255
            assert float(inputs[record, channel, row, column]) == pytest.approx(expected, abs=1e-7)


def test_the_constants_are_one_a_channel(files):
    name, folder, *_ = files
    data = load_dataset(name, root=folder.parent)
    assert len(data.mean) == len(data.std) == 3
    assert all(0.4 < mean < 0.6 for mean in data.mean)


def test_files_that_are_there_are_not_downloaded(files, monkeypatch):
    name, folder, *_ = files
    monkeypatch.setattr(cifar, "download_and_extract_archive", no_network)
    assert load_dataset(name, root=folder.parent).num_records > 0
    assert list(folder.parent.iterdir()) == [folder]


def test_a_changed_file_is_not_read(files, monkeypatch):
    """pickle runs what a file says: only files with the published checksum are opened."""
    name, folder, *_ = files
    monkeypatch.setattr(cifar, "download_and_extract_archive", no_network)
    file = folder / SETS[name][0].test_list[0][0]
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(ValueError, match=f"data {name}: nothing readable in {folder} and no download"):
        load_dataset(name, root=folder.parent)
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("name", sorted(SETS))
def test_without_files_and_network_one_line_says_where_files_are_looked_for_and_nothing_is_left(
    name, tmp_path, monkeypatch
):
    monkeypatch.setattr(cifar, "download_and_extract_archive", no_network)
    root = tmp_path / "a" / "root"
    with pytest.raises(ValueError, match=r"nothing readable in .*no route to host.*; put the files of https") as caught:
        load_dataset(name, root=root)
    assert str(root / SETS[name][0].base_folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_archive_that_was_there_before_stays(tmp_path, monkeypatch):
    """Catches the user's own download deleted because its checksum was wrong."""

    def corrupt(url, root, filename, md5):
        raise RuntimeError("File not found or corrupted.")

    monkeypatch.setattr(cifar, "download_and_extract_archive", corrupt)
    (tmp_path / CIFAR10.filename).write_bytes(b"mine")
    with pytest.raises(ValueError, match="corrupted"):
        load_dataset("cifar10", root=tmp_path)
    assert (tmp_path / CIFAR10.filename).read_bytes() == b"mine"
