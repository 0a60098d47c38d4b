"""Projection: after an optimiser's step, scale a head's weights until its certificate meets the cap.

All linear weights are scaled by one factor t, found with few certificates: for layers in sequence the certified norm is
proportional to tᵏ, so the second certificate already fits; with branches that no weight scales (a skip connection of
norm F) it behaves like F + (v − F)·tᵏ, whose exponent is read off the certificates seen so far. The factor is only a
guess; what is returned is the certificate of the head as it then stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from sensitivity.certificate import Certificate
from sensitivity.certification import certify
from sensitivity.control.layers import distinct_weights, require_cap, scalable_layers
from sensitivity.norms import Norm
from sensitivity.rounding import div_up
from sensitivity.shapes import is_positive_finite

AIM = 1.0 - 2.0**-19  # of the cap: room for weights that are rounded to float32 after scaling
NEAR = 0.99  # of the cap: a head this close to it is not scaled up again
CLOSER = 0.995  # of the cap: aim once the first guess has missed, between NEAR and the cap
FEW_TRIALS = 10
MAX_TRIALS = 60
Trial = Callable[[float], tuple[Certificate, float]]


def cap_sensitivity(
    head: nn.Module,
    *,
    p: Norm,
    q: Norm,
    input_shape: int | Sequence[int],
    cap: float,
    method: str = "fast",
    radius: float | None = None,
) -> Certificate:
    """Scale a head's linear weights, where needed, so that its certified p→q norm is at most `cap`.

    Call it after every `optimizer.step()`. A head inside the cap is left as it is, at the price of one certificate. With
    the cap fixed before training, the noise can be fixed before training too, from cap·R for records at distance R:
    every release then has a noise multiplier known beforehand, and rounds compose non-adaptively. Where noise follows
    the certificate of each round instead, or is fixed while certificates vary, the ratios depend on the data through
    the weights, and the accountant's filter with a preset budget applies. The cap itself must not be chosen by looking
    at private data.

    Args:
        head: the module, in the mode in which it will release. Its weights are changed in place, outside autograd.
        p: norm of the input distance: 1, 2, math.inf or "inf".
        q: norm of the output distance: likewise.
        input_shape: shape of one record, batch dimension excluded.
        cap: the largest norm allowed, in output units per input unit; positive and finite.
        method: of `certify`: "fast" suits every step. "auto" scales less, as its bounds are tighter.
        radius: if given, keep certificate.map(radius) ≤ cap·radius instead, which holds additive slack too (that of
            Softplus, say); noise fixed from cap·radius then covers it.

    Returns:
        The certificate of the head as it now stands, with value ≤ cap (with `radius`: map(radius) ≤ cap·radius).

    Raises:
        UnsupportedModuleError: for a head that `certify` refuses, or a linear layer whose weight is parametrised.
        ValueError: for a bad argument, a head without trainable linear layers, or a cap that scaling cannot meet
            because what it leaves alone (skip connections, normalisation, frozen layers) already exceeds it. The head
            is then as it was.

    Guarantee: no certificate above the cap is ever returned; it belongs to the weights in their own element type, as
        rounded after scaling, and `Certificate.check` passes. Scaling is by one positive factor for the weights of
        every trainable Linear, Conv and ConvTranspose layer of exact type; biases, gains, frozen weights and the
        optimiser's state stay.

    Edge cases: a value at the cap is inside it. Gains of normalisation layers and slopes of PReLU count but are not
        scaled, so that weights make up for their growth. Tied weights are scaled once. With `radius`, tanh-like
        heads whose outputs are bounded may need no scaling.

    Source: H. Gouk, E. Frank, B. Pfahringer, M. J. Cree (2021), Regularisation of neural networks by enforcing
        Lipschitz continuity, Machine Learning 110, projects each layer by power iteration, a lower bound; here
        the whole head is scaled, by its certificate.

    Example:
        >>> head = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU())
        >>> _ = head[0].weight.data.copy_(torch.tensor([[3.0, 4.0]]))
        >>> certificate = cap_sensitivity(head, p=2, q=2, input_shape=2, cap=1.0)
        >>> 0.99 < certificate.value <= 1.0
        True
        >>> [round(value, 4) for value in head[0].weight[0].tolist()]
        [0.6, 0.8]
    """
    limit = require_cap(cap)
    if radius is not None and not is_positive_finite(radius):
        raise ValueError(
            f"radius={radius!r} is no distance: it must be a positive finite number; pass the largest input distance"
        )

    def measured() -> tuple[Certificate, float]:
        certificate = certify(head, p=p, q=q, input_shape=input_shape, method=method)
        return certificate, certificate.value if radius is None else div_up(certificate.map(radius), radius)

    certificate, value = measured()
    if value <= limit:
        return certificate
    layers = scalable_layers(head)
    weights = distinct_weights(layers)
    kept = [weight.clone() for weight in weights]

    def trial(factor: float) -> tuple[Certificate, float]:
        with torch.no_grad():
            for weight, before in zip(weights, kept, strict=True):
                weight.copy_(before.double() * factor)
        return measured()

    try:
        return _fitted(trial, value=value, limit=limit, num_layers=len(layers))
    except BaseException:
        with torch.no_grad():
            for weight, before in zip(weights, kept, strict=True):
                weight.copy_(before)
        raise


def _fitted(trial: Trial, *, value: float, limit: float, num_layers: int) -> Certificate:
    """Find a factor whose certificate is within the limit and near it, and leave the weights scaled by it."""
    rest, exponent = 0.0, float(num_layers)
    above: tuple[float, float] = (1.0, value)
    below: tuple[float, float, Certificate] | None = None
    factor = 1.0
    for number in range(1, MAX_TRIALS + 1):
        near = max(NEAR * limit, 0.5 * (rest + limit))  # half of what a skip connection leaves is used, too
        if below is not None and (below[1] >= near or number > FEW_TRIALS):
            break
        target = AIM * limit if number == 1 else max(CLOSER * limit, 0.25 * rest + 0.75 * limit)
        factor = _next_factor(above, below, target=target, rest=rest, exponent=exponent)
        certificate, found = trial(factor)
        if found <= limit:
            below = (factor, found, certificate)
            exponent = _exponent(above, below[:2], rest=rest, otherwise=exponent)
        else:
            if number == 2 and below is None:
                rest = trial(0.0)[1]
                if rest >= limit:
                    raise ValueError(
                        f"cap={limit} cannot be met: with every linear weight at 0 the bound is still {rest}, from parts "
                        "that scaling leaves alone (skip connections, frozen or normalising layers); raise the cap"
                    )
            exponent = _exponent(above, (factor, found), rest=rest, otherwise=exponent)
            above = (factor, found)
    if below is None:
        raise ValueError(
            f"cap={limit} was not met by scaling the weights down to {above[0]} of their size, where the bound is "
            f"{above[1]}; raise the cap"
        )
    if factor == below[0]:
        return below[2]
    certificate, found = trial(below[0])
    if found > limit:
        raise ValueError(
            f"scaled weights gave {found} where they gave {below[1]} before: the head is not steady; check it"
        )
    return certificate


def _next_factor(
    above: tuple[float, float],
    below: tuple[float, float, Certificate] | None,
    *,
    target: float,
    rest: float,
    exponent: float,
) -> float:
    """Where rest + (v − rest)·tᵏ through the last failure meets the target, kept inside the bracket."""
    high, value = above
    low = 0.0 if below is None else below[0]
    factor = high * ((target - rest) / (value - rest)) ** (1.0 / exponent) if value > rest else math.nan
    if not low < factor < high:
        factor = math.sqrt(low * high) if low > 0.0 else high / 2.0
    return factor


def _exponent(one: tuple[float, float], other: tuple[float, float], *, rest: float, otherwise: float) -> float:
    """K from two points of rest + a·tᵏ."""
    if min(one[1], other[1]) <= rest or one[0] == other[0] or one[1] == other[1]:
        return otherwise
    found = math.log((one[1] - rest) / (other[1] - rest)) / math.log(one[0] / other[0])
    return min(max(found, 0.1), 1000.0)
