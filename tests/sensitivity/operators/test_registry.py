import math

import numpy as np
import pytest
import torch
from torch import library, nn

from sensitivity import UnsupportedModuleError, certify
from sensitivity.operators.registry import register_bound, unregister_bound


@library.custom_op("sensitivity_tests::bump", mutates_args=())
def bump(x: torch.Tensor, height: float) -> torch.Tensor:
    """height·sin(x): slope |height|."""
    return height * torch.sin(x)


@bump.register_fake
def _(x, height):
    return torch.empty_like(x)


bump.register_autograd(
    lambda context, gradient: (gradient * context.height * torch.cos(context.saved_tensors[0]), None),
    setup_context=lambda ctx, inputs, output: (ctx.save_for_backward(inputs[0]), setattr(ctx, "height", inputs[1]))[0],
)


@library.custom_op("sensitivity_tests::weigh", mutates_args=())
def weigh(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x·Wᵀ without a backward."""
    return x @ weight.T


@weigh.register_fake
def _(x, weight):
    return x.new_empty((x.shape[0], weight.shape[0]))


@library.custom_op("sensitivity_tests::soften", mutates_args=())
def soften(x: torch.Tensor) -> torch.Tensor:
    """x plus a little of the batch's mean: mixes records."""
    return x + 1e-3 * x.mean(0, keepdim=True)


@soften.register_fake
def _(x):
    return torch.empty_like(x)


@library.custom_op("sensitivity_tests::wiggle", mutates_args=())
def wiggle(x: torch.Tensor) -> torch.Tensor:
    """Another noise on every call, which its tags do not say."""
    return x + torch.rand(x.shape, dtype=x.dtype)


@wiggle.register_fake
def _(x):
    return torch.empty_like(x)


@library.custom_op("sensitivity_tests::single", mutates_args=())
def single(x: torch.Tensor) -> torch.Tensor:
    """Runs in float32 alone."""
    if x.dtype != torch.float32:
        raise TypeError("float32 only")
    return x.clone()


@single.register_fake
def _(x):
    return torch.empty_like(x)


@library.custom_op("sensitivity_tests::overflow", mutates_args=())
def overflow(x: torch.Tensor) -> torch.Tensor:
    return x * math.inf


@overflow.register_fake
def _(x):
    return torch.empty_like(x)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.fixture
def registered():
    """Registers bounds for one test."""
    names = []

    def register(name, bound):
        register_bound(name, bound)
        names.append(name)

    yield register
    for name in names:
        unregister_bound(name)


WEIGHT = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 4))).float()


def column_norms(W, *, too_small=1.0):
    """The exact table of a matrix where it is easy, and entrywise sums elsewhere."""
    W = np.abs(np.asarray(W, dtype=np.float64)), np.asarray(W, dtype=np.float64)
    return [
        [W[0].sum(0).max() / too_small, np.linalg.norm(W[1], axis=0).max(), W[0].max()],
        [np.linalg.norm(W[0].sum(0)), np.linalg.norm(W[1], 2), np.linalg.norm(W[1], axis=1).max()],
        [W[0].sum(), np.linalg.norm(W[0].sum(1)), W[0].sum(1).max()],
    ]


BUMP = Function(lambda x: torch.ops.sensitivity_tests.bump(x, 2.0))
WEIGH = Function(lambda x: torch.ops.sensitivity_tests.weigh(x, WEIGHT))


def test_an_operator_without_a_bound_is_refused_until_one_is_registered(registered):
    with pytest.raises(UnsupportedModuleError, match="sensitivity_tests::bump"):
        certify(BUMP, p=2, q=2, input_shape=(6,))
    seen = []

    def bound(args, kwargs, input_shape, output_shape):
        seen.append((args, kwargs, input_shape, output_shape))
        return abs(args[1])

    registered("sensitivity_tests::bump", bound)
    assert certify(BUMP, p=2, q=2, input_shape=(6,)).value == 2.0
    assert certify(nn.Sequential(nn.ReLU(), BUMP), p=math.inf, q=1, input_shape=(2, 3)).value == 12.0
    assert seen[0] == ((None, 2.0), {}, (6,), (6,))


def test_a_slope_1_25_times_too_small_is_beaten_by_a_pair(registered):
    """Mutation caught: no self-check. The gradient, or short steps near 0, find slope 2."""
    registered("sensitivity_tests::bump", lambda *facts: 2.0 / 1.25)
    with pytest.raises(UnsupportedModuleError, match="registered bound of sensitivity_tests::bump is beaten by a pair"):
        certify(BUMP, p=2, q=2, input_shape=(6,))


def test_a_right_table_of_a_matrix_passes(registered):
    registered("sensitivity_tests::weigh", lambda args, *rest: column_norms(args[1]))
    truth = np.linalg.norm(WEIGHT.double().numpy(), 2)
    assert certify(WEIGH, p=2, q=2, input_shape=(4,)).value == pytest.approx(truth, rel=1e-12)


@pytest.mark.parametrize(("r", "s"), [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)])
def test_each_entry_of_a_table_is_checked(registered, r, s):
    """One entry, and whatever follows from it, is 1.25 times too small; the operator has no backward, so the random
    and single-coordinate directions must do, or a linear search. Mutation caught: checking 2→2 alone."""

    def bound(args, *rest):
        table = column_norms(args[1])
        table[r][s] /= 1.25
        return table

    registered("sensitivity_tests::weigh", bound)
    with pytest.raises(UnsupportedModuleError, match="beaten by a pair"):
        certify(WEIGH, p=1, q=2, input_shape=(4,))


def test_an_operator_that_mixes_records_is_refused(registered):
    """Mutation caught: pairs of records checked one at a time only."""
    registered("sensitivity_tests::soften", lambda *facts: 2.0)
    with pytest.raises(UnsupportedModuleError, match="records mix"):
        certify(Function(lambda x: torch.ops.sensitivity_tests.soften(x)), p=2, q=2, input_shape=(3,))


@pytest.mark.parametrize(
    ("name", "words"),
    [("wiggle", "differs from run to run"), ("single", "does not run in float64"), ("overflow", "NaN or infinity")],
)
def test_operators_that_cannot_be_checked_are_refused(registered, name, words):
    registered(f"sensitivity_tests::{name}", lambda *facts: 1e6)
    operator = getattr(torch.ops.sensitivity_tests, name)
    with pytest.raises(UnsupportedModuleError, match=words):
        certify(Function(operator), p=2, q=2, input_shape=(3,))


@pytest.mark.parametrize(
    ("claimed", "words"),
    [
        (-1.0, "at least 0"),
        (math.nan, "at least 0"),
        (math.inf, "at least 0"),
        ("2", "neither a slope nor a 3×3 table"),
        (None, "neither a slope nor a 3×3 table"),
        (True, "neither a slope nor a 3×3 table"),
        ([[1.0] * 3] * 2, "neither a slope nor a 3×3 table"),
        ([[1.0, 1.0, math.nan]] * 3, "at least 0"),
    ],
)
def test_claims_that_are_no_bounds_are_refused(registered, claimed, words):
    registered("sensitivity_tests::bump", lambda *facts: claimed)
    with pytest.raises(UnsupportedModuleError, match=words):
        certify(BUMP, p=2, q=2, input_shape=(3,))


def test_a_slope_for_an_operator_that_changes_shapes_is_refused(registered):
    registered("sensitivity_tests::weigh", lambda *facts: 100.0)
    with pytest.raises(UnsupportedModuleError, match="one slope"):
        certify(WEIGH, p=2, q=2, input_shape=(4,))


def test_a_bound_may_refuse_with_its_own_reason(registered):
    def bound(*facts):
        raise ValueError("heights above 1 are not covered; use less")

    registered("sensitivity_tests::bump", bound)
    with pytest.raises(UnsupportedModuleError, match="heights above 1"):
        certify(BUMP, p=2, q=2, input_shape=(3,))


def test_one_of_torchs_own_operators_without_a_rule_can_be_registered(registered):
    head = Function(lambda x: torch.special.log_ndtr(x) - torch.special.log_ndtr(x))
    with pytest.raises(UnsupportedModuleError, match="special_log_ndtr"):
        certify(head, p=2, q=2, input_shape=(3,))
    registered("aten::special_i0e", lambda *facts: 1.0)  # e^{−|x|}I₀(x) has slopes in [−1, 1]
    assert certify(Function(torch.special.i0e), p=2, q=2, input_shape=(3,)).value == 1.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("relu", "has a rule"),
        ("aten::relu", "has a rule"),
        ("hardshrink", "has a rule"),
        ("glu", "has a rule"),
        ("convolution", "has a rule"),
        ("view", "has a rule"),
        ("add", "has a rule"),
        ("input", "has a rule"),
        ("mylib::op.default", "overload"),
        ("", "no operator's name"),
        (3, "no operator's name"),
    ],
)
def test_names_that_cannot_be_registered_are_refused(name, words):
    with pytest.raises(ValueError, match=words):
        register_bound(name, lambda *facts: 1.0)


def test_a_name_is_registered_once_and_taken_back_once(registered):
    registered("sensitivity_tests::bump", lambda *facts: 2.0)
    with pytest.raises(ValueError, match="registered already"):
        register_bound("sensitivity_tests::bump", lambda *facts: 3.0)
    with pytest.raises(ValueError, match="cannot be called"):
        register_bound("sensitivity_tests::other", 3.0)
    with pytest.raises(ValueError, match="is not registered"):
        unregister_bound("sensitivity_tests::other")


def test_the_same_claim_gets_the_same_answer(registered):
    registered("sensitivity_tests::bump", lambda *facts: 1.5)
    messages = set()
    for _ in range(2):
        with pytest.raises(UnsupportedModuleError) as refusal:
            certify(BUMP, p=2, q=2, input_shape=(6,))
        messages.add(str(refusal.value))
    assert len(messages) == 1


@library.custom_op("sensitivity_tests::grow_", mutates_args={"x"})
def grow_(x: torch.Tensor) -> None:
    """Fifty times x, in place; no kin of `grow`."""
    x.mul_(50.0)


@grow_.register_fake
def _(x):
    return None


@library.custom_op("sensitivity_tests::grow", mutates_args=())
def grow(x: torch.Tensor) -> torch.Tensor:
    """A copy of x."""
    return x.clone()


@grow.register_fake
def _(x):
    return torch.empty_like(x)


def test_a_bound_does_not_serve_an_in_place_operator_of_a_similar_name():
    class Grows(nn.Module):
        def forward(self, x):
            y = x + 0.0
            torch.ops.sensitivity_tests.grow_(y)
            return y

    register_bound("sensitivity_tests::grow", lambda *_: 1.0)
    try:
        with pytest.raises(UnsupportedModuleError, match="does not return it"):
            certify(Grows(), p=2, q=2, input_shape=(3,))
    finally:
        unregister_bound("sensitivity_tests::grow")


def test_odd_names_and_huge_bounds_are_refused_in_words():
    with pytest.raises(ValueError, match="3 is not registered"):
        unregister_bound(3)
    register_bound("sensitivity_tests::grow", lambda *_: 10**400)
    try:

        class Copies(nn.Module):
            def forward(self, x):
                return torch.ops.sensitivity_tests.grow(x)

        with pytest.raises(UnsupportedModuleError, match="finite numbers"):
            certify(Copies(), p=2, q=2, input_shape=(3,))
    finally:
        unregister_bound("sensitivity_tests::grow")
