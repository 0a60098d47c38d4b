"""Event classes: releases that share everything but the record."""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from asfl_privacy.accounting.checks import check_choice, check_integer, check_multiplier
from asfl_privacy.accounting.totals import Ints

CHANNELS = ("activations", "labels", "updates")
MECHANISMS = ("gaussian", "laplace")
LARGEST_INTEGER = 2**53


@dataclass(frozen=True, kw_only=True)
class EventClass:
    """Releases that share everything but the record.

    Args:
        channel: "activations", "labels" or "updates".
        mechanism: "gaussian" or "laplace".
        noise_multiplier: σ/Δ or b/Δ, Δ the sensitivity at the ledger's radius (Δ in ℓ2 for Gaussian, ℓ1 for Laplace).
        round: number of the round, ≥ 0.
        whole_record_multiplier: the same with Δ for any two records of the input box; None where it is not known.
    """

    channel: str
    mechanism: str
    noise_multiplier: float
    round: int
    whole_record_multiplier: float | None = None


def make_event(
    *,
    channel: object,
    mechanism: object,
    noise_multiplier: object,
    round_number: object,
    whole_record_multiplier: object,
    radius: float | str,
) -> EventClass:
    """Check the values and make the class; for radius "any" the whole-record multiplier is the multiplier itself.

    Raises:
        ValueError: if a value is out of range.
    """
    z = check_multiplier(noise_multiplier)
    whole = None
    if whole_record_multiplier is not None:
        whole = check_multiplier(whole_record_multiplier, name="whole_record_multiplier")
        if whole > z:
            raise ValueError(
                f"whole_record_multiplier is {whole!r}: any two records differ by at least what the radius allows, so "
                f"it cannot exceed noise_multiplier {z!r}; swap the two or pass None"
            )
    if radius == "any":
        if whole is not None and whole != z:
            raise ValueError(
                f"whole_record_multiplier is {whole!r}: with radius any it is noise_multiplier {z!r} itself; pass None"
            )
        whole = z
    return EventClass(
        channel=check_choice("channel", channel, CHANNELS),
        mechanism=check_choice("mechanism", mechanism, MECHANISMS),
        noise_multiplier=z,
        round=check_integer("round", round_number, minimum=0),
        whole_record_multiplier=whole,
    )


def check_vector(name: str, values: ArrayLike, *, minimum: int) -> Ints:
    """Return a non-empty vector of integers between ``minimum`` and 2**53, or raise ValueError."""
    try:
        vector = np.asarray(values)
    except (ValueError, OverflowError, TypeError):
        vector = np.empty(0, dtype=object)
    if vector.ndim != 1 or vector.size == 0 or vector.dtype.kind not in "iu":
        raise ValueError(f"{name} must be a non-empty vector of integers; pass e.g. {name}=[0, 1, 2]")
    if int(vector.min()) < minimum or int(vector.max()) > LARGEST_INTEGER:
        raise ValueError(
            f"{name} holds {int(vector.min())}…{int(vector.max())}: values lie in {minimum}…2**53; check the vector"
        )
    return vector.astype(np.int64)


def multiplier_at(event: EventClass, distance: float) -> Fraction | None:
    """The exact multiplier for two records at ``distance`` times the radius; None where it is not known.

    Δ(kR) ≤ min(k·Δ(R), Δ_whole) for k ≥ 1, hence max(z/k, z_whole).
    """
    whole = event.whole_record_multiplier
    if math.isinf(distance):
        return None if whole is None else Fraction(whole)
    near = Fraction(event.noise_multiplier) / Fraction(distance)
    return near if whole is None else max(near, Fraction(whole))
