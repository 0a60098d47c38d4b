"""Named tensors as bytes in the safetensors format, and back: the same bits, types, shapes, order and devices."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

_KEY, _VERSION = "asfl-privacy", 1


def encode_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Named tensors as the bytes of one safetensors file.

    Args:
        tensors: Dense tensors of any shape, on any device; they may share memory and need not be contiguous.

    Returns:
        The bytes. The order of the names and the devices stand in the file's metadata.

    Raises:
        ValueError: A tensor that the format does not hold: sparse, quantised, or of a type such as complex128.

    Guarantee:
        `decode_tensors` gives every bit back, NaN payloads and signed zeros included.

    Edge cases:
        No tensors, 0-d tensors and tensors without elements are held like any other. Gradients are not.

    Example:
        >>> decode_tensors(encode_tensors({"b": torch.tensor(True), "a": torch.arange(3)}), name="state")
        {'b': tensor(True), 'a': tensor([0, 1, 2])}
    """
    plain = {}
    for name, value in tensors.items():
        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            raise ValueError(_unfit(name, value))
        if name == "__metadata__":
            raise ValueError(
                "a tensor is named '__metadata__': safetensors keeps that name to itself; name it otherwise"
            )
        # Of its own memory: the format refuses tensors that share it, and a view would carry all of its base along.
        plain[name] = compact(value).to("cpu")
    words = {
        "version": _VERSION,
        "order": list(tensors),
        "devices": {name: str(value.device) for name, value in tensors.items() if value.device.type != "cpu"},
    }
    try:
        return safetensors.torch.save(plain, metadata={_KEY: json.dumps(words)})
    except KeyError:
        name = next(name for name, value in plain.items() if not _fits(value))
        raise ValueError(_unfit(name, plain[name])) from None


def compact(value: Tensor) -> Tensor:
    """A copy of a tensor in memory of its own, contiguous and without gradient; conjugate views are carried out by it."""
    return value.detach().clone(memory_format=torch.contiguous_format)


def decode_tensors(data: bytes, *, name: str, device: torch.device | str | None = None) -> dict[str, Tensor]:
    """The tensors of `encode_tensors`, in their order, of memory that nothing else shares.

    Args:
        data: The file's bytes.
        name: What to call the file in an error.
        device: Where the tensors are put; None for where each of them was.

    Raises:
        ValueError: The bytes are no such file or not all of it, or the device is not on this machine.
    """
    whole = check_tensor_file(data, size=len(data), name=name)
    try:
        words = json.loads(whole[_KEY])
        if words["version"] != _VERSION:
            raise ValueError(f"version {words['version']!r} where {_VERSION} is due")
        found = safetensors.torch.load(data)
        ordered = {key: found[key] for key in words["order"]}
        if len(ordered) != len(found):
            raise ValueError(f"{len(found)} tensors where {len(ordered)} are named")
        devices = words["devices"] if device is None else dict.fromkeys(ordered, device)
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ValueError(_damaged(name, " ".join(str(error).split()))) from None
    try:
        return {key: value.to(devices[key]) if key in devices else value for key, value in ordered.items()}
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{name} holds tensors of a device that is not here ({reason}); pass device='cpu'") from None


def check_tensor_file(start: bytes, *, size: int, name: str) -> dict[str, str]:
    """Check that a file is as long as its header says, from the header alone.

    Args:
        start: The file's first bytes: at least 8, and then as many as these say.
        size: Its size in bytes.
        name: What to call it in an error.

    Returns:
        The file's metadata.

    Raises:
        ValueError: It is no safetensors file, or was cut or lengthened.
    """
    try:
        (length,) = struct.unpack("<Q", start[:8])
        header = json.loads(start[8 : 8 + length])
        end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
        metadata = dict(header["__metadata__"])
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, OverflowError, IndexError):
        raise ValueError(_damaged(name, "its header cannot be read")) from None
    if size != 8 + length + end:
        raise ValueError(_damaged(name, f"{size} bytes where {8 + length + end} are due"))
    return metadata


def _fits(value: Tensor) -> bool:
    try:
        safetensors.torch.save({"value": value})
    except KeyError:
        return False
    return True


def _unfit(name: str, value: Tensor) -> str:
    kind = f"{value.layout}".removeprefix("torch.") if value.layout != torch.strided else str(value.dtype)
    return (
        f"tensor {name!r} is {kind} on {value.device}: only dense tensors of the types that safetensors knows can be kept "
        "in a file; convert it, complex128 by torch.view_as_real"
    )


def _damaged(name: str, reason: str) -> str:
    return f"{name} is damaged ({reason}): what it held is not known; restore a copy of the file"
