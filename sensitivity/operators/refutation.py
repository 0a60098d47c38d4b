"""Attempts to refute a claimed bound: the operator itself, run in float64 on pairs of records.

A pair is a record and a second one at a chosen distance. Directions are single coordinates, dense ones, and those that
the gradient of the output's distance prefers, step after step (as `search` does for whole heads); bases climb along.
One batch holds as many pairs as the recording had records, since constants may depend on no other batch size. Nothing
here proves a bound.
"""

# ruff: noqa: ANN401  (arguments of recorded operators have no narrower type)
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from sensitivity.capturing.recording import Node, Ref, map_leaves
from sensitivity.norms import NORMS, NormTable
from sensitivity.operators.operator import refuse

ROUNDING = 1e-9  # relative allowance for the operator's own float64 arithmetic
SCALES = (1e-2, 1.0, 30.0)  # sizes of base records
STEPS = (1e-3, 0.1, 3.0)  # distances, relative to the size of the base record
CLIMBS = 6  # gradient steps per pair of norms
COORDINATES = 64  # single coordinates tried one by one, at most
SEED = 0


def refute(node: Node, *, source: Node, table: NormTable) -> str | None:
    """Look for a pair of records that an operator pulls further apart than a table allows.

    Args:
        node: a recorded operator with one data input and one output.
        source: the node whose value it reads, batch first.
        table: the claim.

    Returns:
        What was found, in words, or None.

    Raises:
        NoBoundError: if the operator does not run in float64 on the CPU, gives values that are not finite, is not the
            same twice, or lets one record move another's output.

    Guarantee: what is returned is a true counterexample up to the relative rounding ROUNDING of the outputs; None
        proves nothing. The same operator and table give the same answer (fixed seed).
    """
    trial = _Trial(node, source, table)
    with torch.inference_mode(False), torch.enable_grad():
        trial.require_separate_records()
        for scale in SCALES:
            found = trial.try_random(scale) or trial.try_coordinates(scale)
            if found is not None:
                return found
        for r in range(3):
            for s in range(3):
                found = trial.climb(r, s)
                if found is not None:
                    return found
    return None


class _Trial:
    """An operator on batches of base records, and the claim about it."""

    def __init__(self, node: Node, source: Node, table: NormTable) -> None:
        self.node, self.shape, self.table = node, source.shape, table
        self.random = torch.Generator().manual_seed(SEED)
        namespace, _, name = node.op.rpartition("::")
        packet = getattr(getattr(torch.ops, namespace or "aten"), name, None)
        function = getattr(packet, node.overload or "default", None)
        if function is None:
            refuse(f"operator {node.op} is not to be found in torch.ops", "register the functional operator's name")
        self.function: Callable[..., Any] = function
        self.args, self.kwargs = map_leaves(_as_float64, (node.args, node.kwargs))
        self.can_climb = True

    def run(self, batch: torch.Tensor) -> torch.Tensor:
        """The operator on a float64 batch, one row per record."""

        def filled(leaf: Any) -> Any:
            return batch if isinstance(leaf, Ref) else leaf

        args, kwargs = map_leaves(filled, (self.args, self.kwargs))
        try:
            output = self.function(*args, **kwargs)
        except Exception as error:  # an operator of the user may fail in any way
            refuse(
                f"operator {self.node.op} does not run in float64 on the CPU ({' '.join(str(error).split())[:150]}), "
                "so its registered bound cannot be checked",
                "let it accept float64",
            )
        if not isinstance(output, torch.Tensor) or output.shape != self.node.shape:
            refuse(
                f"operator {self.node.op} gives something else in float64 than was recorded",
                "return one tensor of one shape",
            )
        flat = output.reshape(len(batch), -1).to(torch.float64)
        if not bool(torch.isfinite(flat.detach()).all()):
            refuse(
                f"operator {self.node.op} gives NaN or infinity on ordinary records", "bound it on all real inputs only"
            )
        return flat

    def bases(self, scale: float) -> torch.Tensor:
        """Random base records of a given size."""
        return torch.randn(self.shape, generator=self.random, dtype=torch.float64) * scale

    @torch.no_grad()
    def require_separate_records(self) -> None:
        """Refuse an operator that differs from run to run, or by which records move each other's outputs."""
        for scale in SCALES:
            first = self.bases(scale)
            before, again = self.run(first.clone()), self.run(first.clone())
            allowance = ROUNDING * before.abs().max()
            if bool(((before - again).abs() > allowance).any()):
                refuse(f"operator {self.node.op} differs from run to run", "make it a function of its input")
            for moved in {0, len(first) // 2, len(first) - 1}:
                second = first.clone()
                second[moved] = self.bases(scale * 3.0)[0]
                after = self.run(second)
                others = torch.arange(len(first)) != moved
                if bool(((after - before).abs()[others] > allowance + ROUNDING * after.abs().max()).any()):
                    refuse(
                        f"a record moves another record's output through operator {self.node.op}: records mix",
                        "treat records one by one",
                    )

    @torch.no_grad()
    def try_random(self, scale: float) -> str | None:
        """Dense directions: random ones and signs."""
        for step in STEPS:
            for direction in (self.bases(1.0), self.bases(1.0).sign()):
                base = self.bases(scale)
                found = self.judged(base, base + direction * (step * scale))
                if found is not None:
                    return found
        return None

    @torch.no_grad()
    def try_coordinates(self, scale: float) -> str | None:
        """Single coordinates, each from another base record."""
        size, rows = math.prod(self.shape[1:]), self.shape[0]
        chosen = torch.randperm(size, generator=self.random)[:COORDINATES]
        for start in range(0, len(chosen), rows):
            part = chosen[start : start + rows]
            base = self.bases(scale)
            direction = torch.zeros(rows, size, dtype=torch.float64)
            direction[torch.arange(len(part)), part] = 1.0
            for step in STEPS:
                found = self.judged(base, base + direction.reshape(self.shape) * (step * scale))
                if found is not None:
                    return found
        return None

    def climb(self, r: int, s: int) -> str | None:
        """Directions and bases improved by the gradient of the output's distance, from norm r to norm s."""
        if not self.can_climb:
            return None
        sizes = torch.tensor([SCALES[i % len(SCALES)] for i in range(self.shape[0])], dtype=torch.float64)
        steps = torch.tensor([STEPS[i // len(SCALES) % len(STEPS)] for i in range(self.shape[0])], dtype=torch.float64)
        column = (-1, *[1] * (len(self.shape) - 1))
        sizes, steps = sizes.reshape(column), (sizes * steps).reshape(column)
        base, direction = self.bases(1.0) * sizes, self.bases(1.0)
        for _ in range(CLIMBS):
            base = base.detach().requires_grad_(True)
            second = (base.detach() + direction * steps).requires_grad_(True)
            left, right = self.run(base), self.run(second)
            found = self.judged(base.detach(), second.detach(), outputs=(left.detach(), right.detach()))
            if found is not None:
                return found
            gradients = self.gradients(_norms(right - left, NORMS[s]), base, second)
            if gradients is None:
                return None
            uphill = gradients[0] + gradients[1]
            length = _norms(uphill.flatten(1), 2.0).clamp_min(1e-300).reshape(column)
            base = base.detach() + 0.1 * sizes * math.sqrt(math.prod(self.shape[1:])) * uphill / length
            direction = _steepest(gradients[1], NORMS[r])
        return None

    def gradients(
        self, moved: torch.Tensor, base: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Gradients of the output's distances, or None where the operator has none."""
        found: tuple[torch.Tensor | None, ...]
        try:
            found = torch.autograd.grad(moved.clamp_min(1e-300).log().sum(), (base, second), allow_unused=True)
        except Exception:  # operators without a backward raise what they like; the other directions remain
            found = (None, None)
        at_base, at_second = found
        if at_base is None or at_second is None or not bool(torch.isfinite(at_base + at_second).all()):
            self.can_climb = False
            return None
        return at_base, at_second

    @torch.no_grad()
    def judged(
        self, first: torch.Tensor, second: torch.Tensor, *, outputs: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> str | None:
        """The worst pair of two batches, in words, if it beats the claim by more than rounding."""
        left, right = (self.run(first), self.run(second)) if outputs is None else outputs
        step = (second - first).flatten(1)
        for s, q in enumerate(NORMS):
            moved = _norms(right - left, q)
            moved = moved - ROUNDING * (_norms(left, q) + _norms(right, q))
            for r, p in enumerate(NORMS):
                distance = _norms(step, p)
                excess = moved - self.table[r][s] * (1.0 + ROUNDING) * distance
                if bool((excess > 0.0).any()):
                    worst = int((moved / distance.clamp_min(1e-300)).argmax())
                    ratio = float(moved[worst] / distance[worst])
                    return (
                        f"from norm {p:g} to norm {q:g} it reaches {ratio:.6g}, above the registered "
                        f"{self.table[r][s]:.6g}"
                    )
        return None


def _as_float64(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        tensor = leaf.detach().to("cpu")
        return tensor.to(torch.float64) if tensor.is_floating_point() else tensor
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return torch.float64 if isinstance(leaf, torch.dtype) and leaf.is_floating_point else leaf


def _norms(rows: torch.Tensor, order: float) -> torch.Tensor:
    lengths: torch.Tensor = torch.linalg.vector_norm(rows, ord=order, dim=1)
    return lengths


def _steepest(gradient: torch.Tensor, p: float) -> torch.Tensor:
    """The direction of p-norm 1 along which a linear function of this gradient grows most; a random one where it is 0."""
    flat = gradient.flatten(1)
    if math.isinf(p):
        direction = flat.sign()
    elif p == 1:
        chosen = flat.abs().argmax(dim=1, keepdim=True)
        direction = torch.zeros_like(flat).scatter(1, chosen, flat.gather(1, chosen).sign())
    else:
        direction = flat / _norms(flat, 2.0).clamp_min(1e-300)[:, None]
    still = _norms(direction, 1.0)[:, None] == 0.0
    return torch.where(still, torch.ones_like(flat), direction).reshape(gradient.shape)
