"""Learning rates over the rounds of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """By how much the learning rate is multiplied in each round.

    Attributes:
        kind: `constant`, `cosine` (from 1 in the first round to 0 after the last; Loshchilov & Hutter 2017, Eq. 5) or
            `step`.
        factor: Of `step`: what the rate is multiplied by at each of `at`.
        at: Of `step`: rounds, ascending, from which on the factor holds once more.
    """

    kind: str = "constant"
    factor: float = 1.0
    at: tuple[int, ...] = ()

    def multiplier(self, round: int, *, rounds: int) -> float:
        """What the learning rate of a round is multiplied by.

        Args:
            round: Round number, from 0.
            rounds: T, number of rounds of the run.

        Example:
            >>> [Schedule("step", 0.1, (50, 75)).multiplier(r, rounds=100) for r in (49, 50)]
            [1.0, 0.1]
            >>> [round(Schedule("cosine").multiplier(r, rounds=4), 3) for r in range(4)]
            [1.0, 0.854, 0.5, 0.146]
        """
        if self.kind == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * round / rounds))
        return self.factor ** sum(round >= first for first in self.at)


CONSTANT = Schedule()
"""The same rate in all rounds."""


def parse_schedule(text: str) -> Schedule:
    """The schedule that a configuration asks for.

    Args:
        text: `constant`, `cosine`, or `step:FACTOR@ROUND,ROUND…`.

    Raises:
        ValueError: For another form, a factor outside (0, 1] or whose power at the end is 0 in floats, or rounds that do
            not ascend from 1 on.

    Example:
        >>> parse_schedule("step:0.1@50,75")
        Schedule(kind='step', factor=0.1, at=(50, 75))
    """
    if text in ("constant", "cosine"):
        return Schedule(text)
    kind, _, rest = text.partition(":")
    factor, _, rounds = rest.partition("@")
    try:
        found = Schedule(kind, float(factor), tuple(int(one) for one in rounds.split(",")))
    except ValueError:
        found = Schedule("?")
    ascending = all(a < b for a, b in zip((0, *found.at), found.at, strict=False))
    vanishes = not found.factor ** len(found.at) > 0  # a rate of 0 trains nothing, and FedVARP divides by it
    if found.kind != "step" or not 0 < found.factor <= 1 or not ascending or vanishes:
        raise ValueError(
            f"{text!r} is unknown; use constant, cosine, or step:FACTOR@ROUND,… with a factor in (0, 1], its powers above 0 too, "
            "and rounds that ascend from 1 on, e.g. step:0.1@50,75"
        )
    return found
