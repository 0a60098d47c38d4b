import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from sensitivity import UnsupportedModuleError, certify
from sensitivity.capturing.batching import program_of, program_text
from sensitivity.capturing.capture import record


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def operators(head, input_shape):
    recording = record(head, input_shape=input_shape, dtype=torch.float32)
    return [recording.nodes[index] for index in recording.reachable()[1:]]


WHOLE = {
    "CircularPad2d": (nn.CircularPad2d(1), (2, 3, 3), "pad"),
    "F.pad": (lambda x: F.pad(input=x, pad=(1, 1), mode="circular"), (2, 3), "pad"),
    "InstanceNorm1d": (nn.InstanceNorm1d(3), (3, 5), "instance_norm"),
    "InstanceNorm2d": (nn.InstanceNorm2d(3, affine=True), (3, 4, 4), "instance_norm"),
    "InstanceNorm3d": (nn.InstanceNorm3d(2).eval(), (2, 2, 2, 2), "instance_norm"),
    "InstanceNorm2d with running statistics": (
        nn.InstanceNorm2d(3, track_running_stats=True).eval(),
        (3, 4, 4),
        "instance_norm",
    ),
    "GroupNorm": (nn.GroupNorm(2, 4), (4, 3, 3), "native_group_norm"),
    "GroupNorm on vectors": (nn.GroupNorm(2, 4), (4,), "native_group_norm"),
    "RMSNorm": (nn.RMSNorm(6), (2, 6), "rms_norm"),
    "LayerNorm": (nn.LayerNorm((2, 6)), (2, 6), "native_layer_norm"),
    "Linear": (nn.Linear(6, 2), (3, 6), "linear"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_torch_takes_apart_is_recorded_as_one_operator_for_every_batch_size(name):
    """Mutation caught: the batch size among the arguments, which would make each batch size another program."""
    made, shape, op = WHOLE[name]
    head = made if isinstance(made, nn.Module) else Function(made)
    recording = record(head, input_shape=shape, dtype=torch.float32)
    nodes = [recording.nodes[index] for index in recording.reachable()[1:]]
    assert [node.op for node in nodes] == [op]
    assert nodes[0].shape == head(torch.zeros(13, *shape)).shape
    program = program_text(recording)
    assert program_of(head, input_shape=shape, dtype=torch.float32) == program
    scattered = record(head, input_shape=shape, dtype=torch.float32, batch_size=31, scattered=True)
    assert program_text(scattered) == program


def test_arguments_are_recorded_by_position():
    gain, shift = torch.rand(4), torch.rand(4)
    head = Function(lambda x: F.group_norm(x, num_groups=2, bias=shift, weight=gain, eps=0.5))
    (node,) = operators(head, (4, 3, 5))
    assert torch.equal(node.args[1], gain)
    assert torch.equal(node.args[2], shift)
    assert node.args[3:] == ("batch", 4, 15, 2, 0.5)
    (node,) = operators(Function(lambda x: F.instance_norm(x, weight=gain, eps=0.5)), (4, 3))
    assert torch.equal(node.args[1], gain)
    assert node.args[2:] == (None, None, None, True, 0.1, 0.5)
    (node,) = operators(
        Function(lambda x: torch.instance_norm(x, None, None, gain, shift, False, 0.1, 0.25, False)), (4, 3)
    )
    assert torch.equal(node.args[3], gain)
    assert torch.equal(node.args[4], shift)
    assert node.args[5:] == (False, 0.1, 0.25)
    (node,) = operators(nn.RMSNorm(6), (2, 6))
    assert node.args[1] == [6]
    assert node.args[3] == torch.finfo(torch.float32).eps
    (node,) = operators(Function(lambda x: torch.rms_norm(x, (6,), eps=0.25)), (2, 6))
    assert node.args[1:] == ([6], None, 0.25)


def test_other_modes_of_padding_are_operators_of_their_own():
    for mode, op in (
        ("constant", "constant_pad_nd"),
        ("reflect", "reflection_pad1d"),
        ("replicate", "replication_pad1d"),
    ):
        assert [node.op for node in operators(Function(lambda x: F.pad(x, (1, 1), mode)), (2, 3))] == [op]  # noqa: B023


def test_functional_instance_norm_that_would_update_statistics_is_refused_before_it_does():
    mean, variance = torch.zeros(3), torch.ones(3)
    head = Function(lambda x: F.instance_norm(x, mean, variance, use_input_stats=True))
    with pytest.raises(UnsupportedModuleError, match=r"updates its running statistics .* call .eval\(\)"):
        certify(head, p=1, q=1, input_shape=(3, 4))
    assert torch.equal(mean, torch.zeros(3))


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: F.instance_norm(x), (3, 1)),
        (lambda x: F.group_norm(x, 2), (3, 4)),
        (lambda x: F.rms_norm(x, (4,)), (3,)),
        (lambda x: F.pad(x, (4, 0), "circular"), (1, 3)),
        (lambda x: F.linear(x, torch.ones(2, 4)), (2, 3)),
        (lambda x: x @ torch.ones(4, 2), (2, 3)),
    ],
)
def test_calls_that_torch_itself_refuses_are_refused(function, shape):
    with pytest.raises(UnsupportedModuleError):
        certify(Function(function), p=1, q=1, input_shape=shape)


class Tenfold(torch.Tensor):
    """Weights that change what torch's functions do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
        return 10.0 * made if func in (F.linear, torch.matmul) else made


def test_tensor_subclasses_keep_their_say():
    """Mutation caught: catching a call before the weight's own class has seen it, which certifies 1."""
    weight = torch.eye(2).as_subclass(Tenfold)
    try:
        bound = certify(Function(lambda x: F.linear(x, weight)), p=2, q=2, input_shape=(3, 2)).value
    except UnsupportedModuleError:
        return
    assert bound >= 10.0


def test_function_transforms_keep_their_say():
    """Each record meets each weight: 2 copies of x, so 1→1 is 2. Mutation caught: catching calls under vmap."""
    weights = torch.stack([torch.eye(2), 3.0 * torch.eye(2)])
    head = Function(lambda x: torch.vmap(lambda W: F.linear(x, W), out_dims=1)(weights))
    try:
        bound = certify(head, p=1, q=1, input_shape=(3, 2)).value
    except UnsupportedModuleError:
        return
    assert bound >= 4.0


def test_a_products_weights_are_read_when_it_runs():
    """Mutation caught: keeping a reference to weights that the head overwrites afterwards."""

    def forward(x):
        W = torch.eye(2) * 5.0
        y = F.linear(x, W)
        W.zero_()
        return y

    assert certify(Function(forward), p=1, q=1, input_shape=(3, 2)).value == pytest.approx(5.0, rel=1e-12)


def test_in_place_operators_after_a_whole_one_are_followed():
    def forward(x):
        y = F.pad(x, (1, 1), mode="circular")
        y.mul_(3.0)
        return y

    assert certify(Function(forward), p=1, q=1, input_shape=(1, 2)).value == 6.0


def test_weights_that_depend_on_the_input_are_refused():
    for function in (
        lambda x: F.group_norm(x, 1, weight=x[0, :, 0]),
        lambda x: F.rms_norm(x, (3,), weight=x[0, 0]),
        lambda x: F.linear(x, x[0]),
        lambda x: F.instance_norm(x, weight=x[0, :, 0]),
    ):
        with pytest.raises(UnsupportedModuleError):
            certify(Function(function), p=1, q=1, input_shape=(3, 3))
