"""The plan of a release: a certificate of the head as it is now, and the noise calibrated from it, joined."""

import math
from dataclasses import dataclass
from fractions import Fraction

from torch import nn

from asfl_privacy.accounting.checks import check_box, check_choice, check_multiplier, check_norm, check_radius
from asfl_privacy.accounting.rationals import fraction_down
from asfl_privacy.mechanisms.families import FAMILIES, make_mechanism
from asfl_privacy.mechanisms.guards import check_clip, make_input_shape
from asfl_privacy.mechanisms.lattice import LatticeNoise, plan_lattice
from asfl_privacy.mechanisms.mechanism import Mechanism
from asfl_privacy.mechanisms.placement import check_eval, check_place, split_head
from asfl_privacy.mechanisms.release_sensitivity import (
    ReleaseSensitivity,
    release_sensitivity,
    truncated_sensitivity,
)
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
