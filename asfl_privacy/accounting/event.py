"""Event classes: releases that share everything but the record."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from asfl_privacy.accounting.checks import check_choice, check_integer, check_multiplier, check_real

CHANNELS = ("activations", "labels", "updates")
MECHANISMS = ("gaussian", "laplace", "randomized-response")
SAMPLERS = ("lattice", "float", "seeded")
LARGEST_INTEGER = 2**53


@dataclass(frozen=True, kw_only=True)
class EventClass:
    """Releases that share everything but the record.

    Args:
        channel: "activations", "labels" or "updates".
        mechanism: "gaussian", "laplace" or, in channel "labels" alone, "randomized-response".
        noise_multiplier: σ/Δ or b/Δ, Δ the sensitivity at the ledger's radius (Δ in ℓ2 for Gaussian, ℓ1 for Laplace);
            1/ε0 for randomised response, ε0 the pure ε of one draw. Neighbours may differ in their label, so randomised
            response has this multiplier at every distance.
        round: number of the round, ≥ 0.
        whole_record_multiplier: the same with Δ for any two records of the input box; None where it is not known.
        num_classes: k ≥ 2 of k-ary randomised response; None for the other mechanisms.
        sampler: "lattice" (drawn on the lattice from a cryptographic source), "float" (ideal arithmetic is assumed) or
            "seeded" (reproducible: no guarantee towards whoever knows or guesses the seed).
        epsilon_excess: e ≥ 0 of one release by the lattice sampler, see ``tail_probability``.
        tail_probability: τ in [0, 1) of one release: with P the ideal and P̃ the drawn output distribution,
            P̃(S) ≤ e^(e/2)·P(S) and P(S) ≤ e^(e/2)·P̃(S) + τ for every event S. For a Gaussian, moreover, τ is the mass of
            noise outside a table of at most ``sampler_error.TABLE_REACH`` standard deviations, within which e^(e/2) holds
            cell by cell.
        client_multiplier: in channel "updates", σ/Δ with Δ for a change of any or all records of one client at once (a
            clipped client update); None where the shifts of the client's records add up (DP-SGD).
    """

    channel: str
    mechanism: str
    noise_multiplier: float
    round: int
    whole_record_multiplier: float | None = None
    num_classes: int | None = None
    sampler: str = "float"
    epsilon_excess: float = 0.0
    tail_probability: float = 0.0
    client_multiplier: float | None = None


def make_event(
    *,
    channel: object,
    mechanism: object,
    noise_multiplier: object,
    round_number: object,
    whole_record_multiplier: object,
    radius: float | str,
    num_classes: object = None,
    sampler: object = "float",
    epsilon_excess: object = 0.0,
    tail_probability: object = 0.0,
    client_multiplier: object = None,
) -> EventClass:
    """Check the values and make the class.

    Where the distance does not matter (radius "any", randomised response) the whole-record multiplier is the multiplier.

    Raises:
        ValueError: if a value is out of range.

    Example:
        >>> fixed = {"round_number": 0, "whole_record_multiplier": None, "radius": 0.1}
        >>> make_event(channel="labels", mechanism="randomized-response", noise_multiplier=0.5, num_classes=10, **fixed)
        ... # doctest: +ELLIPSIS
        EventClass(channel='labels', mechanism='randomized-response', noise_multiplier=0.5, round=0, ...
    """
    channel = check_choice("channel", channel, CHANNELS)
    mechanism = check_choice("mechanism", mechanism, MECHANISMS)
    z = check_multiplier(noise_multiplier)
    whole = None
    if whole_record_multiplier is not None:
        whole = check_multiplier(whole_record_multiplier, name="whole_record_multiplier")
        if whole > z:
            raise ValueError(
                f"whole_record_multiplier is {whole!r}: any two records differ by at least what the radius allows, so "
                f"it cannot exceed noise_multiplier {z!r}; swap the two or pass None"
            )
    if radius == "any" or mechanism == "randomized-response":
        if whole is not None and whole != z:
            reason = "with radius any" if radius == "any" else "for randomised response"
            raise ValueError(
                f"whole_record_multiplier is {whole!r}: {reason} it is noise_multiplier {z!r} itself; pass None"
            )
        whole = z
    return EventClass(
        channel=channel,
        mechanism=mechanism,
        noise_multiplier=z,
        round=check_integer("round", round_number, minimum=0),
        whole_record_multiplier=whole,
        num_classes=_check_classes(num_classes, mechanism=mechanism, channel=channel),
        sampler=check_choice("sampler", sampler, SAMPLERS),
        epsilon_excess=check_excess(epsilon_excess),
        tail_probability=check_tail(tail_probability),
        client_multiplier=_check_client(client_multiplier, z=z, channel=channel),
    )


def check_excess(epsilon_excess: object) -> float:
    """Return a finite e ≥ 0, or raise ValueError."""
    return check_real(
        "epsilon_excess",
        epsilon_excess,
        minimum=0.0,
        exclusive=False,
        fix="pass that of the sampler, 0.0 if it is exact",
    )


def check_tail(tail_probability: object) -> float:
    """Return a τ in [0, 1), or raise ValueError."""
    fix = "pass that of the sampler, 0.0 if it is exact"
    tail = check_real("tail_probability", tail_probability, minimum=0.0, exclusive=False, fix=fix)
    if tail >= 1.0:
        raise ValueError(f"tail_probability is {tail!r}: it must be < 1, since 1 promises nothing; {fix}")
    return tail


def as_vector(name: str, values: ArrayLike) -> NDArray[np.signedinteger[Any]]:
    """Return a non-empty vector of signed integers, not copied where it is one already, or raise ValueError."""
    try:
        vector = np.asarray(values)
    except (ValueError, OverflowError, TypeError):
        vector = np.empty(0, dtype=object)
    if vector.ndim != 1 or vector.size == 0 or vector.dtype.kind not in "iu":
        raise ValueError(f"{name} must be a non-empty vector of integers; pass e.g. {name}=[0, 1, 2]")
    if vector.dtype.kind == "u":
        check_range(name, 0, int(vector.max()), minimum=0)
        return vector.astype(np.int64)
    return vector


def check_range(name: str, least: int, largest: int, *, minimum: int) -> None:
    """Raise ValueError unless both ends lie in ``minimum``…2**53."""
    if least < minimum or largest > LARGEST_INTEGER:
        raise ValueError(f"{name} holds {least}…{largest}: values lie in {minimum}…2**53; check the vector")


def check_vector(name: str, values: ArrayLike, *, minimum: int) -> NDArray[np.int64]:
    """Return a copy of a non-empty vector of integers between ``minimum`` and 2**53, or raise ValueError."""
    vector = as_vector(name, values)
    check_range(name, int(vector.min()), int(vector.max()), minimum=minimum)
    return vector.astype(np.int64)


def multiplier_at(event: EventClass, distance: float) -> Fraction | None:
    """The exact multiplier for two records at ``distance`` times the radius; None where it is not known.

    Δ(kR) ≤ min(k·Δ(R), Δ_whole) for k ≥ 1, hence max(z/k, z_whole); randomised response does not look at the distance.
    """
    whole = event.whole_record_multiplier
    if event.mechanism == "randomized-response":
        return Fraction(event.noise_multiplier)
    if math.isinf(distance):
        return None if whole is None else Fraction(whole)
    near = Fraction(event.noise_multiplier) / Fraction(distance)
    return near if whole is None else max(near, Fraction(whole))


def _check_client(client_multiplier: object, *, z: float, channel: str) -> float | None:
    if client_multiplier is None:
        return None
    found = check_multiplier(client_multiplier, name="client_multiplier")
    if channel != "updates" or found > z:
        raise ValueError(
            f"client_multiplier is {found!r}: it belongs to channel updates, where a change of a whole client moves at least "
            f"what one record moves, so it cannot exceed noise_multiplier {z!r}; pass None for {channel}, or the multiplier "
            "of the clipped client update"
        )
    return found


def _check_classes(num_classes: object, *, mechanism: str, channel: str) -> int | None:
    if mechanism != "randomized-response":
        if num_classes is not None:
            raise ValueError(
                f"num_classes is {num_classes!r}: mechanism {mechanism} has no classes; pass num_classes=None, or "
                'mechanism="randomized-response"'
            )
        return None
    if channel != "labels":
        raise ValueError(
            f'channel is {channel!r}: randomised response covers labels alone; pass channel="labels", or gaussian or '
            "laplace noise for this channel"
        )
    return check_integer("num_classes", num_classes, minimum=2)
