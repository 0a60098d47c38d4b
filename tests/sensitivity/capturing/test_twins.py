"""The same head written in several ways: what runs counts, not how it is written."""

import math

import pytest
import torch
from dense_oracle import dense_matrix, dense_norm
from torch import nn
from torch.nn import functional as F  # noqa: N812

from sensitivity import UnsupportedModuleError, certify
from sensitivity.norms import NORMS

PAIRS = [(p, q) for p in NORMS for q in NORMS]


class Function(nn.Module):
    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x):
        return self.function(self, x)


def bounds(head, shape):
    return [certify(head, p=p, q=q, input_shape=shape).value for p, q in PAIRS]


def test_modules_functional_calls_and_in_place_operators_give_one_certificate():
    """Mutation caught: reading the module tree, which shows none of the functional twins."""
    torch.manual_seed(0)
    conv, linear = nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.Linear(32, 3)
    modules = nn.Sequential(conv, nn.LeakyReLU(2.0), nn.Flatten(), linear, nn.Hardtanh())
    in_place = nn.Sequential(conv, nn.LeakyReLU(2.0, inplace=True), nn.Flatten(), linear, nn.Hardtanh(inplace=True))

    def functional(self, x):
        padded = F.pad(x, (1, 1, 1, 1), mode="circular")
        y = F.conv2d(padded, self.conv.weight, self.conv.bias)
        return F.hardtanh(F.linear(F.leaky_relu(y, 2.0).flatten(1), self.linear.weight, self.linear.bias))

    def written_out(self, x):
        y = torch.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), self.conv.weight)
        y += self.conv.bias[:, None, None]
        y = F.leaky_relu_(y, 2.0).reshape(x.shape[0], -1) @ self.linear.weight.t()
        return y.add_(self.linear.bias).clamp_(-1.0, 1.0)

    expected = bounds(modules, (1, 4, 4))
    assert all(value > 0.0 for value in expected)
    for twin in (in_place, *(Function(f, conv=conv, linear=linear) for f in (functional, written_out))):
        assert bounds(twin, (1, 4, 4)) == expected


def test_a_module_that_is_used_twice_counts_twice():
    linear = nn.Linear(3, 3, bias=False)
    linear.weight.data = torch.diag(torch.tensor([2.0, 3.0, -5.0]))
    twice = Function(lambda self, x: self.linear(self.linear(x)), linear=linear)
    assert certify(twice, p=2, q=2, input_shape=(3,)).value == pytest.approx(25.0, rel=1e-12)
    assert bounds(twice, (3,)) == bounds(nn.Sequential(linear, linear), (3,))


def test_residual_and_concatenated_branches_are_bounded_above_their_dense_norms():
    torch.manual_seed(1)
    conv = nn.Conv1d(2, 2, 3, padding=1)
    layers = {
        "residual": Function(lambda self, x: x + self.conv(x), conv=conv),
        "in place": Function(lambda self, x: self.conv(x).add_(x), conv=conv),
        "scaled": Function(lambda self, x: torch.sub(x, self.conv(x), alpha=3), conv=conv),
        "concatenated": Function(lambda self, x: torch.cat([x, self.conv(x)], 1), conv=conv),
        "concatenated in space": Function(lambda self, x: torch.cat((self.conv(x), x.flip(2)), -1), conv=conv),
    }
    for name, head in layers.items():
        truth = dense_matrix(head, (2, 4))
        for p, q in [(1, 1), (1, 2), (1, math.inf), (2, 2), (2, math.inf), (math.inf, math.inf)]:
            bound = certify(head, p=p, q=q, input_shape=(2, 4)).value
            assert bound >= dense_norm(truth, p, q) * (1 - 1e-6), (name, p, q)
            assert bound <= 4.0 * dense_norm(truth, p, q), (name, p, q)


def test_several_inputs_of_one_module_are_followed():
    """Both inputs depend on x: y = 2x + 3·(5x)."""

    class Mixed(nn.Module):
        def forward(self, first, second, *, scale):
            return 2.0 * first + scale * second

    head = Function(lambda self, x: self.mixed(x, 5.0 * x, scale=3.0), mixed=Mixed())
    assert certify(head, p=1, q=1, input_shape=(3,)).value == pytest.approx(17.0, rel=1e-12)


def test_branches_that_end_in_nothing_do_not_count_and_branches_that_meet_again_do():
    head = Function(lambda self, x: [100.0 * x, x + x.flip(1), torch.exp(x)][1])
    assert certify(head, p=2, q=2, input_shape=(3,)).value == 2.0


def test_pieces_of_a_split_go_their_own_ways():
    """One half is scaled by 2, the other by 7: the diagonal's largest entry. Mutation caught: mixing the pieces up."""

    def forward(self, x):
        first, second = x.chunk(2, 1)
        return torch.cat([2.0 * first, 7.0 * second], 1)

    head = Function(forward)
    assert certify(head, p=math.inf, q=math.inf, input_shape=(4, 2)).value == 7.0


def test_the_all_ones_convolution_under_spectral_norm_has_norm_2_764():
    """Golden value of the requirements: power iteration normalises the reshaped kernel, not the convolution."""
    conv = nn.Conv2d(1, 1, 3, padding=1, bias=False)
    nn.init.ones_(conv.weight)
    head = nn.utils.parametrizations.spectral_norm(conv, n_power_iterations=20).eval()
    assert certify(head, p=2, q=2, input_shape=(1, 8, 8)).value == pytest.approx(2.764, abs=5e-4)


@pytest.mark.parametrize("normalised", ["spectral_norm", "weight_norm", "orthogonal"])
def test_parametrised_weights_are_read_as_they_act(normalised):
    torch.manual_seed(0)
    linear = nn.Linear(4, 3, bias=False)
    head = getattr(nn.utils.parametrizations, normalised)(linear).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(3.0)
    truth = dense_norm(head.weight.detach().double().numpy(), 2, 2)
    assert certify(head, p=2, q=2, input_shape=(4,)).value == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize("hooked", [nn.utils.spectral_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_norms_that_work_by_hooks_are_refused_with_the_parametrisation_to_use(hooked):
    with pytest.raises(UnsupportedModuleError, match=r"has a forward hook: .* torch.nn.utils.parametrizations"):
        certify(hooked(nn.Linear(3, 3)).eval(), p=2, q=2, input_shape=(3,))


@pytest.mark.parametrize(
    ("head", "shape"),
    [
        (nn.Flatten(0), (3,)),
        (Function(lambda self, x: x[0]), (3, 2)),
        (Function(lambda self, x: x.sum(0)), (3,)),
        (nn.Sequential(nn.Linear(3, 2), nn.Flatten(0, 1)), (3,)),
        (nn.Unflatten(0, (13, 1)), (3,)),
        (Function(lambda self, x: x.mean()), (3,)),
    ],
    ids=["flatten", "first", "sum", "layers", "unflatten", "mean"],
)
def test_a_head_whose_output_lacks_the_batch_dimension_is_refused_in_one_line(head, shape):
    with pytest.raises(UnsupportedModuleError, match=r"batch|record") as refusal:
        certify(head, p=1, q=1, input_shape=shape)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "head",
    [
        nn.Conv2d(1, 1, 1),
        nn.Conv2d(1, 1, 3, padding=1),
        nn.Conv2d(1, 1, 3, padding=1, padding_mode="replicate"),
        nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"),
        nn.Linear(1, 1),
        nn.Sequential(nn.Flatten(), nn.Linear(1, 1), nn.Unflatten(1, (1, 1))),
        nn.PixelShuffle(1),
        nn.ChannelShuffle(1),
        nn.Upsample(size=(1, 1), mode="bilinear"),
        nn.ReflectionPad2d(0),
    ],
    ids=lambda head: type(head).__name__,
)
def test_single_pixels_and_single_channels_are_exact_or_refused(head):
    """Every norm of a 1×1 matrix is its entry."""
    torch.manual_seed(0)
    truth = abs(float(dense_matrix(head, (1, 1, 1)).item()))
    try:
        found = bounds(head, (1, 1, 1))
    except UnsupportedModuleError:
        assert isinstance(head, nn.Upsample)
        return
    assert min(found) >= truth * (1 - 1e-6)
    if not (isinstance(head, nn.Conv2d) and head.padding_mode != "zeros"):  # two operators, 9 = √81 copies of a pixel
        assert max(found) <= truth * (1 + 1e-6)


@pytest.mark.parametrize("write", ["squeeze_", "unsqueeze_", "transpose_", "swapaxes_", "swapdims_", "t_"])
def test_a_shape_changed_in_place_is_refused(write: str) -> None:
    """The head would see the old sizes while it is recorded: 1·x for what runs as 4·x."""

    class Changed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = (1.0 * x) if write == "t_" else (1.0 * x).view(-1, 1, 4)
            getattr(y, write)(*{"squeeze_": (1,), "unsqueeze_": (1,), "t_": ()}.get(write, (1, 2)))
            return y * float(y.shape[1]) if y.dim() == 3 else 100.0 * y

    with pytest.raises(UnsupportedModuleError, match="in place"):
        certify(Changed(), p=1, q=1, input_shape=4)
