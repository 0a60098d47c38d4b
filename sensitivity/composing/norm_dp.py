"""From operators to a whole head: bounds carried from the input through the graph.

For each value v of the graph and a fixed input norm p, the row B_v = (‖·‖_{p→1}, ‖·‖_{p→2}, ‖·‖_{p→∞}) bounds how far
v moves. Through an operator with table T, B_out[s] = min over r of B_in[r]·T[r][s]: the (min, ×) product over the
intermediate norm. Through a sum, the rows add; through a concatenation, entry s is the s-norm of the branches'
entries. By induction over the graph every row is sound, on graphs with shared nodes too, because each value is bounded
against the input itself.

Jumps: claim that v(x) − v(x') = a + b with ‖a‖_s ≤ B_v[s]·‖x − x'‖_p and ‖b‖_s ≤ S_v[s] for every s. An operator f
adds f(v) − f(v' + b) to a and f(v' + b) − f(v') to b, both bounded by T; a jump J per element adds J·n^{1/s} to S. So
B and S may use different routes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sensitivity.capturing.recording import INPUT, Node, Recording, Ref, place_of
from sensitivity.errors import UnsupportedModuleError
from sensitivity.norms import NORMS, NormTable, Row, add_rows, change_of_norm, lipschitz_table, norm_index
from sensitivity.operators.elementwise import constant_multipliers
from sensitivity.operators.operator import Effort, Operator, require_batch_first, require_constant_operand
from sensitivity.operators.rules import operator_of
from sensitivity.rounding import add_up, mul_up, norm2_up

JOINT = ("softsign", "tanhshrink")
ZERO_ROW: Row = (0.0, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class LayerBound:
    """One operator on the route that gave the bound.

    Attributes:
        name: module path inside the head ("" for the head itself).
        kind: what the operator is.
        p: norm of its input on this route.
        q: norm of its output on this route.
        value: its bound from p to q.
        how: how its 2→2 norm was certified; "" for a closed form.
    """

    name: str
    kind: str
    p: float
    q: float
    value: float
    how: str = ""


@dataclass(frozen=True, kw_only=True)
class HeadBound:
    """What composition proves about a head: ‖y(x) − y(x')‖_q ≤ value·‖x − x'‖_p + slack.

    Attributes:
        value: the multiplicative part.
        slack: the additive part.
        layers: the operators on the route.
        tables: norm table of every operator with one data input, by node.
        joint: activations that consist of several operators, by node, with their names.
        rows: bounds on every value, by node.
    """

    value: float
    slack: float
    layers: tuple[LayerBound, ...]
    tables: dict[int, NormTable]
    joint: dict[int, str]
    rows: dict[int, Row]


@dataclass(frozen=True, kw_only=True)
class _State:
    """Bounds on one value against the input, and how they came about."""

    row: Row
    slack: Row
    route: tuple[int, int, int]
    operator: Operator | None


def compose(recording: Recording, *, p: float, q: float, effort: Effort, same_norm: bool) -> HeadBound:
    """Bound a recorded head.

    Args:
        recording: its operators.
        p: norm of the input.
        q: norm of the output.
        effort: work allowed for convolutions.
        same_norm: allow p as the only intermediate norm (the plain product of layer bounds).

    Returns:
        The bound, its slack and the operators on its route.

    Raises:
        UnsupportedModuleError: if a reachable operator has no bound or mixes records.

    Guarantee: see the module's text; rounded up.
    """
    allowed = (norm_index(p),) if same_norm else (0, 1, 2)
    states: dict[int, _State] = {}
    for index in recording.reachable():
        states[index] = _state_of(recording.nodes, index, states, p=p, effort=effort, allowed=allowed)
    last = norm_index(q)
    state = states[recording.output]
    layers = _route_layers(recording, states, last)
    operators = {index: found.operator for index, found in states.items() if found.operator is not None}
    return HeadBound(
        value=state.row[last],
        slack=state.slack[last],
        layers=layers,
        tables={index: operator.table for index, operator in operators.items()},
        rows={index: known.row for index, known in states.items()},
        joint={index: operator.kind for index, operator in operators.items() if operator.kind in JOINT},
    )


def _state_of(
    nodes: tuple[Node, ...],
    index: int,
    states: dict[int, _State],
    *,
    p: float,
    effort: Effort,
    allowed: tuple[int, ...],
) -> _State:
    node = nodes[index]
    if node.op == INPUT:
        size = math.prod(node.shape[1:])
        row = tuple(change_of_norm(p, s, size=size) if j in allowed else math.inf for j, s in enumerate(NORMS))
        return _State(row=(row[0], row[1], row[2]), slack=ZERO_ROW, route=(0, 1, 2), operator=None)
    parents = [states[parent] for parent in node.parents]
    try:
        known = _two_operator_activation(nodes, node)
        if known is not None:
            table = lipschitz_table(1.0, size=math.prod(node.shape[1:]))
            return _through(states[node.args[0].index], Operator(kind=known, table=table), node, allowed)
        if node.op in ("add", "sub", "rsub"):
            return _sum(nodes, node, states)
        if node.op in ("cat", "stack"):
            return _concatenation(nodes, node, states)
    except UnsupportedModuleError:
        raise
    except ValueError as error:
        raise UnsupportedModuleError(f"{place_of(node.path, node.module)} uses {node.op}: {error}") from error
    operator = operator_of(node, source=nodes[node.parents[0]], effort=effort)
    return _through(parents[0], operator, node, allowed)


def _through(state: _State, operator: Operator, node: Node, allowed: tuple[int, ...]) -> _State:
    """Push bounds through one operator: the minimum over the intermediate norm."""
    table = operator.table
    routes = [min(allowed, key=lambda r: mul_up(state.row[r], table[r][s])) for s in range(3)]
    row = [mul_up(state.row[routes[s]], table[routes[s]][s]) if s in allowed else math.inf for s in range(3)]
    size = math.prod(node.shape[1:])
    slack = [
        add_up(
            min(mul_up(state.slack[r], table[r][s]) for r in range(3)),
            mul_up(operator.jump, change_of_norm(math.inf, NORMS[s], size=size)),
        )
        for s in range(3)
    ]
    return _State(
        row=(row[0], row[1], row[2]),
        slack=(slack[0], slack[1], slack[2]),
        route=(routes[0], routes[1], routes[2]),
        operator=operator,
    )


def _sum(nodes: tuple[Node, ...], node: Node, states: dict[int, _State]) -> _State:
    """Bound a + α·b, a − α·b or, for rsub, b − α·a; constants move nothing."""
    alpha = constant_multipliers(
        node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1), dtype=node.dtype, divide=False
    )
    factors = (float(alpha[0]), 1.0) if node.op == "rsub" else (1.0, float(alpha[0]))
    rows, slacks = [], []
    for term, factor in zip(node.args[:2], factors, strict=True):
        if not isinstance(term, Ref):
            require_constant_operand(term, node=node, source=nodes[node.parents[0]])
            continue
        source = nodes[term.index]
        require_batch_first(node, source=source)
        if source.shape != node.shape:
            raise ValueError(
                f"it adds values of shapes {source.shape[1:]} and {node.shape[1:]}; add values of one shape"
            )
        state = states[term.index]
        rows.append(_scaled(state.row, factor))
        slacks.append(_scaled(state.slack, factor))
    return _State(row=add_rows(rows), slack=add_rows(slacks), route=(0, 1, 2), operator=None)


def _concatenation(nodes: tuple[Node, ...], node: Node, states: dict[int, _State]) -> _State:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if dim % len(node.shape) == 0:
        raise ValueError("it joins along the batch dimension, so records mix; concatenate along another dimension")
    terms = [term for term in node.args[0] if isinstance(term, Ref)]
    for term in terms:
        require_batch_first(node, source=nodes[term.index])
    rows = [states[term.index].row for term in terms]
    slacks = [states[term.index].slack for term in terms]
    return _State(row=_joined(rows), slack=_joined(slacks), route=(0, 1, 2), operator=None)


def _joined(rows: list[Row]) -> Row:
    return add_up(*[row[0] for row in rows]), norm2_up(row[1] for row in rows), max(row[2] for row in rows)


def _scaled(row: Row, factor: float) -> Row:
    return mul_up(row[0], factor), mul_up(row[1], factor), mul_up(row[2], factor)


def _two_operator_activation(nodes: tuple[Node, ...], node: Node) -> str | None:
    """Softsign and Tanhshrink reach the dispatcher as x/(|x| + 1) and x − tanh(x); both have slopes in [0, 1]."""
    if node.op not in ("div", "sub") or node.kwargs or not all(isinstance(term, Ref) for term in node.args[:2]):
        return None
    if len(node.args) != 2:
        return None
    data, other = node.args[0], nodes[node.args[1].index]
    if node.op == "sub" and other.op == "tanh" and other.args[0] == data:
        return "tanhshrink"
    if node.op == "div" and other.op == "add" and not other.kwargs and len(other.args) == 2:
        magnitude, one = other.args
        if isinstance(one, int | float) and one == 1 and isinstance(magnitude, Ref):
            inner = nodes[magnitude.index]
            if inner.op == "abs" and inner.args[0] == data:
                return "softsign"
    return None


def _route_layers(recording: Recording, states: dict[int, _State], last: int) -> tuple[LayerBound, ...]:
    """Walk back from the output along the intermediate norms that gave the minimum."""
    found: dict[tuple[int, int], LayerBound] = {}
    stack, seen = [(recording.output, last)], set[tuple[int, int]]()
    while stack:
        index, s = stack.pop()
        if (index, s) in seen:
            continue
        seen.add((index, s))
        node, state = recording.nodes[index], states[index]
        if state.operator is None:
            stack.extend((parent, s) for parent in node.parents)
            continue
        r = state.route[s]
        if state.operator.kind != "rearranged":
            found[index, s] = LayerBound(
                name=node.path,
                kind=state.operator.kind,
                p=NORMS[r],
                q=NORMS[s],
                value=state.operator.table[r][s],
                how=state.operator.how,
            )
        parent = node.args[0] if isinstance(node.args[0], Ref) else next(a for a in node.args if isinstance(a, Ref))
        stack.append((parent.index, r))
    return tuple(found[key] for key in sorted(found))
