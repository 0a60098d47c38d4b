"""register_cap: layers never exceed their caps, and their product never exceeds the head's, whatever training does."""

import math

import numpy as np
import pytest
import torch
from control_heads import Residual, make_head, train
from dense_oracle import dense_matrix, dense_norm
from torch import nn
from torch.nn.utils import parametrize

from sensitivity import UnsupportedModuleError, certify
from sensitivity.control import weight_caps
from sensitivity.control.registration import LayerCap, register_cap
from sensitivity.control.weight_caps import WeightCap

SHAPE = (1, 8, 8)
PAIRS = [(1, 1), (1, 2), (1, math.inf), (2, 2), (2, math.inf), (math.inf, math.inf)]
LAYERS = {
    "linear": (lambda: nn.Linear(12, 7), (12,)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), (2, 9)),
    "conv2d": (lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2), (2, 6, 7)),
    "dilated": (lambda: nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(2, 0), dilation=(2, 1)), (2, 6, 5)),
    "same": (lambda: nn.Conv2d(1, 3, 3, padding="same"), (1, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1, output_padding=1, groups=2), (4, 4, 3)),
}


def capped(name, p, q, cap, *, scale, dtype=torch.float32):
    make, shape = LAYERS[name]
    torch.manual_seed(3)
    layer = make().to(dtype)
    with torch.no_grad():
        layer.weight.mul_(scale)
    parametrisation = WeightCap(layer, p=p, q=q, cap=cap, record_shape=shape)
    parametrize.register_parametrization(layer, "weight", parametrisation)
    return layer, shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_no_layer_exceeds_its_cap_in_dense_truth(name, p, q, dtype):
    """Catches columns counted without stride, borders or groups, and a spectral norm that is a lower bound."""
    layer, shape = capped(name, p, q, 0.3, scale=10.0, dtype=dtype)
    truth = dense_norm(dense_matrix(layer, shape), p, q)
    assert truth <= 0.3
    assert truth >= 0.3 * (0.5 if (p, q) == (2, 2) and name != "linear" else 1 - 1e-5)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("p", "q"), [pair for pair in PAIRS if pair != (2, 2)])
def test_every_channel_inside_the_cap_stays_bit_for_bit(name, p, q):
    layer, _ = capped(name, p, q, 1e3, scale=1.0)
    assert torch.equal(layer.weight, layer.parametrizations.weight.original)


def test_only_columns_above_the_cap_are_scaled():
    layer, _ = capped("linear", 1, 2, 0.5, scale=1.0)
    stored = layer.parametrizations.weight.original
    norms = torch.linalg.vector_norm(stored, dim=0)
    inside = norms < 0.5 * (1 - 1e-6)
    assert 0 < int(inside.sum()) < 12
    assert torch.equal(layer.weight[:, inside], stored[:, inside])
    assert bool((torch.linalg.vector_norm(layer.weight[:, ~inside].double(), dim=0) <= 0.5).all())


def test_a_mutant_with_power_iteration_exceeds_the_cap(monkeypatch):
    """One step of power iteration is a lower bound of σ: the layer that trusts it is above its cap."""

    def one_step(self, W):
        x = W.detach().double().T @ torch.ones(W.shape[0], dtype=torch.float64)
        return float((W.detach().double() @ x).norm() / x.norm())

    layer, shape = capped("linear", 2, 2, 0.3, scale=10.0)
    assert dense_norm(dense_matrix(layer, shape), 2, 2) <= 0.3
    monkeypatch.setattr(weight_caps.WeightCap, "certified_spectral_norm", one_step)
    assert dense_norm(dense_matrix(layer, shape), 2, 2) > 0.3


@pytest.mark.parametrize("name", ["linear", "conv2d", "transposed"])
@pytest.mark.parametrize(("p", "q"), [pair for pair in PAIRS if pair != (2, 2)])
def test_gradients_of_column_and_row_caps_are_those_of_finite_differences(name, p, q):
    make, shape = LAYERS[name]
    torch.manual_seed(3)
    layer = make().double()
    cap = WeightCap(layer, p=p, q=q, cap=0.2, record_shape=shape)
    assert torch.autograd.gradcheck(cap, (layer.weight.detach().requires_grad_(True),), eps=1e-7, atol=1e-5)


def test_the_gradient_of_a_spectral_cap_is_that_of_the_quotient():
    """Against autograd through W·c/‖W‖₂ with a full singular value decomposition."""
    torch.manual_seed(0)
    layer = nn.Linear(9, 6).double()
    with torch.no_grad():  # a clear gap, so that a dozen power iterations converge
        left, values, right = torch.linalg.svd(layer.weight, full_matrices=False)
        values[0] = 4.0 * values[1]
        layer.weight.copy_(left @ torch.diag(values) @ right)
    cap = WeightCap(layer, p=2, q=2, cap=0.1, record_shape=(9,))
    seen = torch.randn(6, 9, dtype=torch.float64)
    stored = layer.weight.detach().requires_grad_(True)
    (ours,) = torch.autograd.grad((cap(stored) * seen).sum(), stored)
    (true,) = torch.autograd.grad(
        (stored * (cap.spectral_limit(stored) / torch.linalg.matrix_norm(stored, 2)) * seen).sum(), stored
    )
    assert torch.allclose(ours, true, rtol=1e-6, atol=1e-9)
    assert abs(float((ours * stored.detach()).sum())) < 1e-9  # the quotient does not change along W


@pytest.mark.parametrize(("kind", "p_q"), list(zip(["conv", "linear"] * 3, PAIRS, strict=True)))
def test_caps_multiply_to_the_heads_cap(kind, p_q):
    p, q = p_q
    head = make_head(kind)
    caps = register_cap(head, p=p, q=q, input_shape=SHAPE, cap=0.8)
    assert caps[0].p == p
    assert caps[-1].q == q
    assert math.prod(cap.cap for cap in caps) == pytest.approx(0.8, rel=1e-6)
    rng = np.random.default_rng(0)
    for scale in (1.0, 1e4):
        with torch.no_grad():
            for cap in caps:
                stored = head.get_submodule(cap.name).parametrizations.weight.original
                stored.copy_(torch.tensor(scale * rng.standard_t(2, size=tuple(stored.shape))))
        assert certify(head, p=p, q=q, input_shape=SHAPE, method="fast").value <= 0.8
    assert certify(head, p=p, q=q, input_shape=SHAPE, method="auto", budget_s=0.1).value <= 0.8


@pytest.mark.parametrize("p", [1, 2, math.inf])
def test_the_worst_weights_of_a_residual_head_attain_the_cap_and_no_more(p):
    """x + conv(relu(conv(x))) with identity kernels has norm exactly 1 + c² on non-negative inputs."""
    head = Residual(2)
    caps = register_cap(head, p=p, q=p, input_shape=(2, 8, 8), cap=1.75)
    assert [cap.cap for cap in caps] == pytest.approx([math.sqrt(0.75)] * 2, rel=1e-6)
    with torch.no_grad():
        for layer in (head.first, head.second):
            stored = layer.parametrizations.weight.original
            stored.zero_()
            stored[range(2), range(2), 1, 1] = 50.0
            layer.bias.zero_()
    value = certify(head, p=p, q=p, input_shape=(2, 8, 8), method="product").value
    tolerance = 3e-3 if p == 2 else 1e-5
    assert 1.75 * (1 - tolerance) <= value <= 1.75
    x = torch.zeros(2, 2, 8, 8, dtype=torch.float64)
    x[1, 0, 4, 4] = 1.0
    with torch.no_grad():
        zero, moved = head.double()(x)
    # A single tap's symbol bound is 0.3 % above its norm, which the cap of p = 2 pays for.
    assert 1.75 * (1 - tolerance) <= (moved - zero).abs().sum().item() <= 1.75


@pytest.mark.parametrize(
    ("kind", "p", "q", "cap"), [("conv", 2, 2, 2.0), ("linear", 1, 2, 1.5), ("residual", 1, 1, 6.0)]
)
def test_no_moment_of_training_is_above_the_cap_and_the_loss_falls(kind, p, q, cap):
    head = make_head(kind)
    register_cap(head, p=p, q=q, input_shape=SHAPE, cap=cap)

    count = 0

    def inside(head):
        nonlocal count
        count += 1
        if count % 3 == 0 or count < 6:
            assert certify(head, p=p, q=q, input_shape=SHAPE, method="fast").value <= cap

    losses = train(head, num_steps=30, after_step=inside, lr=0.3)
    assert sum(losses[-6:]) < 0.8 * sum(losses[:6])
    with torch.no_grad():
        before = head(torch.ones(1, *SHAPE))
        for module in head.modules():
            if parametrize.is_parametrized(module, "weight"):
                parametrize.remove_parametrizations(module, "weight")
        assert torch.equal(head(torch.ones(1, *SHAPE)), before)
    inside(head)


def test_fixed_layers_are_counted_in_the_cap():
    """AvgPool2d(2) halves ℓ2 distances, GELU stretches by 1.1289: the layer's cap makes up for both."""
    head = nn.Sequential(nn.Conv2d(1, 2, 3), nn.GELU(), nn.AvgPool2d(2))
    (cap,) = register_cap(head, p=2, q=2, input_shape=SHAPE, cap=1.0)
    assert cap == LayerCap(name="0", p=2, q=2, cap=pytest.approx(2.0 / 1.128904145185155, rel=1e-6))


def test_registration_is_refused_in_one_line_and_leaves_the_head_alone():
    shared = nn.Linear(3, 3)
    tied = nn.Sequential(shared, nn.Linear(3, 3))
    tied[1].weight = shared.weight

    class Uncalled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return nn.functional.linear(x, self.layer.weight)

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return x + self.layer(x)

    once = nn.Sequential(nn.Linear(3, 3))
    register_cap(once, p=2, q=2, input_shape=3, cap=1.0)
    cases = [
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval()), 2, 2, 1.0, "'1.weight' is trainable"),
        (nn.Sequential(nn.Linear(3, 3), nn.PReLU()), 2, 2, 1.0, "'1.weight' is trainable"),
        (tied, 2, 2, 1.0, "share a weight"),
        (Uncalled(), 2, 2, 1.0, "never called"),
        (Branches(), 1, 2, 9.0, "norm changes from 1 to 2"),
        (Branches(), 2, 2, 1.0, "cannot be met"),
        (nn.Linear(3, 3), 2, 1, 1.0, "use cap_sensitivity"),
        (nn.Linear(3, 3), 2, 2, 0.0, "is no cap"),
        (nn.ReLU(), 2, 2, 1.0, "nothing can be scaled"),
        (nn.Sequential(nn.Linear(3, 3), nn.Threshold(0.1, 20)), 2, 2, 1.0, "hreshold"),
        (nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), 2, 2, 1.0, "Dropout"),
        (once, 2, 2, 1.0, "parametrised by WeightCap"),
    ]
    for head, p, q, cap, match in cases:
        before = {name: value.clone() for name, value in head.state_dict().items()}
        with pytest.raises(ValueError, match=match) as refused:
            register_cap(head, p=p, q=q, input_shape=3, cap=cap)
        assert "\n" not in str(refused.value)
        assert {name: value.tolist() for name, value in head.state_dict().items()} == {
            name: value.tolist() for name, value in before.items()
        }
        assert not any(module._forward_pre_hooks for module in head.modules())
    assert issubclass(UnsupportedModuleError, ValueError)


class Elsewhere(nn.Module):
    """Uses its layer's weight or bias outside the layer."""

    def __init__(self, use):
        super().__init__()
        self.layer, self.use = nn.Linear(4, 4), use

    def forward(self, x):
        return self.use(self.layer, x)


@pytest.mark.parametrize(
    "use",
    [
        lambda layer, x: layer(x) * layer.bias,
        lambda layer, x: layer(x) + x * layer.weight.sum(),
        lambda layer, x: nn.functional.linear(torch.relu(layer(x)), layer.weight.t()),
    ],
    ids=["bias as a gain", "sum of weights", "tied to a function"],
)
def test_a_weight_that_is_used_elsewhere_is_refused(use):
    """A cap on the layer does not hold it there: with bias 50 the first moves 38.9 under a cap of 1."""
    with pytest.raises(UnsupportedModuleError, match="reads a weight or bias"):
        register_cap(Elsewhere(use), p=2, q=2, input_shape=4, cap=1.0)


def test_a_bias_shared_with_a_gain_and_trainable_plain_tensors_are_refused():
    shared = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    shared[1].weight = shared[0].bias
    shared[1].bias.requires_grad_(False)
    with pytest.raises(UnsupportedModuleError, match="reads a weight or bias"):
        register_cap(shared, p=2, q=2, input_shape=4, cap=1e3)
    loose = Elsewhere(lambda layer, x: layer(x) * loose.gain)
    loose.gain = torch.ones(4, requires_grad=True)
    with pytest.raises(UnsupportedModuleError, match="'gain' is trainable"):
        register_cap(loose, p=2, q=2, input_shape=4, cap=1.0)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_that_repeats_pixels_is_refused(mode):
    """Columns are counted for zeros: a reflecting layer under a cap of 1 reached 1.41 in 1→2."""
    head = nn.Sequential(nn.Conv1d(1, 1, 3, padding=1, padding_mode=mode))
    with pytest.raises(UnsupportedModuleError, match=f"pads with '{mode}'"):
        register_cap(head, p=1, q=2, input_shape=(1, 4), cap=1.0)


class Halved(nn.Module):
    """x − x/2: its product bound is 1.5, its norm ½."""

    def forward(self, x):
        return x - 0.5 * x


def test_the_certificate_of_large_layers_stays_below_the_cap_of_the_whole():
    """Catches caps reckoned from tighter bounds of the fixed parts than the certificate of the whole can reach."""
    torch.manual_seed(0)
    head = nn.Sequential(Halved(), nn.Linear(1500, 700), nn.ReLU(), Halved(), nn.Linear(700, 300))
    register_cap(head, p=2, q=2, input_shape=1500, cap=1.0)
    with torch.no_grad():
        for layer in (head[1], head[4]):
            layer.parametrizations.weight.original.mul_(50.0)
    assert certify(head, p=2, q=2, input_shape=1500, method="fast").value <= 1.0
