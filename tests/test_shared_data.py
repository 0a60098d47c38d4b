"""A data set that processes share is the same one, is in memory once, and cannot be changed for the others."""

import multiprocessing
import sys
import warnings
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asfl_privacy.data import Dataset, make_dataset
from asfl_privacy.shared_data import data_arrays, data_of, map_data, write_data

MEGABYTE = 2**20
BOX = (-0.1, 1 / 3)


@pytest.fixture
def plain() -> Dataset:
    """Constants without a short decimal form, two channels, and tensors that are no contiguous whole."""
    rng = np.random.default_rng(0)
    x, y = rng.uniform(*BOX, size=(12, 2, 3, 5)), np.arange(12) % 3
    made = make_dataset("own", train=(x, y), test=(x[::2], y[::2]), input_box=BOX, mean=(0.1, 0.2), std=(1 / 7, 0.3))
    return replace(made, test_inputs=made.train_inputs.transpose(2, 3).contiguous().transpose(2, 3)[::2])


@pytest.fixture(params=[None, [3, 0, 1] * 4], ids=["no groups", "groups"])
def data(request, plain) -> Dataset:
    """Without groups, and with them."""
    groups = request.param
    return plain if groups is None else replace(plain, train_groups=torch.tensor(groups))


def assert_same(one: Dataset, other: Dataset) -> None:
    for field in fields(Dataset):
        mine, yours = getattr(one, field.name), getattr(other, field.name)
        assert type(mine) is type(yours), field.name
        if isinstance(mine, torch.Tensor):
            assert mine.dtype == yours.dtype
            assert torch.equal(mine, yours), field.name
        else:
            assert mine == yours, field.name


def test_a_mapped_data_set_is_the_one_written(data, tmp_path):
    write_data(data, tmp_path / "data")
    assert_same(map_data(tmp_path / "data"), data)


def test_arrays_give_the_data_set_back_without_a_copy_or_a_warning(data):
    facts, arrays = data_arrays(data)
    for array in arrays.values():
        array.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = data_of(facts, arrays)
    assert_same(again, data)
    assert again.train_inputs.data_ptr() == data.train_inputs.data_ptr()


def test_a_write_to_a_mapped_data_set_reaches_nobody_else(data, tmp_path):
    """Catches a mapping that is shared for writing."""
    file = tmp_path / "data"
    write_data(data, file)
    before, spoilt, other = file.read_bytes(), map_data(file), map_data(file)
    spoilt.train_inputs.fill_(7.0)
    assert file.read_bytes() == before
    assert_same(other, data)
    assert_same(map_data(file), data)


def _memory() -> dict[str, int]:
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()]
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[-1] == "kB"}


def _map_and_tell(file: Path, both: object, answers: object) -> None:
    before = _memory()
    data = map_data(file)
    float(data.train_inputs.sum())  # touches every page
    both.wait(60)
    after = _memory()
    answers.put({name: after[name] - before[name] for name in ("Rss", "Pss", "Private_Clean", "Private_Dirty")})
    both.wait(60)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").is_file(), reason=f"{sys.platform} tells no shares of memory")
def test_two_processes_hold_the_data_once(tmp_path):
    """Catches a copy in each: then a process's own share grows by all of it, and Pss by more than half."""
    size = 64 * MEGABYTE
    x, y = torch.rand(size // 4 // 1024, 1, 32, 32), torch.zeros(size // 4 // 1024, dtype=torch.int64)
    data = Dataset("big", train_inputs=x, train_labels=y, test_inputs=x[:1], test_labels=y[:1], num_classes=1)
    write_data(data, tmp_path / "data")
    context = multiprocessing.get_context("spawn")
    both, answers = context.Barrier(2), context.SimpleQueue()
    processes = [context.Process(target=_map_and_tell, args=(tmp_path / "data", both, answers)) for _ in range(2)]
    for process in processes:
        process.start()
    grown = [answers.get() for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    for one in grown:
        assert one["Rss"] > 0.9 * size
        assert one["Private_Clean"] + one["Private_Dirty"] < 0.1 * size
        assert one["Pss"] < 0.6 * size
