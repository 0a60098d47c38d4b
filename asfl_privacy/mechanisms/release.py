"""The release: a certificate of the head as it is now, and the noise calibrated from it, joined."""

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import nn

from asfl_privacy.accounting.checks import check_choice, check_multiplier, check_norm, check_radius
from asfl_privacy.accounting.rationals import fraction_down
from asfl_privacy.mechanisms.clipping import clip_rows
from asfl_privacy.mechanisms.families import FAMILIES, make_mechanism
from asfl_privacy.mechanisms.guards import (
    check_activations,
    check_clip,
    check_input_box,
    check_resolution,
    make_input_box,
    make_input_shape,
)
from asfl_privacy.mechanisms.mechanism import Mechanism, scale_for
from asfl_privacy.mechanisms.placement import check_dtype, check_eval, split_head
from asfl_privacy.mechanisms.release_sensitivity import ReleaseSensitivity, release_sensitivity
from asfl_privacy.mechanisms.stateless import run_stateless
from sensitivity import Certificate


@dataclass(frozen=True, kw_only=True)
class ReleasePlan:
    """Everything a release needs beside the head and the inputs; made once a round by ``plan_release``.

    Args:
        placement: "input", "after:NAME" or "exchange".
        mechanism: Gaussian or Laplace with scale noise_multiplier·Δ.
        noise_multiplier: z; the σ/Δ or b/Δ to record in the ledger.
        whole_record_multiplier: the same for any two records of the input box, rounded down.
        sensitivity: Δ at the radius and for any two records, the certificate and the formula.
        p: norm of the input distance.
        radius: R > 0, or "any".
        clip: C, or None.
        input_box: (low, high) of the raw inputs.
        input_shape: shape of one record.
    """

    placement: str
    mechanism: Mechanism
    noise_multiplier: float
    whole_record_multiplier: float
    sensitivity: ReleaseSensitivity
    p: float
    radius: float | str
    clip: float | None
    input_box: tuple[float, float]
    input_shape: tuple[int, ...]

    @property
    def scale(self) -> float:
        """σ or b."""
        return self.mechanism.scale

    @property
    def noise_stddev(self) -> float:
        """σ or √2·b."""
        return self.mechanism.noise_stddev

    @property
    def certificate(self) -> Certificate | None:
        """The certificate of what runs before the noise; None at placement "input"."""
        return self.sensitivity.certificate


def plan_release(
    head: nn.Sequential,
    *,
    placement: str,
    mechanism: str,
    noise_multiplier: float,
    p: float,
    radius: float | str,
    input_shape: tuple[int, ...],
    clip: float | None = None,
    input_box: tuple[float, float] = (0.0, 1.0),
) -> ReleasePlan:
    """Certify the head as it is now and fix the noise.

    Args:
        head: nn.Sequential of named blocks, in eval mode.
        placement: "input", "after:NAME" or "exchange"; resolve "auto" with ``choose_placement`` first.
        mechanism: "gaussian" or "laplace".
        noise_multiplier: z > 0, fixed before the run.
        p: norm of the input distance: 1, 2 or inf.
        radius: R > 0 in raw input units, or "any" (any two records; needs ``clip``).
        input_shape: shape of one record, without the batch.
        clip: C > 0 to clip each row to q-norm C before the noise.
        input_box: (low, high) that every raw input lies in.

    Returns:
        The plan, valid for these weights only.

    Raises:
        ValueError: if a value is out of range, the head is not in eval mode, or radius is "any" without clip.
        UnsupportedModuleError: if what runs before the noise has no certificate.

    Guarantee:
        The scale is at least z·Δ and at least whole_record_multiplier·Δ_whole, rounding included.

    Example:
        >>> head = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).eval()
        >>> noise = {"mechanism": "gaussian", "noise_multiplier": 10.0}
        >>> plan = plan_release(head, placement="input", p=2, radius=0.5, input_shape=(1, 2, 2), **noise)
        >>> plan.noise_stddev, plan.whole_record_multiplier
        (5.0, 2.5)
    """
    family = check_choice("mechanism", mechanism, tuple(FAMILIES))
    noise_multiplier = check_multiplier(noise_multiplier)
    prefix, _ = split_head(head, placement)
    check_eval(head)
    moved = release_sensitivity(
        prefix if len(prefix) else None,
        p=p,
        q=FAMILIES[family].norm,
        radius=radius,
        input_shape=input_shape,
        clip=clip,
        input_box=input_box,
    )
    scale = scale_for(noise_multiplier, sensitivity=moved.value)
    return ReleasePlan(
        placement=placement,
        mechanism=make_mechanism(family, scale=scale, sensitivity=moved.value),
        noise_multiplier=noise_multiplier,
        whole_record_multiplier=min(noise_multiplier, fraction_down(Fraction(scale) / Fraction(moved.whole_record))),
        sensitivity=moved,
        p=check_norm(p),
        radius=check_radius(radius),
        clip=check_clip(clip),
        input_box=make_input_box(input_box),
        input_shape=make_input_shape(input_shape),
    )


def apply_release(
    plan: ReleasePlan, head: nn.Sequential, inputs: torch.Tensor, *, generator: torch.Generator | None
) -> torch.Tensor:
    """Release the activations of a batch: one noised output per record.

    Args:
        plan: from ``plan_release`` on this head with these weights.
        head: the head, in eval mode.
        inputs: raw inputs in the box, shape (batch, *input_shape), in the head's precision.
        generator: advanced by the call; None draws from the operating system. A known seed voids privacy.

    Returns:
        The released activations at the end of the head, shape (batch, ...), without gradient.

    Raises:
        ValueError: for inputs of another shape, outside the box, in half precision, NaN, inf or an empty batch; for
            activations that are not finite; for a head in train mode or one that changes itself while it runs.
            Nothing is returned then.
        StaleCertificateError: if the weights differ from those certified.

    Guarantee:
        In ideal arithmetic, one release of each record with the plan's noise multipliers; everything after the noise is
        post-processing.
    """
    noised = add_noise(plan, head, inputs, generator=generator)
    return finish_release(plan, head, noised)


def add_noise(
    plan: ReleasePlan, head: nn.Sequential, inputs: torch.Tensor, *, generator: torch.Generator | None
) -> torch.Tensor:
    """The first half of ``apply_release``: run up to the noise and add it.

    At placement "input" the result can be drawn once per record, kept by its client and finished in every later round
    (``finish_release``): that is post-processing of ONE release, and amounts to sharing noised inputs through the head.

    Args:
        plan: see ``apply_release``.
        head: see ``apply_release``.
        inputs: see ``apply_release``.
        generator: see ``apply_release``.

    Returns:
        The noised inputs or intermediates, shape (batch, ...), without gradient.

    Raises:
        ValueError: see ``apply_release``.
        StaleCertificateError: see ``apply_release``.
    """
    prefix, _ = split_head(head, plan.placement)
    check_eval(head)
    check_activations(inputs, what="inputs")
    check_dtype(head, inputs)
    if tuple(inputs.shape[1:]) != plan.input_shape:
        raise ValueError(
            f"inputs have shape {tuple(inputs.shape)}: the plan was made for (batch, *{plan.input_shape}); "
            "reshape the inputs or plan again"
        )
    check_input_box(inputs, input_box=plan.input_box)
    if plan.certificate is not None:
        plan.certificate.check(prefix)
    activations = run_stateless(prefix, inputs)
    check_activations(activations)
    if len(activations) != len(inputs):
        raise ValueError(
            f"the head turns {len(inputs)} records into {len(activations)} rows: a release is one row per record; "
            "keep the batch dimension first"
        )
    if plan.clip is not None:
        activations = clip_rows(activations, max_norm=plan.clip, norm=plan.mechanism.norm)
    check_resolution(activations, noise_stddev=plan.noise_stddev)
    return activations + plan.mechanism.sample_like(activations, generator=generator)


def finish_release(plan: ReleasePlan, head: nn.Sequential, noised: torch.Tensor) -> torch.Tensor:
    """The second half of ``apply_release``: push what was noised through the rest of the head (post-processing).

    Args:
        plan: tells where the rest of the head begins.
        head: the head, in eval mode; its weights may be newer than the plan's.
        noised: from ``add_noise``; left as it is.

    Returns:
        The activations at the end of the head, shape (batch, ...), without gradient.

    Raises:
        ValueError: if the head is in train mode, the result is not finite, or a block changes itself while it runs.

    Guarantee:
        Post-processing as long as the blocks after the noise hold nothing of a record: what they keep of this call is
        refused here, and what they may have kept of another is refused where that one runs through ``run_stateless``.
    """
    _, rest = split_head(head, plan.placement)
    check_eval(head)
    released = run_stateless(rest, noised)
    check_activations(released, what="released activations")
    return released
