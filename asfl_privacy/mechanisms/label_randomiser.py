"""k-ary randomised response on labels: drawn once for each record, remembered ever after.

Legend: k = num_classes, p = probability that a label is kept, r = probability of each of the k − 1 others.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from asfl_privacy.accounting.checks import check_integer, check_real
from asfl_privacy.accounting.rationals import fraction_down

_KEEP_BITS = 128
"""Bits of the integer that decides whether a label is kept: two words."""
_FIXED_BITS = 384
"""Bits after the point in the fixed-point exponential."""
_LARGEST_EPSILON = 256.0
"""Above ln(2^128) the kept probability is 1 − 2^-128 whatever ε; a larger ε is treated as this one."""
_WORD = 1 << 64
NOT_DRAWN = -1
"""Stands for the label of a record that was never drawn."""


class WordSource(Protocol):
    """Where random words come from; a known seed voids privacy."""

    def words(self, n: int, /) -> NDArray[np.uint64]:
        """Draw n independent words, each uniform on 0 … 2⁶⁴ − 1."""
        ...


@dataclass(frozen=True)
class LabelRelease:
    """Outcome of a release of labels.

    Attributes:
        remembered: The state from now on: every record's noisy label, `NOT_DRAWN` where there is none, shape (records,).
        noisy: The labels to release, in the order of the positions asked, shape (n,).
        drawn: Positions drawn for the first time, each once, ascending: what the ledger charges, shape (m,).
    """

    remembered: torch.Tensor
    noisy: torch.Tensor
    drawn: NDArray[np.int64]


def response_probabilities(num_classes: int, *, epsilon: float) -> tuple[Fraction, Fraction]:
    """The exact probabilities (p, r) with which `randomize_labels` keeps a label and gives each other one.

    Args:
        num_classes: k ≥ 2.
        epsilon: ε > 0, finite.

    Returns:
        (p, r) with p + (k − 1)·r = 1.

    Raises:
        ValueError: k < 2; ε ≤ 0, NaN or infinite.

    Guarantee:
        1 ≤ p/r ≤ e^ε in exact arithmetic, and r/r' = 1, so no output's probability differs by more than a factor e^ε
        between two labels. p = K/2¹²⁸ with K rounded down from a lower bound of 2¹²⁸·e^ε/(e^ε + k − 1), which grows in
        e^ε. Where rounding down would leave p < r (ε below about k/2¹²⁸), p = r = 1/k exactly.

    Source:
        Kairouz, Oh & Viswanath (2014), "Extremal mechanisms for local differential privacy", eq. (11).

    Example:
        >>> keep, other = response_probabilities(10, epsilon=1.0)
        >>> round(float(keep), 5), round(float(other), 5), keep + 9 * other
        (0.23197, 0.08534, Fraction(1, 1))
    """
    k = check_integer("num_classes", num_classes, minimum=2)
    threshold = _keep_threshold(k, check_label_epsilon(epsilon))
    keep = Fraction(1, k) if threshold is None else Fraction(threshold, 1 << _KEEP_BITS)
    return keep, (1 - keep) / (k - 1)


def randomize_labels(labels: torch.Tensor, *, num_classes: int, epsilon: float, source: WordSource) -> torch.Tensor:
    """Draw a noisy label for each label by k-ary randomised response.

    Args:
        labels: Integers in 0 … k − 1, shape (n,); n = 0 gives n = 0.
        num_classes: k ≥ 2.
        epsilon: ε > 0 of one draw, finite.
        source: Source of random words.

    Returns:
        Noisy labels, shape (n,), type and device of `labels`.

    Raises:
        ValueError: k < 2; ε ≤ 0, NaN or infinite; labels that are not integers of 0 … k − 1, or a type too small for them.

    Guarantee:
        With uniform words each output has exactly the probabilities of `response_probabilities`: (ε, 0)-differential
        privacy for any two labels, in integer arithmetic, nothing rounded. A label is kept where a 128-bit integer is
        below K; the k − 1 others are equally likely because words that would favour some are drawn again.

    Edge cases:
        From ε ≈ 88.7 on the kept probability stays at 1 − 2⁻¹²⁸ or less.

    Source:
        Warner (1965) for k = 2; Kairouz, Oh & Viswanath (2014) for k > 2.

    Example:
        >>> from types import SimpleNamespace
        >>> rng = np.random.default_rng(0)  # reproducible, hence no privacy: for the example only
        >>> source = SimpleNamespace(words=lambda n: rng.integers(2**64, size=n, dtype=np.uint64))
        >>> randomize_labels(torch.tensor([0, 1, 2, 2]), num_classes=3, epsilon=60.0, source=source)
        tensor([0, 1, 2, 2])
    """
    k = check_integer("num_classes", num_classes, minimum=2)
    threshold = _keep_threshold(k, check_label_epsilon(epsilon))
    values = _checked_labels(labels, num_classes=k)
    if threshold is None:
        noisy = _uniform(len(values), k, source=source)
    else:
        high, low = (np.uint64(part) for part in divmod(threshold, _WORD))
        first, second = _words(source, len(values)), _words(source, len(values))
        keep = (first < high) | ((first == high) & (second < low))
        others = _uniform(len(values), k - 1, source=source)
        others += others >= values  # skips the label itself
        noisy = np.where(keep, values, others)
    return torch.from_numpy(noisy).to(dtype=labels.dtype, device=labels.device)


def remember_none(num_records: int) -> torch.Tensor:
    """The state before the first release: no record's label has been drawn, shape (num_records,)."""
    return torch.full((check_integer("num_records", num_records, minimum=0),), NOT_DRAWN, dtype=torch.int64)


def released_labels(
    remembered: torch.Tensor,
    *,
    positions: NDArray[np.int64],
    labels: torch.Tensor,
    num_classes: int,
    epsilon: float,
    source: WordSource,
) -> LabelRelease:
    """Noisy labels of some records: drawn for those never drawn before, remembered for all others.

    Args:
        remembered: State of earlier releases, from `remember_none` at first; left as it is.
        positions: Which records, indices into the state, repeats allowed, shape (n,).
        labels: Their true labels, shape (n,).
        num_classes: k ≥ 2.
        epsilon: ε > 0 of one draw, finite.
        source: Source of random words.

    Returns:
        The next state, the labels to release, and the positions that were drawn now.

    Raises:
        ValueError: As `randomize_labels`; positions outside the state, or a state that does not fit k; nothing is drawn.

    Guarantee:
        No record is drawn twice as long as the state returned is the one passed on, so everything that is ever released
        of a record's label is post-processing of one draw and costs ε once, over all rounds and recipients.

    Edge cases:
        A remembered label stays even where another true label, k or ε is given later.

    Example:
        >>> from types import SimpleNamespace
        >>> rng = np.random.default_rng(0)  # reproducible, hence no privacy: for the example only
        >>> source = SimpleNamespace(words=lambda n: rng.integers(2**64, size=n, dtype=np.uint64))
        >>> asked = dict(labels=torch.tensor([1, 0]), num_classes=2, epsilon=0.1, source=source)
        >>> first = released_labels(remember_none(5), positions=np.array([4, 2]), **asked)
        >>> again = released_labels(first.remembered, positions=np.array([4, 2]), **asked)
        >>> bool((first.noisy == again.noisy).all()), first.drawn.tolist(), again.drawn.tolist()
        (True, [2, 4], [])
    """
    k = check_integer("num_classes", num_classes, minimum=2)
    check_label_epsilon(epsilon)
    values = torch.from_numpy(_checked_labels(labels, num_classes=k))
    where = torch.from_numpy(_checked_positions(positions, num_records=len(remembered), num_labels=len(values)))
    state = remembered.detach().to("cpu", copy=True)
    if state.dtype != torch.int64 or bool(((state < NOT_DRAWN) | (state >= k)).any()):
        raise ValueError(
            f"remembered labels of type {state.dtype} do not fit {k} classes: each is an int64 of −1 to {k - 1}; pass "
            "the state that the last release returned"
        )
    drawn, first = np.unique(where.numpy(), return_index=True)  # a position asked twice is drawn once
    is_new = state[torch.from_numpy(drawn)].numpy() == NOT_DRAWN
    drawn, first = drawn[is_new], first[is_new]
    state[torch.from_numpy(drawn)] = randomize_labels(
        values[torch.from_numpy(first)], num_classes=k, epsilon=epsilon, source=source
    )
    noisy = state[where].to(dtype=labels.dtype, device=labels.device)
    return LabelRelease(remembered=state.to(remembered.device), noisy=noisy, drawn=drawn)


def transition_matrix(num_classes: int, *, epsilon: float) -> torch.Tensor:
    """T[x, y] = P(y | x), by which a loss on noisy labels is corrected.

    Args:
        num_classes: k ≥ 2.
        epsilon: ε > 0 of one draw, finite.

    Returns:
        float64, shape (k, k): the probabilities of `response_probabilities`, each the nearest float.

    Raises:
        ValueError: As `response_probabilities`.

    Example:
        >>> transition_matrix(2, epsilon=1.0986122886681098)
        tensor([[0.7500, 0.2500],
                [0.2500, 0.7500]], dtype=torch.float64)
    """
    keep, other = response_probabilities(num_classes, epsilon=epsilon)
    matrix = torch.full((num_classes, num_classes), float(other), dtype=torch.float64)
    return matrix.fill_diagonal_(float(keep))


def response_multiplier(epsilon: float) -> float:
    """1/ε rounded down: the noise multiplier of one draw as the ledger takes it, never less than ε when inverted.

    Example:
        >>> response_multiplier(4.0)
        0.25
    """
    return fraction_down(1 / Fraction(check_label_epsilon(epsilon)))


def check_label_epsilon(epsilon: object) -> float:
    """Return a finite ε > 0, or raise ValueError."""
    return check_real("label epsilon", epsilon, minimum=0.0, exclusive=True, fix="pass e.g. epsilon=1.0")


def _keep_threshold(k: int, epsilon: float) -> int | None:
    """K of 2¹²⁸, or None where rounding down would favour the other labels, and the draw must be uniform."""
    odds = _exp_down(min(epsilon, _LARGEST_EPSILON))
    threshold = int(odds / (odds + k - 1) * (1 << _KEEP_BITS))  # truncates
    return threshold if threshold * k >= 1 << _KEEP_BITS else None


def _exp_down(x: float) -> Fraction:
    """A rational at or below e^x, x ≥ 0; relative error below 2⁻³⁰⁰ for x ≤ 256.

    The series has positive terms, so that a partial sum in fixed point, every product truncated, is a lower bound;
    squaring keeps it one.
    """
    halvings = 0
    while x > 0.5 * 2**halvings:
        halvings += 1
    one = 1 << _FIXED_BITS
    argument = int(Fraction(x) / 2**halvings * one)
    total, term = one, one
    for i in range(1, 80):
        term = (term * argument >> _FIXED_BITS) // i
        total += term
    for _ in range(halvings):
        total = total * total >> _FIXED_BITS
    return Fraction(total, one)


def _uniform(n: int, bound: int, *, source: WordSource) -> NDArray[np.int64]:
    """Integers, n of them, each exactly uniform on 0 … bound − 1: words past the last multiple of the bound are drawn again."""
    largest = np.uint64(_WORD // bound * bound - 1)
    words = _words(source, n)
    while len(refused := np.flatnonzero(words > largest)):
        words[refused] = _words(source, len(refused))
    return (words % np.uint64(bound)).astype(np.int64)


def _words(source: WordSource, n: int) -> NDArray[np.uint64]:
    words = np.array(source.words(n)) if n else np.empty(0, dtype=np.uint64)
    if words.dtype != np.uint64 or words.shape != (n,):
        raise ValueError(
            f"the source of randomness gave {words.dtype} of shape {words.shape}: {n} words of type uint64 are due; use "
            "a source of the lattice"
        )
    return words


def _checked_labels(labels: torch.Tensor, *, num_classes: int) -> NDArray[np.int64]:
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.is_complex() or labels.dim() != 1:
        raise ValueError(f"labels are {_kind(labels)}: they must be a tensor of integers of shape (n,); pass .long()")
    if labels.dtype == torch.bool or torch.iinfo(labels.dtype).max < num_classes - 1:
        raise ValueError(
            f"labels have type {labels.dtype}: it must hold every class up to {num_classes - 1}; pass .long()"
        )
    values: NDArray[np.int64] = labels.detach().cpu().numpy().astype(np.int64)
    if len(values) and not 0 <= values.min() <= values.max() < num_classes:
        raise ValueError(
            f"labels lie in {values.min()} to {values.max()}: with {num_classes} classes they lie in 0 to "
            f"{num_classes - 1}; check num_classes"
        )
    return values


def _checked_positions(positions: NDArray[np.int64], *, num_records: int, num_labels: int) -> NDArray[np.int64]:
    where = np.asarray(positions)
    if where.dtype.kind not in "iu" or where.shape != (num_labels,):
        raise ValueError(
            f"positions are {where.dtype} of shape {where.shape}: one integer a label is due, {num_labels}; pass both "
            "for the same records"
        )
    if num_labels and not 0 <= int(where.min()) <= int(where.max()) < num_records:
        raise ValueError(
            f"positions lie in {where.min()} to {where.max()}: the state holds records 0 to {num_records - 1}; pass the "
            "state of these records"
        )
    return where.astype(np.int64)


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return type(value).__name__
