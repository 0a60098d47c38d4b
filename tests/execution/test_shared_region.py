"""Shared memory: what is sent arrives bit for bit, and nothing is written over that somebody still views."""

import gc
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from asfl_privacy.execution import shared_region
from asfl_privacy.execution.shared_region import Region, SharedRegion, Slots, pack, unpack

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def through_memory(value, *, inline):
    parcel = pack(value, inline=inline)
    assert not (inline and parcel.size)
    memory = memoryview(bytearray(parcel.size))
    parcel.write(memory)
    return unpack(parcel.header, memory=memory)


def bits(value):
    return value.contiguous().reshape(-1).view(torch.uint8).tolist() if value.numel() else []


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 4), max_size=4),
    order=st.randoms(use_true_random=False),
    inline=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_bits_types_shapes_and_layouts_arrive(dtype, shape, order, inline, seed):
    """Random bytes, NaNs with payloads among them. Catches layouts made contiguous: they choose kernels, and so bits."""
    count = int(np.prod(shape)) * torch.empty((), dtype=dtype).element_size()
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, size=count, dtype=np.uint8)
    value = torch.from_numpy(raw).view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    value = value.permute(order.sample(range(len(shape)), len(shape)))
    (got,) = through_memory([value], inline=inline)
    assert (got.dtype, got.shape, got.stride()) == (value.dtype, value.shape, value.stride())
    assert bits(got) == bits(value)


@pytest.mark.parametrize("inline", [False, True])
def test_whatever_is_no_plain_tensor_arrives_too(inline):
    array = np.arange(2000).reshape(40, 50)
    view = torch.arange(20.0)[::3]
    value = {
        "parameter": nn.Parameter(torch.arange(3.0)),
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(3, device="meta"),
        "array": array,
        "turned": np.asfortranarray(array),
        "few": np.array([1.5]),
        "view": view,
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "none": None,
    }
    got = through_memory(value, inline=inline)
    assert isinstance(got["parameter"], nn.Parameter)
    assert torch.equal(got["parameter"], value["parameter"])
    assert torch.equal(got["sparse"].to_dense(), torch.eye(3))
    assert got["meta"].shape == (3,)
    for name in ("array", "turned", "few"):
        assert np.array_equal(got[name], value[name])
        assert got[name].flags.writeable
    assert torch.equal(got["view"], view)
    assert torch.equal(got["negative"], value["negative"])
    assert list(got) == list(value)


def test_a_tensor_that_occurs_twice_arrives_as_one():
    """A network's parameters in its split, say."""
    value, network = torch.arange(5.0), nn.Linear(2, 2)
    first, second, whole, part = through_memory((value, value, nn.Sequential(network), network), inline=False)
    assert first is second
    assert whole[0].weight is part.weight


def test_only_the_place_is_sent_of_what_lies_in_a_known_region():
    region = SharedRegion(4096)
    sent = pack({"a": torch.arange(12.0).reshape(3, 4)})
    sent.write(region.memory)
    kept = unpack(sent.header, memory=region.memory)["a"]
    again = pack(kept[:, 1:].T, known={"here": region})
    assert again.size == 0
    got = unpack(again.header, regions={"here": region})
    assert torch.equal(got, kept[:, 1:].T)
    assert got.data_ptr() == kept.data_ptr() + 4


def test_other_mappings_see_what_is_written_and_private_ones_keep_what_they_write():
    region = SharedRegion(100)
    assert region.size >= 100
    shared, private = Region(region.descriptor, region.size), Region(region.descriptor, region.size, private=True)
    region.memory[0] = 7
    assert (shared.memory[0], private.memory[0]) == (7, 7)
    private.memory[0] = 9
    assert (shared.memory[0], region.memory[0]) == (7, 7)


def test_a_region_leaves_no_file_and_gives_its_descriptor_back():
    region = SharedRegion(10_000)
    descriptor = region.descriptor
    assert os.fstat(descriptor).st_nlink == 0
    del region
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_memory_is_reserved_or_refused(monkeypatch):
    """Catches sparse files: a process that writes where the file system is full is ended by the system."""
    region = SharedRegion(1 << 20)
    assert os.fstat(region.descriptor).st_blocks * 512 >= 1 << 20
    with pytest.raises(OSError):
        SharedRegion(1 << 60)


def lent_tensor(slots):
    at = slots.take()
    memory = slots.lend(at)
    parcel = pack(torch.full((8,), float(at)))
    parcel.write(memory)
    return unpack(parcel.header, memory=memory)


def test_a_slot_is_given_again_only_once_nothing_views_it():
    """Catches slots that are given back with the answer: what was kept would change."""
    slots = Slots(SharedRegion(4096), size=100)
    assert slots.size == 128
    kept = [lent_tensor(slots) for _ in range(slots.count)]
    assert slots.take() is None
    parts = [value[1:].view(-1, 1).numpy() for value in kept]
    del kept
    assert slots.take() is None
    parts.pop(3)
    assert slots.take() == 3 * 128
    assert slots.take() is None
    slots.give_back(3 * 128)
    assert slots.take() == 3 * 128


def test_views_outlive_their_slots_and_region():
    kept = lent_tensor(Slots(SharedRegion(4096), size=64))
    gc.collect()
    assert kept.tolist() == [0.0] * 8


def test_a_loan_without_tensors_is_over_at_once():
    slots = Slots(SharedRegion(4096), size=4096)
    slots.lend(slots.take())
    assert slots.take() == 0


def test_the_temporary_folder_stands_in_for_a_full_memory_file_system(monkeypatch, tmp_path):
    calls = []
    real = os.posix_fallocate

    def full_at_first(descriptor, offset, size):
        calls.append(size)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        real(descriptor, offset, size)

    monkeypatch.setattr(shared_region.os, "posix_fallocate", full_at_first)
    monkeypatch.setattr(shared_region.tempfile, "gettempdir", lambda: str(tmp_path))
    region = SharedRegion(5000)
    assert len(calls) == 2
    assert os.fstat(region.descriptor).st_dev == tmp_path.stat().st_dev
