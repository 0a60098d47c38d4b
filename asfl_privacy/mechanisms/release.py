"""The release: a certificate of the head as it is now, and the noise calibrated from it, joined."""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import nn

from asfl_privacy.accounting.checks import check_box, check_choice, check_multiplier, check_norm, check_radius
from asfl_privacy.accounting.rationals import fraction_down
from asfl_privacy.mechanisms.certificate_check import check_certificate
from asfl_privacy.mechanisms.clipping import clip_rows
from asfl_privacy.mechanisms.families import FAMILIES, make_mechanism
from asfl_privacy.mechanisms.guards import (
    check_activations,
    check_clip,
    check_input_box,
    make_input_shape,
)
from asfl_privacy.mechanisms.lattice import (
    LatticeNoise,
    WordSource,
    coarsen,
    encode,
    norm_at_most,
    plan_lattice,
    to_float,
    truncate,
)
from asfl_privacy.mechanisms.mechanism import Mechanism
from asfl_privacy.mechanisms.placement import check_dtype, check_eval, check_place, split_head
from asfl_privacy.mechanisms.release_sensitivity import (
    ReleaseSensitivity,
    release_sensitivity,
    truncated_sensitivity,
)
from asfl_privacy.mechanisms.stateless import run_stateless, run_stateless_over
from sensitivity import Certificate


@dataclass(frozen=True, kw_only=True)
class ReleasePlan:
    """Everything a release needs beside the head and the inputs; made once a round by ``plan_release``.

    Args:
        placement: "input", "after:NAME" or "exchange".
        mechanism: Gaussian or Laplace with scale noise_multiplier·Δ, Δ on the lattice.
        lattice: the spacing that activations are truncated to and the integer noise that is added there.
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
    lattice: LatticeNoise
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
    def payload_spacing(self) -> float:
        """Spacing of what is sent at placement "exchange": the power of two with 32 to 64 steps a scale."""
        return max(self.lattice.spacing, math.ldexp(1.0, math.frexp(self.lattice.scale)[1] - 6))

    @property
    def epsilon_excess(self) -> float:
        """Error of the sampler in one release of one record, as the ledger takes it."""
        return self.lattice.epsilon_excess(self.sensitivity.num_values)

    @property
    def tail_probability(self) -> float:
        """Likewise: the mass of the noise outside the sampler's tables."""
        return self.lattice.tail_probability(self.sensitivity.num_values)

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
        ValueError: if a value is out of range, the head is not in eval mode, what runs before the noise is not on the CPU,
            or radius is "any" without clip.
        UnsupportedModuleError: if what runs before the noise has no certificate.

    Guarantee:
        The scale is at least z·Δ and at least whole_record_multiplier·Δ_whole, rounding included.

    Example:
        >>> head = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).eval()
        >>> noise = {"mechanism": "gaussian", "noise_multiplier": 10.0}
        >>> plan = plan_release(head, placement="input", p=2, radius=0.5, input_shape=(1, 2, 2), **noise)
        >>> 5.0 <= plan.noise_stddev <= 5.02, round(plan.whole_record_multiplier, 1)  # truncation's share, 10 bits
        (True, 2.5)
    """
    family = check_choice("mechanism", mechanism, tuple(FAMILIES))
    noise_multiplier = check_multiplier(noise_multiplier)
    prefix, _ = split_head(head, placement)
    check_eval(head)
    check_place(prefix)
    moved = release_sensitivity(
        prefix if len(prefix) else None,
        p=p,
        q=FAMILIES[family].norm,
        radius=radius,
        input_shape=input_shape,
        clip=clip,
        input_box=input_box,
    )
    lattice = plan_lattice(
        family,
        sensitivity=moved.value,
        noise_multiplier=noise_multiplier,
        num_values=moved.num_values,
        clip_only=moved.is_clip_only,
    )
    whole = truncated_sensitivity(
        moved.whole_record,
        q=FAMILIES[family].norm,
        num_values=moved.num_values,
        spacing=lattice.spacing,
        clip=check_clip(clip),
    )
    return ReleasePlan(
        placement=placement,
        mechanism=make_mechanism(family, scale=lattice.scale, sensitivity=lattice.sensitivity),
        lattice=lattice,
        noise_multiplier=noise_multiplier,
        whole_record_multiplier=min(noise_multiplier, fraction_down(Fraction(lattice.scale) / Fraction(whole))),
        sensitivity=moved,
        p=check_norm(p),
        radius=check_radius(radius),
        clip=check_clip(clip),
        input_box=check_box(input_box),
        input_shape=make_input_shape(input_shape),
    )


def apply_release(plan: ReleasePlan, head: nn.Sequential, inputs: torch.Tensor, *, source: WordSource) -> torch.Tensor:
    """Release the activations of a batch: one noised output per record.

    Args:
        plan: from ``plan_release`` on this head with these weights.
        head: the head, in eval mode.
        inputs: raw inputs in the box, shape (batch, *input_shape), in the head's precision.
        source: `SystemSource()`; a `SeededSource` is for experiments, as a known seed voids privacy.

    Returns:
        The released activations at the end of the head, shape (batch, ...), without gradient.

    Raises:
        ValueError: for inputs of another shape, outside the box, in half precision, NaN, inf or an empty batch; for
            activations that are not finite; for a head in train mode or one that changes itself while it runs.
            Nothing is returned then.
        StaleCertificateError: if the weights differ from those certified.

    Guarantee:
        One release of each record with the plan's noise multipliers: what is noised is truncated toward zero onto the
        lattice (its norm stays ≤ C, checked again in exact integers), and integer noise with the law of the rounded
        mechanism is added there, but for the sampler's error, which the plan states. Everything after is
        post-processing.
    """
    noised = add_noise(plan, head, inputs, source=source)
    return finish_release(plan, head, noised)


def add_noise(plan: ReleasePlan, head: nn.Sequential, inputs: torch.Tensor, *, source: WordSource) -> torch.Tensor:
    """The first half of ``apply_release``: run up to the noise and add it.

    At placement "input" the result can be drawn once per record, kept by its client and finished in every later round
    (``finish_release``): that is post-processing of ONE release, and amounts to sharing noised inputs through the head.

    Args:
        plan: see ``apply_release``.
        head: see ``apply_release``.
        inputs: see ``apply_release``.
        source: see ``apply_release``.

    Returns:
        The noised inputs or intermediates, shape (batch, ...), without gradient.

    Raises:
        ValueError: see ``apply_release``.
        StaleCertificateError: see ``apply_release``.
    """
    return noised_and_clean(plan, head, inputs, source=source)[0]


def noised_and_clean(
    plan: ReleasePlan, head: nn.Sequential, inputs: torch.Tensor, *, source: WordSource
) -> tuple[torch.Tensor, torch.Tensor]:
    """``add_noise``, and what reached the noise, for the client itself.

    Args:
        plan: see ``apply_release``.
        head: see ``apply_release``.
        inputs: see ``apply_release``.
        source: see ``apply_release``.

    Returns:
        The noised rows, and the rows before clip, truncation and noise (at placement "input" the inputs themselves), in
        the same shape, without gradient. The second must stay with the client: nothing hides the records in them.

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
        check_place(prefix)
        check_certificate(plan.certificate, prefix)
    activations = run_stateless(prefix, inputs)
    check_activations(activations)
    if len(activations) != len(inputs):
        raise ValueError(
            f"the head turns {len(inputs)} records into {len(activations)} rows: a release is one row per record; "
            "keep the batch dimension first"
        )
    return noise_rows(plan, activations, source=source), activations


def noise_rows(plan: ReleasePlan, activations: torch.Tensor, *, source: WordSource) -> torch.Tensor:
    """What happens at the noise itself: clip, truncate onto the lattice, check the norm, add integer noise.

    Args:
        plan: see ``apply_release``.
        activations: what reaches the noise, shape (batch, ...), float32 or float64, finite.
        source: see ``apply_release``.

    Returns:
        The noised rows, in the type of ``activations``; at placement "exchange" on the coarser lattice that is sent.

    Raises:
        ValueError: for activations that must not be released.
    """
    noised, spacing = plan.lattice.release(_on_the_lattice(plan, activations), source), plan.lattice.spacing
    if plan.placement == "exchange":  # nothing needs the finer steps any more, and the payload is smaller
        noised = coarsen(noised, spacing=spacing, coarse_spacing=plan.payload_spacing)
        spacing = plan.payload_spacing
    values = torch.from_numpy(to_float(noised, spacing=spacing))
    return values.to(dtype=activations.dtype).to(device=activations.device)


def rows_before_noise(plan: ReleasePlan, activations: torch.Tensor) -> torch.Tensor:
    """What the noise of ``noise_rows`` is added to: clipped and truncated rows, float64, shape (batch, ...)."""
    cells = _on_the_lattice(plan, activations)
    return torch.from_numpy(np.ldexp(cells.astype(np.float64), math.frexp(plan.lattice.spacing)[1] - 1))


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
    return _finished(plan, head, [noised])[0]


def finish_both(
    plan: ReleasePlan, head: nn.Sequential, noised: torch.Tensor, clean: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``finish_release``, and the same blocks on the client's own clean rows.

    Args:
        plan: see ``finish_release``.
        head: see ``finish_release``.
        noised: from ``noised_and_clean``; left as it is.
        clean: from the same call; left as it is.

    Returns:
        The released activations, and the head's output for the clean inputs, which must stay with the client.

    Raises:
        ValueError: see ``finish_release``; also where a block keeps something of the clean rows.

    Guarantee:
        What is released was computed before the blocks saw a clean row, in a call of its own, so that no block can mix
        the two; and a block that keeps a clean row for a later call is refused.
    """
    released, own = _finished(plan, head, [noised, clean])
    return released, own


def _finished(plan: ReleasePlan, head: nn.Sequential, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """The rest of the head on batches of what reached the noise, the noised one first."""
    _, rest = split_head(head, plan.placement)
    check_eval(head)
    finished = run_stateless_over(rest, batches)
    check_activations(finished[0], what="released activations")
    return finished


def payload_bytes(plan: ReleasePlan | None, released: torch.Tensor) -> int:
    """Bytes of released activations as they are sent: lattice integers, coded without loss, at placement "exchange".

    Args:
        plan: what they were released with; None for clean activations.
        released: from ``apply_release`` or ``finish_release``.

    Returns:
        Bytes; elsewhere the head's float output of what was noised travels as it is.
    """
    if plan is None or plan.placement != "exchange":
        return released.numel() * released.element_size()
    return len(encode(truncate(released, spacing=plan.payload_spacing), spacing=plan.payload_spacing))


def _on_the_lattice(plan: ReleasePlan, activations: torch.Tensor) -> np.ndarray:
    """Activations in float64, clipped, truncated toward zero to whole lattice steps, their norm checked in integers."""
    check_activations(activations)
    rows = activations
    if plan.clip is not None:
        rows = clip_rows(rows.double(), max_norm=plan.clip, norm=plan.mechanism.norm)
    integers = truncate(rows, spacing=plan.lattice.spacing)  # in float64, into which float32 goes exactly
    if plan.clip is not None and not bool(
        norm_at_most(integers, norm=plan.mechanism.norm, bound=plan.clip, spacing=plan.lattice.spacing).all()
    ):
        raise ValueError(
            f"a clipped row has a norm above clip {plan.clip:g} on the lattice: nothing was released; report this as a bug"
        )
    return integers
