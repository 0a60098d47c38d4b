"""Clipping: exact norms, rows alone, and its Lipschitz constant in each norm."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asfl_privacy.mechanisms import clip_rows
from asfl_privacy.mechanisms.clipping import clip_lipschitz, row_norms_up


def within(row, limit, norm):
    """Whether the exact norm of a row is at most the limit."""
    exact = [abs(Fraction(value)) for value in row.flatten().tolist()]
    if norm == 1:
        return sum(exact) <= Fraction(limit)
    return sum(value**2 for value in exact) <= Fraction(limit) ** 2


@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_the_exact_norm_never_exceeds_the_clip(norm, dtype, data):
    """Catches: float32 norms, rounding the scaled row to nearest, no final check."""
    magnitude = data.draw(st.floats(-30.0, 30.0))
    limit = 10.0 ** data.draw(st.floats(-6.0, 6.0))
    seed = data.draw(st.integers(0, 2**31))
    rows = torch.randn(4, 37, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = (rows * 10.0**magnitude).to(dtype)
    clipped = clip_rows(rows, max_norm=limit, norm=norm)
    assert clipped.dtype == dtype
    for before, after in zip(rows, clipped, strict=True):
        assert within(after, limit, norm)
        if not within(before, limit, norm):
            assert not within(after, limit * (1.0 - 1e-5), norm)  # not needlessly small
    assert torch.equal(clip_rows(clipped, max_norm=limit, norm=norm), clipped)


@pytest.mark.parametrize("norm", [1, 2])
def test_huge_and_tiny_values_do_not_overflow(norm):
    """Catches: squares of 1e30 in float32, sums of 1e308 in float64."""
    for dtype, huge, tiny in ((torch.float32, 3e38, 1e-45), (torch.float64, 1.7e308, 5e-324)):
        rows = torch.tensor([[huge, -huge, huge], [1e30, 0.0, 0.0], [tiny, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=dtype)
        clipped = clip_rows(rows, max_norm=1.0, norm=norm)
        assert bool(torch.isfinite(clipped).all())
        for row in clipped:
            assert within(row, 1.0, norm)
        assert float(clipped[0, 0]) == pytest.approx(1.0 / 3.0 if norm == 1 else 1.0 / math.sqrt(3.0), rel=1e-6)
        assert float(clipped[1, 0]) == pytest.approx(1.0, rel=1e-6)
        assert torch.equal(clipped[2:], rows[2:])


@pytest.mark.parametrize("norm", [1, 2])
def test_rows_are_clipped_one_by_one(norm):
    """Catches: one factor for the whole batch."""
    rows = torch.randn(16, 3, 5, 5, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 16).reshape(
        16, 1, 1, 1
    )
    together = clip_rows(rows, max_norm=2.0, norm=norm)
    alone = torch.cat([clip_rows(row.unsqueeze(0), max_norm=2.0, norm=norm) for row in rows])
    assert torch.equal(together, alone)
    assert together.shape == rows.shape
    inside = row_norms_up(rows, norm=norm) <= 2.0
    assert 0 < int(inside.sum()) < 16
    assert torch.equal(together[inside], rows[inside])


def test_clipping_is_two_lipschitz_in_l1_and_one_lipschitz_in_l2():
    """x=(1, 0), y=(1, t), C=1: the ℓ1 ratio tends to 2. Catches: taking clipping for a contraction in ℓ1."""
    for t in (1e-3, 1e-2, 0.5):
        pair = torch.tensor([[1.0, 0.0], [1.0, t]], dtype=torch.float64)
        moved = clip_rows(pair, max_norm=1.0, norm=1)
        ratio = float((moved[0] - moved[1]).abs().sum()) / t
        assert ratio == pytest.approx(2.0 / (1.0 + t), rel=1e-9)
        assert 1.0 < ratio <= clip_lipschitz(1)
    assert clip_lipschitz(2) == 1


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.floats(-4.0, 1.0), norm=st.sampled_from([1, 2]))
def test_no_pair_moves_more_than_the_lipschitz_constant(seed, spread, norm):
    generator = torch.Generator().manual_seed(seed)
    one = torch.randn(200, 3, generator=generator, dtype=torch.float64)
    other = one + 10.0**spread * torch.randn(200, 3, generator=generator, dtype=torch.float64)
    moved = clip_rows(one, max_norm=1.0, norm=norm) - clip_rows(other, max_norm=1.0, norm=norm)
    before = torch.linalg.vector_norm(one - other, ord=norm, dim=1)
    after = torch.linalg.vector_norm(moved, ord=norm, dim=1)
    assert bool((after <= clip_lipschitz(norm) * before * (1 + 1e-9)).all())


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, None, "1"])
def test_bad_clips_are_refused(bad):
    with pytest.raises(ValueError, match=r"clip is|max_norm is"):
        clip_rows(torch.ones(1, 2), max_norm=bad, norm=2)


def test_bad_rows_and_norms_are_refused():
    with pytest.raises(ValueError, match="NaN or inf"):
        clip_rows(torch.tensor([[float("nan"), 1.0, 2.0]]), max_norm=1.0, norm=2)
    with pytest.raises(ValueError, match="at least one record"):
        clip_rows(torch.empty(0, 2), max_norm=1.0, norm=2)
    with pytest.raises(ValueError, match="ℓ1 and ℓ2"):
        clip_rows(torch.ones(1, 2), max_norm=1.0, norm=math.inf)
