import copy
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from sensitivity import UnsupportedModuleError, certify
from sensitivity.capturing.capture import record
from sensitivity.composing.norm_dp import compose
from sensitivity.operators.operator import Effort


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def swallowing(x):
    try:
        if x.sum() > 0:
            return 100 * x
    except Exception:
        pass
    return x


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x * x.mean().item(),
        lambda x: x if torch.isnan(x).any() else 2 * x,
        lambda x: x * float(x.max()),
        swallowing,
    ],
)
def test_branching_on_values_of_the_input_is_refused(function):
    """Mutation caught: tracing one branch (torch.fx or a real forward pass does), or letting the head swallow the
    refusal."""
    with pytest.raises(UnsupportedModuleError, match="reads a value of its input"):
        certify(Function(function), p=1, q=1, input_shape=(3,))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.from_numpy(x.numpy()),
        lambda x: torch.tensor(x.tolist()),
        lambda x: torch.tensor(np.asarray(x)),
        lambda x: x.untyped_storage()[0] * x,
    ],
)
def test_values_cannot_leave_through_numpy_lists_or_storages(function):
    with pytest.raises(UnsupportedModuleError, match="reads a value of its input"):
        certify(Function(function), p=1, q=1, input_shape=(3,))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + torch.randn(3),
        lambda x: F.dropout(x, 0.5, training=True),
        lambda x: x * torch.rand_like(x),
        lambda x: x + torch.zeros(3).normal_(),
        lambda x: torch.bernoulli(torch.sigmoid(x)),
    ],
)
def test_drawing_random_numbers_is_refused(function):
    with pytest.raises(UnsupportedModuleError, match="draws random numbers"):
        certify(Function(function), p=1, q=1, input_shape=(3,))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - x.mean(0),
        lambda x: x - x.mean(0, keepdim=True),
        lambda x: x.flatten(0),
        lambda x: x.reshape(-1),
        lambda x: x.t(),
        lambda x: x.transpose(0, 1),
        lambda x: x.permute(1, 0),
        lambda x: x.unsqueeze(0),
        lambda x: x.sum(),
        lambda x: x.sum(0, keepdim=True) + x,
        lambda x: x.flip(0),
        lambda x: x.roll(1, 0),
        lambda x: x.cumsum(0),
        lambda x: F.softmax(x, 0),
        lambda x: x[:1] + x,
        lambda x: x[torch.arange(12, -1, -1)],
        lambda x: torch.cat([x, x]),
        lambda x: torch.stack(list(x)),
        lambda x: torch.mm(torch.ones(13, 13), x),
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.conv1d(x.unsqueeze(0), torch.ones(13, 13, 1))[0],
        lambda x: F.linear(x.t(), torch.ones(13, 13)).t(),
        lambda x: x + torch.arange(13.0).reshape(13, 1),
        lambda x: x * torch.arange(13.0).reshape(13, 1),
        lambda x: F.pad(x, (0, 0, 1, -1)),
        lambda x: x.view(3, 13).t(),
        lambda x: F.normalize(x, dim=0),
    ],
)
def test_mixing_or_moving_the_records_of_a_batch_is_refused(function):
    """Mutation caught: bounding one record at a time, which sees none of these."""
    with pytest.raises(UnsupportedModuleError, match=r"head \(Function\)"):
        certify(Function(function), p=1, q=1, input_shape=(3,))


class Hundredfold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 100.0 * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@pytest.mark.parametrize(
    "function",
    [
        Hundredfold.apply,
        lambda x: torch.vmap(lambda record: 100.0 * record)(x),
        lambda x: 100.0 * torch.as_tensor(x),
        lambda x: 100.0 * x.detach(),
    ],
)
def test_detours_around_the_module_layer_are_followed(function):
    """Mutation caught: reading modules instead of what runs."""
    assert certify(Function(function), p=1, q=1, input_shape=(3,)).value == 100.0


def set_data(x):
    x.data = 100.0 * x
    return x


def in_a_thread(x):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: 100.0 * x).result()


@pytest.mark.parametrize(
    "function",
    [
        set_data,
        in_a_thread,
        lambda x: 100.0 * x.as_subclass(torch.Tensor),
        lambda x: x.set_(100.0 * x),
        lambda x: torch.vmap(lambda record: record - record.mean(), in_dims=1, out_dims=1)(x),
        lambda x: torch.as_strided(x, (13, 3), (0, 1)),
        lambda x: F.pad(x, (1, 1), value=float("nan")),
        lambda x: torch.maximum(x, 100.0 * x),
        lambda x: torch.where(x > 0, x, 100.0 * x),
    ],
)
def test_detours_that_cannot_be_followed_are_refused(function):
    with pytest.raises(UnsupportedModuleError):
        certify(Function(function), p=1, q=1, input_shape=(3,))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.mean(0, keepdim=True),
        lambda x: x.mean(0),
        lambda x: x.sum((0, 1)),
        lambda x: x.flatten(0),
        lambda x: x.unsqueeze(0),
        lambda x: x.transpose(0, 1),
        lambda x: x.permute(1, 0),
        lambda x: x.unsqueeze(1).transpose(2, 0),
        lambda x: torch.cat([x, x]),
        lambda x: F.pad(x, (0, 0, 1, -1)),
        lambda x: torch.mm(torch.ones(13, 13), x),
        lambda x: x + torch.arange(13.0).reshape(13, 1),
        lambda x: x * torch.arange(13.0).reshape(13, 1),
        lambda x: F.conv1d(x.unsqueeze(0), torch.ones(13, 13, 1)),
    ],
)
def test_each_operator_that_touches_the_batch_dimension_is_refused_by_its_own_rule(function):
    """Without the comparison of batch sizes, and with as many numbers in a record as records in the batch.

    Mutations caught: dropping the check of the first dimension, of permuted dimensions, or of constants of batch shape.
    """
    recording = record(Function(function), input_shape=(13,), dtype=torch.float32)
    with pytest.raises(UnsupportedModuleError, match=r"batch|records"):
        compose(recording, p=1, q=1, effort=Effort(dense_entries=0, symbol_flops=1.0), same_norm=False)


def test_square_records_hide_no_transposition():
    with pytest.raises(UnsupportedModuleError, match="batch"):
        certify(Function(lambda x: x.transpose(0, 1)), p=1, q=1, input_shape=(13, 2))


def test_in_place_operators_are_followed():
    """x becomes relu(5x) before the sum, so the sum is 2·relu(5x). Mutation caught: reading the old x says 5 + 1."""
    assert certify(Function(lambda x: F.relu_(x.mul_(5.0)) + x), p=1, q=1, input_shape=(3,)).value == 10.0


def test_an_in_place_write_through_another_view_is_refused():
    def through_a_view(x):
        y = 1.0 * x
        y.view(-1).mul_(100.0)
        return y

    with pytest.raises(UnsupportedModuleError, match="through another view"):
        certify(Function(through_a_view), p=1, q=1, input_shape=(3,))


def test_an_in_place_write_through_a_slice_is_refused():
    def through_a_slice(x):
        y = 1.0 * x
        y[:, 0] *= 100.0
        return y

    with pytest.raises(UnsupportedModuleError):
        certify(Function(through_a_slice), p=1, q=1, input_shape=(3,))


def test_writing_to_weights_or_buffers_in_forward_is_refused_and_does_not_happen():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    head = Counting()
    with pytest.raises(UnsupportedModuleError, match="writes to its own weights or buffers"):
        certify(head, p=1, q=1, input_shape=(3,))
    assert float(head.calls) == 0.0


def test_spectral_norm_in_train_mode_is_refused_because_it_updates_its_vectors():
    head = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)).train()
    before = copy.deepcopy(head.state_dict())
    with pytest.raises(UnsupportedModuleError, match="writes to its own weights or buffers"):
        certify(head, p=2, q=2, input_shape=(3,))
    assert all(torch.equal(before[name], value) for name, value in head.state_dict().items())


@pytest.mark.parametrize(
    "function", [lambda x: (x, x), lambda x: {"y": x}, lambda x: None, lambda x: torch.zeros(3), lambda x: x.shape[0]]
)
def test_outputs_other_than_one_computed_tensor_are_refused(function):
    with pytest.raises(UnsupportedModuleError, match="return just that tensor"):
        certify(Function(function), p=1, q=1, input_shape=(3,))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x.half().float(), "changes torch.float32"),
        (lambda x: x.double(), "changes torch.float32"),
        (lambda x: x > 0, "changes torch.float32|no bound is known"),
        (lambda x: torch.fft.fft(x).real, "."),
        (lambda x: x.round(), "no bound is known"),
        (lambda x: x**2, "no largest slope"),
        (lambda x: torch.sort(x).values, "no bound is known"),
        (lambda x: F.glu(x), "no bound is known"),
    ],
)
def test_operators_without_a_rule_are_refused(function, words):
    with pytest.raises(UnsupportedModuleError, match=words):
        certify(Function(function), p=1, q=1, input_shape=(4,))


def test_the_place_of_a_refused_operator_is_named():
    head = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.GLU()))
    with pytest.raises(UnsupportedModuleError, match=r"head layer '1.1' \(GLU\) uses glu"):
        certify(head, p=1, q=1, input_shape=(4,))


@pytest.mark.parametrize(
    ("head", "shape"),
    [
        (nn.Conv2d(3, 1, 3), (1, 8, 8)),
        (nn.Conv2d(1, 1, 3), (8, 8)),
        (nn.Conv2d(1, 1, 3), (1, 1, 8, 8)),
        (nn.Linear(4, 2), (5,)),
        (nn.Conv2d(1, 1, 9), (1, 8, 8)),
        (nn.BatchNorm2d(3).eval(), (2, 4, 4)),
    ],
    ids=str,
)
def test_a_head_that_does_not_fit_the_input_shape_is_refused_in_one_line(head, shape):
    with pytest.raises(ValueError, match="input_shape excludes the batch dimension") as refusal:
        certify(head, p=1, q=1, input_shape=shape)
    assert "\n" not in str(refusal.value)


def test_subclasses_are_seen_through_by_what_they_run():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2.0 * super().forward(x)

    layer = Doubled(2, 2, bias=False)
    nn.init.eye_(layer.weight)
    assert certify(layer, p=1, q=1, input_shape=(2,)).value == pytest.approx(2.0, rel=1e-14)


def test_dead_branches_do_not_count():
    def forward(x):
        torch.exp(x)
        return x

    assert certify(Function(forward), p=1, q=1, input_shape=(2,)).value == 1.0


def test_recording_leaves_the_head_and_every_random_state_alone():
    head = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Dropout()).eval()
    head[0].weight.grad = torch.ones_like(head[0].weight)
    state, mode = copy.deepcopy(head.state_dict()), [module.training for module in head.modules()]
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    certify(head, p=2, q=2, input_shape=(1, 6, 6), search=True)
    assert all(torch.equal(state[name], value) for name, value in head.state_dict().items())
    assert mode == [module.training for module in head.modules()]
    assert torch.equal(head[0].weight.grad, torch.ones_like(head[0].weight))
    assert head[2].inplace
    assert torch.equal(torch_state, torch.get_rng_state())
    assert np.array_equal(numpy_state, np.random.get_state()[1])  # noqa: NPY002
    assert python_state == random.getstate()
    assert all(parameter.requires_grad for parameter in head.parameters())


def test_a_recording_lists_operators_with_their_modules():
    recording = record(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), input_shape=(2, 2), dtype=torch.float32)
    assert [(node.op, node.path, node.module) for node in recording.nodes] == [
        ("input", "", "Sequential"),
        ("view", "0", "Flatten"),
        ("addmm", "1", "Linear"),
    ]
    assert recording.reachable() == [0, 1, 2]


def numpy_in_a_try(x):
    try:
        return x * float(x.numpy().max())
    except Exception:
        return x


def lists_in_a_try(x):
    try:
        return x * x.tolist()[0][0]
    except Exception:
        return x


def failing_operator_in_a_try(x):
    try:
        return x @ torch.ones(7, 7)
    except RuntimeError:
        return x


@pytest.mark.parametrize("function", [numpy_in_a_try, lists_in_a_try, failing_operator_in_a_try])
def test_a_head_cannot_swallow_what_a_recording_refuses(function):
    """Mutation caught: raising without remembering, so that the branch for failures is certified."""
    with pytest.raises(UnsupportedModuleError, match=r"reads a value|goes on after an operator failed"):
        certify(Function(function), p=1, q=1, input_shape=(3,))
