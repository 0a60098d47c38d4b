"""Modules that keep nothing: whatever a block remembers of one record could leave with the next."""

import functools
import hashlib
import logging
import pathlib
import pickle
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import nn

_SIMPLE = (bool, int, float, complex, str, bytes, bytearray, types.NoneType)
_OPAQUE = (type, types.ModuleType, torch.dtype, torch.device, logging.Logger)
_WORDS = frozenset(_SIMPLE)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_AS_NUMPY = frozenset((torch.float32, torch.float64, torch.int64, torch.int32, torch.bool))
_GENERATORS = (torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)
_MADE_BY_PYTHON = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: a class that a class statement made, whose instances hold what is in __dict__ and slots."""
_COMPILER_MARKS = [("_dynamo_static_input_type", kind) for kind in ("guarded", "unguarded")]
"""What torch.compile leaves on parameters when it first runs."""
_CONTAINERS_OF_PYTHON = frozenset((dict, list, set))
_LIBRARIES = {"builtins", "collections", "numpy", "torch"}
_EMPTY = {name for name, value in vars(nn.Identity()).items() if isinstance(value, dict)}
"""Tables that every torch module holds, mostly empty ones."""


def run_stateless(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Run a module without gradient on a copy of the inputs, and refuse one that changes itself meanwhile.

    Args:
        module: the module, in the mode in which it is meant to run.
        inputs: shape (batch, ...); left as they are.

    Returns:
        The module's output, without gradient.

    Raises:
        ValueError: naming the block that changed itself.

    Guarantee:
        Nothing that the module or its parts hold differs after the call, bit for bit: parameters, buffers (persistent
        or not) with their gradients, layout in memory and all of the memory that they are views of, attributes of any
        depth, class attributes, code and closures, and the values and containers among the globals that their own methods
        name. Outside the claim: files, other globals, generators, locks and what else pickle cannot write, compiled
        extensions and scripted objects, classes, modules and loggers that are held as values, and which of several equal
        numbers or texts is the same object as which.

    Edge cases:
        BatchNorm in train mode is refused; a module that counts its calls is refused too.

    Example:
        >>> run_stateless(nn.ReLU(), torch.tensor([[-1.0, 2.0]]))
        tensor([[0., 2.]])
    """
    return run_stateless_over(module, [inputs])[0]


def run_stateless_over(module: nn.Module, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``run_stateless`` on one batch after the other; what is kept is looked for once, after the last.

    Args:
        module: see ``run_stateless``.
        batches: in the order in which they run; left as they are. An output can depend on its own batch and on earlier
            ones, never on later ones: what may leave comes first.

    Returns:
        One output per batch.

    Raises:
        ValueError: naming the block that changed itself.

    Example:
        >>> run_stateless_over(nn.ReLU(), [torch.tensor([-1.0]), torch.tensor([2.0])])
        [tensor([0.]), tensor([2.])]
    """
    before = _snapshots(module)
    with torch.no_grad():
        outputs: list[torch.Tensor] = [module(batch.clone()) for batch in batches]
    after = _snapshots(module)
    for name, snapshot in before.items():
        if after.get(name) != snapshot:
            where = f"head block {name}" if name else "the head"
            raise ValueError(
                f"{where} changed itself while running: what it kept may be another record; remove the state"
            )
    return outputs


def holdings_digest(module: nn.Module) -> bytes:
    """A digest of all that ``run_stateless`` compares: equal where a module and its parts hold the same, bit for bit.

    Example:
        >>> holdings_digest(nn.ReLU()) == holdings_digest(nn.ReLU()) != holdings_digest(nn.ReLU(inplace=True))
        True
    """
    digest = hashlib.blake2b(digest_size=32)
    for name, snapshot in _snapshots(module).items():
        for part in (name.encode(), *snapshot):
            digest.update(b"%d;" % len(part))
            digest.update(part)
    return digest.digest()


def _snapshots(module: nn.Module) -> dict[str, list[bytes]]:
    """What each block holds, by name, then of the module itself under the empty name."""
    seen: dict[int, tuple[int, object]] = {}  # number and object; the object is held, so that no id is used twice
    return {name: _snapshot(part, seen) for name, part in [*module.named_children(), ("", module)]}


def _snapshot(root: object, seen: dict[int, tuple[int, object]]) -> list[bytes]:
    """Type, values and links of everything that is reached from ``root`` and not yet seen."""
    found: list[bytes] = []
    waiting = [root]
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if _is_word(value) or isinstance(value, _OPAQUE):
            found.append(f"{kind.__qualname__}={value!r};".encode())
        elif id(value) in seen:
            found.append(b"%d;" % seen[id(value)][0])
        else:
            seen[id(value)] = (len(seen), value)
            held = _held(value)
            found.append(f"{kind.__qualname__}*{len(held)};".encode() + _data(value))
            shown: list[object] = []
            for part in held:
                if _is_word(part):
                    shown.append(part)
                elif _is_of_words(part):  # which object it is counts: a list of two such objects can spell a record
                    shown.append((seen.setdefault(id(part), (len(seen), part))[0], part))
                else:
                    shown.append(...)
                    waiting.append(part)
            found.append(repr(shown).encode())
    return found


def _is_word(value: object) -> bool:
    """Whether its repr says all of it: exact plain types; the bits of a NaN do not show."""
    return type(value) in _WORDS and value == value


def _is_of_words(value: object) -> bool:
    """Whether its repr says what is in it: a tuple of words, or a container with nothing in it."""
    kind = type(value)
    if kind is tuple:
        return all(map(_is_word, value))  # type: ignore[call-overload]  # it is a tuple
    return kind in _CONTAINERS_OF_PYTHON and not value


def _data(value: object) -> bytes:
    """What a value says by itself: the numbers of a tensor or an array, the bits of a number, what pickle writes."""
    if isinstance(value, torch.Tensor):
        return _tensor_bytes(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return b"" if value.dtype == object else f"{value.shape}{value.dtype}".encode() + value.tobytes()
    for kind in _SIMPLE:
        if isinstance(value, kind):  # NaN, or a subclass, whose own repr may say anything
            bits = np.array(value, dtype=complex).tobytes() if kind in (float, complex) else b""
            return bits + kind.__repr__(value).encode()  # type: ignore[call-arg]  # of an instance
    if isinstance(value, types.FunctionType):
        return value.__code__.co_code if _is_own(value) else b""
    if _is_path(value):
        return str(value).encode()
    if isinstance(value, torch.ScriptObject) or _is_generator(value) or _is_transparent(value):
        return b""
    try:
        return pickle.dumps(value)
    except Exception:  # a lock, a handle: what pickle cannot write lies outside the claim
        return b""


def _is_path(value: object) -> bool:
    """Whether it is a path of the standard library: what it keeps beside its text is computed from that."""
    return isinstance(value, pathlib.PurePath) and type(value).__module__.partition(".")[0] == "pathlib"


def _is_generator(value: object) -> bool:
    """Whether it is a generator of a library, whose state lies outside the claim; a user's subclass is looked into."""
    return isinstance(value, _GENERATORS) and (type(value) is random.Random or not _is_own(type(value)))


def _is_transparent(value: object) -> bool:
    """Whether ``_held`` looks into it, and nothing of it lies where only its own methods reach."""
    if isinstance(value, (nn.Module, torch.Tensor, dict, Mapping, *_CONTAINERS, types.MethodType, functools.partial)):
        return True
    return all(
        kind.__flags__ & _MADE_BY_PYTHON
        and any("__dict__" in vars(k) or "__slots__" in vars(k) for k in kind.__mro__[:-1])
        for kind in type(value).__mro__[:-1]
    )


def _held(value: object) -> list[object]:
    """What a value holds one level down."""
    held: list[object] = []
    if isinstance(value, nn.Module):
        pass  # all of it is in __dict__
    elif isinstance(value, (dict, Mapping)):
        held += [*value.keys(), *value.values()]
    elif isinstance(value, _CONTAINERS):
        held += value
        if isinstance(value, deque):
            held.append(value.maxlen)
    elif isinstance(value, torch.Tensor):
        if value.is_leaf and value.grad is not None:
            held.append(value.grad)
        if value._backward_hooks:
            held.append(value._backward_hooks)
    elif isinstance(value, np.ndarray):
        held += value.tolist() if value.dtype == object else []
        held.append(value.base)
    elif isinstance(value, types.BuiltinMethodType):
        held.append(value.__self__)
    elif isinstance(value, types.MethodType):
        held += [value.__self__, value.__func__]
    elif isinstance(value, functools.partial):
        held += [value.func, value.args, value.keywords]
    elif isinstance(value, types.FunctionType):
        held += _held_by_function(value)
    if _is_path(value) or _is_generator(value):
        return held
    held += [
        part
        for name, kept in getattr(value, "__dict__", {}).items()
        if (name not in _EMPTY or kept) and (name, kept) not in _COMPILER_MARKS
        for part in (name, kept)
    ]
    if _is_own(type(value)):
        for base in filter(_is_own, type(value).__mro__):
            slots = base.__dict__.get("__slots__", ())
            held += [getattr(value, name, None) for name in ((slots,) if isinstance(slots, str) else slots)]
            held += [part for name, kept in vars(base).items() if not name.startswith("__") for part in (name, kept)]
    return held


def _is_own(code: type | types.FunctionType) -> bool:
    return str(code.__module__).partition(".")[0] not in _LIBRARIES


def _held_by_function(function: types.FunctionType) -> Iterator[object]:
    if not _is_own(function):
        return
    yield from (function.__defaults__, function.__kwdefaults__, function.__code__.co_consts)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not yet filled
            yield None
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, (*_SIMPLE, *_CONTAINERS, dict, torch.Tensor, np.ndarray)):
            yield name
            yield value


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    values = tensor.detach()
    wants_gradient = tensor.requires_grad and tensor.is_leaf  # of what is computed anew the mode decides
    try:
        header = f"{tuple(values.shape)} {values.dtype} {values.device} {wants_gradient}".encode()
        if values.is_meta:
            return header
        if values.layout != torch.strided or values.is_quantized or values.is_nested:
            return header + _compared(values)
        memory = values.untyped_storage()
        laid = f"{values.stride()} {values.storage_offset()} {values.is_neg()} {values.is_conj()}".encode()
        if memory.nbytes() > values.numel() * values.element_size():  # what lies beside a view is kept as well
            whole = torch.empty(0, dtype=torch.uint8, device=values.device).set_(memory)
            return header + laid + whole.cpu().numpy().tobytes()
        if values.dtype in _AS_NUMPY and values.is_cpu and not values.is_neg():
            return header + laid + values.numpy().tobytes()
        return header + laid + _compared(values)
    except RuntimeError as error:
        line = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"the head holds a tensor of {values.dtype} whose values cannot be read ({line}): nobody could tell whether it "
            "kept a record; hold ordinary tensors"
        ) from error


def _compared(values: torch.Tensor) -> bytes:
    if values.is_quantized:
        values = values.int_repr()
    if values.layout != torch.strided:
        values = values.to_dense()
    values = values.resolve_conj().resolve_neg().cpu().contiguous()
    return values.reshape(-1).view(torch.uint8).numpy().tobytes()
