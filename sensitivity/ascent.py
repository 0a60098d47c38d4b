"""Gradient search for close pairs of records that a net pulls far apart.

On a convex set the largest ratio ‖f(x) − f(x')‖_q / ‖x − x'‖_p is the largest ‖J(x)v‖_q over records x and directions
v of p-norm 1, so the search takes close pairs (x, x + t·v) and improves both parts by gradients:

- v by Boyd's power method: v becomes the direction of p-norm 1 that Jᵀu likes best, u being the dual vector of Jv. The
  ratio never falls, and for p = q = 2 this is power iteration (finished by Lanczos).
- x by ascent on log ‖J(x)v‖_q. Where f is piecewise linear that gradient is 0, so ReLUs and their kin are softened to
  softplus, sharper from step to step; only the net itself says which pairs are good.

For p = 1 the best v is a coordinate, and for q = ∞ it is dual to a row of J: all of them are tried around a few
records before the ascent starts from the best, which on linear nets already is the norm.

Source: D. W. Boyd (1974), The power method for lp norms, Linear Algebra Appl. 9, for the direction step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from sensitivity.smoothing import SoftenedKinks

CLOSENESS = 1e-5  # distance of a pair, relative to the record's root mean square
FORWARD_ERROR = 1e-12  # relative allowance when pairs are compared; the best one is judged by `cautious_ratio`
SMALLEST = 1e-3  # a record's size is never taken to be less
ROUND = 100  # steps between restarts
WIDEST, SHARPEST = 1.0, 0.01  # softening at the start and the end of a round, relative to a unit's inputs
SHRINK = 0.05  # a record's step at the end of a round, relative to the first step of the round
FIRST_STEPS = (0.05, 0.5)  # range of a record's first step, relative to the record: drawn per pair and round
POWER_STEPS = 6  # on the head itself at the end of a round
CHUNK = 256
MANY = 300  # coordinates or rows from which they are tried around one record only
MAX_TRIED = 2048  # coordinates or rows that are tried one by one around a record
KRYLOV = 40  # Lanczos steps on the best pair
TINY = 1e-290  # gradients below are taken for 0, and quotients by them avoided
SAME = 1e-7  # relative difference below which two ratios count as one
FINALISTS = 8  # pairs that are kept for the judgement


@dataclass(frozen=True)
class Pairs:
    """Records and directions of p-norm 1, batched."""

    base: torch.Tensor
    direction: torch.Tensor

    def __len__(self) -> int:
        return len(self.base)

    def take(self, rows: torch.Tensor) -> Pairs:
        """Some of the pairs, in this order."""
        return Pairs(self.base[rows], self.direction[rows])

    def where(self, chosen: torch.Tensor, other: Pairs) -> Pairs:
        """These pairs where chosen, of shape (B,), the others elsewhere."""
        mask = per_record(chosen, self.base)
        return Pairs(torch.where(mask, self.base, other.base), torch.where(mask, self.direction, other.direction))


class PairSearch:
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
        self.elite: Pairs | None = None
        self.ranking: torch.Tensor | None = None
        self.ratios = torch.zeros(0, dtype=torch.float64)
        self.kinks = SoftenedKinks()
        self.movable = torch.ones(shape, dtype=torch.bool) if box is None else box[0] < box[1]

    def run(self, *, num_starts: int, num_steps: int) -> Pairs:
        """All rounds.

        Args:
            num_starts: pairs that are improved side by side.
            num_steps: gradient steps of each.

        Returns:
            The best pairs, best first.
        """
        for done in range(0, num_steps, ROUND):
            pairs = self.starting_pairs(num_starts, first=done == 0)
            self.ascend(pairs, min(ROUND, num_steps - done), keep=num_starts)
        assert self.elite is not None
        return self.elite

    # ---- evaluating -------------------------------------------------------------------------------------------

    def sizes(self, base: torch.Tensor) -> torch.Tensor:
        """Root mean square of each record, or of the box's widths where they are smaller; shape (B, 1, …)."""
        size = base.flatten(1).square().mean(1).sqrt()
        if self.box is not None:
            size = size.clamp_max(float((self.box[1] - self.box[0])[self.movable].square().mean().sqrt()))
        return per_record(size.clamp_min(SMALLEST), base)

    def distances(self, base: torch.Tensor) -> torch.Tensor:
        """Distance of each pair, of shape (B, 1, …)."""
        return CLOSENESS * self.sizes(base)

    def pair_of(self, pairs: Pairs, distance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
        """The records, pulled back into the box."""
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
    def try_out(self, pairs: Pairs) -> torch.Tensor:
        """Ratios of the pairs on the head itself, rounding allowed for."""
        return self.ratios_of(*self.pair_of(pairs, self.distances(pairs.base)))

    @torch.no_grad()
    def ratios_of(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Ratios of pairs of records, 0 for two equal ones."""
        left, right = self.outputs(torch.cat([first, second])).chunk(2)
        distance, moved = record_norms(second - first, self.p), record_norms(right - left, self.q)
        allowance = FORWARD_ERROR * moved + 1e-15 * (record_norms(left, self.q) + record_norms(right, self.q))
        ratios = torch.where(distance > 0, (moved - allowance) / distance.clamp_min(TINY), torch.zeros_like(moved))
        if not bool(torch.isfinite(ratios).all()):
            raise ValueError(
                "the head's output is not finite on ordinary records: no ratio exists; check its weights or the box"
            )
        return ratios

    def slopes(self, pairs: Pairs, *, softening: float) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Gradients of log ‖J(x)v‖_q with respect to x and v, or None for a head that ignores its input."""
        distance = self.distances(pairs.base)
        first, second = (record.detach().requires_grad_(True) for record in self.pair_of(pairs, distance))
        with self.kinks.softened(softening):
            left, right = self.outputs(torch.cat([first, second])).chunk(2)
        moved = record_norms(right - left, self.q)
        if not moved.requires_grad:
            return None
        logs = moved.clamp_min(TINY).log().sum()
        at_first, at_second = torch.autograd.grad(logs, (first, second), materialize_grads=True)
        return at_first + at_second, at_second * distance

    # ---- improving --------------------------------------------------------------------------------------------

    def ascend(self, pairs: Pairs, length: int, *, keep: int) -> None:
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
            uphill = uphill / per_record(record_norms(uphill, 2).clamp_min(TINY), uphill)
            velocity = 0.9 * velocity + 0.1 * uphill
            energy = 0.99 * energy + 0.01 * uphill.square()
            move = velocity / (energy.sqrt() + 1e-3 * per_record(energy.flatten(1).mean(1).sqrt(), energy) + TINY)
            move = move / per_record(record_norms(move, 2).clamp_min(TINY), move)
            stride = per_record(strides * SHRINK**progress * math.sqrt(move[0].numel()), move)
            base = self.inside(pairs.base + stride * self.sizes(pairs.base) * move)
            pairs = Pairs(base, self.turned(pairs.direction, along))
            candidates = pairs
            if not self.kinks.seen or step % 4 == 3:
                candidates = self.power_step(pairs)
            ratios = self.try_out(candidates)
            best = candidates.where(ratios > best_ratios, best)
            best_ratios = torch.maximum(ratios, best_ratios)
        self.remember(self.powered(best), keep)

    def powered(self, pairs: Pairs) -> Pairs:
        """Better directions on the head itself with the records held: power steps, for 2→2 those of Lanczos."""
        for _ in range(1 if self.p == self.q == 2 else POWER_STEPS):
            turned = self.lanczos(pairs) if self.p == self.q == 2 else self.power_step(pairs)
            better = self.try_out(turned) > self.try_out(pairs)
            pairs = turned.where(better, pairs)
        return pairs

    def power_step(self, pairs: Pairs) -> Pairs:
        """One step of Boyd's power method on the net itself."""
        slopes = self.slopes(pairs, softening=0.0)
        return pairs if slopes is None else Pairs(pairs.base, self.turned(pairs.direction, slopes[1]))

    def lanczos(self, pairs: Pairs) -> Pairs:
        """The best direction in the Krylov space of JᵀJ (Rayleigh–Ritz, orthogonalised in full)."""
        vectors = [pairs.direction.flatten(1) / record_norms(pairs.direction, 2)[:, None]]
        images = []
        for _ in range(min(KRYLOV, vectors[0].shape[1])):
            current = Pairs(pairs.base, vectors[-1].reshape(pairs.base.shape))
            slopes = self.slopes(current, softening=0.0)
            if slopes is None:
                return pairs
            images.append(slopes[1].flatten(1) * self.try_out(current)[:, None] ** 2)  # JᵀJv = ‖Jv‖²·∇ log ‖Jv‖
            fresh = images[-1]
            basis = torch.stack(vectors, 1)
            for _ in range(2):
                fresh = fresh - torch.einsum("bk,bkn->bn", torch.einsum("bkn,bn->bk", basis, fresh), basis)
            vectors.append(fresh / fresh.norm(dim=1, keepdim=True).clamp_min(TINY))
        basis = torch.stack(vectors[:-1], 1)
        small = torch.einsum("bkn,bln->bkl", basis, torch.stack(images, 1))
        weights = torch.linalg.eigh((small + small.mT) / 2).eigenvectors[:, :, -1]
        best = torch.einsum("bk,bkn->bn", weights, basis).reshape(pairs.base.shape)
        return Pairs(pairs.base, self.turned(pairs.direction, best))

    def turned(self, direction: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The direction of p-norm 1 along which a linear function of this gradient grows most; the old one if it is 0."""
        turned = _dual_direction(gradient * self.movable, self.p)
        length = record_norms(turned, self.p)
        unit = turned / per_record(length.clamp_min(TINY), turned)
        return torch.where(per_record(length > TINY, turned), unit, direction)

    def remember(self, pairs: Pairs, keep: int) -> torch.Tensor:
        """Merge pairs into the best ones known; returns their ratios."""
        ratios = found = self.try_out(pairs)
        if self.elite is not None:
            pairs = Pairs(torch.cat([self.elite.base, pairs.base]), torch.cat([self.elite.direction, pairs.direction]))
            ratios = torch.cat([self.ratios, ratios])
        order = ratios.argsort(descending=True, stable=True)
        steps = ratios[order].diff(prepend=torch.full((1,), math.inf, dtype=torch.float64))
        distinct = steps.abs() > SAME * ratios[order]  # equal ratios come from one pattern of active units
        order = order[distinct][: max(keep, FINALISTS)]
        self.elite, self.ratios = pairs.take(order), ratios[order]
        return found

    # ---- starting ---------------------------------------------------------------------------------------------

    def starting_records(self, count: int) -> torch.Tensor:
        """Random records of many sizes, or spread over the box."""
        spread = torch.randn((count, *self.shape), generator=self.random, dtype=torch.float64)
        scales = 10.0 ** (torch.rand(count, generator=self.random, dtype=torch.float64) * 4.0 - 3.0)
        if self.box is None:
            return spread * per_record(scales, spread)
        low, high = (side.clamp(-1e6, 1e6) for side in self.box)
        return low + (high - low) * torch.rand((count, *self.shape), generator=self.random, dtype=torch.float64)

    def starting_pairs(self, count: int, *, first: bool) -> Pairs:
        """New pairs; after the first round half of them near the best ones."""
        if first and (self.p == 1 or self.q == math.inf):
            self.ranking = self.scan(self.starting_records(min(4, count)), keep=max(count, FINALISTS))
        fresh = self.fresh_pairs(count, first=first)
        if self.elite is None or first:
            return fresh
        near = (count + 1) // 2
        chosen = self.elite.take(torch.arange(near) % len(self.elite))
        noise = torch.randn((near, *self.shape), generator=self.random, dtype=torch.float64)
        strength = 10.0 ** (torch.rand(near, generator=self.random, dtype=torch.float64) * 2.0 - 2.0)
        moved = self.inside(chosen.base + per_record(strength, noise) * self.sizes(chosen.base) * noise)
        return Pairs(
            torch.cat([moved, fresh.base[: count - near]]),
            torch.cat([chosen.direction, fresh.direction[: count - near]]),
        )

    def fresh_pairs(self, count: int, *, first: bool) -> Pairs:
        """Random records with random directions, or with likely ones where they were ranked."""
        base = self.starting_records(count)
        if self.ranking is None:
            direction = torch.randn(base.shape, generator=self.random, dtype=torch.float64)
            return Pairs(base, self.turned(direction, direction))
        places = torch.arange(count) % len(self.ranking)
        if not first:  # log-uniform, so that good places come up often and each one sometimes
            drawn = torch.rand(count, generator=self.random, dtype=torch.float64) * math.log(len(self.ranking))
            places = drawn.exp().long().clamp_max(len(self.ranking) - 1)
        return Pairs(base, self.likely_directions(base, self.ranking[places]))

    def scan(self, records: torch.Tensor, *, keep: int) -> torch.Tensor:
        """Try every coordinate (p = 1), or the direction dual to every row of the Jacobian (q = ∞); best numbers first."""
        total = int(self.movable.sum()) if self.p == 1 else self.outputs(records[:1]).numel()
        scores = torch.full((total,), -1.0, dtype=torch.float64)
        for record in records[: len(records) if total <= MANY else 1]:
            numbers = torch.arange(total)
            if total > MAX_TRIED:
                numbers = torch.randperm(total, generator=self.random)[:MAX_TRIED]
            for rows in numbers.split(CHUNK):  # type: ignore[no-untyped-call]
                bases = record.expand(len(rows), *self.shape)
                pairs = Pairs(bases, self.likely_directions(bases, rows))
                scores[rows] = torch.maximum(scores[rows], self.remember(pairs, keep))
        return scores.argsort(descending=True, stable=True)

    def likely_directions(self, bases: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """For p = 1 coordinates that may move, else the directions that rows of the Jacobian like best."""
        return self.coordinates(numbers) if self.p == 1 else self.row_directions(bases, numbers)

    def coordinates(self, rows: torch.Tensor) -> torch.Tensor:
        """Unit directions along coordinates that may move."""
        directions = torch.zeros(len(rows), self.movable.numel(), dtype=torch.float64)
        directions[torch.arange(len(rows)), self.movable.flatten().nonzero()[rows, 0]] = 1.0
        return directions.reshape(-1, *self.shape)

    def row_directions(self, bases: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Directions of p-norm 1 that one row of the Jacobian at each record likes best."""
        batch = bases.clone().requires_grad_(True)
        outputs = self.outputs(batch).flatten(1)
        fallback = self.turned(torch.ones_like(bases), torch.ones_like(bases))
        if not outputs.requires_grad:
            return fallback
        (gradient,) = torch.autograd.grad(outputs[torch.arange(len(rows)), rows].sum(), batch)
        return self.turned(fallback, gradient)


def per_record(values: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """One value a record, shaped to multiply a batch."""
    return values.reshape(-1, *[1] * (batch.ndim - 1))


def record_norms(batch: torch.Tensor, order: float) -> torch.Tensor:
    """Norm of each record of a batch."""
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
    picked: torch.Tensor = torch.zeros_like(flat).scatter(1, chosen, flat.gather(1, chosen).sign())
    return picked.reshape(gradient.shape)
