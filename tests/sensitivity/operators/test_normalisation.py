import copy
import math

import numpy as np
import pytest
import torch
from nine_norms import NINE, nine_norms
from torch import nn
from torch.nn import functional as F  # noqa: N812

from sensitivity import UnsupportedModuleError, certify, operator_norm
from sensitivity.capturing.capture import record
from sensitivity.operators.normalisation import output_range


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def shaken(layer):
    """The layer with random gains and shifts."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


LAYERS = [
    (nn.LayerNorm(4, eps=0.3), (2, 4)),
    (shaken(nn.LayerNorm((2, 3), eps=0.3)), (2, 3)),
    (shaken(nn.LayerNorm(3, eps=0.3)), (2, 3)),
    (nn.LayerNorm(4, eps=0.3, bias=False), (4,)),
    (shaken(nn.GroupNorm(2, 4, eps=0.3)), (4, 2)),
    (shaken(nn.GroupNorm(1, 3, eps=0.3)), (3,)),
    (nn.InstanceNorm1d(2, eps=0.3), (2, 4)),
    (shaken(nn.InstanceNorm2d(2, eps=0.3, affine=True)), (2, 2, 2)),
    (shaken(nn.InstanceNorm3d(2, eps=0.3, affine=True)), (2, 1, 2, 2)),
    (shaken(nn.RMSNorm(4, eps=0.3)), (2, 4)),
    (nn.RMSNorm((2, 3), eps=0.3), (2, 3)),
]


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=str)
def test_no_jacobian_of_a_module_exceeds_its_nine_bounds(layer, shape):
    """Mutations caught: wrong group size, gains of the wrong group or channel, an argument read from the wrong place."""
    net = copy.deepcopy(layer).double()
    size = math.prod(shape)
    bounds = np.array([operator_norm(layer, p=p, q=q, input_shape=shape) for p, q in NINE]).reshape(3, 3)
    random = np.random.default_rng(0)
    reached = np.zeros((3, 3))
    for scale in (0.0, 0.2, 0.5, 1.0, 2.0):
        for _ in range(1 if scale == 0.0 else 6):
            x = torch.from_numpy(random.normal(size=(1, *shape)) * scale)
            J = torch.func.jacrev(net)(x).detach().reshape(size, size).numpy()
            reached = np.maximum(reached, nine_norms(J))
    assert (reached <= bounds * (1 + 1e-9)).all()
    assert (reached >= 0.45 * bounds).all()


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=str)
def test_outputs_stay_in_their_range_and_come_near_its_ends(layer, shape):
    """A spike in every entry drives each to its extreme. Mutation caught: shifts per channel taken per entry."""
    recording = record(layer, input_shape=shape, dtype=torch.float32)
    node, source = recording.nodes[1], recording.nodes[0]
    low, high = output_range(node, source)
    assert low.shape == high.shape == shape
    size = math.prod(shape)
    spikes = torch.eye(size, dtype=torch.float64).reshape(size, *shape) * 1e6
    values = torch.cat([spikes, -spikes, torch.randn(50, *shape, dtype=torch.float64) * 3])
    outputs = copy.deepcopy(layer).double()(values).detach().numpy()
    assert (outputs >= low).all()
    assert (outputs <= high).all()
    assert np.allclose(outputs.max(0), high, atol=1e-9)
    assert np.allclose(outputs.min(0), low, atol=1e-9)


def test_other_operators_have_no_such_range():
    for layer in (nn.ReLU(), nn.InstanceNorm1d(4, track_running_stats=True).eval()):
        recording = record(layer, input_shape=(4, 3), dtype=torch.float32)
        assert output_range(recording.nodes[-1], recording.nodes[0]) is None


def test_layer_norm_of_256_has_the_certified_column_sum():
    """Golden (sensitivity.md §2, §6): 1→1 ≥ 1108; 2→2 = 1/√ε = 316.23, for the float32 cast of ε at most."""
    assert operator_norm(nn.LayerNorm(256), p=1, q=1, input_shape=(256,)) >= 1108.0
    assert operator_norm(nn.LayerNorm(256), p=2, q=2, input_shape=(256,)) == pytest.approx(316.23, abs=0.01)
    assert operator_norm(nn.LayerNorm(256), p=2, q=2, input_shape=(256,)) >= 1 / math.sqrt(float(np.float32(1e-5)))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_instance_norm_with_running_statistics_is_a_multiplier_per_channel(dims):
    layer = shaken(getattr(nn, f"InstanceNorm{dims}d")(3, affine=True, track_running_stats=True))
    layer.running_var.uniform_(0.5, 2.0)
    layer.eval()
    shape = (3, *[2] * dims)
    d = (layer.weight.double() / (layer.running_var.double() + layer.eps).sqrt()).abs().detach().numpy()
    for p, q in NINE:
        per_entry = np.repeat(d, 2**dims)
        truth = {True: d.max(), False: 0.0}[p <= q] or np.linalg.norm(per_entry, 1 if (p, q) == (math.inf, 1) else 2)
        assert truth * (1 - 1e-6) <= operator_norm(layer, p=p, q=q, input_shape=shape) <= truth * (1 + 1e-6)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_batch_norm_in_eval_mode_is_a_multiplier_per_channel(dims):
    layer = getattr(nn, f"BatchNorm{dims}d")(2)
    layer.running_var.copy_(torch.tensor([0.25, 4.0]))
    assert operator_norm(layer.eval(), p=2, q=2, input_shape=(2, *[3] * dims)) == pytest.approx(2.0, rel=1e-4)


@pytest.mark.parametrize(
    ("head", "shape", "words"),
    [
        (nn.LayerNorm(4, eps=0.0), (4,), "its eps is 0.0"),
        (nn.LayerNorm(4, eps=1e-60), (4,), "its eps is 0.0"),
        (nn.GroupNorm(2, 4, eps=-1.0), (4, 3), "its eps is -1.0"),
        (nn.RMSNorm(4, eps=0.0), (4,), "its eps is 0.0"),
        (nn.InstanceNorm1d(4, eps=0.0), (4, 3), "its eps is 0.0"),
        (Function(lambda x: F.layer_norm(x, (13, 4))), (4,), "leave the batch out"),
        (Function(lambda x: torch.native_layer_norm(x, [13, 4], None, None, 1e-5)[0]), (4,), "leave the batch out"),
        (Function(lambda x: x - x.mean(0)), (4,), "."),
        (Function(lambda x: torch.native_group_norm(x, None, None, 1, 52, 1, 1, 1e-5)[0]), (4,), "sizes are not those"),
        (nn.InstanceNorm1d(4, track_running_stats=True), (4, 3), "."),
        (nn.BatchNorm1d(4), (4,), "train mode"),
        (nn.LocalResponseNorm(2), (4, 3, 3), "unbounded"),
    ],
    ids=str,
)
def test_what_mixes_records_or_has_no_bound_is_refused(head, shape, words):
    with pytest.raises(UnsupportedModuleError, match=words):
        certify(head, p=2, q=2, input_shape=shape)


def test_gains_that_are_not_finite_are_refused():
    head = Function(lambda x: F.layer_norm(x, (4,), torch.tensor([1.0, math.inf, 1.0, 1.0])))
    with pytest.raises(UnsupportedModuleError, match="NaN or infinity"):
        certify(head, p=2, q=2, input_shape=(4,))


def test_a_group_of_one_entry_moves_nothing():
    """Every output is its shift."""
    assert operator_norm(nn.LayerNorm(1), p=1, q=1, input_shape=(4, 1)) == 0.0
