"""Bounds that users add for operators of their own, and the check that tries to refute each of them.

A registered bound is a claim that nobody has proven here. Every certification therefore runs the operator on pairs of
records and refuses a claim that some pair beats; what survives is as good as the user's proof.
"""

# ruff: noqa: ANN401  (arguments of recorded operators have no narrower type)
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sensitivity.capturing.recording import Node, Ref, map_leaves
from sensitivity.norms import NormTable, lipschitz_table, tighten
from sensitivity.operators.activations import ACTIVATIONS
from sensitivity.operators.operator import Effort, Operator, Rule, refuse
from sensitivity.operators.refutation import refute

Bound = Callable[[tuple[Any, ...], dict[str, Any], tuple[int, ...], tuple[int, ...]], Any]
_COMPOSED = ("input", "add", "sub", "rsub", "cat", "stack")  # bounded by `composing`, without a rule
_BOUNDS: dict[str, Bound] = {}


def register_bound(name: str, bound: Bound) -> None:
    """Add a bound for an operator that has no rule.

    Args:
        name: the dispatcher's name without overload: "mylib::op", or "op" for one of torch's own ("aten::op").
        bound: called as bound(args, kwargs, input_shape, output_shape) at every certification, with the operator's
            arguments (None in place of the data, tensors for constants) and the shapes of one record. It returns a
            slope, for an elementwise operator, or a 3×3 table over the norms (1, 2, ∞): table[r][s] bounds the output's
            distance in norm s by that of the input in norm r. It may raise ValueError with a reason to refuse.

    Raises:
        ValueError: for a name that is no string, is registered or has a rule, or a bound that cannot be called.

    Guarantee: none of its own. Certificates of heads with this operator hold if the bound does, and if the operator
        treats records one by one; each certification runs it on pairs of records in float64, on the CPU, and refuses
        a bound that some pair beats in any of the nine pairs of norms, and an operator in whose batches of 13 one
        record is seen to move another's output. What it does in float32, or in other batches, is not looked at.

    Edge cases: multi-output operators and those that do not run in float64 on the CPU are refused at certification.

    Example:
        >>> register_bound("mylib::halve", lambda args, kwargs, input_shape, output_shape: 0.5)
        >>> unregister_bound("mylib::halve")
    """
    if not isinstance(name, str) or not name or name != name.strip():
        raise ValueError(f"name={name!r} is no operator's name: pass the dispatcher's, such as 'mylib::op'")
    short = name.removeprefix("aten::")
    if "." in short:
        raise ValueError(f"name={name!r} has an overload: one bound serves all overloads; pass {short.split('.')[0]!r}")
    if short in _BOUNDS:
        raise ValueError(f"{name!r} is registered already: one operator has one bound; call unregister_bound first")
    if short in _names_with_rules():
        raise ValueError(f"{name!r} has a rule of its own: proven rules cannot be replaced; use another operator")
    if not callable(bound):
        raise ValueError(
            f"bound={bound!r} cannot be called: it must map (args, kwargs, input_shape, output_shape) to a slope or a "
            "3×3 table; pass a function"
        )
    _BOUNDS[short] = bound


def unregister_bound(name: str) -> None:
    """Take a registered bound back.

    Raises:
        ValueError: if there is none of that name.

    Example:
        >>> unregister_bound("mylib::unknown")
        Traceback (most recent call last):
            ...
        ValueError: 'mylib::unknown' is not registered: only registered bounds can be taken back; look for a typing error
    """
    if not isinstance(name, str) or _BOUNDS.pop(name.removeprefix("aten::"), None) is None:
        raise ValueError(
            f"{name!r} is not registered: only registered bounds can be taken back; look for a typing error"
        )


def registered_rule(name: str) -> Rule | None:
    """The rule of a registered operator, or None."""
    return _registered if name in _BOUNDS else None


def _registered(node: Node, source: Node, effort: Effort) -> Operator:
    shapes = source.shape[1:], node.shape[1:]
    args, kwargs = map_leaves(lambda leaf: None if isinstance(leaf, Ref) else leaf, (node.args, node.kwargs))
    try:
        claimed = _BOUNDS[node.op](args, kwargs, *shapes)
    except ValueError:
        raise  # the bound's own refusal
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        refuse(
            f"its registered bound fails ({type(error).__name__}: {reason})",
            "it is called as bound(args, kwargs, input_shape, output_shape); mend it",
        )
    table = _as_table(claimed, input_shape=shapes[0], output_shape=shapes[1])
    found = refute(node, source=source, table=table)
    if found is not None:
        refuse(f"registered bound of {node.op} is beaten by a pair: {found}", "register a bound that holds")
    return Operator(kind=node.op, table=table, how="registered by the user")


def _as_table(claimed: Any, *, input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> NormTable:
    """The claim as a table of finite numbers, each at least 0."""
    num_in, num_out = math.prod(input_shape), math.prod(output_shape)
    if isinstance(claimed, int | float) and not isinstance(claimed, bool):
        if input_shape != output_shape:
            refuse(
                f"its registered bound is one slope, but it maps records of shape {input_shape} to {output_shape}",
                "return a 3×3 table; a slope is for elementwise operators",
            )
        return lipschitz_table(_as_bound(claimed), size=num_in)
    try:
        rows = [[_as_bound(value) for value in row] for row in claimed]
    except TypeError:
        rows = []
    if len(rows) != 3 or any(len(row) != 3 for row in rows):
        refuse(
            f"its registered bound is a {type(claimed).__name__} that is neither a slope nor a 3×3 table",
            "return a float, or three rows of three floats for the norms 1, 2 and inf",
        )
    first, second, third = ((row[0], row[1], row[2]) for row in rows)
    return tighten((first, second, third), num_in=num_in, num_out=num_out)


def _as_bound(value: Any) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        refuse(f"its registered bound holds {value!r}", "return numbers")
    if not math.isfinite(number) or number < 0.0:
        refuse(f"its registered bound holds {number}", "return finite numbers of at least 0")
    return number


def _names_with_rules() -> set[str]:
    from sensitivity.operators.rules import RULES  # here, since `rules` reads this file

    return {*RULES, *ACTIVATIONS, *_COMPOSED}
