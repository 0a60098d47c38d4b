"""δ(ε) of composed releases by Fourier inversion, from both sides.

Legend: S = G + Σ L, the total privacy loss, G ~ N(μ²/2, μ²) that of all Gaussian releases; E = Σ n·ε0, the largest
value of Σ L; gap = E − ε; D(x) = E[(1 − e^{x − S})₊], so δ = D(ε); s = θ + it; W = e^{−θε}·E[e^{θS}] = the weight;
h = step of t; period = 2π/h; v = variance parameter of the smoothing.

1. For θ > 0 the Fourier transform of F(x) = D(x)·e^{θx} is E[e^{sS}]/(s(s + 1)), in closed form for every mechanism.
   Poisson's summation formula, with no error:  Σ_k F(ε + k·period) = (h/2π)·Σ_j E[e^{s_j S}]·e^{−i t_j ε}/(s_j(s_j + 1)).
   The terms k ≠ 0 are ≥ 0, hence the sum is ≥ F(ε); they are ≤ W(θ')·e^{−(θ' − θ)·k·period} by Chernoff's bound
   D(x) ≤ e^{−θ'x}·E[e^{θ'S}] for any θ' ≥ 0 (θ' > θ for k > 0, θ' < θ for k < 0), hence it is not far above.
2. A further Gaussian release with parameter v makes the terms decay as e^{−vt²/2}. It can only raise δ, so what is
   computed is ≥ δ. By ∂D/∂v = f_v(ε)/2, with f_v the density of the smoothed S, it raises δ by ½·∫ f_w(ε) dw over
   0 < w < v, and f_w ≤ √(v/w)·e^{v/8}·f_v since N(w/2, w) has density exp(−x²/2w + x/2 − w/8)/√(2πw). So it raises δ by
   at most v·e^{v/8}·f_v(ε), and f_v is inverted like D, without the factor 1/(s(s + 1)).
3. Every rounding is bounded and added or subtracted.

Source: Poisson's summation formula; Zhu, Dong & Wang (2022) for dominating pairs, their composition and the use of
characteristic functions; the formula for D is that of Dupire for a call, with e^ε as the strike. Items 1 and 2 bound
what those sources leave to numerical quadrature.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from asfl_privacy.accounting.losses import Complexes, Floats, Losses, characteristic, log_moment, log_moment_error
from asfl_privacy.accounting.rationals import fraction_up

_ULP = 2.0**-52
_REACH = 8.5  # e^{−8.5²/2} = 2e-16: what the nodes left out could add
_MAX_NODES = 2**18
_FARTHER = np.array([1.02, 1.05, 1.1, 1.2, 1.35, 1.6, 2.0, 3.0, 5.0])
_NEARER = np.array([0.0, 0.1, 0.3, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98])


@dataclass(frozen=True, kw_only=True, eq=False)
class Contour:
    """What is computed once for a line Re s = θ.

    Args:
        losses: the losses other than Gaussian.
        theta: θ > 0.
        variance: μ² + v, of all Gaussian releases and of the smoothing.
        step: h.
        nodes: t_j = j·h, exact, shape (J,).
        upper: terms of D at the nodes without the turn e^{i·t·gap}, shape (J,).
        lower: terms of D − v·e^{v/8}·f_v, shape (J,).
        upper_error: bound on the error of the sum of ``upper``, all nodes left out included.
        lower_error: the same for ``lower``.
        log_error: bound on the error of ln W at gap 0.
    """

    losses: Losses
    theta: float
    variance: float
    step: float
    nodes: Floats
    upper: Complexes
    lower: Complexes
    upper_error: float
    lower_error: float
    log_error: float


def log_weight(losses: Losses, variance: float, gap: float, thetas: Floats) -> Floats:
    """Logarithm of W(θ) at ε = E − gap, shape (B,): Chernoff's bound is δ ≤ W."""
    return np.asarray(log_moment(losses, thetas) + thetas * (thetas + 1.0) * variance / 2.0 + thetas * gap)


def chernoff_gap(losses: Losses, variance: float, log_delta: float) -> float:
    """A gap at which Chernoff's bound reaches δ: where to begin the search."""

    def gaps(thetas: Floats) -> Floats:
        # D(x) ≤ W·θ^θ/(1 + θ)^{1 + θ}: the largest value of (1 − e^{−y})·e^{−θy}
        constant = -np.log1p(thetas) - thetas * np.log1p(1.0 / thetas)
        return np.asarray((log_weight(losses, variance, 0.0, thetas) + constant - log_delta) / thetas)

    theta = _minimiser(gaps)
    return -float(gaps(np.array([theta]))[0])


def best_theta(losses: Losses, variance: float, gap: float) -> float:
    """The saddle point of the integrand at this gap: the θ at which the sum cancels least."""
    return _minimiser(lambda thetas: log_weight(losses, variance, gap, thetas) - np.log(thetas) - np.log1p(thetas))


def make_contour(
    losses: Losses, *, mu_squared: tuple[Fraction, Fraction], theta: float, gap: float, smoothing: float
) -> Contour:
    """Choose nodes and smoothing for gaps near ``gap``, and evaluate the terms.

    Args:
        losses: the losses other than Gaussian.
        mu_squared: bounds of the exact μ².
        theta: θ > 0.
        gap: E − ε where the contour is to be sharp.
        smoothing: about the relative change of δ that v may cause, e.g. 1e-3.

    Returns:
        The contour; any θ, step and smoothing give valid bounds, good ones give close bounds.
    """
    pole = theta * (1.0 + theta)
    variance = max(fraction_up(mu_squared[1]), smoothing / pole)
    period, step = 30.0 / theta, 0.0
    for _ in range(80):
        step = _few_bits(2.0 * math.pi / period)
        alias = _log_alias(losses, variance, theta, gap, 2.0 * math.pi / step)
        if alias < math.log(1e-4 / (pole * period)) or _REACH / math.sqrt(variance) > _MAX_NODES * step:
            break
        period *= 1.3
    variance = max(variance, (_REACH / (_MAX_NODES * step)) ** 2)
    num_nodes = min(_MAX_NODES, math.ceil(_REACH / (math.sqrt(variance) * step))) + 1
    nodes = step * np.arange(num_nodes, dtype=np.float64)

    phi, error = characteristic(losses, theta, nodes)
    s = theta + 1j * nodes
    damping = np.exp(-variance * nodes**2 / 2.0)
    density, pole_terms = phi * damping, s * (s + 1.0)
    sizes = damping / np.abs(pole_terms)
    v = fraction_up(Fraction(variance) - mu_squared[0])
    # beyond v = 4000 the bound on f_w says nothing, and no lower bound is claimed
    factor = v * math.exp(v / 8.0) * (1.0 + 1e-12) if v < 4000.0 else math.inf
    provable = math.isfinite(factor)
    factor = factor if provable else 0.0
    last = float(nodes[-1])
    log_cut = -variance * last**2 / 2.0
    cut = math.exp(log_cut) / math.pi * min(1.0 / last, 1.0 / (variance * last**3))
    cut_density = math.exp(log_cut) / math.pi / (variance * last)
    # damping: 36·4 ulp at most; quotients; the sum: pairwise, 64 ulp; the turn is charged by _turn_error
    each = error + 512.0 * _ULP
    return Contour(
        losses=losses,
        theta=theta,
        variance=variance,
        step=step,
        nodes=nodes,
        upper=density / pole_terms,
        lower=density / pole_terms - factor * density,
        upper_error=1.01 * (each * _sum(sizes, step) + cut),
        lower_error=1.01 * (each * _sum(sizes + factor * damping, step) + cut + factor * cut_density)
        if provable
        else math.inf,
        log_error=log_moment_error(losses) + 16.0 * _ULP * (1.0 + pole * variance),
    )


def log_delta_upper(contour: Contour, gap: float) -> float:
    """Logarithm of an upper bound of δ at ε = E − gap."""
    log_w, log_error = _log_weight_at(contour, gap)
    turn = _turn_error(contour, gap)
    size = _sum(np.abs(contour.upper), contour.step)
    total = _turned_sum(contour.upper, contour, gap) + contour.upper_error + turn * size
    return min(0.0, log_w + log_error + math.log(total)) if total > 0.0 and math.isfinite(total) else 0.0


def log_delta_lower(contour: Contour, gap: float) -> float:
    """Logarithm of a lower bound of δ at ε = E − gap; −inf where nothing is proven."""
    log_w, log_error = _log_weight_at(contour, gap)
    turn = _turn_error(contour, gap)
    size = _sum(np.abs(contour.lower), contour.step)
    log_alias = _log_alias(contour.losses, contour.variance, contour.theta, gap, 2.0 * math.pi / contour.step)
    if not log_alias < 0.0:
        return -math.inf
    total = _turned_sum(contour.lower, contour, gap) - contour.lower_error - turn * size - 1.1 * math.exp(log_alias)
    return log_w - log_error + math.log(total) if total > 0.0 and log_error < 0.01 else -math.inf


def _log_weight_at(contour: Contour, gap: float) -> tuple[float, float]:
    log_w = float(log_weight(contour.losses, contour.variance, gap, np.array([contour.theta]))[0])
    return log_w, contour.log_error + 16.0 * _ULP * (1.0 + contour.theta * abs(gap) + abs(log_w))


def _turn_error(contour: Contour, gap: float) -> float:
    """Bound on the relative error of e^{it·c}: three roundings in t·c, c = (2θ + 1)·variance/2 + gap."""
    centre = (2.0 * contour.theta + 1.0) * contour.variance / 2.0 + abs(gap)
    return 8.0 * _ULP * (1.0 + float(contour.nodes[-1]) * centre)


def _turned_sum(terms: Complexes, contour: Contour, gap: float) -> float:
    turn = contour.nodes * ((2.0 * contour.theta + 1.0) * contour.variance / 2.0 + gap)
    return _sum(terms.real * np.cos(turn) - terms.imag * np.sin(turn), contour.step)


def _sum(terms: Floats, step: float) -> float:
    """(h/2π)·Σ over all j, from the terms with j ≥ 0 of an even sequence."""
    return float(step / (2.0 * math.pi) * (2.0 * np.sum(terms) - terms[0]))


def _log_alias(losses: Losses, variance: float, theta: float, gap: float, period: float) -> float:
    """Logarithm of an upper bound of Σ_{k ≠ 0} F(ε + k·period)/(W·e^{θε})."""
    thetas = np.concatenate([[theta], theta * _FARTHER, theta * _NEARER])
    log_w = log_weight(losses, variance, gap, thetas)
    decay = np.abs(thetas[1:] - theta) * period
    logs = log_w[1:] - log_w[0] - decay - np.log(-np.expm1(-decay))
    farther, nearer = logs[: len(_FARTHER)], logs[len(_FARTHER) :]
    return float(np.logaddexp(np.min(farther), np.min(nearer)))


def _few_bits(value: float) -> float:
    """The value rounded down to 12 bits, so that its products with node numbers are exact."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(math.floor(mantissa * 4096.0) / 4096.0, exponent)


def _minimiser(objective: Callable[[Floats], Floats]) -> float:
    """θ at about the least value of an objective with one valley, by grids in ln θ that narrow."""
    low, high = -30.0, 40.0
    for _ in range(4):
        grid = np.linspace(low, high, 41)
        best = int(np.argmin(objective(np.exp(grid))))
        low, high = grid[max(0, best - 1)], grid[min(40, best + 1)]
    return math.exp(0.5 * (low + high))
