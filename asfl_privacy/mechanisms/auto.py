"""Placement "auto": the place where the same guarantee disturbs the released activations least."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from asfl_privacy.accounting.checks import check_box, check_choice, check_integer, check_multiplier
from asfl_privacy.mechanisms.clipping import clip_rows
from asfl_privacy.mechanisms.families import FAMILIES, make_mechanism
from asfl_privacy.mechanisms.guards import make_input_shape
from asfl_privacy.mechanisms.mechanism import scale_for
from asfl_privacy.mechanisms.placement import check_eval, split_head, valid_placements
from asfl_privacy.mechanisms.release_sensitivity import release_sensitivity
from sensitivity import UnsupportedModuleError

TIE = 0.1
"""Placements whose disturbances differ by less than this share count as equal."""


@dataclass(frozen=True, kw_only=True)
class PlacementChoice:
    """What "auto" chose.

    Args:
        placement: the choice.
        reason: one line with the numbers.
        relative_noise: mean squared disturbance over mean squared activation at the exchange layer, by candidate.
        skipped: candidates without a certificate, with the reason.
    """

    placement: str
    reason: str
    relative_noise: dict[str, float]
    skipped: dict[str, str]


def choose_placement(
    head: nn.Sequential,
    *,
    mechanism: str,
    p: float,
    radius: float | str,
    input_shape: tuple[int, ...],
    clip: float | None = None,
    input_box: tuple[float, float] = (0.0, 1.0),
    noise_multiplier: float = 1.0,
    num_samples: int = 64,
    seed: int = 0,
) -> PlacementChoice:
    """Choose where the noise goes, from weights and public constants alone.

    Args:
        head: nn.Sequential of named blocks, in eval mode.
        mechanism: "gaussian" or "laplace".
        p: norm of the input distance.
        radius: R > 0, or "any" (needs ``clip``).
        input_shape: shape of one record.
        clip: C > 0 if rows are clipped before the noise.
        input_box: (low, high) of the raw inputs.
        noise_multiplier: z, the same at every candidate.
        num_samples: synthetic inputs, drawn uniformly from the box.
        seed: of the synthetic inputs and the trial noise.

    Returns:
        The choice. Each candidate's noise z·Δ is added to synthetic activations and pushed through the rest of the
        head; the smallest mean squared disturbance at the exchange layer, relative to the undisturbed activations,
        wins. Ties go to the placement nearest the input: a later one must be better by more than a tenth, which the
        trial noise alone does not reach (behind a mere rescaling both are equal in truth).

    Raises:
        ValueError: if a value is out of range, or the head is not in eval mode.

    Guarantee:
        No private data is read: the choice costs no privacy beyond that of the weights.

    Edge cases:
        Candidates without a certificate are skipped, with the reason. A clip counts as disturbance where it acts.
    """
    family = check_choice("mechanism", mechanism, tuple(FAMILIES))
    noise_multiplier = check_multiplier(noise_multiplier)
    num_samples = check_integer("num_samples", num_samples, minimum=1)
    low, high = check_box(input_box)
    input_shape = make_input_shape(input_shape)
    candidates = valid_placements(head)
    candidates = (*candidates[:-2], "exchange")  # after the last block is the exchange itself
    check_eval(head)
    generator = torch.Generator().manual_seed(seed)
    parameter = next(head.parameters(), torch.zeros(1))
    inputs = low + (high - low) * torch.rand(num_samples, *input_shape, generator=generator, dtype=torch.float64)
    inputs = inputs.to(parameter)
    relative_noise: dict[str, float] = {}
    skipped: dict[str, str] = {}
    with torch.no_grad():
        clean = head(inputs.clone()).double()
        power = float(clean.square().mean())
        for placement in candidates:
            prefix, rest = split_head(head, placement)
            try:
                moved = release_sensitivity(
                    None if placement == "input" else prefix,
                    p=p,
                    q=FAMILIES[family].norm,
                    radius=radius,
                    input_shape=input_shape,
                    clip=clip,
                    input_box=input_box,
                )
            except UnsupportedModuleError as error:
                skipped[placement] = str(error)
                continue
            noise = make_mechanism(family, scale=scale_for(noise_multiplier, sensitivity=moved.value))
            activations = prefix(inputs.clone())
            if clip is not None:
                activations = clip_rows(activations, max_norm=clip, norm=noise.norm)
            noised = activations + noise.sample_like(activations, generator=generator)
            disturbance = float((rest(noised).double() - clean).square().mean())
            relative_noise[placement] = disturbance / power if power > 0.0 else disturbance
    finite = {placement: value for placement, value in relative_noise.items() if math.isfinite(value)}
    if not finite:
        raise ValueError("no placement of this head gives a finite disturbance: check its weights")
    choice = next(iter(finite))
    for placement, value in finite.items():
        if value < (1.0 - TIE) * finite[choice]:
            choice = placement
    numbers = ", ".join(f"{placement} {value:.3g}" for placement, value in relative_noise.items())
    reason = (
        f"{choice}: the earliest within a tenth of the least mean squared disturbance of the exchanged activations, on "
        f"{num_samples} synthetic inputs at noise multiplier {noise_multiplier:g} ({numbers})"
    )
    if skipped:
        reason += f"; no certificate at {', '.join(skipped)}"
    return PlacementChoice(placement=choice, reason=reason, relative_noise=relative_noise, skipped=skipped)
