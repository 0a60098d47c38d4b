"""Sensitivity at the noise: hand values, brute-force operator norms, and no pair of inputs above the bound."""

import itertools
import math
import tomllib
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from asfl_privacy.mechanisms import clip_rows, release_sensitivity
from asfl_privacy.mechanisms.release_sensitivity import norm_growth
from sensitivity import UnsupportedModuleError

GOLDEN = Path(__file__).parents[1] / "golden" / "privacy.toml"


def linear(matrix):
    layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False).double().eval()
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(matrix))
    return layer


def brute_force_norm(matrix, p, q):
    """max ‖Wx‖_q over ‖x‖_p ≤ 1, by the vertices of the ball or of the dual ball."""
    if p == 1:
        return max(np.linalg.norm(column, ord=q) for column in matrix.T)
    if p == math.inf:
        corners = np.array(list(itertools.product((-1.0, 1.0), repeat=matrix.shape[1])))
        return np.linalg.norm(corners @ matrix.T, ord=q, axis=1).max()
    if q == 1:  # 2→1 of W is ∞→2 of its transpose
        return brute_force_norm(matrix.T, math.inf, 2)
    return np.linalg.svd(matrix, compute_uv=False)[0]


def head():
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(conv=nn.Conv2d(1, 3, 3, stride=2), relu=nn.ReLU(), flat=nn.Flatten(), fc=nn.Linear(27, 5))
    ).eval()


def test_laplace_with_an_l2_radius_at_the_input_agrees_with_the_written_values():
    """√d·R: 8 on digits, 28 on Fashion-MNIST. Catches: Laplace noise from an ℓ2 bound."""
    for row in tomllib.loads(GOLDEN.read_text(encoding="utf-8"))["laplace_l2_radius"]:
        found = release_sensitivity(None, p=2, q=1, radius=0.1, input_shape=tuple(row["input_shape"]))
        assert found.value == pytest.approx(float(row["factor"]) * 0.1, rel=1e-12)
        assert found.certificate is None


@pytest.mark.parametrize(
    ("p", "q", "factor", "diameter"),
    [
        (1, 1, 1.0, 16.0),
        (2, 2, 1.0, 4.0),
        (1, 2, 1.0, 4.0),
        (2, 1, 4.0, 16.0),
        (math.inf, 1, 16.0, 16.0),
        (math.inf, 2, 4.0, 4.0),
    ],
)
def test_at_the_input_no_weights_are_needed(p, q, factor, diameter):
    """Δ = R·d^max(0, 1/q−1/p), d=16; the box [0, 1] has the q-diameter d^(1/q)."""
    found = release_sensitivity(None, p=p, q=q, radius=0.25, input_shape=(4, 4))
    assert (found.value, found.whole_record) == (0.25 * factor, diameter)
    wide = release_sensitivity(None, p=p, q=q, radius=0.25, input_shape=(4, 4), input_box=(-1.0, 2.0))
    assert (wide.value, wide.whole_record) == (0.25 * factor, 3.0 * diameter)
    assert release_sensitivity(None, p=p, q=q, radius=1e3, input_shape=(4, 4)).value == diameter


@pytest.mark.parametrize(("p", "q"), [(1, 1), (1, 2), (2, 2), (2, 1), (math.inf, 1), (math.inf, 2)])
def test_no_linear_prefix_exceeds_its_bound(p, q):
    """Catches: 2→1 taken for 2→2 or 1→1, √m and √d swapped, a factor rounded down."""
    rng = np.random.default_rng(0)
    for rows, columns in ((2, 9), (9, 2), (6, 6), (1, 8), (8, 1)):
        matrix = rng.standard_normal((rows, columns))
        found = release_sensitivity(linear(matrix), p=p, q=q, radius=0.5, input_shape=(columns,), input_box=(-9.0, 9.0))
        truth = brute_force_norm(matrix, p, q)
        assert found.value >= 0.5 * truth
        if (p, q) in ((1, 1), (1, 2), (2, 2)):
            assert found.value <= 0.5 * truth * (1 + 1e-6)
        whole = brute_force_norm(matrix, math.inf, q) * 18.0
        assert whole <= found.whole_record


def test_two_to_one_is_the_smaller_of_its_two_routes():
    """√d·(1→1) and √m·(2→2) by hand, on one matrix for each."""
    wide, tall = np.ones((1, 16)), np.ones((16, 1))
    assert release_sensitivity(linear(wide), p=2, q=1, radius=0.5, input_shape=(16,)).value == pytest.approx(2.0)
    assert release_sensitivity(linear(tall), p=2, q=1, radius=0.5, input_shape=(1,)).value == pytest.approx(8.0)


@pytest.mark.parametrize(("p", "q"), [(1, 1), (1, 2), (2, 2), (2, 1), (math.inf, 2)])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_no_pair_of_inputs_exceeds_the_bound(p, q, clip):
    """Catches: leaving out the ℓ1 factor 2 of clipping, the radius, or a layer."""
    module = head().double()
    found = release_sensitivity(module, p=p, q=q, radius=0.5, input_shape=(1, 8, 8), clip=clip)
    generator = torch.Generator().manual_seed(1)
    one = torch.rand(3000, 1, 8, 8, generator=generator, dtype=torch.float64)
    step = torch.randn(one.shape, generator=generator, dtype=torch.float64)
    step[1000:] *= torch.rand(one[1000:].shape, generator=generator) < 0.05
    step[2000:] = step[2000:].sign()
    sizes = torch.linalg.vector_norm(step.flatten(1), ord=p, dim=1).clamp_min(1e-9).reshape(-1, 1, 1, 1)
    other = one + step / sizes * 0.5
    corners = [(torch.rand(one.shape, generator=generator) < 0.5).double() for _ in range(2)]

    def moved(a, b):
        with torch.no_grad():
            outputs = [module(x) if clip is None else clip_rows(module(x), max_norm=clip, norm=q) for x in (a, b)]
        return float(torch.linalg.vector_norm(outputs[0] - outputs[1], ord=q, dim=1).max())

    assert moved(one, other) <= found.value
    assert moved(*corners) <= found.whole_record
    assert found.value <= found.whole_record


def test_clipping_doubles_the_l1_move_and_caps_both():
    """Laplace Δ = min(2·S(R), 2C), Gaussian Δ = min(S(R), 2C); x=(1, 0), y=(1, t) shows that S(R) alone is too small."""
    for t in (0.01, 0.2):
        pair = torch.tensor([[1.0, 0.0], [1.0, t]], dtype=torch.float64)
        clipped = clip_rows(pair, max_norm=1.0, norm=1)
        moved = float((clipped[0] - clipped[1]).abs().sum())
        laplace = release_sensitivity(None, p=1, q=1, radius=t, input_shape=(2,), clip=1.0)
        unclipped = release_sensitivity(None, p=1, q=1, radius=t, input_shape=(2,))
        assert unclipped.value < moved <= laplace.value == pytest.approx(2.0 * t, rel=1e-12)
        assert laplace.whole_record == 2.0
    gaussian = release_sensitivity(None, p=2, q=2, radius=0.2, input_shape=(2,), clip=0.25)
    assert (gaussian.value, gaussian.whole_record) == (pytest.approx(0.2, rel=1e-12), 0.5)
    assert release_sensitivity(None, p=2, q=2, radius=0.9, input_shape=(2,), clip=0.25).value == 0.5
    assert release_sensitivity(None, p=1, q=1, radius=0.9, input_shape=(2,), clip=0.25).value == 0.5


def test_clipping_doubles_the_l1_move_of_any_two_records_too():
    """y = (1, t·x) over the box [0, 1] moves by t, clipped by 2t/(1 + t). Catches: min(S(diameter), 2C) for Laplace."""
    t = 0.2
    prefix = linear(np.array([[0.0], [t]]))
    prefix.bias = nn.Parameter(torch.tensor([1.0, 0.0], dtype=prefix.weight.dtype))
    outputs = clip_rows(prefix.eval()(torch.tensor([[0.0], [1.0]], dtype=prefix.weight.dtype)), max_norm=1.0, norm=1)
    moved = float((outputs[0] - outputs[1]).abs().sum())
    found = release_sensitivity(prefix, p=1, q=1, radius="any", input_shape=(1,), clip=1.0)
    assert 1.5 * t < moved <= found.value == found.whole_record <= 2.0 * t * (1 + 1e-6)


def test_rounding_of_the_forward_pass_is_part_of_the_sensitivity():
    """2E for float32 exceeds that for float64; without a head there is none. Catches: a certificate without the box."""
    single = release_sensitivity(head(), p=2, q=2, radius=0.1, input_shape=(1, 8, 8))
    double = release_sensitivity(head().double(), p=2, q=2, radius=0.1, input_shape=(1, 8, 8))
    assert single.rounding == double.rounding == "included"
    assert single.certificate.slack > 1e3 * double.certificate.slack > 0
    assert single.value >= 0.1 * single.certificate.value + single.certificate.slack
    assert release_sensitivity(None, p=2, q=2, radius=0.1, input_shape=(4,)).rounding == "none"


def test_any_two_records_need_a_clip():
    found = release_sensitivity(head(), p=2, q=2, radius="any", input_shape=(1, 8, 8), clip=0.01)
    assert (found.value, found.whole_record) == (0.02, 0.02)
    with pytest.raises(ValueError, match="pass a clip"):
        release_sensitivity(head(), p=2, q=2, radius="any", input_shape=(1, 8, 8))


def test_the_formula_says_what_was_done():
    words = release_sensitivity(None, p=2, q=1, radius=0.5, input_shape=(16,), clip=3.0).formula
    assert words == "Δ = 2 × 4·R = 4, at most min(32 for any two records of the box, 2C = 6)"


def test_norm_growth_rounds_up():
    for size in range(1, 300):
        assert norm_growth(size, source=2.0, target=1.0) ** 2 >= size
        assert norm_growth(size, source=math.inf, target=1.0) == size
        assert norm_growth(size, source=1.0, target=math.inf) == 1.0


def test_what_has_no_bound_is_refused():
    class Unknown(nn.Module):
        def forward(self, x):
            return torch.sin(x.mean(dim=0, keepdim=True) + x)

    with pytest.raises(UnsupportedModuleError):
        release_sensitivity(Unknown().eval(), p=2, q=2, radius=0.1, input_shape=(4,))
    with pytest.raises(ValueError, match="Δ > 0"):
        release_sensitivity(linear(np.zeros((2, 2))), p=2, q=2, radius=0.1, input_shape=(2,))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"p": 3}, "p is 3"),
        ({"q": 3}, "q is 3"),
        ({"q": math.inf}, "ℓ1 and ℓ2"),
        ({"radius": 0.0}, "radius is 0.0"),
        ({"radius": math.nan}, "radius is nan"),
        ({"clip": 0.0}, "clip is 0.0"),
        ({"clip": math.inf}, "clip is inf"),
        ({"input_shape": ()}, "input_shape is"),
        ({"input_shape": (0, 4)}, "input_shape is"),
        ({"input_box": (1.0, 0.0)}, "low must be below high"),
        ({"input_box": (0.0, math.nan)}, "input_box is nan"),
        ({"input_box": 1.0}, "a pair"),
    ],
)
def test_bad_values_are_refused_in_one_line(change, words):
    values = {"p": 2, "q": 2, "radius": 0.1, "input_shape": (4,)} | change
    with pytest.raises(ValueError, match=words) as caught:
        release_sensitivity(None, **values)
    assert "\n" not in str(caught.value)
