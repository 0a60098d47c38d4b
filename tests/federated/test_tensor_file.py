"""Tensors in files: every bit comes back, and a file that is not whole is refused."""

import math
import struct

import pytest
import safetensors.torch
import torch

from asfl_privacy.federated.tensor_file import check_tensor_file, decode_tensors, encode_tensors

EVERY_TYPE = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64),
)


def bits(value):
    """Type, shape and bytes of a tensor, whatever its strides."""
    whole = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach()).reshape(-1)
    return value.dtype, tuple(value.shape), bytes(whole.view(torch.uint8).numpy()) if whole.numel() else b""


def random_bits(dtype, shape):
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return (
        (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(shape)
    )  # floats: NaNs of any payload among them


@pytest.mark.parametrize("dtype", EVERY_TYPE)
def test_every_bit_of_every_type_comes_back(dtype):
    """Catches: a detour over another type, NaN payloads lost, 0-d made 1-d, strides mistaken for order."""
    square = random_bits(dtype, (64, 48))
    tensors = {
        "zero-d": square[5, 7].clone(),
        "empty": square[:0],
        "transposed": square.T,
        "strided": square[::3, 1::2],
        "same memory": square,
        "again": square,
    }
    back = decode_tensors(encode_tensors(tensors), name="x")
    assert list(back) == list(tensors)
    assert {name: bits(value) for name, value in back.items()} == {name: bits(v) for name, v in tensors.items()}


def test_order_special_values_and_views_come_back():
    """Catches: names sorted (sums over them would change), a conjugate view stored without its sign, gradients kept."""
    numbers = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324], dtype=torch.float64)
    tensors = {
        "z": numbers,
        "a": torch.complex(numbers.float(), numbers.float()).conj(),
        "m": torch.nn.Parameter(torch.ones(2)),
        "imaginary": torch.tensor([1 + 2j]).conj().imag,
        "": torch.tensor(7),
        "ünïcode/with.dots": torch.tensor(True),
    }
    back = decode_tensors(encode_tensors(tensors), name="x")
    assert list(back) == list(tensors)
    assert all(bits(back[name]) == bits(value) for name, value in tensors.items())
    assert not any(value.requires_grad for value in back.values())
    assert torch.equal(back["imaginary"], torch.tensor([-2.0]))


def test_a_view_does_not_bring_its_base_along():
    """Catches: storing or keeping the storage behind a small view."""
    assert len(encode_tensors({"few": torch.zeros(100_000)[:3]})) < 1000


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("x", torch.zeros(2, dtype=torch.complex128), "tensor 'x' is torch.complex128 on cpu"),
        ("x", torch.zeros(2, 2).to_sparse(), "tensor 'x' is sparse_coo on cpu"),
        ("x", torch.zeros(2, device="meta"), "on meta"),
        ("__metadata__", torch.zeros(2), "named '__metadata__'"),
    ],
)
def test_what_the_format_does_not_hold_is_refused_in_one_line(name, value, words):
    with pytest.raises(ValueError, match=words) as caught:
        encode_tensors({"good": torch.zeros(1), name: value})
    assert "\n" not in str(caught.value)


def test_a_file_that_is_cut_lengthened_or_something_else_is_refused():
    """Every length but the whole one. Catches: a tensor filled up with what happens to follow."""
    data = encode_tensors({"a": torch.arange(3.0), "b": torch.tensor(True)})
    for wrong in (*(data[:end] for end in range(len(data))), data + b"\0", b"\xff" * 300, b"no file of tensors"):
        with pytest.raises(ValueError, match="x is damaged"):
            decode_tensors(wrong, name="x")


def test_files_of_other_programs_are_refused():
    """A whole file without our words, and one whose words name other tensors."""
    words = '{"version": 1, "order": ["a", "b"], "devices": {}}'
    for metadata in (None, {"asfl-privacy": words}, {"asfl-privacy": words.replace("1", "9")}, {"asfl-privacy": "{"}):
        with pytest.raises(ValueError, match="x is damaged"):
            decode_tensors(safetensors.torch.save({"a": torch.zeros(1)}, metadata=metadata), name="x")


def test_the_header_alone_tells_the_size():
    data = encode_tensors({"a": torch.zeros(50)})
    (length,) = struct.unpack("<Q", data[:8])
    check_tensor_file(data[: 8 + length], size=len(data), name="x")
    with pytest.raises(ValueError, match="bytes where"):
        check_tensor_file(data[: 8 + length], size=len(data) - 1, name="x")


def test_a_device_that_is_not_here_is_named():
    data = encode_tensors({"a": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"x holds tensors of a device that is not here .*; pass device='cpu'"):
        decode_tensors(data, name="x", device="cuda:99")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_come_back_where_they_were():
    tensors = {"far": torch.arange(3.0, device="cuda:0"), "near": torch.arange(3.0)}
    data = encode_tensors(tensors)
    assert {name: value.device for name, value in decode_tensors(data, name="x").items()} == {
        "far": torch.device("cuda:0"),
        "near": torch.device("cpu"),
    }
    assert decode_tensors(data, name="x", device="cpu")["far"].device.type == "cpu"
