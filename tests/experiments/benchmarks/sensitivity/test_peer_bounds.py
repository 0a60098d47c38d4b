"""Peers: the formulas against the shared golden figures, and answers instead of crashes."""

import sys

import pytest
import torch
from torch import nn


def ask(scripts, name, head, shape, p="2", q="2"):
    (peer,) = [peer for peer in scripts.peers.PEERS if peer.name == name]
    return peer.ask(head.eval(), input_shape=shape, p=p, q=q)


def test_folded_layers_compute_what_the_head_computes(scripts):
    torch.manual_seed(0)
    head = scripts.heads.convbn3(strides=(1, 2, 1)).double()
    head(3.0 * torch.randn(20, 1, 8, 8, dtype=torch.float64) + 1.0)  # running statistics that are not 0 and 1
    records = torch.randn(5, 1, 8, 8, dtype=torch.float64)
    values = records
    for layer in scripts.peers.weighted_layers(head.eval()):
        values = layer(values).relu()
    torch.testing.assert_close(values, head(records))


@pytest.mark.parametrize(("stride", "excess"), [(1, 0.435), (2, 0.41)])
def test_pixeldp_exceeds_the_true_norm_by_the_golden_figure(scripts, stride, excess):
    """5×5 1→32 on 28² at initialisation: +43.5 % and, with stride 2, +41 %, from another implementation."""
    torch.manual_seed(0)
    conv = nn.Conv2d(1, 32, 5, stride=stride, padding=2)
    truth, how = scripts.truth.spectral_norm(conv, input_shape=(1, 28, 28))
    answer = ask(scripts, "PixelDP formula", conv, (1, 28, 28))
    assert how == "dense"
    assert answer.kind == scripts.rows.UPPER
    assert answer.value / truth - 1 == pytest.approx(excess, abs=0.005)


@pytest.mark.parametrize("q", [1, 2])
def test_pixeldp_columns_of_a_convolution_without_stride_are_exact(scripts, q):
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3, padding=1, bias=False)
    with torch.no_grad():
        columns = conv(torch.eye(50).reshape(50, 2, 5, 5)).flatten(1)
    answer = ask(scripts, "PixelDP formula", conv, (2, 5, 5), p="1", q=str(q))
    assert answer.value == pytest.approx(float(columns.norm(p=q, dim=1).max()), rel=1e-5)


def test_multiplied_one_to_two_bounds_are_the_unsound_one(scripts):
    """64×1 of 1/8, then 64×64 of 1/8: 8.0 in truth, 1.0 when 1→2 is multiplied."""
    head = nn.Sequential(nn.Linear(1, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
    for layer in (head[0], head[2]):
        nn.init.constant_(layer.weight, 0.125)
    answer = ask(scripts, "PixelDP formula", head, (1,), p="1", q="2")
    assert answer.value == pytest.approx(1.0)
    assert "multiplied" in answer.note


def test_a_residual_sum_is_refused_and_a_crash_is_an_answer(scripts):
    block = scripts.heads.ResidualBlock(1, 1, stride=1)
    refusal = ask(scripts, "PixelDP formula", nn.Sequential(block), (1, 4, 4))
    assert (refusal.kind, refusal.value, refusal.note) == (scripts.rows.REFUSES, None, "no rule for ResidualBlock")
    overlapping = ask(scripts, "PixelDP formula", nn.Sequential(nn.MaxPool2d(3, stride=2)), (1, 9, 9))
    assert overlapping.kind == scripts.rows.REFUSES

    def broken(head, **_):
        raise KeyError("Xi")

    peer = scripts.peers.Peer(name="broken", pairs=(), rule=broken)
    failure = peer.ask(nn.ReLU(), input_shape=(1,), p="2", q="2")
    assert (failure.kind, failure.value) == (scripts.rows.FAILED, None)
    assert "KeyError" in failure.note


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("orthogonium", "orthogonium"),
        ("eclipse-nn", "eclipse_nn"),
        ("deel-torchlip layers", "deel"),
        ("deel-torchlip evaluate", "deel"),
    ],
)
def test_a_missing_peer_says_so(scripts, monkeypatch, name, package):
    for module in [module for module in sys.modules if module.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    answer = ask(scripts, name, nn.Conv2d(1, 1, 3), (1, 5, 5))
    assert (answer.kind, answer.value) == (scripts.rows.MISSING, None)


def test_the_spectral_norm_of_torch_is_that_of_the_kernel_as_a_matrix(scripts):
    """3×3 of ones on 8×8: the kernel's matrix has norm 3, while the convolution's is 8.3."""
    conv = nn.Conv2d(1, 1, 3, padding=1)
    nn.init.constant_(conv.weight, 1.0)
    assert ask(scripts, "torch spectral_norm", conv, (1, 8, 8)).value == pytest.approx(3.0)
    assert float(conv.weight.detach().norm()) == pytest.approx(3.0)  # the head itself is left alone


def test_gram_iterations_shrink_with_the_layer(scripts):
    assert scripts.peers.gram_steps(nn.Conv2d(1, 16, 3)) == scripts.peers.GRAM_STEPS
    assert 1 <= scripts.peers.gram_steps(nn.Conv2d(512, 512, 3)) < scripts.peers.GRAM_STEPS


@pytest.mark.parametrize("side", [0, 4096])
def test_the_truth_is_the_largest_singular_value_of_the_unrolled_operator(scripts, monkeypatch, side):
    monkeypatch.setattr(scripts.truth, "DENSE_SIDE", side)
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2).double()
    with torch.no_grad():
        unrolled = (
            conv(torch.eye(98, dtype=torch.float64).reshape(98, 2, 7, 7)) - conv(torch.zeros(1, 2, 7, 7).double())
        ).flatten(1)
    value, how = scripts.truth.spectral_norm(conv, input_shape=(2, 7, 7))
    assert how == ("dense" if side else "svds")
    assert value == pytest.approx(float(torch.linalg.matrix_norm(unrolled, ord=2)), rel=1e-10)
