"""What a certificate was issued for, in digests, so that any later difference can be named."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as module_globals

from sensitivity.capturing.inspection import GLOBAL_HOOK_TABLES, HOOK_TABLES

PARTS = ("modules", "mode", "hooks", "dtype", "input shape", "parameters", "buffers")
_HOOK_LISTS = (*HOOK_TABLES, "_backward_hooks", "_backward_pre_hooks")
_MODULE_INTERNALS = frozenset(nn.Module().__dict__)
_EMPTY_CELL = types.CellType()
DEPTH = 4
_SIMPLE = (int, float, str, bool, bytes, complex, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Digests of a head and of the shape of its input.

    Attributes:
        input_shape: shape of one record.
        entries: (part, name, digest) in a fixed order; part is one of "modules", "mode", "hooks", "dtype",
            "parameters", "buffers".
        program: digest of what forward computes, constants included; empty if it was not recorded.
    """

    input_shape: tuple[int, ...]
    entries: tuple[tuple[str, str, str], ...]
    program: str = ""

    def changes(self, other: Fingerprint) -> list[str]:
        """Words for everything that differs, most telling first; empty if nothing does.

        Example:
            >>> old = Fingerprint(input_shape=(1,), entries=(("mode", "0", "eval"),))
            >>> old.changes(Fingerprint(input_shape=(2,), entries=(("mode", "0", "train"),)))
            ["mode of '0' (eval → train)", 'input shape ((1,) → (2,))']
        """
        mine = {(part, name): digest for part, name, digest in self.entries}
        theirs = {(part, name): digest for part, name, digest in other.entries}
        different = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
        found = []
        for part, name in sorted(different, key=lambda key: PARTS.index(key[0])):
            before, after = mine.get((part, name), "absent"), theirs.get((part, name), "absent")
            shown = f" ({before} → {after})" if part in ("mode", "dtype") or "absent" in (before, after) else ""
            found.append(f"{part} of {name!r}{shown}" if name else f"{part}{shown}")
        if self.input_shape != other.input_shape:
            found.append(f"input shape ({self.input_shape} → {other.input_shape})")
        if not found and self.program and other.program and self.program != other.program:
            found.append("what forward computes")
        return found


def take_fingerprint(head: nn.Module, *, input_shape: tuple[int, ...]) -> Fingerprint:
    """Digest a head as it is now.

    Args:
        head: the module.
        input_shape: shape of one record.

    Returns:
        Its fingerprint: module types, code of forward and simple attributes; train or eval; hooks; element types;
            values.

    Guarantee: equal fingerprints mean equal parameters, buffers, tensor attributes, modes, hooks, element types,
        module types, forward code and simple attributes (barring a collision of BLAKE2). What forward reads from
        elsewhere is seen through the program alone, which `with_program` adds.
    """
    entries: list[tuple[str, str, str]] = []
    for table in GLOBAL_HOOK_TABLES:
        entries.extend(("hooks", "global", str(key)) for key in getattr(module_globals, table, {}))
    for path, module in head.named_modules(remove_duplicate=False):
        entries.append(("modules", path, _digest(structure_of(module).encode())))
        entries.append(("mode", path, "train" if module.training else "eval"))
        hooks = [f"{table}:{key}:{id(hook)}" for table in _HOOK_LISTS for key, hook in getattr(module, table).items()]
        if hooks:
            entries.append(("hooks", path, _digest("|".join(hooks).encode())))
        prefix = f"{path}." if path else ""
        for part, values in (
            ("parameters", module._parameters),
            ("buffers", module._buffers),
            ("buffers", module.__dict__),
        ):
            for name, tensor in values.items():
                if isinstance(tensor, torch.Tensor):
                    entries.append(("dtype", prefix + name, str(tensor.dtype)))
                    entries.append((part, prefix + name, tensor_digest(tensor)))
    return Fingerprint(input_shape=input_shape, entries=tuple(entries))


def with_program(fingerprint: Fingerprint, program: str) -> Fingerprint:
    """The fingerprint with the digest of a program, as `batching` gives it."""
    return replace(fingerprint, program=_digest(program.encode()))


def structure_of(module: nn.Module) -> str:
    """Type, code and simple attributes of one module, as text.

    The code is that of forward and, for classes defined outside torch, of every method; with the values that it reads
    from closures and globals, as far as they are numbers, strings, tensors or containers of these.

    Example:
        >>> structure_of(nn.ReLU()) == structure_of(nn.ReLU())
        True
        >>> structure_of(nn.ReLU()) == structure_of(nn.ReLU(inplace=True))
        False
    """
    kind = type(module)
    own = [vars(base) for base in kind.__mro__ if not base.__module__.startswith("torch.") and base is not object]
    code = [_function_text(value) for table in own for value in table.values() if isinstance(value, types.FunctionType)]
    attributes = [
        f"{name}={_text(value, DEPTH)}"
        for name, value in sorted(module.__dict__.items())
        if name not in _MODULE_INTERNALS and not isinstance(value, torch.Tensor)
    ]
    return "|".join([f"{kind.__module__}.{kind.__qualname__}", *code, *attributes])


def _text(value: object, depth: int) -> str:
    """Text of a value that changes when it does, for simple values, tensors, functions and containers of these."""
    if isinstance(value, _SIMPLE):
        return repr(value)
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor):
        return tensor_digest(value)
    if isinstance(value, np.ndarray | np.generic):
        return _digest(repr((value.dtype, value.shape)).encode() + value.tobytes())
    if isinstance(value, nn.Module | type | types.ModuleType) or depth == 0:
        return f"<{name}>"
    if isinstance(value, types.MethodType):
        return _function_text(value.__func__, depth - 1)
    if isinstance(value, types.FunctionType):
        return _function_text(value, depth - 1)
    if isinstance(value, tuple | list | set | frozenset):
        return f"{name}({', '.join(_text(item, depth - 1) for item in value)})"
    fields = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return f"{name}{{{', '.join(f'{_text(key, 1)}: {_text(item, depth - 1)}' for key, item in fields.items())}}}"


def _function_text(function: Callable[..., object], depth: int = DEPTH) -> str:
    """Code of a function with its defaults and the simple values that it reads from outside."""
    if not isinstance(function, types.FunctionType):
        return repr(function)
    code = function.__code__
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY_CELL]
    outside = [function.__globals__.get(name) for name in code.co_names]
    read = [value for value in outside if isinstance(value, (*_SIMPLE, torch.Tensor, tuple, list, dict))]
    values = ", ".join(_text(value, depth - 1) if depth > 0 else "" for value in [function.__defaults__, *cells, *read])
    return f"{_code_text(code)}({values})"


def _code_text(code: types.CodeType) -> str:
    constants = ", ".join(
        _code_text(item) if isinstance(item, types.CodeType) else repr(item) for item in code.co_consts
    )
    return f"{code.co_name}:{code.co_code.hex()}:{constants}:{code.co_names}"


def tensor_digest(tensor: torch.Tensor) -> str:
    """Digest of a tensor's shape, element type and values."""
    if tensor.is_meta or tensor.is_quantized or tensor.layout != torch.strided or tensor.is_sparse:
        return f"{tensor.layout} {tensor.device}"
    values = tensor.detach().to("cpu").contiguous()
    header = f"{tuple(values.shape)} {values.dtype} ".encode()
    return _digest(header + values.reshape(-1).view(torch.uint8).numpy().tobytes())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
