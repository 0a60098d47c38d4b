"""The certificate: a proven upper bound on a head's sensitivity, for the head as it was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from sensitivity.capturing.batching import program_of
from sensitivity.capturing.inspection import input_dtype, require_certifiable_tree
from sensitivity.composing.drift import Anchor
from sensitivity.composing.norm_dp import LayerBound
from sensitivity.errors import StaleCertificateError, UnsupportedModuleError
from sensitivity.fingerprint import Fingerprint, take_fingerprint, with_program
from sensitivity.rounding import add_up, mul_up
from sensitivity.shapes import is_positive_finite, parse_input_shape


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A proven bound: ‖y(x) − y(x')‖_q ≤ value·‖x − x'‖_p + slack for every pair of records.

    Attributes:
        value: bound on the p→q Lipschitz constant, rounded up.
        p: norm of the input: 1, 2 or math.inf.
        q: norm of the output: 1, 2 or math.inf.
        method: what gave the value: "product", "norm-dp", "loop transform", "columns", "rows" or "drift".
        layers: the operators on the route of the norms composed, input first.
        slack: additive part, in the output norm: jumps, as Softplus has them, and where an input box was given the
            rounding of the forward pass, as far as it is known.
        fingerprint: what the bound was proven for.
        lower_bound: largest ratio found by search, or None if no search was asked for.
        diameter: largest distance of any two outputs in the output norm (over the input box, where one was given), or
            infinity.
        rounding: the part of the slack that the forward pass in the head's own element type takes, or None where it is
            not bounded: no input box, or an operator without an error model.
        anchor: the bound from which the next `certify(..., previous=this)` may start, or None.
    """

    value: float
    p: float
    q: float
    method: str
    layers: tuple[LayerBound, ...]
    slack: float
    fingerprint: Fingerprint = field(repr=False)
    lower_bound: float | None = None
    diameter: float = math.inf
    rounding: float | None = None
    anchor: Anchor | None = field(default=None, repr=False, compare=False)

    def map(self, radius: float) -> float:
        """Sensitivity for records at p-distance of at most `radius`.

        Args:
            radius: distance in the input's units, positive and finite.

        Returns:
            value·radius + slack, or the diameter if that is less; rounded up, in the output's units.

        Raises:
            ValueError: if the radius is not a positive finite number, or the result overflows.

        Example:
            >>> from sensitivity import certify
            >>> certify(nn.ReLU(), p=2, q=2, input_shape=(3,)).map(0.5)
            0.5
        """
        if not is_positive_finite(radius):
            raise ValueError(
                f"radius={radius!r} is no distance: it must be a positive finite number; pass the largest input "
                "distance"
            )
        far = add_up(self.diameter, self.rounding or 0.0)
        result = min(add_up(mul_up(self.value, float(radius)), self.slack), far)
        if not math.isfinite(result):
            raise ValueError(
                f"sensitivity at radius {radius} overflows float64: no noise can hide it; use a smaller radius"
            )
        return result

    def check(self, head: nn.Module, *, input_shape: int | Sequence[int] | None = None) -> None:
        """Refuse a head that differs from the one this certificate was issued for.

        Args:
            head: the head about to release.
            input_shape: shape of one record about to be released, if known; it must be the certified one.

        Raises:
            StaleCertificateError: naming what changed: modules, mode, hooks, dtype, input shape, parameters or buffers.
            ValueError: for something that is no module, or a bad shape.

        Guarantee: what forward computes is recorded again and compared with what was certified, operator by operator
            and constant by constant, for one record and for an unknown batch size; so are parameters, buffers, modes,
            hooks, element types, module types and simple attributes. Outside the claim: what `certify` names there.
        """
        if not isinstance(head, nn.Module):
            raise ValueError(
                f"head is a {type(head).__name__}: only a torch.nn.Module can be checked; pass the certified head"
            )
        shape = self.fingerprint.input_shape if input_shape is None else parse_input_shape(input_shape)
        current = take_fingerprint(head, input_shape=shape)
        changes = self.fingerprint.changes(current)
        if not changes:
            try:
                module = require_certifiable_tree(head)
                program = program_of(module, input_shape=shape, dtype=input_dtype(module))
            except UnsupportedModuleError as error:
                raise StaleCertificateError(
                    f"changed since the certificate: it would be refused today ({error}); a bound holds for one head "
                    "only; certify it again"
                ) from error
            changes = self.fingerprint.changes(with_program(current, program))
        if changes:
            shown = ", ".join(changes[:4]) + (f" and {len(changes) - 4} more" if len(changes) > 4 else "")
            raise StaleCertificateError(
                f"changed since the certificate: {shown}; a bound holds for one head only; certify it again"
            )
