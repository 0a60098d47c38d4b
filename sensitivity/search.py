"""Lower bounds by search: pairs of records that a head really pulls apart. Nothing here may calibrate noise.

On a convex set the largest ratio ‖f(x) − f(x')‖_q / ‖x − x'‖_p is the largest ‖J(x)v‖_q over records x and directions
v of p-norm 1, so the search takes close pairs (x, x + t·v) and improves both parts by gradients:

- v by Boyd's power method: v becomes the direction of p-norm 1 that Jᵀu likes best, u being the dual vector of Jv. The
  ratio never falls, and for p = q = 2 this is power iteration (finished by Lanczos).
- x by ascent on log ‖J(x)v‖_q. Where f is piecewise linear that gradient is 0, so ReLUs and their kin are softened to
  softplus, sharper from step to step; only the head itself says which pairs are good.

For p = 1 the best v is a coordinate, and for q = ∞ it is dual to a row of J: all of them are tried around a few
records before the ascent starts from the best, which on linear heads already is the norm.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parametrize

from sensitivity.capturing.inspection import require_certifiable_tree
from sensitivity.norms import Norm, parse_norm
from sensitivity.shapes import InputBox, parse_input_box, parse_input_shape
from sensitivity.smoothing import SoftenedKinks
from sensitivity.stochastic import cautious_distance

CLOSENESS = 1e-5  # distance of a pair, relative to the record's root mean square
FORWARD_ERROR = 1e-12  # relative allowance when pairs are compared; the best one is judged by `cautious_ratio`
ROUND = 100  # steps between restarts
WIDEST, SHARPEST = 1.0, 0.01  # softening at the start and the end of a round, relative to a unit's inputs
SHRINK = 0.05  # a record's step at the end of a round, relative to the first step of the round
FIRST_STEPS = (0.05, 0.5)  # range of a record's first step, relative to the record: drawn per pair and round
POWER_STEPS = 6  # on the head itself at the end of a round
CHUNK = 256
MAX_TRIED = 4096  # coordinates or rows that are tried one by one around a record
KRYLOV = 40  # Lanczos steps on the best pair
FINALISTS = 8  # pairs that are kept for the judgement
WIDENINGS = (1.0, 1e1, 1e3, 1e5, 0.0)  # distances at which finalists are judged, relative to close ones; 0 means 1.0


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """A ratio that a pair of records attains; the true p→q sensitivity is at least this, and may be far above.

    Attributes:
        value: ‖y(x) − y(x')‖_q / ‖x − x'‖_p, less an allowance for rounding.
        p: norm of the input.
        q: norm of the output.
        first: the record x, float64.
        second: the record x', float64.
    """

    value: float
    p: float
    q: float
    first: torch.Tensor
    second: torch.Tensor


def lower_bound(
    head: nn.Module,
    *,
    p: Norm,
    q: Norm,
    input_shape: int | Sequence[int],
    input_box: InputBox | None = None,
    num_starts: int = 16,
    num_steps: int = 60,
    generator: torch.Generator | None = None,
) -> LowerBound:
    """Search for a pair of records that a head pulls far apart.

    Args:
        head: the module, in the mode in which it will release.
        p: norm of the input distance: 1, 2, math.inf or "inf".
        q: norm of the output distance: likewise; all nine pairs are searched.
        input_shape: shape of one record, batch dimension excluded.
        input_box: (low, high) that both records stay in, or None for the whole space.
        num_starts: pairs that are improved side by side.
        num_steps: gradient steps of each of them; every 100 the search starts anew, half of it near the best so far.
        generator: source of the starting points, on the CPU; None takes a new one of seed 0, so results repeat.

    Returns:
        The best pair found and its ratio, computed in float64 on a copy of the head.

    Raises:
        UnsupportedModuleError: for a head that draws random numbers, mixes records or has hooks.
        ValueError: for a bad norm, shape, box or count, a box that is a point, a head that cannot be copied or does
            not run in float64, or one whose output is not finite.

    Guarantee: a pair of records attains `value`, up to rounding, which is estimated by stochastic arithmetic and
        taken off, not proven: a head that cancels large numbers gets a smaller value, not a larger one. It says
        nothing from above.

    Edge cases: a constant head gives 0.0.

    Source: D. W. Boyd (1974), The power method for lp norms, Linear Algebra Appl. 9, for the direction step.

    Example:
        >>> found = lower_bound(nn.Identity(), p=2, q=2, input_shape=(3,))
        >>> 0.999999 < found.value <= 1.0
        True
    """
    p_norm, q_norm = parse_norm(p, name="p"), parse_norm(q, name="q")
    shape = parse_input_shape(input_shape)
    box = parse_input_box(input_box, input_shape=shape)
    for name, count in (("num_starts", num_starts), ("num_steps", num_steps)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name}={count!r} is no count: it must be an integer of at least 1; pass for example 16")
    if box is not None and not bool((box[0] < box[1]).any()):
        raise ValueError(
            "input_box is a single point: no two records differ in it; pass a box with low < high somewhere"
        )
    net = _float64_copy(require_certifiable_tree(head))
    random = torch.Generator().manual_seed(0) if generator is None else generator
    search = _Search(net, p=p_norm, q=q_norm, shape=shape, box=box, random=random)
    return search.run(num_starts=num_starts, num_steps=num_steps)


@dataclass(frozen=True)
class _Pairs:
    """Records and directions of p-norm 1, batched."""

    base: torch.Tensor
    direction: torch.Tensor

    def __len__(self) -> int:
        return len(self.base)

    def take(self, rows: torch.Tensor) -> _Pairs:
        return _Pairs(self.base[rows], self.direction[rows])

    def where(self, chosen: torch.Tensor, other: _Pairs) -> _Pairs:
        """These pairs where chosen, of shape (B,), the others elsewhere."""
        mask = _like(chosen, self.base)
        return _Pairs(torch.where(mask, self.base, other.base), torch.where(mask, self.direction, other.direction))


class _Search:
    """Proposes pairs, tries them on the head and remembers the best ones."""

    def __init__(
        self,
        net: nn.Module,
        *,
        p: float,
        q: float,
        shape: tuple[int, ...],
        box: tuple[torch.Tensor, torch.Tensor] | None,
        random: torch.Generator,
    ) -> None:
        self.net, self.p, self.q, self.shape, self.box, self.random = net, p, q, shape, box, random
        self.elite: _Pairs | None = None
        self.ratios = torch.zeros(0, dtype=torch.float64)
        self.kinks = SoftenedKinks()

    def run(self, *, num_starts: int, num_steps: int) -> LowerBound:
        """All rounds, then the judgement of the best pairs."""
        for done in range(0, num_steps, ROUND):
            pairs = self.starting_pairs(num_starts, first=done == 0)
            self.ascend(pairs, min(ROUND, num_steps - done), keep=num_starts)
        return self.judged()

    @torch.no_grad()
    def judged(self) -> LowerBound:
        """The best pair by stochastic arithmetic among the finalists, close pairs and wide ones."""
        assert self.elite is not None
        finalists = self.elite.take(torch.arange(min(FINALISTS, len(self.elite))))
        found = LowerBound(
            value=0.0, p=self.p, q=self.q, first=finalists.base[0].clone(), second=finalists.base[0].clone()
        )
        for widening in WIDENINGS:
            distances = (
                self.distances(finalists.base) if widening else _like(torch.ones(len(finalists)), finalists.base)
            )
            distances = distances * (widening or 1.0)
            firsts, seconds = self.pair_of(finalists, distances)
            rank = self.ratios_of(firsts, seconds).argmax()
            first, second = firsts[rank], seconds[rank]
            distance = float(_norms((second - first)[None], self.p))
            if distance == 0.0:
                continue
            moved = cautious_distance(self.outputs, first, second, order=self.q)
            value = moved / distance * (1.0 - FORWARD_ERROR)
            if value > found.value or bool((found.first == found.second).all()):
                found = LowerBound(value=value, p=self.p, q=self.q, first=first.clone(), second=second.clone())
        if bool((found.first == found.second).all()):
            raise ValueError(
                f"no pair of two different records of shape {self.shape} was found in the box: widen input_box"
            )
        return found

    # ---- evaluating -------------------------------------------------------------------------------------------

    def distances(self, base: torch.Tensor) -> torch.Tensor:
        """Distance of each pair, of shape (B, 1, …)."""
        size = base.flatten(1).square().mean(1).sqrt().clamp_min(1e-6)
        return _like(CLOSENESS * size, base)

    def pair_of(self, pairs: _Pairs, distance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two records, both in the box."""
        first = pairs.base
        if self.box is not None:
            margin = distance * pairs.direction.abs()
            low, high = self.box[0] + margin, self.box[1] - margin
            middle = (self.box[0] + self.box[1]) / 2
            first = torch.where(low <= high, torch.minimum(torch.maximum(first, low), high), middle)
            first = self.inside(first)
        return first, self.inside(first + distance * pairs.direction)

    def inside(self, records: torch.Tensor) -> torch.Tensor:
        return records if self.box is None else torch.minimum(torch.maximum(records, self.box[0]), self.box[1])

    def outputs(self, batch: torch.Tensor) -> torch.Tensor:
        """The net on a float64 batch."""
        try:
            outputs: torch.Tensor = self.net(batch)
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"the head does not run in float64 ({' '.join(str(error).split())[:150]}): the search computes in "
                "float64; keep constants in buffers and leave casts out, or do without the search"
            ) from error
        return outputs

    @torch.no_grad()
    def try_out(self, pairs: _Pairs) -> torch.Tensor:
        """Ratios of the pairs on the head itself, rounding allowed for."""
        return self.ratios_of(*self.pair_of(pairs, self.distances(pairs.base)))

    def ratios_of(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        left, right = self.outputs(torch.cat([first, second])).chunk(2)
        distance, moved = _norms(second - first, self.p), _norms(right - left, self.q)
        allowance = FORWARD_ERROR * moved + 1e-15 * (_norms(left, self.q) + _norms(right, self.q))
        ratios = torch.where(distance > 0, (moved - allowance) / distance.clamp_min(1e-300), torch.zeros_like(moved))
        if not bool(torch.isfinite(ratios).all()):
            raise ValueError(
                "the head's output is not finite on ordinary records: no ratio exists; check its weights or the box"
            )
        return ratios

    def slopes(self, pairs: _Pairs, *, softening: float) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Gradients of log ‖J(x)v‖_q with respect to x and v, or None for a head that ignores its input."""
        distance = self.distances(pairs.base)
        first, second = (record.detach().requires_grad_(True) for record in self.pair_of(pairs, distance))
        with self.kinks.softened(softening):
            left, right = self.outputs(torch.cat([first, second])).chunk(2)
        moved = _norms(right - left, self.q)
        if not moved.requires_grad:
            return None
        logs = moved.clamp_min(1e-300).log().sum()
        at_first, at_second = torch.autograd.grad(logs, (first, second), materialize_grads=True)
        return at_first + at_second, at_second * distance

    # ---- improving --------------------------------------------------------------------------------------------

    def ascend(self, pairs: _Pairs, length: int, *, keep: int) -> None:
        """One round: soft steps of records and directions, with power steps on the head itself in between."""
        best, best_ratios = pairs, self.try_out(pairs)
        low, high = (math.log(end) for end in FIRST_STEPS)
        strides = (low + (high - low) * torch.rand(len(pairs), generator=self.random, dtype=torch.float64)).exp()
        velocity = torch.zeros_like(pairs.base)
        energy = torch.zeros_like(pairs.base)
        for step in range(length):
            progress = step / max(length - 1, 1)
            slopes = self.slopes(pairs, softening=WIDEST * (SHARPEST / WIDEST) ** progress)
            if slopes is None:
                break
            uphill, along = slopes
            uphill = uphill / _like(_norms(uphill, 2).clamp_min(1e-300), uphill)
            velocity = 0.9 * velocity + 0.1 * uphill
            energy = 0.99 * energy + 0.01 * uphill.square()
            move = velocity / (energy.sqrt() + 1e-3 * _like(energy.flatten(1).mean(1).sqrt(), energy) + 1e-300)
            move = move / _like(_norms(move, 2).clamp_min(1e-300), move)
            stride = strides * SHRINK**progress * _norms(pairs.base, 2).clamp_min(1e-6)
            base = self.inside(pairs.base + _like(stride, move) * move)
            pairs = _Pairs(base, self.turned(pairs.direction, along))
            candidates = pairs
            if not self.kinks.seen or step % 4 == 3:
                candidates = self.power_step(pairs)
            ratios = self.try_out(candidates)
            best = candidates.where(ratios > best_ratios, best)
            best_ratios = torch.maximum(ratios, best_ratios)
        self.remember(self.powered(best), keep)

    def powered(self, pairs: _Pairs) -> _Pairs:
        """Better directions on the head itself with the records held: power steps, for 2→2 those of Lanczos."""
        for _ in range(1 if self.p == self.q == 2 else POWER_STEPS):
            turned = self.lanczos(pairs) if self.p == self.q == 2 else self.power_step(pairs)
            better = self.try_out(turned) > self.try_out(pairs)
            pairs = turned.where(better, pairs)
        return pairs

    def power_step(self, pairs: _Pairs) -> _Pairs:
        slopes = self.slopes(pairs, softening=0.0)
        return pairs if slopes is None else _Pairs(pairs.base, self.turned(pairs.direction, slopes[1]))

    def lanczos(self, pairs: _Pairs) -> _Pairs:
        """The best direction in the Krylov space of JᵀJ (Rayleigh–Ritz, orthogonalised in full)."""
        vectors = [pairs.direction.flatten(1) / _norms(pairs.direction, 2)[:, None]]
        images = []
        for _ in range(min(KRYLOV, vectors[0].shape[1])):
            current = _Pairs(pairs.base, vectors[-1].reshape(pairs.base.shape))
            slopes = self.slopes(current, softening=0.0)
            if slopes is None:
                return pairs
            images.append(slopes[1].flatten(1) * self.try_out(current)[:, None] ** 2)  # JᵀJv = ‖Jv‖²·∇ log ‖Jv‖
            fresh = images[-1]
            basis = torch.stack(vectors, 1)
            for _ in range(2):
                fresh = fresh - torch.einsum("bk,bkn->bn", torch.einsum("bkn,bn->bk", basis, fresh), basis)
            vectors.append(fresh / fresh.norm(dim=1, keepdim=True).clamp_min(1e-300))
        basis = torch.stack(vectors[:-1], 1)
        small = torch.einsum("bkn,bln->bkl", basis, torch.stack(images, 1))
        weights = torch.linalg.eigh((small + small.mT) / 2).eigenvectors[:, :, -1]
        return _Pairs(pairs.base, torch.einsum("bk,bkn->bn", weights, basis).reshape(pairs.base.shape))

    def turned(self, direction: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The direction of p-norm 1 along which a linear function of this gradient grows most, if it is not 0."""
        turned = _dual_direction(gradient, self.p)
        length = _norms(turned, self.p)
        return torch.where(_like(length > 0, turned), turned / _like(length.clamp_min(1e-300), turned), direction)

    def remember(self, pairs: _Pairs, keep: int) -> None:
        """Merge pairs into the best ones known."""
        ratios = self.try_out(pairs)
        if self.elite is not None:
            pairs = _Pairs(torch.cat([self.elite.base, pairs.base]), torch.cat([self.elite.direction, pairs.direction]))
            ratios = torch.cat([self.ratios, ratios])
        order = ratios.argsort(descending=True, stable=True)[: max(keep, FINALISTS)]
        self.elite, self.ratios = pairs.take(order), ratios[order]

    # ---- starting ---------------------------------------------------------------------------------------------

    def starting_records(self, count: int) -> torch.Tensor:
        spread = torch.randn((count, *self.shape), generator=self.random, dtype=torch.float64)
        scales = 10.0 ** (torch.rand(count, generator=self.random, dtype=torch.float64) * 3.0 - 2.0)
        if self.box is None:
            return spread * _like(scales, spread)
        low, high = (side.clamp(-1e6, 1e6) for side in self.box)
        return low + (high - low) * torch.rand((count, *self.shape), generator=self.random, dtype=torch.float64)

    def starting_pairs(self, count: int, *, first: bool) -> _Pairs:
        """New pairs, half of them near the best ones after the first round."""
        base = self.starting_records(count)
        direction = torch.randn(base.shape, generator=self.random, dtype=torch.float64)
        pairs = _Pairs(base, self.turned(direction, direction))
        if first and (self.p == 1 or self.q == math.inf):
            self.scan(base[: min(4, count)], keep=max(count, FINALISTS))
        if self.elite is None:
            return pairs
        near = count if first else (count + 1) // 2
        rows = torch.arange(near) % len(self.elite)
        chosen = self.elite.take(rows)
        if first:
            return _Pairs(base, chosen.direction)
        noise = torch.randn((near, *self.shape), generator=self.random, dtype=torch.float64)
        size = _like(chosen.base.flatten(1).square().mean(1).sqrt(), noise)
        strength = 10.0 ** (torch.rand(near, generator=self.random, dtype=torch.float64) * 2.0 - 2.0)
        moved = self.inside(chosen.base + noise * size * _like(strength, noise))
        fresh = pairs.take(torch.arange(near, count))
        if self.p == 1 or self.q == math.inf:
            fresh = _Pairs(fresh.base, self.elite.direction[torch.arange(near, count) % len(self.elite)])
        return _Pairs(torch.cat([moved, fresh.base]), torch.cat([chosen.direction, fresh.direction]))

    def scan(self, records: torch.Tensor, *, keep: int) -> None:
        """Try every coordinate (p = 1), or the direction dual to every row of the Jacobian (q = ∞)."""
        for record in records:
            propose = self.coordinates if self.p == 1 else self.row_directions(record)
            if propose is None:
                return
            total = math.prod(self.shape) if self.p == 1 else self.outputs(record[None]).numel()
            tried = torch.arange(total)
            if total > MAX_TRIED:
                tried = torch.randperm(total, generator=self.random)[:MAX_TRIED]
            found = []
            for rows in tried.split(CHUNK):  # type: ignore[no-untyped-call]
                directions = propose(rows)
                pairs = _Pairs(record.expand_as(directions), directions)
                ratios = self.try_out(pairs)
                top = ratios.argsort(descending=True, stable=True)[:keep]
                found.append((pairs.take(top), ratios[top]))
            merged = _Pairs(torch.cat([f.base for f, _ in found]), torch.cat([f.direction for f, _ in found]))
            order = torch.cat([r for _, r in found]).argsort(descending=True, stable=True)[:keep]
            self.remember(merged.take(order), keep)

    def coordinates(self, rows: torch.Tensor) -> torch.Tensor:
        size = math.prod(self.shape)
        directions = torch.zeros(len(rows), size, dtype=torch.float64)
        directions[torch.arange(len(rows)), rows] = 1.0
        return directions.reshape(-1, *self.shape)

    def row_directions(self, record: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
        def propose(rows: torch.Tensor) -> torch.Tensor:
            batch = record.expand(len(rows), *self.shape).clone().requires_grad_(True)
            outputs = self.outputs(batch).flatten(1)
            if not outputs.requires_grad:
                return torch.ones(len(rows), *self.shape, dtype=torch.float64)
            (gradient,) = torch.autograd.grad(outputs[torch.arange(len(rows)), rows].sum(), batch)
            return self.turned(torch.ones_like(gradient), gradient)

        return propose


def _like(values: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """One value a record, shaped to multiply a batch."""
    return values.reshape(-1, *[1] * (batch.ndim - 1))


def _norms(batch: torch.Tensor, order: float) -> torch.Tensor:
    lengths: torch.Tensor = torch.linalg.vector_norm(batch.reshape(len(batch), -1), ord=order, dim=1)
    return lengths


def _dual_direction(gradient: torch.Tensor, p: float) -> torch.Tensor:
    """The direction of p-norm 1 along which a linear function of this gradient grows most."""
    if p == 2:
        return gradient
    if math.isinf(p):
        return gradient.sign()
    flat = gradient.flatten(1)
    chosen = flat.abs().argmax(dim=1, keepdim=True)
    return torch.zeros_like(flat).scatter(1, chosen, flat.gather(1, chosen).sign()).reshape(gradient.shape)


def _float64_copy(head: nn.Module) -> nn.Module:
    """A float64 copy with effective weights in place of parametrised ones: the head that a certificate speaks of."""
    try:
        net = copy.deepcopy(head).to("cpu")
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"the head cannot be copied ({' '.join(str(error).split())[:150]}): the search runs on a copy; keep "
            "computed tensors, locks and files out of its attributes, or do without the search"
        ) from error
    for module in list(net.modules()):
        if parametrize.is_parametrized(module):
            with torch.no_grad():
                effective = {name: getattr(module, name).clone() for name in module.parametrizations}  # type: ignore[union-attr]
            # The class made by parametrisation is shared with the original, so it is left, never edited.
            module.__class__ = parametrize.type_before_parametrizations(module)
            del module.parametrizations
            for name, weight in effective.items():
                module.register_parameter(name, nn.Parameter(weight))
    return net.double().requires_grad_(False)
