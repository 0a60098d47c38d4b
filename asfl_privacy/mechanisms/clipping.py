"""Clipping: every record's activation is scaled into the q-norm ball of radius C, row by row."""

import torch

from asfl_privacy.accounting.checks import check_norm
from asfl_privacy.mechanisms.guards import check_activations, check_clip

_ULP = 2.0**-52


def clip_rows(activations: torch.Tensor, *, max_norm: float, norm: float) -> torch.Tensor:
    """Scale each row down to q-norm at most C; rows within it are untouched.

    Args:
        activations: shape (batch, ...), float32 or float64, finite.
        max_norm: C > 0.
        norm: q, 1 or 2.

    Returns:
        A tensor of the same shape and type.

    Raises:
        ValueError: for half precision, integers, an empty batch, NaN, inf or C ≤ 0.

    Guarantee:
        The exact q-norm of every row of the result is ≤ C, so two rows differ by at most 2C in that norm. The map is
        1-Lipschitz in ℓ2 and 2-Lipschitz in ℓ1 (see ``clip_lipschitz``), up to float rounding.

    Edge cases:
        Zero rows stay zero; 1e30 in float32 or 1e300 in float64 do not overflow; a batch of one equals its row in a
        larger batch.

    Example:
        >>> clip_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), max_norm=10.0, norm=2).tolist()
        [[3.0, 4.0], [0.0, 0.0]]
        >>> row_norms_up(clip_rows(torch.tensor([[3e30, 4e30]]), max_norm=1.0, norm=2), norm=2).item() <= 1.0
        True
    """
    check_activations(activations)
    limit = check_clip(max_norm)
    if limit is None:
        raise ValueError("max_norm is None: clipping needs a norm C > 0; pass e.g. max_norm=1.0")
    rows = activations.detach().flatten(1) if activations.dim() > 1 else activations.detach().unsqueeze(1)
    largest, unit_norms = _scaled_norms(rows, norm=norm)
    over = torch.nonzero(_norms_up(largest, unit_norms, width=rows.shape[1]) > limit).squeeze(1)
    result = rows.clone()
    if len(over) == 0:
        return result.reshape(activations.shape)
    margin = 1.0 - 4.0 * _rounding(rows.shape[1])
    # a row is largest · direction with 1 ≤ norm of direction, so nothing overflows
    target = rows[over].double() / largest[over].unsqueeze(1) * (limit * margin / unit_norms[over]).unsqueeze(1)
    clipped = target.to(rows.dtype)
    clipped = torch.where(
        clipped.double().abs() > target.abs(), torch.nextafter(clipped, torch.zeros_like(clipped)), clipped
    )
    result[over] = clipped
    if bool((row_norms_up(clipped, norm=norm) > limit).any()):
        raise ValueError(f"clip is {limit:g}: rows of dtype {rows.dtype} cannot be scaled into it; pass a larger clip")
    return result.reshape(activations.shape)


def row_norms_up(rows: torch.Tensor, *, norm: float) -> torch.Tensor:
    """An upper bound of each row's exact q-norm.

    Args:
        rows: shape (batch, ...), finite.
        norm: q, 1 or 2.

    Returns:
        float64, shape (batch,).

    Guarantee:
        Never below the exact norm; relative excess about (d + 8)·2⁻⁵².
    """
    flat = rows.detach().flatten(1) if rows.dim() > 1 else rows.detach().unsqueeze(1)
    return _norms_up(*_scaled_norms(flat, norm=norm), width=flat.shape[1])


def clip_lipschitz(norm: float) -> int:
    """Lipschitz constant of clipping in its own norm: 1 for ℓ2, 2 for ℓ1.

    Source:
        In a Hilbert space the radial map is the projection onto a convex set, hence 1-Lipschitz. In any normed space it
        is 2-Lipschitz (Dunkl & Williams 1964); ℓ1 attains 2 in the limit: x=(1, 0), y=(1, t), C=1 gives 2/(1 + t).

    Example:
        >>> clip_lipschitz(2), clip_lipschitz(1)
        (1, 2)
    """
    q = check_norm(norm, name="norm")
    if q not in (1.0, 2.0):
        raise ValueError(f"norm is {norm!r}: clipping is offered in ℓ1 and ℓ2; pass norm=1 or norm=2")
    return 1 if q == 2.0 else 2


def _scaled_norms(rows: torch.Tensor, *, norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's largest magnitude (1 for zero rows) and the q-norm of the row divided by it, in float64."""
    clip_lipschitz(norm)
    doubles = rows.double()
    largest = doubles.abs().amax(dim=1)
    largest = torch.where(largest == 0, torch.ones_like(largest), largest)
    scaled = doubles.abs() / largest.unsqueeze(1)
    unit_norms = scaled.sum(dim=1) if norm == 1 else (scaled * scaled).sum(dim=1).sqrt()
    return largest, unit_norms


def _norms_up(largest: torch.Tensor, unit_norms: torch.Tensor, *, width: int) -> torch.Tensor:
    """Upper bounds of row norms from ``_scaled_norms``; a zero row's is 0, since its unit norm is."""
    return largest * unit_norms * (1.0 + _rounding(width))


def _rounding(width: int) -> float:
    return (width + 8) * _ULP
