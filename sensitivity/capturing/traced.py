"""The tensor that a recording passes through a head: it stands for data, has shapes, and has no values.

Whatever would carry values past the dispatcher (NumPy, lists, storages, pickles) is refused here, and the refusal stays
with the recording even if the head swallows the exception.
"""

# ruff: noqa: ANN401  (arguments of recorded operators have no narrower type)
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from sensitivity.errors import UnsupportedModuleError

_VALUE_METHODS = (
    *("numpy", "tolist", "__array__", "__dlpack__", "__dlpack_device__", "data_ptr", "storage", "untyped_storage"),
    *("_typed_storage", "__reduce_ex__", "__deepcopy__", "__copy__"),
)


class Traced(torch.Tensor):
    """A tensor without values that stands for data which depends on the input.

    Attributes:
        blanks: tensors on the meta device that carry its shape and layout, one per batch size recorded side by side.
        node: index of the operator that made its present value.
        version: writes to its memory when that value was made.
        refuse: refuses for the recording, with the name of what was tried.
    """

    blanks: tuple[torch.Tensor, ...]
    node: int
    version: int
    refuse: Callable[[str], NoReturn]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type[Traced],
        blanks: tuple[torch.Tensor, ...],
        *,
        sizes: tuple[Any, ...],
        node: int,
        device: torch.device,
        refuse: Callable[[str], NoReturn],
    ) -> Traced:
        """Wrap blanks; `sizes` are those that the head sees."""
        made: Traced = torch.Tensor._make_wrapper_subclass(
            cls,
            sizes,
            strides=blanks[0].stride(),
            storage_offset=blanks[0].storage_offset(),
            dtype=blanks[0].dtype,
            device=device,
            requires_grad=False,
        )
        made.blanks, made.node, made.version, made.refuse = blanks, node, 0, refuse
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to add: `__new__` has made the tensor."""

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The same value; setting it would bypass the dispatcher, so that is an error."""
        return self.detach()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls: type[Traced],
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        raise UnsupportedModuleError(
            f"{func} ran on a recorded value outside the recording: the head kept its input or moved it to another "
            "thread; remove that"
        )


def _refusing(name: str) -> Callable[..., NoReturn]:
    def method(self: Traced, *args: Any, **kwargs: Any) -> NoReturn:
        self.refuse(name)

    return method


for _name in _VALUE_METHODS:
    setattr(Traced, _name, _refusing(_name))
