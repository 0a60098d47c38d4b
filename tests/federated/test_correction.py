"""Forward-corrected loss: what is learned from noisy labels is what clean ones would teach."""

import math

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.federated.correction import corrected_cross_entropy, record_losses
from asfl_privacy.mechanisms.label_randomiser import transition_matrix

ASYMMETRIC = torch.tensor([[0.7, 0.2, 0.1], [0.05, 0.9, 0.05], [0.3, 0.3, 0.4]], dtype=torch.float64)
"""A transpose of this one is no transition at all: its columns do not sum to 1."""


def batch(n=6, k=3, *, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, k, generator=generator, dtype=dtype), torch.arange(n) % k


def minimiser(noisy_posterior, transition):
    """softmax of the logits at which the expected corrected loss is least, one row a feature value."""
    m, k = noisy_posterior.shape
    logits = torch.zeros(m, k, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=500, tolerance_grad=1e-13, tolerance_change=0, history_size=50)

    def closure():
        optimizer.zero_grad()
        each = torch.stack([record_losses(logits, torch.full((m,), y), transition=transition) for y in range(k)], dim=1)
        loss = (noisy_posterior * each).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return logits.detach().softmax(1)


@pytest.mark.parametrize("T", [ASYMMETRIC, transition_matrix(3, epsilon=1.0)], ids=["asymmetric", "response"])
def test_the_minimiser_of_the_corrected_loss_is_the_clean_posterior(T):
    """Patrini et al. 2017, Theorem 2, on a table of counts. Catches T transposed, T⁻¹ for T, and no correction."""
    counts = torch.tensor([[8.0, 1.0, 1.0], [2.0, 5.0, 3.0], [1.0, 1.0, 2.0], [4.0, 4.0, 12.0]], dtype=torch.float64)
    clean = counts / counts.sum(1, keepdim=True)
    noisy = clean @ T  # P(y | feature) = Σ_x P(x | feature)·T[x, y]
    assert torch.allclose(minimiser(noisy, T), clean, atol=1e-5)
    assert not torch.allclose(minimiser(noisy, torch.eye(3, dtype=torch.float64)), clean, atol=0.02)


@pytest.mark.parametrize("noisy", [None, torch.tensor([True, False] * 3)])
def test_the_identity_is_cross_entropy_bit_for_bit(noisy):
    logits, labels = batch(dtype=torch.float32)
    loss = F.cross_entropy(logits, labels)
    assert torch.equal(corrected_cross_entropy(logits, labels, transition=torch.eye(3), noisy=noisy), loss)
    assert torch.equal(corrected_cross_entropy(logits, labels), loss)
    nothing = torch.zeros(6, dtype=torch.bool)
    assert torch.equal(corrected_cross_entropy(logits, labels, transition=ASYMMETRIC, noisy=nothing), loss)


def test_near_the_identity_the_corrected_branch_tends_to_cross_entropy():
    logits, labels = batch()
    T = torch.eye(3, dtype=torch.float64) * (1 - 3e-12) + 1e-12
    assert torch.allclose(
        corrected_cross_entropy(logits, labels, transition=T), F.cross_entropy(logits, labels), atol=1e-10
    )


def test_each_row_is_the_formula_written_out():
    logits, labels = batch()
    losses = record_losses(logits, labels, transition=ASYMMETRIC)
    for row in range(6):
        probability = sum(float(logits[row].softmax(0)[x]) * float(ASYMMETRIC[x, labels[row]]) for x in range(3))
        assert losses[row].item() == pytest.approx(-torch.tensor(probability).double().log().item(), rel=1e-6)


def test_a_mixed_pool_corrects_its_noisy_rows_only_and_takes_one_mean():
    """Catches a mask turned round, and a mean of two means."""
    logits, labels = batch()
    noisy = torch.tensor([True, False, False, False, True, False])
    by_hand = torch.stack(
        [
            record_losses(logits[i : i + 1], labels[i : i + 1], transition=ASYMMETRIC)[0]
            if noisy[i]
            else F.cross_entropy(logits[i : i + 1], labels[i : i + 1])
            for i in range(6)
        ]
    )
    assert torch.allclose(record_losses(logits, labels, transition=ASYMMETRIC, noisy=noisy), by_hand, atol=1e-14)
    mixed = corrected_cross_entropy(logits, labels, transition=ASYMMETRIC, noisy=noisy)
    assert mixed.item() == pytest.approx(by_hand.mean().item(), rel=1e-14)


@pytest.mark.parametrize("noisy", [None, torch.tensor([True, False] * 3)])
def test_gradients_agree_with_differences(noisy):
    logits, labels = batch()
    logits.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: record_losses(z, labels, transition=ASYMMETRIC, noisy=noisy), (logits,), atol=1e-8
    )


@pytest.mark.parametrize("size", [1e2, 1e4, 1e30])
def test_huge_logits_give_finite_losses_and_gradients(size):
    """Catches a log of an underflown probability."""
    logits = torch.tensor([[size, 0.0, -size], [-size, size, 0.0]], requires_grad=True)
    loss = corrected_cross_entropy(logits, torch.tensor([2, 0]), transition=transition_matrix(3, epsilon=60.0))
    loss.backward()
    assert torch.isfinite(loss)
    assert loss.item() == pytest.approx(60.0, rel=0.02)  # −log of 1/(e^60 + 2)
    assert torch.isfinite(logits.grad).all()


def test_a_label_that_only_an_underflowing_class_explains_has_a_finite_loss():
    """Catches a sum of probabilities that is 0 in float32: class 1 alone can give label 1, at e^−200."""
    T = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    logits = torch.tensor([[200.0, 0.0, -50.0]], requires_grad=True)
    loss = corrected_cross_entropy(logits, torch.tensor([1]), transition=T)
    loss.backward()
    assert loss.item() == pytest.approx(200.0 + math.log(2.0), rel=1e-6)
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize(
    ("T", "match"),
    [
        (torch.eye(2), "transition has shape"),
        (ASYMMETRIC.T, "rows whose sums are off 1"),
        (torch.full((3, 3), float("nan")), "rows whose sums are off 1"),
        (torch.tensor([[1.2, -0.2, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]), "entries below 0"),
        (torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]), "column of zeros"),
    ],
)
def test_matrices_that_are_no_transition_are_refused(T, match):
    logits, labels = batch()
    with pytest.raises(ValueError, match=match):
        corrected_cross_entropy(logits, labels, transition=T)


def test_noisy_rows_without_a_transition_and_masks_that_do_not_fit_are_refused():
    logits, labels = batch()
    with pytest.raises(ValueError, match="without a transition"):
        corrected_cross_entropy(logits, labels, noisy=torch.ones(6, dtype=torch.bool))
    for mask in (torch.ones(5, dtype=torch.bool), torch.ones(6)):
        with pytest.raises(ValueError, match="one bool a label"):
            corrected_cross_entropy(logits, labels, transition=ASYMMETRIC, noisy=mask)
