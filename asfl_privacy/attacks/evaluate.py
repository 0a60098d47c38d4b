"""Every attack on one release: what is rebuilt, told apart and read off, each beside what is known without it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asfl_privacy.accounting.checks import check_box, check_integer
from asfl_privacy.attacks.guards import check_batch, check_labels, check_rows
from asfl_privacy.attacks.local_inverse import local_inverse
from asfl_privacy.attacks.membership import MembershipGuess, farthest_neighbours, guess_membership, membership_bound
from asfl_privacy.attacks.property_guess import PropertyGuess, guess_property
from asfl_privacy.attacks.rebuilding import Effort, Reconstruction, make_reconstruction, rebuild
from asfl_privacy.attacks.view import RecipientView


@dataclass(frozen=True, kw_only=True, eq=False)
class AttackResult:
    """What a curious recipient gets from one release of each record.

    Attributes:
        originals: The records attacked, float32, shape (n, *input_shape).
        baseline: The mean auxiliary record in place of each: what is known without any release.
        without_noise: Reconstructions from activations without noise, one an attack, "best of each record" last.
        reconstructions: Reconstructions from the releases.
        neighbours: Guess between a record and the worst neighbour found at distance ≤ R; None without a radius.
        any_two: Guess between a record and another record attacked; None where only one record is.
        property_guess: Guess of the label from the releases.
        property_without_noise: The same from activations without noise.
    """

    originals: NDArray[np.float32]
    baseline: Reconstruction
    without_noise: tuple[Reconstruction, ...]
    reconstructions: tuple[Reconstruction, ...]
    neighbours: MembershipGuess | None
    any_two: MembershipGuess | None
    property_guess: PropertyGuess
    property_without_noise: PropertyGuess

    @property
    def best(self) -> Reconstruction:
        """The best reconstruction of each record from the releases."""
        return self.reconstructions[-1]

    @property
    def best_without_noise(self) -> Reconstruction:
        """The best reconstruction of each record from activations without noise."""
        return self.without_noise[-1]

    def figures(self) -> dict[str, object]:
        """Everything but the pictures, as plain numbers and words that JSON holds."""

        def plain(one: Reconstruction) -> dict[str, object]:
            return {"attack": one.attack, "psnr": asdict(one.psnr), "ssim": one.ssim and asdict(one.ssim)}

        return {
            "num_records": len(self.originals),
            "baseline": plain(self.baseline),
            "without_noise": [plain(one) for one in self.without_noise],
            "reconstructions": [plain(one) for one in self.reconstructions],
            "neighbours": self.neighbours and asdict(self.neighbours),
            "any_two": self.any_two and asdict(self.any_two),
            "property": asdict(self.property_guess),
            "property_without_noise": asdict(self.property_without_noise),
        }


def attack_release(
    release: Callable[[Tensor], Tensor],
    view: RecipientView,
    *,
    held_out_inputs: Tensor,
    held_out_labels: Tensor,
    auxiliary_inputs: Tensor,
    auxiliary_labels: Tensor,
    input_box: tuple[float, float],
    epsilon: float | None = None,
    epsilon_any_two: float | None = None,
    delta: float = 0.0,
    radius: float | None = None,
    p: float = 2.0,
    seed: int,
    effort: Effort | None = None,
) -> AttackResult:
    """Attack one release of each held-out record with everything in this room.

    Args:
        release: raw inputs in the box to released activations, noise drawn afresh at each call; it is called on the
            records attacked, and on auxiliary ones and neighbours as the attacker would imitate it.
        view: what the attacker knows; `view.expected` must be `release` without its noise.
        held_out_inputs: records attacked, which neither model nor attacker has seen, shape (n, *input_shape).
        held_out_labels: their labels, shape (n,).
        auxiliary_inputs: the attacker's own records, shape (m, *input_shape), m ≥ 10; a few thousand are plenty.
        auxiliary_labels: their labels.
        input_box: (low, high) of every input.
        epsilon: ε of ONE release at distance ≤ `radius`; None where nothing is claimed.
        epsilon_any_two: ε of one release for any two records; None where nothing is claimed.
        delta: δ that goes with both.
        radius: R in the ℓp norm, or None to leave the guess between neighbours out.
        p: norm of that distance.
        seed: of everything but the noise, whose generator is `release`'s own.
        effort: how hard the attacker works.

    Returns:
        The figures and the rebuilt records.

    Raises:
        ValueError: shapes that differ, values out of range, NaN, a view that does not fit the release.

    Guarantee:
        Equal arguments and an equally seeded release give equal results; torch's global generator is left as it was.
        Figures of attacks bound nothing from above: a better attack may exist. A membership advantage whose `low` lies
        above its `bound` refutes the claimed (ε, δ), up to the interval's confidence.

    Edge cases:
        Records that are no images have no SSIM and no prior. Several releases of one record under one head give the
        attacker their mean: pass a release that averages them, with view.noise_stddev divided by √T, and their total ε.
    """
    effort = effort or Effort()
    seed = check_integer("seed", seed, minimum=0)
    box = check_box(input_box)
    inputs = check_batch(held_out_inputs, what="held_out_inputs")
    auxiliary = check_batch(auxiliary_inputs, what="auxiliary_inputs", shape=tuple(inputs.shape[1:]))
    labels = check_labels(held_out_labels, what="held_out_labels", count=len(inputs))
    known_labels = check_labels(auxiliary_labels, what="auxiliary_labels", count=len(auxiliary))
    bounds = [_bound(value, delta=delta) for value in (epsilon, epsilon_any_two)]

    def noise_free(batch: Tensor) -> Tensor:
        with torch.no_grad():
            return view.expected(batch)

    with torch.no_grad():
        released = check_batch(check_rows(release(inputs), what="release", count=len(inputs)), what="released")
    clean = noise_free(inputs)
    if clean.shape != released.shape:
        raise ValueError(
            f"the release gives rows of shape {tuple(released.shape[1:])} and the view {tuple(clean.shape[1:])}: the view "
            "must describe the release; check before_noise and after_noise"
        )
    quiet = RecipientView(
        before_noise=view.before_noise, after_noise=view.after_noise, mechanism=view.mechanism, clip=view.clip
    )
    attack = partial(rebuild, originals=inputs, auxiliary_inputs=auxiliary, input_box=box, effort=effort)
    without_noise = attack(noise_free, quiet, clean, generator=_stream(seed, "without noise"))
    noised = without_noise
    if view.noise_stddev is not None:
        noised = attack(release, view, released, generator=_stream(seed, "rebuild"))
    first = inputs[: effort.membership_pairs]
    neighbours = any_two = None
    if radius is not None:
        near = farthest_neighbours(
            view.noised_quantity,
            first,
            radius=radius,
            p=p,
            q=view.norm,
            input_box=box,
            steps=effort.search_steps,
            generator=_stream(seed, "neighbours"),
        )
        neighbours = _tell_apart(
            release,
            view,
            first,
            near,
            bound=bounds[0],
            trials=effort.membership_trials,
            generator=_stream(seed, "guess between neighbours"),
        )
    if len(inputs) > 1:
        any_two = _tell_apart(
            release,
            view,
            first,
            inputs.roll(1, 0)[: len(first)],
            bound=bounds[1],
            trials=effort.membership_trials,
            generator=_stream(seed, "guess between any two"),
        )
    with torch.no_grad():
        auxiliary_released = release(auxiliary)
    return AttackResult(
        originals=inputs.cpu().float().numpy(),
        baseline=make_reconstruction(
            "mean record", auxiliary.mean(0).expand_as(inputs), originals=inputs, input_box=box
        ),
        without_noise=without_noise,
        reconstructions=noised,
        neighbours=neighbours,
        any_two=any_two,
        property_guess=guess_property(auxiliary_released, known_labels, released, labels),
        property_without_noise=guess_property(noise_free(auxiliary), known_labels, clean, labels),
    )


def _tell_apart(
    release: Callable[[Tensor], Tensor],
    view: RecipientView,
    first: Tensor,
    second: Tensor,
    *,
    bound: float | None,
    trials: int,
    generator: torch.Generator,
) -> MembershipGuess:
    """Guess between the two records of each pair; where noise sits inside the head, what was noised is estimated first."""
    with torch.no_grad():
        means = [view.noised_quantity(records) for records in (first, second)]
        released = [release(records.repeat_interleave(trials, 0)) for records in (first, second)]
    if not view.noise_is_last:
        estimates: tuple[list[Tensor], list[Tensor]] = ([], [])
        for number in range(len(first)):
            candidates = torch.stack([means[0][number], means[1][number]])
            estimate = local_inverse(view, candidates, generator=generator)
            for rows, estimated in zip(released, estimates, strict=True):
                estimated.append(estimate(rows[number * trials : (number + 1) * trials]))
        released = [torch.cat(estimated) for estimated in estimates]
    return guess_membership(
        *released,
        expected_first=means[0].repeat_interleave(trials, 0),
        expected_second=means[1].repeat_interleave(trials, 0),
        mechanism=view.mechanism,
        bound=bound,
    )


def _bound(epsilon: float | None, *, delta: float) -> float | None:
    return None if epsilon is None else membership_bound(epsilon, delta=delta)


def _stream(seed: int, purpose: str) -> torch.Generator:
    """A generator for one purpose, so that dropping one attack leaves the others as they were."""
    digest = hashlib.sha256(f"attack|{seed}|{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
