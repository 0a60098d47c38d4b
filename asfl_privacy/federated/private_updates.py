"""Clipped, noised vectors: the sum that DP-SGD releases each step, and a client's whole update (DP-FedAvg)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from fractions import Fraction

import torch
from torch import Tensor, nn

from asfl_privacy.accounting.checks import check_multiplier, check_real
from asfl_privacy.accounting.rationals import fraction_down
from asfl_privacy.federated.weights import Weights

AddNoise = Callable[[Tensor], Tensor]
"""Takes a float64 vector and returns it with fresh noise on every coordinate; shape, type and device stay."""

_CHUNK = 250_000
"""Numbers clipped at a time, so that temporaries stay in the cache."""
_ULP = 2.0**-52


def noise_multiplier_of(noise_stddev: float, *, clip: float) -> float:
    """Noise multiplier z = σ/(2C) of one noised sum or update, as the ledger takes it.

    Args:
        noise_stddev: σ of the noise on the sum of clipped vectors, in the units of the sum.
        clip: C > 0.

    Returns:
        z, rounded down.

    Raises:
        ValueError: σ or C that is ≤ 0, NaN or infinite.

    Guarantee:
        z·2C ≤ σ exactly. The factor 2 is that of replace-one: the vector of norm C that one record contributes may turn
        into its opposite. Opacus and most papers state σ/C, which is for adding or removing a record.

    Example:
        >>> noise_multiplier_of(3.0, clip=0.5)
        3.0
    """
    sigma = check_multiplier(noise_stddev, name="noise_stddev")
    z = fraction_down(Fraction(sigma) / (2 * Fraction(check_clip_norm(clip))))
    return check_multiplier(z)  # 0 where it underflows


def noised_sum(rows: Tensor, *, clip: float, add_noise: AddNoise, spacing: float | None = None) -> Tensor:
    """Sum of rows, each clipped to ℓ2 norm C, with noise.

    Args:
        rows: One vector a record (or client), finite, shape (n, d) with n, d ≥ 1.
        clip: C > 0.
        add_noise: Adds the noise; sees multiples of `spacing` alone.
        spacing: Power of two to whose multiples every clipped coordinate is truncated toward zero, for a sampler that
            works on a lattice; None for the finest that fits.

    Returns:
        float64, shape (d,).

    Raises:
        ValueError: Rows whose norm is not finite, C ≤ 0, a spacing that is no power of two or too fine for an exact sum,
            or noise that changed shape or type or is not finite.

    Guarantee:
        Two lists of n rows that differ in one row give sums before noise whose exact ℓ2 distance is ≤ 2C: every clipped
        row has exact norm ≤ C, truncation toward zero keeps it, and the sum of multiples of a spacing of at least
        2⁻⁵²·n·C is exact in float64 in any order. What is released is as private as the noise that the caller adds.

    Example:
        >>> noised_sum(torch.tensor([[3.0, 4.0], [0.25, 0.0]]), clip=1.0, add_noise=lambda total: total).numpy().round(6)
        array([0.85, 0.8 ])
    """
    limit = check_clip_norm(clip)
    if rows.dim() != 2 or rows.numel() == 0:
        raise ValueError(f"rows have shape {tuple(rows.shape)}: one vector a record is due; pass shape (n, d)")
    grid = _checked_spacing(spacing, clip=limit, num_rows=len(rows))
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    for chunk in torch.split(rows.detach(), max(1, _CHUNK // rows.shape[1])):
        total += _clipped_cells(chunk, clip=limit, grid=grid).sum(0) * grid
    noised = add_noise(total.clone())
    if not isinstance(noised, Tensor) or (noised.shape, noised.dtype) != (total.shape, total.dtype):
        raise ValueError(
            f"add_noise gave {_kind(noised)}: it must return float64 of shape {tuple(total.shape)}; add the noise alone"
        )
    if not bool(torch.isfinite(noised).all()):
        raise ValueError("add_noise gave NaN or inf: such a sum says nothing and must not leave; lower its scale")
    return noised


def privatize_update(
    new_weights: Weights,
    *,
    old_weights: Weights,
    parameters: Collection[str],
    clip: float,
    add_noise: AddNoise,
    spacing: float | None = None,
) -> Weights:
    """What a client sends in DP-FedAvg: the old weights plus its clipped, noised change.

    Args:
        new_weights: The client's network after its local steps.
        old_weights: The round's global weights that it started from.
        parameters: Names of the parameters that train, as `trained_names` gives them; all else must not have changed.
        clip: C > 0, of the change of all these parameters together.
        add_noise: Adds the noise, on the client: the server is an adversary.
        spacing: As in `noised_sum`.

    Returns:
        Weights in the types of `old_weights`; entries outside `parameters` are those of `old_weights`.

    Raises:
        ValueError: Names or shapes that differ, parameters that are not float32 or float64, an entry outside
            `parameters` that changed (a buffer, which would leave in the clear), or whatever `noised_sum` refuses, such as
            a change that is not finite. Nothing is drawn then.

    Guarantee:
        Given the old weights, whatever two data sets a client may hold, what enters the noise differs by at most 2C in ℓ2:
        one release with multiplier `noise_multiplier_of(σ, clip=C)` protects the whole client, hence each of its
        records. Adding back and rounding to the weights' type are post-processing. Not covered: how many records the
        client holds, by which FedAvg weights it.

    Source:
        McMahan, Ramage, Talwar & Zhang (2018), Algorithm 1, with noise added by each client and for replace-one.

    Example:
        >>> old, new = {"w": torch.zeros(2)}, {"w": torch.tensor([3.0, 4.0])}
        >>> sent = privatize_update(new, old_weights=old, parameters=["w"], clip=1.0, add_noise=lambda change: change)
        >>> sent["w"].numpy().round(6)
        array([0.6, 0.8], dtype=float32)
    """
    names = _checked_names(new_weights, old_weights, parameters)
    change = torch.cat([(new_weights[n].double() - old_weights[n].double()).flatten() for n in names])
    noised = noised_sum(change.unsqueeze(0), clip=clip, add_noise=add_noise, spacing=spacing)
    pieces = dict(zip(names, torch.split(noised, [old_weights[n].numel() for n in names]), strict=True))
    return {
        name: (old.double() + pieces[name].reshape(old.shape)).to(old.dtype) if name in pieces else old.clone()
        for name, old in old_weights.items()
    }


def trained_names(model: nn.Module) -> tuple[str, ...]:
    """Names, as in the state dict, of the parameters that train; one that several modules share has several."""
    return tuple(name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad)


def check_clip_norm(clip: object) -> float:
    """Return a clipping norm in 1e-30 … 1e30, or raise ValueError."""
    norm = check_real("clip", clip, minimum=1e-30, exclusive=False, fix="pass e.g. clip=1.0")
    if norm > 1e30:
        raise ValueError(f"clip is {norm!r}: it must be ≤ 1e30, since nothing larger is ever clipped; pass clip=1.0")
    return norm


def _clipped_cells(rows: Tensor, *, clip: float, grid: float) -> Tensor:
    """Each row scaled to ℓ2 norm ≤ C and truncated toward zero, in integer multiples of the grid, float64.

    The computed norm of a row is off by a factor of at most 1 ± (d + 8)·2⁻⁵², whatever the order of summation: squares
    that underflow belong to coordinates below 1e-150, which truncation drops. Both branches below leave that much room.
    """
    cells = rows.to(torch.float64, copy=True)
    norms = torch.linalg.vector_norm(cells, dim=1)
    if not bool(torch.isfinite(norms).all()):
        raise ValueError("a vector to be clipped holds NaN or inf, or its norm overflows: training diverged; lower lr")
    rounding = (rows.shape[1] + 8) * _ULP
    scale = torch.where(norms * (1.0 + rounding) <= clip, 1.0, clip * (1.0 - 4.0 * rounding) / norms)
    return cells.mul_((scale / grid).unsqueeze(1)).trunc_()


def _checked_spacing(spacing: float | None, *, clip: float, num_rows: int) -> float:
    # C < 2^exponent and n ≤ 2^bits, so that a sum of n coordinates is at most 2^52 cells
    finest = math.ldexp(1.0, math.frexp(clip)[1] + (num_rows - 1).bit_length() - 52)
    if spacing is None:
        return finest
    grid = check_real("spacing", spacing, minimum=0.0, exclusive=True, fix="pass a power of two")
    if math.frexp(grid)[0] != 0.5 or grid < finest:
        raise ValueError(
            f"spacing is {grid!r}: it must be a power of two ≥ {finest!r}, so that {num_rows} rows of norm {clip:g} sum "
            "exactly; pass a coarser power of two"
        )
    return grid


def _checked_names(new_weights: Weights, old_weights: Weights, parameters: Collection[str]) -> list[str]:
    """Names of the parameters in the order of the weights, once everything fits."""
    if new_weights.keys() != old_weights.keys() or not parameters or not set(parameters) <= old_weights.keys():
        raise ValueError(
            f"weights of {len(new_weights)} and {len(old_weights)} entries and {len(parameters)} parameters do not fit: "
            "both weights hold the same names, at least one of them a parameter; pass those of one network"
        )
    for name, old in old_weights.items():
        new = new_weights[name]
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            raise ValueError(f"weights {name} are {_kind(new)}: they were {_kind(old)}; pass those of one network")
        if name in parameters and old.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"weights {name} are {old.dtype}: an update needs float32 or float64; call .float()")
        if name not in parameters and not torch.equal(new, old):
            raise ValueError(
                f"weights {name} changed though they are no parameter that trains: a buffer would carry raw data past the "
                "noise; use layers without running statistics, such as GroupNorm, or freeze it by .eval()"
            )
    return [name for name in old_weights if name in parameters]


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return type(value).__name__
