"""FEMNIST: LEAF's files as they are, with whose each training record is."""

import json

import numpy as np
import pytest
import torch

from asfl_privacy.data import hold_out, load_dataset


def content(counts, *, seed=0):
    """LEAF's JSON for writers with so many records each: white paper, and one grey pixel that tells the record."""
    rng = np.random.default_rng(seed)
    records = {}
    for writer, count in counts.items():
        x = np.ones((count, 784))
        x[:, 30] = np.arange(count) / 255
        records[writer] = {"x": x.tolist(), "y": rng.integers(0, 62, count).tolist()}
    return {"users": list(counts), "num_samples": list(counts.values()), "user_data": records}


def write(root, part, **files):
    folder = root / "femnist" / part
    folder.mkdir(parents=True, exist_ok=True)
    for name, made in files.items():
        (folder / f"{name}.json").write_text(made if isinstance(made, str) else json.dumps(made))


@pytest.fixture
def root(tmp_path):
    write(tmp_path, "train", all_data_0=content({"f1": 3, "f0": 2}), all_data_1=content({"f2": 1, "f1": 2}, seed=1))
    write(tmp_path, "test", all_data_0=content({"f1": 1, "f0": 1}, seed=2))
    return tmp_path


def test_every_record_keeps_its_pixels_label_and_writer(root):
    """By hand: files in order, writers in their file's order, numbered by name. Catches one group a file, and sorted users."""
    data = load_dataset("femnist", root=root)
    assert data.input_shape == (1, 28, 28)
    assert data.num_classes == 62
    assert data.train_groups.tolist() == [1, 1, 1, 0, 0, 2, 1, 1]
    assert (255 * data.train_inputs[:, 0, 1, 2]).round().tolist() == [
        0,
        1,
        2,
        0,
        1,
        0,
        0,
        1,
    ]  # pixel 30 is row 1, column 2
    first, second = content({"f1": 3, "f0": 2}), content({"f2": 1, "f1": 2}, seed=1)
    labels = [label for made in (first, second) for user in made["users"] for label in made["user_data"][user]["y"]]
    assert data.train_labels.tolist() == labels
    assert len(data.test_labels) == 2


def test_the_white_background_stays_1(root):
    """Catches pixels turned to white on black, or scaled by 255 again."""
    data = load_dataset("femnist", root=root)
    assert float(data.train_inputs.max()) == 1.0
    assert float(data.train_inputs.median()) == 1.0


def test_a_writer_without_records_is_no_group(tmp_path):
    write(tmp_path, "train", a=content({"f0": 0, "f1": 2}))
    write(tmp_path, "test", a=content({"f1": 1}))
    assert load_dataset("femnist", root=tmp_path).train_groups.tolist() == [0, 0]


def test_what_is_held_out_takes_its_writer_with_it(tmp_path):
    """Each record's pixel tells its writer. Catches groups that are left in the old order or at the old length."""
    made = content({f"f{i}": 9 for i in range(4)})
    for number, user in enumerate(made["users"]):
        x = np.ones((9, 784))
        x[:, 30] = number / 255
        made["user_data"][user] = {"x": x.tolist(), "y": [0, 1, 2] * 3}
    write(tmp_path, "train", a=made)
    write(tmp_path, "test", a=content({"f0": 1}))
    held = hold_out(load_dataset("femnist", root=tmp_path))
    assert held.num_records == 36 - 3 * 2  # twelve of each of three classes, a sixth of them held out
    assert torch.equal((255 * held.train_inputs[:, 0, 1, 2]).round().long(), held.train_groups)


@pytest.mark.parametrize("missing", ["train", "test"])
def test_missing_files_say_where_they_are_looked_for_and_how_to_make_them(root, missing):
    for file in (root / "femnist" / missing).iterdir():
        file.unlink()
    with pytest.raises(
        ValueError, match=r"preprocess.sh of LEAF's data/femnist, e.g. -s niid --sf 0.1 -k 0 -t sample"
    ) as caught:
        load_dataset("femnist", root=root)
    assert f"no .json file in {root / 'femnist' / missing}" in str(caught.value)
    assert "\n" not in str(caught.value)


GOOD = content({"f0": 2})
SHORT = {**GOOD, "user_data": {"f0": {"x": [[1.0] * 783] * 2, "y": [0, 1]}}}


@pytest.mark.parametrize(
    ("made", "match"),
    [
        ("{", "is not LEAF's"),
        ("[1]", "is not LEAF's"),
        ({"users": ["f0"]}, "no 'num_samples'"),
        ({**GOOD, "users": ["f9"]}, "no 'f9'"),
        ({**GOOD, "num_samples": [3]}, "num_samples is 3"),
        ({**GOOD, "num_samples": []}, "1 users and 0 in num_samples"),
        (SHORT, r"x of shape \(2, 783\)"),
        ({**GOOD, "user_data": {"f0": {"x": [[0.5] * 784] * 2, "y": [0.5, 1]}}}, "and type float64"),
        ({**GOOD, "user_data": {"f0": {"x": [["a"] * 784] * 2, "y": [0, 1]}}}, "could not convert"),
        ({**GOOD, "user_data": {"f0": {"x": [[255.0] * 784] * 2, "y": [0, 1]}}}, "inside the input box"),
        ({**GOOD, "user_data": {"f0": {"x": [[0.5] * 784] * 2, "y": [0, 62]}}}, "62 classes"),
        (content({"f0": 0}), "hold no record"),
    ],
)
def test_a_file_that_is_not_leafs_gets_one_line(root, made, match):
    for file in (root / "femnist" / "train").iterdir():
        file.unlink()
    write(root, "train", odd=made)
    with pytest.raises(ValueError, match=match) as caught:
        load_dataset("femnist", root=root)
    assert str(caught.value).startswith("data femnist: ")
    assert "\n" not in str(caught.value)
