"""Certify a head: inspect, record, bound each operator, compose, round up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from sensitivity.capturing.batching import require_steady
from sensitivity.capturing.capture import record
from sensitivity.capturing.inspection import input_dtype, precision_problem, require_certifiable_tree
from sensitivity.capturing.recording import Recording
from sensitivity.certificate import Certificate
from sensitivity.composing.drift import Anchor, drifted
from sensitivity.composing.norm_dp import HeadBound, compose
from sensitivity.composing.tightening import Tightened, tightened, vector_norm_up
from sensitivity.errors import UnsupportedModuleError
from sensitivity.fingerprint import take_fingerprint, with_program
from sensitivity.norms import Norm, norm_index, parse_pair
from sensitivity.operators.linear import matrix_table
from sensitivity.operators.operator import Effort, NoBoundError, weights_as_float64
from sensitivity.rounding import FloatArray, add_up, mul_up, require_bound
from sensitivity.search import lower_bound
from sensitivity.shapes import InputBox, parse_input_box, parse_input_shape, require_budget

NOMINAL_SPEED = 5e9  # floating-point operations that a second of budget stands for, on every machine alike
FAST_FLOPS = 5e8
FAST_EFFORT = Effort(dense_entries=20_000, symbol_flops=2e7)
_EFFORTS = {
    "auto": Effort(dense_entries=600_000, symbol_flops=2e8),
    "fast": FAST_EFFORT,
    "product": Effort(dense_entries=600_000, symbol_flops=2e8),
}
_AGAIN = Effort(dense_entries=20_000, symbol_flops=2e6)  # for drift: weights moved little, so coarse norms do
_FAR = 1.05  # drift beyond the old head's composed norms that is taken without looking at the new head's


def certify(
    head: nn.Module,
    *,
    p: Norm,
    q: Norm,
    input_shape: int | Sequence[int],
    input_box: InputBox | None = None,
    method: str = "auto",
    budget_s: float = 10.0,
    search: bool = False,
    previous: Certificate | None = None,
) -> Certificate:
    """Prove a bound on how far a head's output moves when one record moves.

    Args:
        head: the module as it will release, in eval mode if it has modes.
        p: norm of the input distance: 1, 2, math.inf or "inf".
        q: norm of the output distance: likewise.
        input_shape: shape of one record, batch dimension excluded.
        input_box: (low, high) that both inputs lie in, in the input's units: slopes are then local, the outputs'
            diameter is bounded, and the slack holds the rounding of the forward pass.
        method: "auto" (the least of norms composed, loop transformation, columns or rows, and semidefinite relaxation),
            "fast" (the same with little work) or "product" (layer bounds in one norm multiplied; p = q only).
        budget_s: seconds that tightening may take with "auto". They are counted as 5·10⁹ floating-point operations
            each, planned beforehand, so that a certificate never depends on the machine; a slow one takes longer.
        search: also look for a lower bound and put it into the certificate, cut off at the certified value, which
            rounding and jumps could otherwise exceed.
        previous: for "fast" without a box: a certificate of the same head before its weights moved. Where its bound
            plus that of the drift is known, nothing but norms composed is tried beside it, which costs little. Drift
            is measured from the last certificate that had no previous one, and value / anchor.value says how much it
            has added: call "auto" again once that exceeds what you would pay in noise, 1.2 say.

    Returns:
        The certificate.

    Raises:
        UnsupportedModuleError: if some part of the head has no proven bound; the message names it.
        ValueError: for an unsupported pair of norms, an unknown method, a bad shape, box or budget, or a bound that
            overflows.

    Guarantee: for every pair of records x, x' and every batch that holds them, ‖y(x) − y(x')‖_q ≤ value·‖x − x'‖_p +
        slack, where y is the head in exact arithmetic with its present weights, as it runs under torch.no_grad(). All
        rounding is upward; the rounding of the head's own forward pass is included where `rounding` is a number
        (CPU; conventional sums, no fast transforms). The head, its gradients and the random states are left as they
        are. The head is recorded for an unknown batch size, one record, and many
        records scattered in memory, and must compute the same with the same constants each time. Outside the claim is
        a forward that looks at what no recording can show: the Python type or requires_grad of its input or of its
        batch size, whether gradients are enabled, errors that it catches (of torch.cond, say), a clock, or state
        outside the head that changes between recordings or after `Certificate.check`.

    Edge cases: a head without parameters is fine (Identity gives 1); zero weights give 0.

    Source: `operators` for each layer, `composing` for how they are put together.

    Example:
        >>> head = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU())
        >>> _ = head[0].weight.data.copy_(torch.tensor([[3.0, 4.0]]))
        >>> certify(head, p=1, q=2, input_shape=(2,)).value
        4.0
    """
    p_norm, q_norm = parse_pair(p, q)
    shape = parse_input_shape(input_shape)
    box = parse_input_box(input_box, input_shape=shape)
    require_budget(budget_s)
    if previous is not None and not isinstance(previous, Certificate):
        raise ValueError(f"previous is a {type(previous).__name__}: it takes a Certificate or None; pass the last one")
    if not isinstance(method, str) or method not in _EFFORTS:
        raise ValueError(f"method={method!r} is unknown: the methods are {', '.join(_EFFORTS)}; choose one of these")
    if method == "product" and p_norm != q_norm:
        raise ValueError(
            f"method='product' multiplies bounds in one norm: it needs p = q, not p={p!r}, q={q!r}; use method='auto'"
        )
    module = require_certifiable_tree(head)
    dtype = input_dtype(module)
    fingerprint = take_fingerprint(module, input_shape=shape)
    recording = record(module, input_shape=shape, dtype=dtype)
    anchor = None if previous is None or box is not None else previous.anchor
    bound, best, kept = _bounded(
        recording, p=p_norm, q=q_norm, box=box, method=method, budget_s=budget_s, anchor=anchor
    )
    program = require_steady(module, recording, input_shape=shape, dtype=dtype)
    changes = fingerprint.changes(take_fingerprint(module, input_shape=shape))
    if changes:
        raise UnsupportedModuleError(
            f"head ({type(module).__name__}) changes itself in forward ({', '.join(changes[:3])}): the next release "
            "would come from another head; keep state out of forward"
        )
    found = None
    if search:
        found = min(lower_bound(module, p=p, q=q, input_shape=shape, input_box=input_box).value, best.value)
    return Certificate(
        value=require_bound(best.value, what=f"the bound of head ({type(module).__name__})"),
        p=p_norm,
        q=q_norm,
        method=best.method,
        layers=bound.layers,
        slack=require_bound(
            add_up(bound.slack, best.rounding or 0.0), what=f"the slack of head ({type(module).__name__})"
        ),
        fingerprint=with_program(fingerprint, program),
        lower_bound=found,
        diameter=min(best.diameter, _spanned(best.value, bound.slack, p=p_norm, box=box)),
        rounding=best.rounding,
        anchor=kept or _anchor(recording, bound, best, p=p_norm, q=q_norm, box=box),
    )


def _bounded(
    recording: Recording,
    *,
    p: float,
    q: float,
    box: tuple[torch.Tensor, torch.Tensor] | None,
    method: str,
    budget_s: float,
    anchor: Anchor | None,
) -> tuple[HeadBound, Tightened, Anchor | None]:
    """Norms composed, the best of the methods that were asked for, and the anchor that it was measured from."""
    if method == "fast" and anchor is not None:
        bound = compose(recording, p=p, q=q, effort=_AGAIN, same_norm=False)
        drift = drifted(anchor, recording, tables=bound.tables, p=p, q=q, effort=_AGAIN)
        if drift is not None:
            if drift > _FAR * anchor.rows[recording.output][norm_index(q)]:  # fresh norms may say less by now
                bound = compose(recording, p=p, q=q, effort=FAST_EFFORT, same_norm=False)
            best = tightened(recording, bound, p=p, q=q, box=None, flops=0.0)
            return bound, replace(best, value=drift, method="drift") if drift < best.value else best, anchor
    flops = FAST_FLOPS if method == "fast" else budget_s * NOMINAL_SPEED
    effort = _EFFORTS[method] if method == "fast" else replace(_EFFORTS[method], flops=flops)
    bound = compose(recording, p=p, q=q, effort=effort, same_norm=method == "product")
    if method == "product":
        return bound, Tightened(value=bound.value, method=method, diameter=math.inf, rounding=None), None
    return bound, tightened(recording, bound, p=p, q=q, box=box, flops=flops), None


def _spanned(value: float, slack: float, *, p: float, box: tuple[torch.Tensor, torch.Tensor] | None) -> float:
    """How far two outputs can be apart at most because their inputs lie in one box."""
    if box is None:
        return math.inf
    low, high = (side.reshape(-1).numpy().astype(np.float64) for side in box)
    with np.errstate(over="ignore"):
        widths = np.where(low == high, 0.0, np.nextafter(high - low, np.inf))
    return add_up(mul_up(value, vector_norm_up(widths, p)), slack)


def _anchor(
    recording: Recording, bound: HeadBound, best: Tightened, *, p: float, q: float, box: object
) -> Anchor | None:
    """What a later certificate may start from; bounds over a box hold for its slopes alone, so they start nothing."""
    if box is not None:
        return None
    return Anchor(value=best.value, p=p, q=q, recording=recording, rows=bound.rows, tables=bound.tables)


def operator_norm(
    module_or_matrix: nn.Module | torch.Tensor | FloatArray,
    *,
    p: Norm,
    q: Norm,
    input_shape: int | Sequence[int] | None = None,
) -> float:
    """Upper bound on the p→q norm of one operator.

    Args:
        module_or_matrix: a layer, or a matrix of shape (outputs, inputs).
        p: norm of the input: 1, 2, math.inf or "inf".
        q: norm of the output: likewise.
        input_shape: shape of one record; needed for modules other than Linear, refused for matrices.

    Returns:
        The norm, rounded up: exact up to rounding for matrices and for 1→q and p→∞ of linear layers.

    Raises:
        UnsupportedModuleError: if the module has no proven bound.
        ValueError: for a bad pair, shape or matrix, or a module with additive slack.

    Guarantee: at or above the true norm (Lipschitz constant, for modules that are not linear).

    Example:
        >>> 6.0 <= operator_norm(torch.tensor([[1.0, -2.0], [3.0, 4.0]]), p=1, q=1) < 6.0 + 1e-14
        True
    """
    if isinstance(module_or_matrix, nn.Module):
        if input_shape is None:
            if type(module_or_matrix) is not nn.Linear:
                raise ValueError(
                    f"input_shape is missing: the norm of a {type(module_or_matrix).__name__} depends on it; pass the "
                    "shape of one record"
                )
            input_shape = (module_or_matrix.in_features,)
        certificate = certify(module_or_matrix, p=p, q=q, input_shape=input_shape)
        if certificate.slack > 0.0:
            raise ValueError(
                f"the module jumps by up to {certificate.slack}: it has no finite norm; use certify, which reports "
                "slack"
            )
        return certificate.value
    if input_shape is not None:
        raise ValueError(
            f"input_shape={input_shape!r} was given for a matrix: its columns say that already; leave it out"
        )
    p_norm, q_norm = parse_pair(p, q)
    settings = precision_problem(set())
    if settings is not None:
        raise UnsupportedModuleError(settings)
    try:
        tensor = torch.as_tensor(module_or_matrix).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"a {type(module_or_matrix).__name__} is no matrix ({' '.join(str(error).split())[:100]}): the norm of a "
            "layer or of a real 2-D matrix is known here; pass one"
        ) from error
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise ValueError(
            f"matrix has layout {tensor.layout} on {tensor.device}: only dense matrices with values have a bound here; "
            "make it dense"
        )
    try:
        matrix = weights_as_float64(tensor)
    except NoBoundError as error:
        raise ValueError(f"matrix has no bound here: {error}") from error
    table = matrix_table(matrix)
    return require_bound(table[norm_index(p_norm)][norm_index(q_norm)], what="the operator norm")
