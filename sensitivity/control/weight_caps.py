"""Parametrisations of single layers: a weight whose layer never exceeds a norm cap, with gradients.

Letters: W the stored weight, c the cap, σ⁺(W) ≥ ‖W‖₂ a certified bound. The effective weight is W·min(1, c/σ⁺(W)) for
2→2, W with every input channel's columns scaled to q-norm ≤ c for 1→q, and W with every output channel's rows scaled
to p*-norm ≤ c for p→∞ (p* dual to p). Columns and rows are those of the unrolled layer, borders and stride included: a
convolution of |W|^r with ones gives the row sums, its adjoint the column sums, of which each channel's largest counts.

Rounding: norms are computed in float64 from non-negative terms, with a relative error of at most γ_n, n < 2²⁸ terms.
Rounding the scaled weight to float32 moves every entry by a relative 2⁻²⁴ at most, so rows and columns by as much, and
the 2→2 norm by 2⁻²⁴·√(taps·min(channels))·‖W‖: a tap's matrix W_a has ‖W_a‖_F ≤ √min(channels)·‖W_a‖₂ and ‖W_a‖₂ ≤ σ⁺,
and the taps' errors add up to at most √taps times their root sum of squares, itself ≤ 2⁻²⁴·√min(channels)·σ⁺
(Parseval: Σ‖W_a‖_F² is the mean of the symbol's). The margins below are four times that, plus what certificates add.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from torch import Tensor, nn

from sensitivity.spectra.dense import largest_singular_value_up
from sensitivity.spectra.symbol import symbol_bound

ENTRY_MARGIN = 2.0**-22
CERTIFICATE_MARGIN = 2e-6
SYMBOL_FLOPS = 2e7  # what method="fast" spends, so that its certificate is not the coarser one
NUM_ITERATIONS = 12


class WeightCap(nn.Module):
    """Keeps the p→q norm of one linear layer at or below a cap; register it on the layer's weight.

    Args:
        layer: Linear, or a zero-padded Conv1d, Conv2d, ConvTranspose1d or ConvTranspose2d.
        p: norm of the layer's input; p = 1, q = ∞ or p = q = 2.
        q: norm of its output.
        cap: positive.
        record_shape: shape of one record at the layer's input.

    Guarantee: the layer with the effective weight, in the weight's element type, has p→q norm ≤ cap for every stored
        weight that is finite. Power iteration is used in the gradient only, never in the value.
    """

    def __init__(self, layer: nn.Module, *, p: float, q: float, cap: float, record_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.p, self.q, self.cap = p, q, cap
        self.record_shape = record_shape
        self.kind = type(layer).__name__
        self.is_linear = isinstance(layer, nn.Linear)
        self.is_transposed = bool(getattr(layer, "transposed", False))
        self.stride: tuple[int, ...] = getattr(layer, "stride", ())
        self.dilation: tuple[int, ...] = getattr(layer, "dilation", ())
        self.groups = int(getattr(layer, "groups", 1))
        self.output_padding: tuple[int, ...] = getattr(layer, "output_padding", ())
        self.padding: tuple[int, ...] = () if self.is_linear else _explicit_padding(layer)

    def forward(self, W: Tensor) -> Tensor:
        """The effective weight, of W's shape and element type."""
        if (self.p, self.q) == (2, 2):
            capped: Tensor = _SpectralCap.apply(W, self)
            return capped
        limit = self.cap * (1.0 - ENTRY_MARGIN)
        power = self.q if self.p == 1 else {2: 2, math.inf: 1}[self.p]
        sums = self._largest_sums(W.double().abs(), power=power, of_columns=self.p == 1)
        # The clamp stands before the root, whose slope at 0 is infinite; inside the cap the factor is exactly 1.
        norms = sums.clamp_min(limit) if math.isinf(power) else sums.clamp_min(limit**power) ** (1.0 / power)
        return (W.double() * self._per_channel(limit / norms.clamp_min(limit), W, of_columns=self.p == 1)).to(W.dtype)

    def apply_layer(self, W: Tensor, x: Tensor) -> Tensor:
        """The layer without bias: x of shape (batch, *record)."""
        if self.is_linear:
            return F.linear(x, W)
        one_axis = len(self.stride) == 1
        if self.is_transposed:
            convolve: Any = F.conv_transpose1d if one_axis else F.conv_transpose2d
            made: Tensor = convolve(
                x, W, None, self.stride, self.padding, self.output_padding, self.groups, self.dilation
            )
            return made
        convolve = F.conv1d if one_axis else F.conv2d
        made = convolve(x, W, None, self.stride, self.padding, self.dilation, self.groups)
        return made

    def certified_spectral_norm(self, W: Tensor) -> float:
        """An upper bound on the layer's 2→2 norm."""
        array = W.detach().to("cpu", torch.float64).numpy()
        if self.is_linear:
            return largest_singular_value_up(array)
        kernels = np.split(array if array.ndim == 4 else array[:, :, None, :], self.groups, axis=0)
        stride, dilation = ((1, *pair)[-2:] for pair in (self.stride, self.dilation))
        return max(
            symbol_bound(
                kernel,
                stride=(stride[0], stride[1]),
                dilation=(dilation[0], dilation[1]),
                flops=SYMBOL_FLOPS / self.groups,
            )
            for kernel in kernels
        )

    def spectral_limit(self, W: Tensor) -> float:
        """The cap less the margin for rounding the weight."""
        taps = math.prod(W.shape[2:])
        strided = min(W.shape[0] // (1 if self.is_linear else self.groups), W.shape[1] * math.prod(self.stride))
        return self.cap * (1.0 - ENTRY_MARGIN * math.sqrt(taps * strided) - CERTIFICATE_MARGIN)

    def _largest_sums(self, A: Tensor, *, power: float, of_columns: bool) -> Tensor:
        """Per channel, the largest Σ A^power over a column (row) of the unrolled layer; for ∞ the largest entry."""
        if self.is_linear:
            dim = 0 if of_columns else 1
            return A.amax(dim) if math.isinf(power) else (A**power).sum(dim)
        if math.isinf(power):
            return self._channels_last(A, of_columns=of_columns).amax(dim=0)
        ones = torch.ones(1, *self.record_shape, dtype=A.dtype, device=A.device)
        powered = A**power
        if not of_columns:
            return self.apply_layer(powered, ones).flatten(2).amax(dim=2)[0]
        outputs = torch.ones_like(self.apply_layer(powered.detach(), ones))
        return self._adjoint(powered, outputs).flatten(2).amax(dim=2)[0]

    def _adjoint(self, A: Tensor, y: Tensor) -> Tensor:
        """Aᵀ y, as a tensor of the record's shape."""
        one_axis = len(self.stride) == 1
        if self.is_transposed:
            convolve: Any = F.conv1d if one_axis else F.conv2d
            made: Tensor = convolve(y, A, None, self.stride, self.padding, self.dilation, self.groups)
            return made
        convolve = F.conv_transpose1d if one_axis else F.conv_transpose2d
        reached = [
            (out - 1) * s - 2 * pad + d * (k - 1) + 1
            for out, s, pad, d, k in zip(
                y.shape[2:], self.stride, self.padding, self.dilation, A.shape[2:], strict=True
            )
        ]
        unread = tuple(size - end for size, end in zip(self.record_shape[1:], reached, strict=True))
        made = convolve(y, A, None, self.stride, self.padding, unread, self.groups, self.dilation)
        return made

    def _channels_last(self, A: Tensor, *, of_columns: bool) -> Tensor:
        """A as a matrix whose columns are the layer's input (output) channels."""
        first_is_wanted = of_columns == self.is_transposed
        if first_is_wanted:
            return A.flatten(1).T
        grouped = A.reshape(self.groups, A.shape[0] // self.groups, A.shape[1], -1)
        return grouped.permute(1, 3, 0, 2).reshape(-1, self.groups * A.shape[1])

    def _per_channel(self, factors: Tensor, W: Tensor, *, of_columns: bool) -> Tensor:
        """One factor an input (output) channel, in a shape that multiplies W."""
        if self.is_linear:
            return factors[None, :] if of_columns else factors[:, None]
        trailing = (1,) * (W.ndim - 2)
        if of_columns == self.is_transposed:
            return factors.reshape(-1, 1, *trailing)
        per_group = factors.reshape(self.groups, 1, W.shape[1])
        spread = per_group.expand(self.groups, W.shape[0] // self.groups, W.shape[1])
        return spread.reshape(*W.shape[:2], *trailing)


class _SpectralCap(torch.autograd.Function):
    """W·min(1, c/σ⁺(W)). The value comes from the certified σ⁺; the gradient takes σ's from power iteration."""

    @staticmethod
    def forward(ctx: Any, W: Tensor, cap: WeightCap) -> Tensor:  # noqa: ANN401 - torch's own
        sigma, limit = cap.certified_spectral_norm(W), cap.spectral_limit(W)
        ctx.factor, ctx.cap = (1.0 if sigma <= limit else limit / sigma), cap
        ctx.save_for_backward(W)
        return W.clone() if ctx.factor == 1.0 else (W.double() * ctx.factor).to(W.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401 - torch's own
        (W,) = ctx.saved_tensors
        if ctx.factor == 1.0:
            return gradient, None
        slope = _slope_of_spectral_norm(W, ctx.cap)
        inner = float((slope * W).sum())
        if inner <= 0.0:
            return ctx.factor * gradient, None
        # d(W/σ) = dW/σ − W⟨σ', dW⟩/σ², and ⟨σ', W⟩ = σ as σ is homogeneous.
        return ctx.factor * (gradient - slope * (float((gradient * W).sum()) / inner)), None


def _slope_of_spectral_norm(W: Tensor, cap: WeightCap) -> Tensor:
    """∂‖W‖₂/∂W up to a factor: u ⊗ v through the layer, with u, v from power iteration. Never part of a bound."""
    weight = W.detach().clone().requires_grad_(True)
    count = math.prod(cap.record_shape)
    start = torch.cos(torch.arange(count, dtype=W.dtype, device=W.device))  # no random state is touched
    x = start.reshape(1, *cap.record_shape)
    with torch.enable_grad():
        for _ in range(NUM_ITERATIONS):
            x = (x / x.norm().clamp_min(1e-30)).detach().requires_grad_(True)
            y = cap.apply_layer(weight.detach(), x)
            (x,) = torch.autograd.grad(y, x, y.detach())
        x = (x / x.norm().clamp_min(1e-30)).detach()
        y = cap.apply_layer(weight, x)
        (slope,) = torch.autograd.grad(y, weight, y.detach())
    return slope


def _explicit_padding(layer: nn.Module) -> tuple[int, ...]:
    """Zeros on each side, per axis."""
    padding: Any = layer.padding
    if not isinstance(padding, str):
        return tuple(padding)
    kernel: Any = layer.kernel_size
    dilation: Any = layer.dilation
    totals = [0 if padding == "valid" else d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    if any(total % 2 for total in totals):
        raise ValueError(
            f"padding='same' of kernel size {kernel} puts more zeros on one side: its columns are not counted here; pad "
            "by numbers"
        )
    return tuple(total // 2 for total in totals)
