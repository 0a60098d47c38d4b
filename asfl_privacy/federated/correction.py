"""Forward-corrected cross-entropy: learning from labels that were randomised with known probabilities."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

_ROW_TOLERANCE = 1e-6


def corrected_cross_entropy(
    logits: Tensor, labels: Tensor, *, transition: Tensor | None = None, noisy: Tensor | None = None
) -> Tensor:
    """Mean loss of a batch in which some or all labels are noisy.

    Args:
        logits: Shape (n, k).
        labels: Integers in 0 … k − 1, shape (n,).
        transition: T[x, y] = P(noisy label y | true label x), shape (k, k), or None where every label is clean.
        noisy: Which rows hold noisy labels, bool, shape (n,); None for all of them.

    Returns:
        The mean over all rows, a scalar.

    Raises:
        ValueError: As `record_losses`.

    Guarantee:
        Without a transition, with the identity, or without a noisy row it is `F.cross_entropy`, bit for bit. Otherwise
        the minimiser over all functions of the expected loss on noisy labels is that of cross-entropy on clean ones,
        provided that T is invertible.

    Source:
        Patrini, Rozza, Menon, Nock & Qu (2017), "Making deep neural networks robust to label noise", Theorem 2.

    Example:
        >>> T = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
        >>> loss = corrected_cross_entropy(torch.zeros(1, 2), torch.tensor([0]), transition=T)
        >>> round(float(loss.exp()), 4)  # 1/(.9/2 + .2/2)
        1.8182
    """
    if _is_clean(transition, noisy, num_classes=logits.shape[1]):
        return F.cross_entropy(logits, labels)
    return record_losses(logits, labels, transition=transition, noisy=noisy).mean()


def record_losses(
    logits: Tensor, labels: Tensor, *, transition: Tensor | None = None, noisy: Tensor | None = None
) -> Tensor:
    """Each row's loss: cross-entropy where the label is clean, −log Σ_x T[x, y]·softmax(logits)[x] where it is noisy.

    Args:
        logits: Shape (n, k).
        labels: Integers in 0 … k − 1, shape (n,).
        transition: T[x, y] = P(noisy label y | true label x), shape (k, k), or None where every label is clean.
        noisy: Which rows hold noisy labels, bool, shape (n,); None for all of them.

    Returns:
        Losses, shape (n,); computed in log space, so that no probability underflows.

    Raises:
        ValueError: A transition that is not a (k, k) matrix of probabilities whose rows sum to 1 and whose columns each
            hold one above 0, noisy rows without a transition, or a mask of another shape or type.

    Guarantee:
        A row's loss depends on its own logits and label alone.

    Source:
        Patrini et al. (2017), the forward correction, §4.2.

    Example:
        >>> record_losses(torch.zeros(2, 4), torch.tensor([0, 3])).tolist() == [float(torch.tensor(4.0).log())] * 2
        True
    """
    if noisy is not None and (noisy.dtype != torch.bool or noisy.shape != labels.shape):
        raise ValueError(
            f"noisy is {noisy.dtype} of shape {tuple(noisy.shape)}: one bool a label is due, {len(labels)}; pass a mask"
        )
    clean = F.cross_entropy(logits, labels, reduction="none")
    if transition is None and noisy is not None and bool(noisy.any()):
        raise ValueError(
            "noisy labels without a transition: their loss cannot be corrected; pass transition=transition_matrix(...)"
        )
    if transition is None or _is_clean(transition, noisy, num_classes=logits.shape[1]):
        return clean
    log_transition = _log_transition(transition, num_classes=logits.shape[1]).to(logits)
    corrected = -torch.logsumexp(F.log_softmax(logits, dim=1) + log_transition.T[labels], dim=1)
    return corrected if noisy is None else torch.where(noisy, corrected, clean)


def _is_clean(transition: Tensor | None, noisy: Tensor | None, *, num_classes: int) -> bool:
    """Whether nothing is left to correct."""
    if noisy is not None and not bool(noisy.any()):
        return True
    if transition is None:
        return noisy is None
    return torch.equal(transition, torch.eye(num_classes).to(transition))


def _log_transition(transition: Tensor, *, num_classes: int) -> Tensor:
    """Log of T in float64, −inf where it is 0."""
    matrix = transition.detach().double()
    if matrix.shape != (num_classes, num_classes):
        raise ValueError(
            f"transition has shape {tuple(matrix.shape)}: with {num_classes} classes it is {num_classes}×{num_classes}; "
            "pass the matrix of these labels"
        )
    off = float((matrix.sum(1) - 1.0).abs().max())
    if not bool((matrix >= 0).all()) or not off <= _ROW_TOLERANCE:  # NaN fails both
        raise ValueError(
            f"transition has rows whose sums are off 1 by {off:.3g}, or entries below 0 or NaN: each row holds the "
            "probabilities of one true label; pass T[x, y] = P(y | x)"
        )
    if not bool((matrix.amax(0) > 0).all()):
        raise ValueError(
            "transition has a column of zeros: that noisy label cannot occur, so its loss is infinite; drop the class"
        )
    return matrix.log()
