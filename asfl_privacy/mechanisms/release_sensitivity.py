"""Sensitivity of what is noised: Δ at the radius, and Δ for any two records of the input box.

Legend: d = numbers in one record; m = numbers in one activation; p = norm of the inputs; q = the mechanism's norm.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import nn

import sensitivity
from asfl_privacy.accounting.checks import check_box, check_norm, check_radius, norm_word
from asfl_privacy.accounting.rationals import fraction_up
from asfl_privacy.mechanisms.clipping import clip_lipschitz
from asfl_privacy.mechanisms.guards import check_clip, make_input_shape
from sensitivity import Certificate

BUDGET_S = 0.1  # for each certificate: heads change every round


@dataclass(frozen=True, kw_only=True)
class ReleaseSensitivity:
    """How far what is noised can move, in the mechanism's norm.

    Args:
        value: Δ for two inputs at p-distance at most the radius; for radius "any", Δ for any two records.
        whole_record: Δ for any two records of the input box, capped by 2C.
        num_values: numbers in one row of what is noised.
        is_clip_only: whether Δ is 2C for any two rows, whatever they are: truncation then costs nothing.
        certificate: the certificate used; None where no weights come before the noise.
        rounding: whether the rounding of the forward pass is in Δ: "included", "unknown", or "none" without a head.
        formula: the bound in words.
    """

    value: float
    whole_record: float
    num_values: int
    is_clip_only: bool
    certificate: Certificate | None
    rounding: str
    formula: str


@dataclass(frozen=True, kw_only=True)
class _Transfer:
    """‖y − y'‖_q ≤ out_factor · certificate.map(in_factor · ‖x − x'‖_p); no certificate stands for the identity.

    ``diameter`` is the diameter of the box in the certificate's own input norm (in the norm q for the identity).
    """

    certificate: Certificate | None
    in_factor: float
    out_factor: float
    diameter: float

    def at(self, radius: float) -> float:
        """The move for inputs at p-distance at most ``radius``."""
        return self._move(_times(self.in_factor, radius))

    def anywhere(self) -> float:
        """The move for any two inputs of the box."""
        return self._move(self.diameter)

    def words(self) -> str:
        """The move at R in words."""
        near = "R" if self.in_factor == 1.0 else f"{self.in_factor:.6g}·R"
        if self.certificate is None:
            return near
        words = f"S{norm_word(self.certificate.p)}→{norm_word(self.certificate.q)}({near})"
        return words if self.out_factor == 1.0 else f"{self.out_factor:.6g} × {words}"

    def _move(self, distance: float) -> float:
        return _times(self.out_factor, distance if self.certificate is None else self.certificate.map(distance))


def release_sensitivity(
    prefix: nn.Module | None,
    *,
    p: float,
    q: float,
    radius: float | str,
    input_shape: tuple[int, ...],
    clip: float | None = None,
    input_box: tuple[float, float] = (0.0, 1.0),
) -> ReleaseSensitivity:
    """Bound how far the activations at the noise can move.

    Args:
        prefix: what runs before the noise, in eval mode; None at placement "input".
        p: norm of the input distance: 1, 2 or inf.
        q: the mechanism's norm: 1 (Laplace) or 2 (Gaussian).
        radius: R > 0 in raw input units, or "any" (any two records of the box; needs ``clip``).
        input_shape: shape of one record, without the batch.
        clip: C > 0 if every row is clipped to q-norm C before the noise.
        input_box: (low, high) that every input lies in.

    Returns:
        The bounds, rounded up.

    Raises:
        ValueError: if a value is out of range, radius is "any" without clip, or the head is insensitive (Δ = 0).
        UnsupportedModuleError: if the prefix has no certificate.

    Guarantee:
        Write S(D) for the certified move of the prefix between inputs at distance D, its slack included; at the input S
        is D·d^max(0, 1/q−1/p). Then Δ(R) = min(S(R), Δ_whole) with Δ_whole = S(diameter of the box). With a clip C,
        Δ_whole = min(λ·S(diameter), 2C) and Δ(R) = min(λ·S(R), Δ_whole), where λ = 1 for q=2 and 2 for q=1, because
        clipping is only 2-Lipschitz in ℓ1; the float rounding of the clip itself is added. The certificates hold for
        inputs in the box, and their slack holds the rounding of the forward pass where an error model is known. S is the
        smallest over the certificates p'→q' of m^max(0, 1/q−1/q')·S_p'→q'(d^max(0, 1/p'−1/p)·D); for 2→1 these are
        √d·(1→1) and √m·(2→2). The diameter of the box is width·d^(1/p') in the certificate's own norm.

    Source:
        Norm inequalities: Hölder. Clipping: see ``clip_lipschitz``.

    Example:
        >>> release_sensitivity(None, p=2, q=1, radius=0.5, input_shape=(1, 8, 8)).value
        4.0
    """
    p, q = check_norm(p), check_norm(q, name="q")
    clip_lipschitz(q)  # refuses norms that no mechanism has
    radius, clip = check_radius(radius), check_clip(clip)
    low, high = check_box(input_box)
    input_shape = make_input_shape(input_shape)
    if radius == "any" and clip is None:
        raise ValueError('radius is "any": any two records are bounded by 2C only; pass a clip, e.g. clip=1.0')
    num_values = math.prod(input_shape) if prefix is None else _num_outputs(prefix, input_shape)
    transfers = _transfers(prefix, p=p, q=q, input_shape=input_shape, input_box=(low, high), num_values=num_values)
    factor, clip_error = 1, 0.0
    if clip is not None:
        factor, clip_error = clip_lipschitz(q), _times(clip, 16.0 * (num_values + 8) * 2.0**-52)

    def clipped(move: float) -> float:
        return _plus(_times(factor, move), clip_error)

    whole_record = clipped(min(transfer.anywhere() for transfer in transfers))
    cap = f"at most {whole_record:.6g} for any two records of the box"
    is_capped = clip is not None and 2.0 * clip <= whole_record
    if clip is not None:
        whole_record = min(whole_record, 2.0 * clip)
        cap = f"at most min({cap.removeprefix('at most ')}, 2C = {2.0 * clip:.6g})"
    if isinstance(radius, str):
        value, certificate = whole_record, transfers[0].certificate
        words = f"Δ = {value:.6g}, {cap}"
    else:
        best = min(transfers, key=lambda transfer: transfer.at(radius))
        value, certificate = min(clipped(best.at(radius)), whole_record), best.certificate
        words = f"Δ = {'2 × ' if factor == 2 else ''}{best.words()} = {value:.6g}, {cap}"
    is_constant = certificate is not None and certificate.value == 0.0
    if not (math.isfinite(value) and math.isfinite(whole_record)) or value <= 0.0 or is_constant:
        raise ValueError(
            f"the sensitivity before the noise is {0.0 if is_constant else value!r}: noise needs a finite Δ > 0; check the "
            "weights of the head"
        )
    is_clip_only = radius == "any" and is_capped
    if prefix is None or is_clip_only:  # 2C holds for whatever numbers come out of the head
        rounding = "none"
    else:
        rounding = "unknown" if certificate is None or certificate.rounding is None else "included"
    return ReleaseSensitivity(
        value=value,
        whole_record=whole_record,
        num_values=num_values,
        is_clip_only=is_clip_only,
        certificate=certificate,
        rounding=rounding,
        formula=words,
    )


def truncated_sensitivity(value: float, *, q: float, num_values: int, spacing: float, clip: float | None) -> float:
    """Δ of rows that are truncated toward zero to multiples of ``spacing``: every number moves by less than a step.

    Args:
        value: Δ before truncation, in the norm q.
        q: 1 or 2.
        num_values: m, numbers in one row.
        spacing: g > 0.
        clip: C, or None; truncation toward zero keeps a row's norm ≤ C, so 2C stays a bound.

    Returns:
        min(Δ + g·m^(1/q), 2C), rounded up.

    Example:
        >>> truncated_sensitivity(1.0, q=2, num_values=64, spacing=0.125, clip=None)
        2.0
    """
    moved = _plus(value, _times(norm_growth(num_values, source=math.inf, target=q), spacing))
    return moved if clip is None else min(moved, 2.0 * clip)


def norm_growth(size: int, *, source: float, target: float) -> float:
    """The least float at or above size^max(0, 1/target − 1/source).

    It bounds ‖v‖_target/‖v‖_source for every vector of ``size`` numbers.

    Example:
        >>> norm_growth(64, source=2.0, target=1.0), norm_growth(64, source=1.0, target=2.0)
        (8.0, 1.0)
    """
    exponent = max(0.0, 1.0 / target - 1.0 / source)
    if exponent in (0.0, 1.0):
        return float(size) if exponent else 1.0
    root = math.sqrt(size)
    return math.nextafter(root, math.inf) if Fraction(root) ** 2 < size else root


def _transfers(
    prefix: nn.Module | None,
    *,
    p: float,
    q: float,
    input_shape: tuple[int, ...],
    input_box: tuple[float, float],
    num_values: int,
) -> list[_Transfer]:
    num_in, (low, high) = math.prod(input_shape), input_box
    width = fraction_up(Fraction(high) - Fraction(low))

    def diameter(norm: float) -> float:
        return _times(norm_growth(num_in, source=math.inf, target=norm), width)

    if prefix is None:
        growth = norm_growth(num_in, source=p, target=q)
        return [_Transfer(certificate=None, in_factor=growth, out_factor=1.0, diameter=diameter(q))]
    # 2→2 serves the box at every p; 1→1 and 1→2 can be smaller where they apply; the other pairs follow from these
    pairs = [(2.0, 2.0)]
    if q == 1.0:
        pairs.append((1.0, 1.0))
    elif p == 1.0:
        pairs.append((1.0, 2.0))
    return [
        _Transfer(
            certificate=sensitivity.certify(
                prefix, p=p_known, q=q_known, input_shape=input_shape, input_box=input_box, budget_s=BUDGET_S
            ),
            in_factor=norm_growth(num_in, source=p, target=p_known),
            out_factor=norm_growth(num_values, source=q_known, target=q),
            diameter=diameter(p_known),
        )
        for p_known, q_known in pairs
    ]


def _num_outputs(prefix: nn.Module, input_shape: tuple[int, ...]) -> int:
    dtype = next((parameter.dtype for parameter in prefix.parameters()), torch.float32)
    device = next((parameter.device for parameter in prefix.parameters()), torch.device("cpu"))
    with torch.no_grad():
        return int(prefix(torch.zeros(1, *input_shape, dtype=dtype, device=device)).numel())


def _times(a: float, b: float) -> float:
    """The least float at or above a·b, for a, b ≥ 0; inf and NaN stay what they are."""
    product = a * b
    return fraction_up(Fraction(a) * Fraction(b)) if math.isfinite(product) else product


def _plus(a: float, b: float) -> float:
    """The least float at or above a + b; inf and NaN stay what they are."""
    total = a + b
    return fraction_up(Fraction(a) + Fraction(b)) if math.isfinite(total) else total
