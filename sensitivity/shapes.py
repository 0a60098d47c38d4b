"""Reading and checking of input shapes, input boxes and budgets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

MAX_ENTRIES = 2**27
InputBox = tuple[Any, Any]


def parse_input_shape(input_shape: int | Sequence[int]) -> tuple[int, ...]:
    """Read the shape of one record.

    Args:
        input_shape: positive integers, batch dimension excluded; an int stands for a vector.

    Returns:
        The shape as a tuple.

    Raises:
        ValueError: if it is empty or holds something other than positive integers.

    Example:
        >>> parse_input_shape([1, 28, 28])
        (1, 28, 28)
    """
    sizes = (input_shape,) if isinstance(input_shape, int) else input_shape
    is_sequence = isinstance(sizes, Sequence) and not isinstance(sizes, str | bytes)
    if not is_sequence or len(sizes) == 0 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
        raise ValueError(
            f"input_shape={input_shape!r} is no shape of a record: it takes one or more positive integers, batch "
            "dimension excluded; pass for example (1, 28, 28)"
        )
    if math.prod(sizes) > MAX_ENTRIES:
        raise ValueError(
            f"input_shape={input_shape!r} has more than 2^27 entries: bounds of such records do not fit in "
            "memory; pass the shape of one record"
        )
    return tuple(int(n) for n in sizes)


def parse_input_box(
    input_box: InputBox | None, *, input_shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Read the box that inputs lie in.

    Args:
        input_box: (low, high), each a number or a tensor that broadcasts to `input_shape`, in the input's units; or
            None.
        input_shape: shape of one record.

    Returns:
        Two float64 tensors of that shape, or None.

    Raises:
        ValueError: unless low ≤ high everywhere and neither holds NaN.

    Edge cases: low equal to high is a point; infinite sides are allowed.

    Example:
        >>> parse_input_box((-1.0, 2.0), input_shape=(2,))[0].tolist()
        [-1.0, -1.0]
    """
    if input_box is None:
        return None
    if not isinstance(input_box, tuple | list) or len(input_box) != 2:
        raise ValueError(
            f"input_box={input_box!r} is no box: it takes a pair (low, high); pass two numbers or two tensors"
        )
    sides = []
    for name, side in zip(("low", "high"), input_box, strict=True):
        try:
            tensor = torch.as_tensor(side, dtype=torch.float64, device="cpu")
            sides.append(tensor.broadcast_to(input_shape))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"input_box's {name} does not fit records of shape {input_shape}: it must be a number or broadcast to "
                "that shape; reshape it"
            ) from error
    low, high = sides
    if not bool((low <= high).all()):
        raise ValueError(
            "input_box has low > high or NaN somewhere: a box needs low <= high everywhere; swap or repair its sides"
        )
    return low, high


def is_positive_finite(number: object) -> bool:
    """Whether something is a Python number above 0 that float64 can hold.

    Example:
        >>> is_positive_finite(0.5), is_positive_finite(10**400), is_positive_finite(True)
        (True, False, False)
    """
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    try:
        return math.isfinite(number) and number > 0
    except OverflowError:
        return False


def require_budget(budget_s: float) -> float:
    """Check a time budget.

    Raises:
        ValueError: unless it is a positive finite number of seconds.

    Example:
        >>> require_budget(10.0)
        10.0
    """
    if not is_positive_finite(budget_s):
        raise ValueError(
            f"budget_s={budget_s!r} is no budget: it must be a positive finite number of seconds; pass for example 10.0"
        )
    return float(budget_s)
