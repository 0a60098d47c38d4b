"""The release: what runs before the noise, the noise, and what runs after it."""

import math

import numpy as np
import torch
from torch import nn

from asfl_privacy.mechanisms.certificate_check import check_certificate
from asfl_privacy.mechanisms.clipping import clip_rows
from asfl_privacy.mechanisms.guards import check_activations, check_input_box
from asfl_privacy.mechanisms.lattice import WordSource, coarsen, encode, norm_at_most, to_float, truncate
from asfl_privacy.mechanisms.placement import check_dtype, check_eval, check_place, split_head
from asfl_privacy.mechanisms.release_plan import ReleasePlan
from asfl_privacy.mechanisms.stateless import run_stateless, run_stateless_over


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
