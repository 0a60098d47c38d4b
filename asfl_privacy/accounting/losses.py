"""Privacy losses of the Laplace mechanism and of randomised response: their moment generating functions.

Legend: ε0 = 1/z, the pure ε of one release; L = ln(P/Q) under P, the privacy loss; M(s) = E[e^{sL}] for Re s ≥ 0;
m(s) = e^{−s·ε0}·M(s), the same for the loss seen from its largest value ε0; θ = Re s, t = Im s; n = releases;
A(t) = m(θ + it)/m(θ), the characteristic function of the loss tilted by e^{θL}, so |A| ≤ 1.

Laplace, noise b, two scalars at distance Δ = ε0·b: L = ε0 with mass 1/2, −ε0 with mass e^{−ε0}/2, and density
e^{(L − ε0)/2}/4 between, hence m = 1 − s·(1 − e^{−(1 + 2s)ε0})/(1 + 2s), and 1/2 ≤ m(θ) ≤ 1.
k-ary randomised response, two inputs a ≠ b: the output is a (L = ε0), b (−ε0) or one of k − 2 others (0), hence
m = p·(1 + (k − 2)·e^{−(1 + s)ε0} + e^{−(1 + 2s)ε0}) with p = 1/(1 + (k − 1)·e^{−ε0}).
Both pairs are symmetric: reflecting the real line, or exchanging a and b, exchanges P and Q and changes nothing else;
all pairs a ≠ b are alike. So one direction of adjacency stands for both.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Complexes = NDArray[np.complex128]

_ULP = 2.0**-52
_NEGLIGIBLE = 1e-30


@dataclass(frozen=True, kw_only=True, eq=False)
class Losses:
    """The losses of all releases, by class.

    Args:
        epsilons: ε0 of one release, within half an ulp, shape (C,).
        counts: n of each class, shape (C,), integers.
        num_classes: k of randomised response, 0 for Laplace, shape (C,).
    """

    epsilons: Floats
    counts: Floats
    num_classes: Floats


def log_moment(losses: Losses, thetas: Floats) -> Floats:
    """Σ n·ln m(θ), shape (B,), for θ ≥ 0 of shape (B,)."""
    eps, k, theta = losses.epsilons, losses.num_classes, thetas[:, None]
    # a huge θ·ε0 underflows to the right limit, e^{−∞} = 0
    laplace = np.log1p(theta * np.expm1(-(1.0 + 2.0 * theta) * eps) / (1.0 + 2.0 * theta))
    others, opposite = _shares(eps, k, theta)
    response = np.log1p(others + opposite) - np.log1p(np.maximum(k - 1.0, 0.0) * np.exp(-eps))
    return np.asarray(np.where(k > 0, response, laplace) @ losses.counts)


def log_moment_error(losses: Losses) -> float:
    """Bound on the error of ``log_moment`` at any θ, the rounding of ε0 included.

    A relative change r of ε0 moves ln m by at most .37·2·r for Laplace (x·e^{−x} ≤ .37 and m ≥ 1/2) and by
    2·(1 + ln k)·r for randomised response (x·K·e^{−x}/(1 + K·e^{−x}) ≤ ln K + .3); |ln m| ≤ ln 2 or ln k.
    """
    each = 16.0 * _ULP * (2.0 + np.log1p(losses.num_classes))
    total = float(each @ losses.counts)
    return total * (2.0 + len(losses.counts) / 16.0)  # the sum of C terms, each rounded


def characteristic(losses: Losses, theta: float, nodes: Floats) -> tuple[Complexes, float]:
    """Π A(t)^n over all releases, at the nodes t.

    Args:
        losses: the losses.
        theta: θ > 0.
        nodes: t ≥ 0, shape (J,), increasing.

    Returns:
        The product, shape (J,), and a bound on the absolute error of each entry; inf where too many releases void it.

    Guarantee:
        The error bound holds for the exact ε0, rounding included: |Â^n − A^n| ≤ n·|Â − A| where both are ≤ 1, and a
        product of numbers ≤ 1 adds up the errors of its factors. Entries below 1e-30 may be returned as 0.
    """
    product = np.ones(len(nodes), dtype=np.complex128)
    active = np.arange(len(nodes))
    error = _NEGLIGIBLE
    for eps, n, k in zip(losses.epsilons, losses.counts, losses.num_classes, strict=True):
        evaluate = _response_ratio if k > 0 else _laplace_ratio
        values, phase = evaluate(float(eps), float(k), theta, nodes[active])
        product[active] *= _power(values, float(n))
        error += float(n) * _ULP * (64.0 + 8.0 * phase) + 8.0 * _ULP
        active = active[np.abs(product[active]) > _NEGLIGIBLE]
        if not len(active):
            break
    product[np.abs(product) <= _NEGLIGIBLE] = 0.0
    return product, error * 1.01 if error < 0.005 else math.inf  # (1 + error)^n is bounded by 1.01 for small ones only


def _laplace_ratio(eps: float, _: float, theta: float, nodes: Floats) -> tuple[Complexes, float]:
    """A(t), and the largest product whose rounding turns a term of it, times that term's share."""
    s = theta + 1j * nodes
    reflected = math.exp(-(1.0 + 2.0 * theta) * eps)
    at_theta = 1.0 - theta * (1.0 - reflected) / (1.0 + 2.0 * theta)
    values = 1.0 - s * (1.0 - np.exp(-(1.0 + 2.0 * s) * eps)) / (1.0 + 2.0 * s)
    return values / at_theta, 2.0 * (1.0 + theta + float(nodes[-1])) * eps * reflected


def _response_ratio(eps: float, k: float, theta: float, nodes: Floats) -> tuple[Complexes, float]:
    """The same for randomised response."""
    s = theta + 1j * nodes
    others, opposite = (float(share) for share in _shares(np.float64(eps), np.float64(k), theta))
    at_theta = 1.0 + others + opposite
    values = 1.0 + (k - 2.0) * np.exp(-(1.0 + s) * eps) + np.exp(-(1.0 + 2.0 * s) * eps)
    phase = (1.0 + theta + float(nodes[-1])) * eps * (others + 2.0 * opposite) / at_theta
    return values / at_theta, phase


def _shares(eps: Floats | np.float64, k: Floats | np.float64, theta: Floats | float) -> tuple[Floats, Floats]:
    """The tilted masses of the losses 0 and −ε0 of randomised response, that of ε0 being 1."""
    others = np.maximum(k - 2.0, 0.0) * np.exp(-(1.0 + theta) * eps)
    return np.asarray(others), np.asarray(np.exp(-(1.0 + 2.0 * theta) * eps))


def _power(values: Complexes, n: float) -> Complexes:
    if n == 1.0:
        return values
    with np.errstate(divide="ignore"):  # ln 0 = −∞, and e^{−∞} = 0 is right
        size = np.exp(n * np.log(np.abs(values)))
    turn = n * np.angle(values)
    return np.asarray(size * (np.cos(turn) + 1j * np.sin(turn)))
