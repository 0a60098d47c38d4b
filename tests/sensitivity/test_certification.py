import math

import numpy as np
import pytest
import torch
from dense_oracle import dense_matrix, dense_norm
from torch import nn

import sensitivity
from sensitivity import UnsupportedModuleError, certify, operator_norm

PAIRS = [(1, 1), (1, 2), (2, 2)]


class Normalize(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.2860]).reshape(1, 1, 1))
        self.register_buffer("std", torch.tensor([0.3530]).reshape(1, 1, 1))

    def forward(self, x):
        return (x - self.mean) / self.std


def lenet_head(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        Normalize(),
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
    ).eval()


def test_the_public_face_is_complete():
    names = {
        "certify",
        "Certificate",
        "lower_bound",
        "operator_norm",
        "UnsupportedModuleError",
        "StaleCertificateError",
    }
    assert names <= set(sensitivity.__all__)
    assert issubclass(sensitivity.UnsupportedModuleError, ValueError)
    assert issubclass(sensitivity.StaleCertificateError, ValueError)


def test_spectral_norm_in_eval_whose_weight_was_overwritten_uses_the_effective_weight():
    """Golden idea (sensitivity.md §6): stored u and v are stale. Mutation caught: trusting them says 1."""
    torch.manual_seed(0)
    head = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)).eval()
    head.parametrizations.weight.original.data = torch.diag(torch.tensor([100.0] + [1.0] * 7))
    effective = head.weight.detach().double().numpy()
    assert certify(head, p=2, q=2, input_shape=(8,)).value == pytest.approx(dense_norm(effective, 2, 2), rel=1e-12)
    assert certify(head, p=2, q=2, input_shape=(8,)).value > 1.01


def test_weight_norm_is_certified_through_its_effective_weight():
    head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    head.parametrizations.weight.original0.data *= 5.0
    effective = head.weight.detach().double().numpy()
    for p, q in PAIRS:
        bound = certify(head, p=p, q=q, input_shape=(4,)).value
        assert dense_norm(effective, p, q) * (1 - 1e-15) <= bound <= dense_norm(effective, p, q) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("head", "shape", "golden"),
    [
        (nn.Identity(), (3, 4), 1.0),
        (nn.Sequential(), (5,), 1.0),
        (nn.SiLU(), (2, 2), 1.0998),
        (nn.LeakyReLU(2), (2,), 2.0),
        (nn.Flatten(), (2, 3, 4), 1.0),
    ],
    ids=str,
)
def test_heads_of_one_layer_and_heads_without_parameters_work(head, shape, golden):
    """Golden (sensitivity.md §6)."""
    for p, q in PAIRS:
        assert certify(head, p=p, q=q, input_shape=shape).value == pytest.approx(golden, abs=5e-5)


def test_heads_without_bias_work_and_biases_do_not_count():
    with_bias, without = nn.Linear(3, 2), nn.Linear(3, 2, bias=False)
    without.weight.data = with_bias.weight.data.clone()
    with_bias.bias.data.fill_(1e6)
    for p, q in PAIRS:
        assert (
            certify(with_bias, p=p, q=q, input_shape=(3,)).value == certify(without, p=p, q=q, input_shape=(3,)).value
        )


@pytest.mark.parametrize("layer", [nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 3, padding=1), nn.MaxPool2d(1)], ids=str)
def test_single_pixels_and_single_channels_work(layer):
    W = dense_matrix(layer, (1, 1, 1))
    for p, q in PAIRS:
        assert certify(layer, p=p, q=q, input_shape=(1, 1, 1)).value == pytest.approx(dense_norm(W, p, q), rel=1e-12)


@pytest.mark.parametrize("box", [(-3.0, 0.5), (0.25, 0.25), (torch.zeros(1, 28, 28), 1.0), (-math.inf, 2)])
def test_any_valid_box_is_accepted_and_never_loosens_a_bound(box):
    head = lenet_head()
    free = certify(head, p=1, q=2, input_shape=(1, 28, 28))
    assert certify(head, p=1, q=2, input_shape=(1, 28, 28), input_box=box).value <= free.value


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"p": 3}, "p=3"),
        ({"q": "2"}, "q='2'"),
        ({"p": math.nan}, "p=nan"),
        ({"p": True}, "p=True"),
        ({"input_shape": ()}, "batch dimension excluded"),
        ({"input_shape": (4, -1)}, "batch dimension excluded"),
        ({"input_box": (1, 0)}, "low > high"),
        ({"input_box": (math.nan, 0)}, "NaN"),
        ({"method": "lipsdp"}, "auto, fast, product"),
        ({"method": "product", "p": 1, "q": 2}, "needs p = q"),
        ({"budget_s": 0}, "budget_s"),
        ({"budget_s": math.nan}, "budget_s"),
        ({"budget_s": 10**400}, "budget_s"),
        ({"method": ["auto"]}, "auto, fast, product"),
        ({"input_shape": (10**30,)}, "do not fit in memory"),
        ({"input_shape": (2**40, 2**40)}, "do not fit in memory"),
        ({"head": None}, "only a torch.nn.Module"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments, words):
    arguments = {"head": nn.Linear(4, 4), "p": 1, "q": 1, "input_shape": (4,), **arguments}
    with pytest.raises(ValueError, match=words) as refusal:
        certify(arguments.pop("head"), **arguments)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("p_q", [(1, 1), (1, 2), (2, 2), (1, "inf"), (2, "inf"), ("inf", "inf")])
def test_methods_agree_on_what_is_certified(p_q):
    p, q = p_q
    head = lenet_head()
    auto = certify(head, p=p, q=q, input_shape=(1, 28, 28))
    fast = certify(head, p=p, q=q, input_shape=(1, 28, 28), method="fast")
    assert auto.value <= fast.value * (1 + 1e-12)
    assert auto.method in ("norm-dp", "loop transform", "columns", "rows", "semidefinite")
    assert auto.slack == 0.0


def test_search_fills_the_lower_bound_and_stays_below():
    head = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    assert certify(head, p=2, q=2, input_shape=(4,)).lower_bound is None
    certificate = certify(head, p=2, q=2, input_shape=(4,), search=True)
    assert 0.0 < certificate.lower_bound <= certificate.value


def test_float64_heads_and_float32_heads_of_the_same_weights_agree():
    head = lenet_head()
    single = certify(head, p=1, q=2, input_shape=(1, 28, 28)).value
    assert certify(head.double(), p=1, q=2, input_shape=(1, 28, 28)).value == single


@pytest.mark.parametrize("scale", [1e-30, 1e30, 1e150])
def test_extreme_weights_scale_the_bound(scale):
    head = nn.Linear(3, 3).double()
    unit = certify(head, p=2, q=2, input_shape=(3,)).value
    head.weight.data *= scale
    assert certify(head, p=2, q=2, input_shape=(3,)).value == pytest.approx(unit * scale, rel=1e-12)


def test_a_bound_that_overflows_is_refused_rather_than_infinite():
    head = nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)]).double()
    for layer in head:
        layer.weight.data.fill_(1e200)
    with pytest.raises(ValueError, match="finite"):
        certify(head, p=1, q=1, input_shape=(3,))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused(value):
    head = lenet_head()
    head[4].weight.data[0, 0, 0, 0] = value
    with pytest.raises(UnsupportedModuleError, match=r"'4.weight' holds NaN or infinity"):
        certify(head, p=1, q=1, input_shape=(1, 28, 28))


def test_a_weight_that_only_the_parametrisation_makes_infinite_is_refused():
    head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    head.parametrizations.weight.original1.data.zero_()
    with pytest.raises(UnsupportedModuleError, match="NaN or infinity"):
        certify(head, p=1, q=1, input_shape=(4,))


def test_an_operator_norm_of_something_that_jumps_is_refused():
    with pytest.raises(ValueError, match="reports slack"):
        operator_norm(nn.Softplus(), p=1, q=1, input_shape=(2,))


def test_a_shared_layer_counts_each_time_it_is_used():
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.data = 3.0 * torch.eye(2)
    assert certify(nn.Sequential(layer, layer), p=1, q=1, input_shape=(2,)).value == pytest.approx(9.0, rel=1e-12)


def test_a_head_that_counts_its_calls_is_refused():
    class Counting(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x if self.calls < 1000 else 100 * x

    with pytest.raises(UnsupportedModuleError, match="changes itself in forward"):
        certify(Counting(), p=1, q=1, input_shape=(2,))


@pytest.mark.parametrize(
    "matrix",
    [
        torch.eye(3).to_sparse(),
        torch.empty(2, 2, device="meta"),
        np.ones((2, 2), dtype=np.longdouble),
        "abc",
        None,
        object(),
        [[1.0], [1.0, 2.0]],
    ],
)
def test_what_is_no_dense_real_matrix_is_refused_in_one_line(matrix):
    with pytest.raises(ValueError, match="matrix") as refusal:
        operator_norm(matrix, p=1, q=1)
    assert "\n" not in str(refusal.value)
