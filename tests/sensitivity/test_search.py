import copy
import math
import threading

import numpy as np
import pytest
import torch
from dense_oracle import EXACT_PAIRS, dense_matrix, dense_norm
from torch import nn
from torch.nn import functional as F  # noqa: N812

from sensitivity import Certificate, LowerBound, certify, lower_bound


def digits_head(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("p", "q"), [(1, 1), (1, 2), (2, 2)])
def test_no_pair_of_inputs_exceeds_the_certificate_of_a_digits_head(seed, p, q):
    head = digits_head(seed)
    certificate = certify(head, p=p, q=q, input_shape=(1, 8, 8))
    found = lower_bound(head, p=p, q=q, input_shape=(1, 8, 8), num_steps=30)
    assert 0.03 * certificate.value < found.value <= certificate.value


@pytest.mark.parametrize(("p", "q"), [(1, 1), (1, 2), (2, 2)])
def test_the_ratio_is_that_of_the_pair_it_names(p, q):
    head = digits_head().double()
    found = lower_bound(head, p=p, q=q, input_shape=(1, 8, 8), num_steps=10)
    pair = torch.stack([found.first, found.second])
    with torch.no_grad():
        outputs = head(pair)
    ratio = torch.linalg.vector_norm(outputs[0] - outputs[1], q) / torch.linalg.vector_norm(pair[0] - pair[1], p)
    assert found.value <= float(ratio) <= found.value * (1 + 1e-6)


@pytest.mark.parametrize(("p", "q"), [*EXACT_PAIRS, (2, 2)])
@pytest.mark.parametrize("kind", ["dense", "strided"])
def test_a_linear_head_is_searched_to_its_norm_and_not_beyond(kind, p, q):
    """Mutation caught: taking off the spread of the norms, not of the entries (the noise of many exceeds it in 1→1)."""
    torch.manual_seed(3)
    head, shape = (nn.Linear(30, 20), (30,)) if kind == "dense" else (nn.Conv2d(3, 8, 3, stride=2), (3, 13, 13))
    found = lower_bound(head, p=p, q=q, input_shape=shape, num_steps=20)
    exact = dense_norm(dense_matrix(head, shape), p, q)
    assert (1 - 1e-6) * exact <= found.value <= exact * (1 + 1e-14)


def norm_by_brute_force(W, p, q):
    signs = np.array(np.meshgrid(*[[-1.0, 1.0]] * W.shape[1])).reshape(W.shape[1], -1)
    if p == math.inf:
        return np.linalg.norm(W @ signs, ord=q, axis=0).max()
    if (p, q) == (2, 1):
        return norm_by_brute_force(W.T, math.inf, 2)
    return dense_norm(W, p, q)


@pytest.mark.parametrize("p", [1, 2, math.inf])
@pytest.mark.parametrize("q", [1, 2, math.inf])
def test_the_worst_pattern_of_a_hidden_layer_is_found(p, q):
    """Units outnumber no inputs, so every pattern of active units is reached by some record: the norm is known."""
    torch.manual_seed(5)
    head = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5)).double()
    before, after = (layer.weight.detach().numpy() for layer in (head[0], head[2]))
    patterns = np.array(np.meshgrid(*[[0.0, 1.0]] * 6)).reshape(6, -1).T
    truth = max(norm_by_brute_force(after @ (pattern[:, None] * before), p, q) for pattern in patterns)
    found = lower_bound(head, p=p, q=q, input_shape=8, num_steps=300).value
    assert 0.9 * truth <= found <= truth * (1 + 1e-12)


def test_layer_norm_is_pushed_past_the_obvious_constant():
    head = nn.LayerNorm(256)
    assert (
        lower_bound(head, p=1, q=1, input_shape=256, num_steps=200).value > 1100 > 2 * (1 - 1 / 256) / math.sqrt(1e-5)
    )


def test_directions_that_the_box_forbids_are_not_searched():
    torch.manual_seed(6)
    head = nn.Linear(6, 5)
    low, high = -torch.ones(6), torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 1.0])
    free = dense_matrix(head, (6,))[:, [0, 2, 4, 5]]
    for p, q in ((1, 1), (2, 2), (math.inf, math.inf)):
        found = lower_bound(head, p=p, q=q, input_shape=6, input_box=(low, high), num_steps=20).value
        truth = dense_norm(free, p, q)
        assert (1 - 1e-6) * truth <= found <= truth * (1 + 1e-12)


def test_slopes_outside_the_box_are_not_found():
    assert 0.4999 < lower_bound(nn.GELU(), p=2, q=2, input_shape=3, input_box=(-9.0, 0.0)).value <= 0.5 + 1e-6


def test_hard_norms_are_searched_too_and_stay_below_brute_force():
    torch.manual_seed(4)
    head = nn.Linear(5, 4)
    W = dense_matrix(head, (5,))
    signs = np.array(np.meshgrid(*[[-1.0, 1.0]] * 5)).reshape(5, -1)
    truth = np.linalg.norm(W @ signs, ord=1, axis=0).max()
    assert 0.9 * truth <= lower_bound(head, p=math.inf, q=1, input_shape=(5,)).value <= truth * (1 + 1e-12)


def test_both_records_stay_in_the_box():
    low, high = torch.tensor([-1.0, 0.0, 2.0]), torch.tensor([1.0, 0.0, 5.0])
    found = lower_bound(nn.SiLU(), p=2, q=2, input_shape=(3,), input_box=(low, high))
    for record in (found.first, found.second):
        assert bool((record >= low).all())
        assert bool((record <= high).all())


def test_the_search_repeats_and_takes_a_generator():
    head = digits_head()
    first = lower_bound(head, p=2, q=2, input_shape=(1, 8, 8), num_steps=3)
    again = lower_bound(head, p=2, q=2, input_shape=(1, 8, 8), num_steps=3)
    other = lower_bound(head, p=2, q=2, input_shape=(1, 8, 8), num_steps=3, generator=torch.Generator().manual_seed(9))
    assert first.value == again.value != other.value


def test_a_parametrised_head_is_searched_without_touching_its_class():
    """Mutation caught: removing parametrisations from the copy, which edits the class that both share."""
    torch.manual_seed(0)
    head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    before = copy.deepcopy(head.state_dict())
    for p, q in ((1, 1), (1, 2), (2, 2)):
        bound = certify(head, p=p, q=q, input_shape=(4,)).value
        assert 0.9 * bound <= lower_bound(head, p=p, q=q, input_shape=(4,)).value <= bound
    assert all(torch.equal(before[name], value) for name, value in head.state_dict().items())


def test_lower_and_upper_bounds_share_no_type():
    found = lower_bound(nn.ReLU(), p=2, q=2, input_shape=(2,))
    assert isinstance(found, LowerBound)
    assert not isinstance(found, Certificate)
    assert not hasattr(found, "map")


def test_a_constant_head_has_ratio_zero():
    head = nn.Linear(3, 2)
    nn.init.zeros_(head.weight)
    assert lower_bound(head, p=1, q=1, input_shape=(3,)).value == 0.0


def test_a_box_in_which_the_head_is_constant_gives_zero():
    """Mutation caught: dividing vanishing gradients by a floor, which leaves a direction of length 0."""
    head = nn.Sequential(nn.ReLU(), nn.Linear(5, 6))
    for p, q in ((1, 1), (2, 2), (math.inf, math.inf)):
        found = lower_bound(head, p=p, q=q, input_shape=5, input_box=(-1.9, -1.5))
        assert found.value == 0.0
        assert not torch.equal(found.first, found.second)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"p": 3}, "p=3"),
        ({"input_shape": ()}, "input_shape"),
        ({"input_box": (1.0, 0.0)}, "input_box"),
        ({"input_box": (1.0, 1.0)}, "single point"),
        ({"num_starts": 0}, "num_starts"),
        ({"num_steps": 1.5}, "num_steps"),
    ],
)
def test_bad_arguments_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        lower_bound(nn.ReLU(), **{"p": 1, "q": 1, "input_shape": (3,), **arguments})


def test_a_head_that_mixes_records_is_refused():
    with pytest.raises(ValueError, match="train mode"):
        lower_bound(nn.BatchNorm1d(3), p=1, q=1, input_shape=(3,))


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def cancelling_layers():
    head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.eye_(head[0].weight)
    nn.init.constant_(head[0].bias, 1e10)
    head[1].weight.data = torch.tensor([[1.0, -1.0, 0.0, 0.0]] * 4)
    return head


@pytest.mark.parametrize(
    ("head", "truth"), [(Function(lambda x: (x + 1e12) - 1e12), 1.0), (cancelling_layers(), 2.0)], ids=["sum", "layers"]
)
@pytest.mark.parametrize("norm", [1, math.inf])
def test_rounding_errors_of_a_cancelling_head_are_no_sensitivity(head, truth, norm):
    """Mutation caught: an allowance relative to the output, which cancellation makes small (1.0158 found before)."""
    truth = truth if norm == math.inf else certify(head, p=norm, q=norm, input_shape=4).value
    assert 0.0 < lower_bound(head, p=norm, q=norm, input_shape=4).value <= truth
    certificate = certify(head, p=norm, q=norm, input_shape=4, search=True)
    assert certificate.lower_bound <= certificate.value


def test_a_jump_cannot_push_the_lower_bound_above_the_certificate():
    certificate = certify(nn.Softplus(threshold=0.0), p=1, q=1, input_shape=4, search=True)
    assert certificate.slack > 0.0
    assert certificate.lower_bound <= certificate.value


def with_computed_tensor():
    head = nn.Linear(4, 4)
    head.twice = head.weight * 2
    return head


def with_lock():
    head = nn.Linear(4, 4)
    head.lock = threading.Lock()
    return head


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (with_computed_tensor(), "cannot be copied"),
        (with_lock(), "cannot be copied"),
        (Function(lambda x: F.linear(x, torch.eye(4))), "does not run in float64"),
        (nn.Sequential(Function(lambda x: x.float()), nn.Linear(4, 4)), "does not run in float64"),
    ],
    ids=["computed tensor", "lock", "float32 constant", "cast"],
)
def test_heads_that_cannot_be_searched_are_refused_in_one_line(head, words):
    with pytest.raises(ValueError, match=words) as refusal:
        certify(head, p=1, q=1, input_shape=4, search=True)
    assert "\n" not in str(refusal.value)
    assert certify(head, p=1, q=1, input_shape=4).value > 0.0
