"""What a head computes: its operators on a batch of records, recorded from one run on tensors that have no values.

The run goes through torch's dispatcher below every Python layer, so subclasses, functional calls, parametrisations and
in-place operators are all seen as the operators that really execute. Operators on weights alone run for real, so
effective weights come out; operators that touch the input run on shapes only. A head that tries to read a value of its
input, draws randomness or writes to its own weights is refused before that happens, so a recording leaves the head as
it was.
"""

# ruff: noqa: ANN401  (arguments of recorded operators have no narrower type)
from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sensitivity.errors import UnsupportedModuleError

BATCH_SIZE = 13  # no ordinary layer has 13 channels by accident; other sizes are compared by `batching`
INPUT = "input"
_READS_VALUES = {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "masked_select", "unique"}


@dataclass(frozen=True)
class Ref:
    """A value that depends on the input: the index of the node that made it."""

    index: int


@dataclass(frozen=True, kw_only=True)
class Node:
    """One operator that ran on data.

    Attributes:
        op: functional name of the operator, such as "convolution"; "input" for the input itself.
        overload: the overload's name, such as "Tensor".
        parents: nodes whose values it read.
        args: positional arguments; a `Ref` for each value, tensors for constants.
        kwargs: keyword arguments, likewise.
        shape: shape of the result, batch first.
        dtype: its element type.
        path: module path inside the head ("" for the head itself).
        module: class name of that module.
    """

    op: str
    overload: str = ""
    parents: tuple[int, ...] = ()
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    path: str = ""
    module: str = ""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The operators of one run, in order.

    Attributes:
        nodes: all operators; node 0 is the input.
        output: index of the node that the head returned.
        batch_size: records in the batch.
    """

    nodes: tuple[Node, ...]
    output: int
    batch_size: int

    def reachable(self) -> list[int]:
        """Indices of the nodes that the output depends on, in order."""
        wanted, stack = set[int](), [self.output]
        while stack:
            index = stack.pop()
            if index not in wanted:
                wanted.add(index)
                stack.extend(self.nodes[index].parents)
        return sorted(wanted)


def place_of(path: str, module: str) -> str:
    """Words that name a place in a head, for messages.

    Example:
        >>> place_of("0.conv", "Conv2d")
        "head layer '0.conv' (Conv2d)"
    """
    return f"head layer {path!r} ({module})" if path else f"head ({module})"


def record(
    head: torch.nn.Module, *, input_shape: tuple[int, ...], dtype: torch.dtype, batch_size: int = BATCH_SIZE
) -> Recording:
    """Record the operators that a head applies to a batch.

    Args:
        head: the module, in the mode in which it will release.
        input_shape: shape of one record, batch dimension excluded.
        dtype: element type of the input.
        batch_size: records in the batch.

    Returns:
        The recording.

    Raises:
        UnsupportedModuleError: if the head reads values of its input, draws random numbers, writes to its weights or
            buffers, updates a view in place and reads the rest, or returns anything but one tensor that depends on its
            input.
        ValueError: if the head does not run on this shape.

    Guarantee: values of the recorded run that depend on the input do so through the recorded operators alone. The
        head, its gradients and the random states stay as they were.
    """
    recorder = _Recorder(head)
    shape = (batch_size, *input_shape)
    device = next((t.device for t in (*head.parameters(), *head.buffers())), torch.device("cpu"))
    blank = torch.empty(shape, dtype=dtype, device="meta")
    recorder.nodes.append(Node(op=INPUT, shape=shape, dtype=dtype, module=type(head).__name__))
    data = _Traced(blank, 0, device)
    try:
        with torch.no_grad(), recorder:
            output = head(data)
    except UnsupportedModuleError:
        raise
    except Exception as error:
        if recorder.refusal is not None:
            raise recorder.refusal from error
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedModuleError(
            f"head ({type(head).__name__}) does not run on a batch of inputs of shape {input_shape} "
            f"({type(error).__name__}: {reason}): it must map such a batch to one tensor without reading input values; "
            "input_shape excludes the batch dimension"
        ) from error
    if recorder.refusal is not None:
        raise recorder.refusal
    if not isinstance(output, _Traced):
        raise UnsupportedModuleError(
            f"head ({type(head).__name__}) returns a {type(output).__name__} that is no tensor computed from its "
            "input: a bound needs one output tensor; return just that tensor"
        )
    recorder.require_current(output)
    return Recording(nodes=tuple(recorder.nodes), output=output.node, batch_size=batch_size)


class _Traced(torch.Tensor):
    """A tensor without values that stands for data which depends on the input."""

    blank: torch.Tensor
    node: int
    version: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[_Traced], blank: torch.Tensor, node: int, device: torch.device) -> _Traced:
        made: _Traced = torch.Tensor._make_wrapper_subclass(
            cls,
            blank.shape,
            strides=blank.stride(),
            storage_offset=blank.storage_offset(),
            dtype=blank.dtype,
            device=device,
            requires_grad=False,
        )
        made.blank, made.node, made.version = blank, node, 0
        return made

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The same value; setting it would bypass the dispatcher, so that is an error."""
        return self.detach()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls: type[_Traced],
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        raise UnsupportedModuleError(
            f"{func} ran on a recorded value outside the recording: the head kept its input or moved it to another "
            "thread; remove that"
        )


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operator that touches a traced value; runs the rest."""

    def __init__(self, head: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.head = head
        self.nodes: list[Node] = []
        self.refusal: UnsupportedModuleError | None = None
        self._names = {id(module): name for name, module in head.named_modules()}
        self._versions: dict[int, int] = {}
        self._made_here: dict[int, torch.Tensor] = {}
        self._alive: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        name = func._schema.name.removeprefix("aten::")
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._refuse(
                f"draws random numbers ({name})", "a random head has no fixed sensitivity", "call .eval() or remove it"
            )
        written = _written_arguments(func, args, kwargs)
        if any(isinstance(leaf, _Traced) for leaf in leaves):
            return self._on_data(func, name, args, kwargs, written)
        return self._on_constants(func, name, args, kwargs, written, tensors)

    def require_current(self, value: _Traced) -> None:
        """Refuse a value whose memory was since overwritten through another view."""
        if value.version != self._versions.get(_storage(value.blank), 0):
            self._refuse(
                "reads memory that an in-place operator changed through another view",
                "such updates are not followed",
                "use the operator that returns a new tensor",
            )

    def _refuse(self, what: str, rule: str, fix: str) -> None:
        path, module = self._where()
        self.refusal = UnsupportedModuleError(f"{place_of(path, module)} {what}: {rule}; {fix}")
        raise self.refusal

    def _where(self) -> tuple[str, str]:
        """Path and class of the innermost module whose call is on the Python stack."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name == "_call_impl":
                module = frame.f_locals.get("self")
                if id(module) in self._names:
                    return self._names[id(module)], type(module).__name__
            if frame.f_back is None:
                break
            frame = frame.f_back
        return "", type(self.head).__name__

    def _on_constants(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        written: list[Any],
        tensors: list[torch.Tensor],
    ) -> Any:
        for target in written:
            if _storage(target) not in self._made_here:
                self._refuse(
                    f"writes to its own weights or buffers in forward ({name})",
                    "the next release would come from another head",
                    "call .eval() or move the update out of forward",
                )
        result = func(*args, **kwargs)
        known = {_storage(tensor) for tensor in tensors}
        for made in pytree.tree_leaves(result):
            if isinstance(made, torch.Tensor) and _storage(made) not in known:
                self._made_here[_storage(made)] = made
        return result

    def _on_data(self, func: Any, name: str, args: Any, kwargs: Any, written: list[Any]) -> Any:
        traced = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, _Traced)]
        if name == "prim::device":
            return traced[0].device
        for value in traced:
            self.require_current(value)
        if name in _READS_VALUES:
            self._refuse(
                f"reads a value of its input ({name})", "what it computes would depend on data", "use tensor operators"
            )
        if written and not (len(written) == 1 and written[0] is args[0] and isinstance(args[0], _Traced)):
            self._refuse(
                f"writes into a second tensor ({name})",
                "only plain in-place operators are followed",
                "return a new tensor",
            )
        inner_args, inner_kwargs = pytree.tree_map(_to_inner, (args, kwargs))
        result = func(*inner_args, **inner_kwargs)
        path, module = self._where()
        refs_args, refs_kwargs = pytree.tree_map(_to_ref, (args, kwargs))
        parents = tuple(dict.fromkeys(value.node for value in traced))
        flat, is_many = (list(result), True) if isinstance(result, tuple | list) else ([result], False)
        outputs: list[Any] = []
        for position, made in enumerate(flat):
            if made is None:
                outputs.append(None)
                continue
            if not isinstance(made, torch.Tensor):
                self._refuse(
                    f"reads a value of its input ({name})",
                    "what it computes would depend on data",
                    "use tensor operators",
                )
            self.nodes.append(
                Node(
                    op=_functional_name(name, bool(written)) + (f"[{position}]" if position else ""),
                    overload=func._overloadname,
                    parents=parents,
                    args=tuple(refs_args),
                    kwargs=dict(refs_kwargs),
                    shape=tuple(made.shape),
                    dtype=made.dtype,
                    path=path,
                    module=module,
                )
            )
            outputs.append(self._overwritten(args[0], made, name) if written else self._fresh(made, traced[0].device))
        return type(result)(outputs) if is_many else outputs[0]

    def _overwritten(self, target: _Traced, made: torch.Tensor, name: str) -> _Traced:
        if made.shape != target.shape or made.dtype != target.dtype:
            self._refuse(
                f"changes a shape in place ({name})",
                "only elementwise in-place operators are followed",
                "return a new tensor",
            )
        key = _storage(target.blank)
        self._versions[key] = self._versions.get(key, 0) + 1
        target.version, target.node = self._versions[key], len(self.nodes) - 1
        return target

    def _fresh(self, made: torch.Tensor, device: torch.device) -> _Traced:
        self._alive.append(made)  # keeps storages alive, so that no address is used twice
        value = _Traced(made, len(self.nodes) - 1, device)
        value.version = self._versions.get(_storage(made), 0)
        return value


def _functional_name(name: str, in_place: bool) -> str:
    return name[:-1] if in_place and name.endswith("_") else name


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written_arguments(func: Any, args: Any, kwargs: Any) -> list[Any]:
    written: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written.extend(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return written


def _to_inner(leaf: Any) -> Any:
    if isinstance(leaf, _Traced):
        return leaf.blank
    if isinstance(leaf, torch.Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _to_ref(leaf: Any) -> Any:
    if isinstance(leaf, _Traced):
        return Ref(leaf.node)
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
