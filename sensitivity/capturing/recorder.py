"""The dispatch mode that writes a recording: it follows traced values and runs everything else."""

# ruff: noqa: ANN401  (arguments of recorded operators have no narrower type)
from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sensitivity.capturing.composites import Composites
from sensitivity.capturing.recording import INPUT, PIECES, SIZED, Node, Ref, leaves_of, map_leaves, place_of
from sensitivity.capturing.symbolic import SYMBOLIC_NUMBERS, AnyBatchSize, refusing_to_reveal
from sensitivity.capturing.traced import Traced
from sensitivity.errors import UnsupportedModuleError

_READS_VALUES = {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "masked_select", "unique"}
_KEEPS_SHAPE = ("relu", "tanh", "sigmoid", "neg", "abs", "silu", "gelu", "leaky_relu", "elu", "hardtanh")
_ARITHMETIC = ("add", "sub", "mul", "div")
_COPIES = ("clone", "_to_copy", "contiguous")
_UNINITIALISED = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operator that touches a traced value; runs the rest."""

    def __init__(
        self, head: torch.nn.Module, *, sizes: tuple[int, ...], symbol: AnyBatchSize | None, scattered: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.head, self.sizes, self.symbol, self.scattered = head, sizes, symbol, scattered
        self.nodes: list[Node] = []
        self.refusal: UnsupportedModuleError | None = None
        self._failed = ""
        self._names = {id(module): name for name, module in head.named_modules()}
        self._versions: dict[int, int] = {}
        self._made_here: dict[int, torch.Tensor] = {}
        self._alive: list[torch.Tensor] = []

    def run(self, input_shape: tuple[int, ...], dtype: torch.dtype) -> Traced:
        """Run the head on a traced batch and return its output."""
        device = next((t.device for t in (*self.head.parameters(), *self.head.buffers())), torch.device("cpu"))
        blanks = tuple(torch.empty((size, *input_shape), dtype=dtype, device="meta") for size in self.sizes)
        self.nodes.append(Node(op=INPUT, shape=tuple(blanks[0].shape), dtype=dtype, module=type(self.head).__name__))
        data = self._fresh(blanks, INPUT, device, shared=False)
        name = type(self.head).__name__
        watched = contextlib.nullcontext() if self.symbol is None else refusing_to_reveal(self._refuse_reveal)
        try:
            with torch.no_grad(), watched, self, Composites(self):
                output = self.head(data)
        except (Exception, SystemExit) as error:  # a head may fail in any way; all of them are refusals
            if self.refusal is not None:
                raise self.refusal from error
            if isinstance(error, UnsupportedModuleError):
                raise
            reason = " ".join(str(error).split())[:300]
            raise UnsupportedModuleError(
                f"head ({name}) does not run on a batch of inputs of shape {input_shape} "
                f"({type(error).__name__}: {reason}): it must map such a batch to one tensor without reading input "
                "values; input_shape excludes the batch dimension"
            ) from error
        if self.refusal is not None:
            raise self.refusal
        if self.symbol is not None and self.symbol.was_inspected():
            self.refuse(
                "branches on the batch size", "a bound must hold for any batch size", "make forward independent of it"
            )
        if self._failed:
            self.refuse(
                f"goes on after an operator failed ({self._failed})",
                "a recorded batch may fail where a real one does not",
                "do not catch errors in forward",
            )
        if not isinstance(output, Traced):
            raise UnsupportedModuleError(
                f"head ({name}) returns a {type(output).__name__} that is no tensor computed from its input: a bound "
                "needs one output tensor; return just that tensor"
            )
        self.require_current(output)
        return output

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        args = self._without_size(name, args)
        if name == "index":
            args = (args[0], _positions(args[1]), *args[2:])
        leaves = list(leaves_of((args, kwargs)))
        if any(isinstance(leaf, SYMBOLIC_NUMBERS) for leaf in leaves):
            self.refuse(
                f"computes with the batch size ({name})",
                "a bound must hold for any batch size",
                "make forward independent of it",
            )
        if name.startswith("_scaled_dot_product") or name.startswith("scaled_dot_product"):
            self.refuse(
                f"multiplies values that all depend on the input ({name})",
                "attention has no finite sensitivity over all inputs",
                "exchange before it, or bound the operator with register_bound",
            )
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.refuse(
                f"draws random numbers ({name})",
                "a random head has no fixed sensitivity",
                "call .eval(), or use a layer that draws none even then (LeakyReLU for RReLU, MaxPool for fractional ones)",
            )
        if torch.Tag.inplace_view in func.tags and name != "detach_":
            self.refuse(
                f"changes the shape of a value in place ({name})",
                "the sizes that the head sees afterwards are not followed",
                "use the operator that returns a new tensor",
            )
        written = _written_arguments(func, args, kwargs)
        if any(isinstance(leaf, Traced) for leaf in leaves):
            return self._on_data(func, name, args, kwargs, written, overload=func._overloadname)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return self._on_constants(func, name, args, kwargs, written, tensors)

    def record_whole(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Write a function down as one operator, whatever it consists of; it must return a new tensor."""

        def on_shapes(*blanks: Any) -> Any:
            with _disable_current_modes():
                return function(*blanks)

        return self._on_data(on_shapes, name, args, {}, [])

    def require_current(self, value: Traced) -> None:
        """Refuse a value whose memory was since overwritten through another view."""
        if value.version != self._versions.get(_storage(value.blanks[0]), 0):
            self.refuse(
                "reads memory that an in-place operator changed through another view",
                "such updates are not followed",
                "use the operator that returns a new tensor",
            )

    def refuse(self, what: str, rule: str, fix: str) -> NoReturn:
        """Raise, and remember the refusal in case the head swallows it."""
        path, module = self._where()
        self.refusal = UnsupportedModuleError(f"{place_of(path, module)} {what}: {rule}; {fix}")
        raise self.refusal

    def _refuse_read(self, name: str) -> NoReturn:
        self.refuse(
            f"reads a value of its input ({name})", "what it computes would depend on data", "use tensor operators"
        )

    def _refuse_reveal(self, name: str) -> NoReturn:
        self.refuse(
            f"prints or looks up the batch size ({name})",
            "a bound must hold for any batch size",
            "make forward independent of it",
        )

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

    def _without_size(self, name: str, args: Any) -> Any:
        """Arguments with the first size replaced, where it is the unknown batch size."""
        if (
            self.symbol is None
            or name not in SIZED
            or not (len(args) > 1 and isinstance(args[1], list | tuple) and args[1])
        ):
            return args
        return (args[0], [_BATCH, *args[1][1:]], *args[2:]) if self.symbol.is_size(args[1][0]) else args

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
                self.refuse(
                    f"writes to its own weights or buffers in forward ({name})",
                    "the next release would come from another head",
                    "call .eval() or move the update out of forward",
                )
        result = func(*args, **kwargs)
        known = {_storage(tensor) for tensor in tensors}
        for made in leaves_of(result):
            if isinstance(made, torch.Tensor) and _storage(made) not in known:
                self._made_here[_storage(made)] = made
        if name in _UNINITIALISED:
            _poison(result)
        return result

    def _on_data(self, func: Any, name: str, args: Any, kwargs: Any, written: list[Any], *, overload: str = "") -> Any:
        traced = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Traced)]
        if name == "prim::device":
            return traced[0].device
        for value in traced:
            self.require_current(value)
        if name in _READS_VALUES:
            self._refuse_read(name)
        if written and not (len(written) == 1 and written[0] is args[0] and isinstance(args[0], Traced)):
            self.refuse(
                f"writes into a second tensor ({name})",
                "only plain in-place operators are followed",
                "return a new tensor",
            )
        results = self._on_blanks(func, name, args, kwargs, is_mutable=bool(written))
        path, module = self._where()
        refs_args, refs_kwargs = map_leaves(_to_ref, (args, kwargs))
        parents = tuple(dict.fromkeys(value.node for value in traced))
        is_many, is_cut = isinstance(results[0], tuple | list), name in PIECES
        flat = list(zip(*results, strict=True)) if is_many else [tuple(results)]
        if written and not (flat and isinstance(flat[0][0], torch.Tensor)):
            self.refuse(
                f"writes into a value and does not return it ({name})",
                "only plain in-place operators are followed",
                "return a new tensor",
            )
        known = {_storage(value.blanks[0]) for value in traced}
        outputs: list[Any] = []
        for position, made in enumerate(flat):
            if made[0] is None:
                outputs.append(None)
                continue
            if not isinstance(made[0], torch.Tensor):
                self._refuse_read(name)
            self.nodes.append(
                Node(
                    op=_functional_name(name, bool(written)) + (f"[{position}]" if position and not is_cut else ""),
                    overload=overload,
                    parents=parents,
                    args=tuple(refs_args),
                    kwargs={**refs_kwargs, "piece": position} if is_cut else dict(refs_kwargs),
                    shape=tuple(made[0].shape),
                    dtype=made[0].dtype,
                    path=path,
                    module=module,
                )
            )
            if written:
                outputs.append(self._overwritten(args[0], made[0], name))
            else:
                outputs.append(self._fresh(made, name, traced[0].device, shared=_storage(made[0]) in known))
        return type(results[0])(outputs) if is_many else outputs[0]

    def _on_blanks(self, func: Any, name: str, args: Any, kwargs: Any, *, is_mutable: bool) -> list[Any]:
        """Run an operator on shapes, once per batch size."""
        if not is_mutable and _keeps_shape(name, args):  # spares slow shape rules that say the same
            return [_another(blank) for blank in args[0].blanks]
        results = []
        for index, size in enumerate(self.sizes):
            inner_args, inner_kwargs = map_leaves(lambda leaf: _to_blank(leaf, index, size), (args, kwargs))  # noqa: B023
            try:
                results.append(func(*inner_args, **inner_kwargs))
            except Exception as error:
                if name != "view" or not self.scattered:
                    self._failed = f"{name}: {' '.join(str(error).split())[:200]}"
                    raise
                # A real tensor of this layout would fail too; one of a friendlier layout would share its memory.
                blank = inner_args[0]
                shape = torch.empty(blank.shape, device="meta").view(inner_args[1]).shape
                contiguous = torch.empty(shape, device="meta").stride()
                results.append(blank.as_strided(shape, contiguous, blank.storage_offset()))
        return results

    def _overwritten(self, target: Traced, made: torch.Tensor, name: str) -> Traced:
        if made.shape != target.blanks[0].shape or made.dtype != target.dtype:
            self.refuse(
                f"changes a shape in place ({name})",
                "only elementwise in-place operators are followed",
                "return a new tensor",
            )
        key = _storage(target.blanks[0])
        self._versions[key] = self._versions.get(key, 0) + 1
        target.version, target.node = self._versions[key], len(self.nodes) - 1
        return target

    def _fresh(self, made: tuple[torch.Tensor, ...], name: str, device: torch.device, *, shared: bool) -> Traced:
        """Wrap a result; its memory is its own unless it is shared with an argument."""
        if self.scattered and not shared and name not in _COPIES:
            made = tuple(_scattered(blank) for blank in made)
        self._alive.extend(made)  # keeps storages alive, so that no address is used twice
        value = Traced(
            made, sizes=self._seen_sizes(made, name), node=len(self.nodes) - 1, device=device, refuse=self._refuse_read
        )
        value.version = self._versions.get(_storage(made[0]), 0)
        return value

    def _seen_sizes(self, made: tuple[torch.Tensor, ...], name: str) -> tuple[Any, ...]:
        """Sizes that the head sees: the unknown batch size first, if results for two sizes differ there alone."""
        shapes = [tuple(blank.shape) for blank in made]
        if self.symbol is None or shapes[0] == shapes[1]:
            return shapes[0]
        batched = all(shape[:1] == (size,) for shape, size in zip(shapes, self.sizes, strict=True))
        if not batched or shapes[0][1:] != shapes[1][1:] or made[0].stride() != made[1].stride():
            self.refuse(
                f"spreads the batch over other dimensions ({name})",
                "records mix or the batch dimension moves",
                "keep the batch as the first dimension and treat records one by one",
            )
        return (self.symbol.size, *shapes[0][1:])


_BATCH = object()  # stands for the unknown batch size among recorded arguments


def _keeps_shape(name: str, args: Any) -> bool:
    """Whether an operator surely gives a new tensor of its first argument's shape, element type and layout."""
    if not isinstance(args[0], Traced) or not args[0].is_floating_point():
        return False
    if name in _KEEPS_SHAPE:
        return True
    if name not in _ARITHMETIC or len(args) != 2:
        return False
    other = args[1]
    if not isinstance(other, torch.Tensor):
        return isinstance(other, int | float)
    is_constant = not isinstance(other, Traced) and other.dtype == args[0].dtype
    data = args[0].blanks[0].shape
    tail = data[len(data) - other.ndim :]
    return is_constant and other.ndim < len(data) and all(n in (1, m) for n, m in zip(other.shape, tail, strict=True))


def _functional_name(name: str, in_place: bool) -> str:
    """Name of the operator that returns a new tensor; one of another library may differ from its in-place namesake."""
    return name[:-1] if in_place and name.endswith("_") and "::" not in name else name


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written_arguments(func: Any, args: Any, kwargs: Any) -> list[Any]:
    written: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written.extend(leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor))
    return written


def _to_blank(leaf: Any, index: int, size: int) -> Any:
    """The argument of one batch size's run on shapes."""
    if isinstance(leaf, Traced):
        return leaf.blanks[index]
    if isinstance(leaf, torch.Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    if leaf is _BATCH:
        return size
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _positions(indices: Any) -> list[Any]:
    """Indices with constant masks as the positions that they select, as torch reads them; shapes alone cannot say."""
    found: list[Any] = []
    for index in indices:
        is_mask = isinstance(index, torch.Tensor) and not isinstance(index, Traced) and index.dtype == torch.bool
        found.extend(index.nonzero(as_tuple=True) if is_mask else [index])
    return found


def _to_ref(leaf: Any) -> Any:
    """The argument as recorded; constants are copied, since the head may overwrite them after use."""
    if isinstance(leaf, Traced):
        return Ref(leaf.node)
    if leaf is _BATCH:
        return "batch"
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _another(blank: torch.Tensor) -> torch.Tensor:
    """New memory of the same shape and layout."""
    return torch.empty_strided(blank.shape, blank.stride(), dtype=blank.dtype, device="meta")


def _scattered(blank: torch.Tensor) -> torch.Tensor:
    """The same shape with every second element of memory left out and the first dimension innermost."""
    strides, step = [], 2
    for size in blank.shape:
        strides.append(step)
        step *= max(size, 1)
    return torch.empty_strided(blank.shape, strides, dtype=blank.dtype, device="meta")


def _poison(result: Any) -> None:
    """Fill uninitialised memory with what no bound accepts, so that a head which reads it is refused."""
    for made in leaves_of(result):
        if isinstance(made, torch.Tensor) and made.dtype != torch.bool:
            made.fill_(float("nan") if made.is_floating_point() or made.is_complex() else torch.iinfo(made.dtype).max)
