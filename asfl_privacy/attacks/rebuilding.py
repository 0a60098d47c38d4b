"""All reconstructions of one batch of releases, each with how much it resembles the originals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asfl_privacy.accounting.checks import check_integer
from asfl_privacy.attacks.decoder import reconstruct, train_decoder
from asfl_privacy.attacks.guards import check_batch
from asfl_privacy.attacks.intervals import MeanError, mean_error
from asfl_privacy.attacks.inversion import invert, invert_noised, total_variation_weight
from asfl_privacy.attacks.measures import psnr, ssim
from asfl_privacy.attacks.view import RecipientView

SHARES = (0.05, 0.2, 0.6)
"""Prior weights tried, as shares of the likeliest."""
TUNED = 16
"""Auxiliary records that they are tried on."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How hard the attacker works.

    Attributes:
        inversion_steps: Adam steps of an inversion.
        restarts: Random starts of an inversion, beside the mean of the auxiliary records.
        decoder_steps: AdamW steps of the decoder.
        search_steps: Ascent steps towards the worst neighbour.
        membership_pairs: Pairs of candidates told apart.
        membership_trials: Releases of each candidate of a pair.
    """

    inversion_steps: int = 300
    restarts: int = 1
    decoder_steps: int = 400
    search_steps: int = 30
    membership_pairs: int = 8
    membership_trials: int = 250

    def __post_init__(self) -> None:
        for name in ("inversion_steps", "decoder_steps", "search_steps", "membership_pairs", "membership_trials"):
            check_integer(name, getattr(self, name), minimum=1)
        check_integer("restarts", self.restarts, minimum=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Reconstruction:
    """Rebuilt records.

    Attributes:
        attack: "mean record" (no attack: what is known without any release), "inversion", "inversion, then denoising",
            "decoder", or "best of each record", which picks by PSNR as no attacker can, and so flatters the attack.
        records: float32, shape (n, *input_shape).
        psnr_by_record: Decibels, shape (n,).
        psnr: Their mean.
        ssim: Mean structural similarity; None for records that are no images.
    """

    attack: str
    records: NDArray[np.float32]
    psnr_by_record: NDArray[np.float64]
    psnr: MeanError
    ssim: MeanError | None


def make_reconstruction(
    attack: str, records: Tensor, *, originals: Tensor, input_box: tuple[float, float]
) -> Reconstruction:
    """Measure rebuilt records against the originals, both of shape (n, *input_shape)."""
    decibels = psnr(records, originals, input_box=input_box)
    similarity = ssim(records, originals, input_box=input_box).tolist() if originals.dim() == 4 else None
    return Reconstruction(
        attack=attack,
        records=records.detach().cpu().float().numpy(),
        psnr_by_record=decibels.cpu().numpy(),
        psnr=mean_error(decibels.tolist()),
        ssim=None if similarity is None else mean_error(similarity),
    )


def rebuild(
    release: Callable[[Tensor], Tensor],
    view: RecipientView,
    released: Tensor,
    *,
    originals: Tensor,
    auxiliary_inputs: Tensor,
    input_box: tuple[float, float],
    effort: Effort,
    generator: torch.Generator,
) -> tuple[Reconstruction, ...]:
    """Rebuild released records by every attack that fits, and pick the best of each record.

    Args:
        release: imitated by the attacker on its own records.
        view: what it knows.
        released: the releases attacked, shape (n, ...).
        originals: the truth, for measuring alone, shape (n, *input_shape).
        auxiliary_inputs: the attacker's own records.
        input_box: (low, high) of the records.
        effort: how hard it works.
        generator: for starts, weights and batches.

    Returns:
        One reconstruction an attack, the last one the best of each record.

    Raises:
        ValueError: see `invert` and `train_decoder`.
    """
    input_shape = tuple(originals.shape[1:])
    sample = auxiliary_inputs[:TUNED]
    with torch.no_grad():
        rows = torch.cat([check_batch(release(sample), what="released"), released])  # tuned on the first, then attacked
    arriving = noise_at_the_end(view, rows[: len(sample)], sample)
    steps = effort.inversion_steps
    search = partial(invert, input_shape=input_shape, input_box=input_box, steps=steps, generator=generator)

    def explain(rows: Tensor, prior_weight: float) -> Tensor:
        return search(
            view.expected,
            rows,
            mechanism=view.mechanism,
            noise_stddev=arriving,
            restarts=effort.restarts,
            prior_weight=prior_weight,
            start=auxiliary_inputs.mean(0),
        )

    def denoise(rows: Tensor, prior_weight: float) -> Tensor:
        return search(
            nn.Identity(),
            rows,
            mechanism=view.mechanism,
            noise_stddev=view.noise_stddev,
            prior_weight=prior_weight,
        )

    def tuned(attack: Callable[[Tensor, float], Tensor], rows: Tensor) -> Tensor:
        weight = 0.0 if len(input_shape) != 3 else total_variation_weight(auxiliary_inputs)
        if weight > 0.0 and arriving is not None:
            weight = choose_weight(attack, rows[: len(sample)], sample, likeliest=weight, input_box=input_box)
        return attack(rows[len(sample) :], weight)

    found = {"inversion": tuned(explain, rows)}
    if view.noise_stddev is not None and not view.noise_is_last and is_identity(view, sample):
        noised = invert_noised(
            view.after_noise,
            rows,
            input_shape=input_shape,
            input_box=input_box,
            steps=steps,
            generator=generator,
            noise_stddev=view.noise_stddev,
        )
        found["inversion, then denoising"] = tuned(denoise, noised)
    decoder = train_decoder(
        release, auxiliary_inputs, input_box=input_box, steps=effort.decoder_steps, generator=generator
    )
    found["decoder"] = reconstruct(decoder, released)
    measured = [
        make_reconstruction(attack, records, originals=originals, input_box=input_box)
        for attack, records in found.items()
    ]
    choice = np.argmax([one.psnr_by_record for one in measured], axis=0)
    best = torch.stack(list(found.values()))[torch.from_numpy(choice), torch.arange(len(choice))]
    return (*measured, make_reconstruction("best of each record", best, originals=originals, input_box=input_box))


def choose_weight(
    attack: Callable[[Tensor, float], Tensor],
    rows: Tensor,
    records: Tensor,
    *,
    likeliest: float,
    input_box: tuple[float, float],
) -> float:
    """The prior weight with which an attack rebuilds auxiliary records best, among shares of the likeliest one.

    A maximum a posteriori smooths more than a mean does, so that the likeliest weight is often too heavy.
    """
    weights = [share * likeliest for share in SHARES]
    return max(weights, key=lambda weight: float(psnr(attack(rows, weight), records, input_box=input_box).mean()))


def noise_at_the_end(view: RecipientView, released: Tensor, inputs: Tensor) -> float | None:
    """Standard deviation of the noise where it arrives: as given, or measured on releases of auxiliary records."""
    if view.noise_stddev is None or view.noise_is_last:
        return view.noise_stddev
    with torch.no_grad():
        noise = released - view.expected(inputs)
    return float(noise.double().square().mean().sqrt()) or None


def is_identity(view: RecipientView, inputs: Tensor) -> bool:
    """Whether the noise sits on the records themselves."""
    with torch.no_grad():
        before = view.noised_quantity(inputs)
    return view.clip is None and before.shape == inputs.shape and bool(torch.equal(before, inputs))
