"""What a run is asked to do, as frozen facts already checked against each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Privacy:
    """How released activations are made private; the noise multiplier is fixed before the run.

    Attributes:
        mechanism: `gaussian` (ℓ2 sensitivity) or `laplace` (ℓ1 sensitivity).
        noise_multiplier: σ/Δ or b/Δ of every release, Δ the sensitivity at `radius`.
        p: Norm of the input distance: 1, 2 or inf.
        radius: Largest p-distance of two records that must look alike, in raw pixel units; `any` for any two.
        clip: Norm C (the mechanism's own) that each noised record is clipped to, or None.
        placement: Where the noise sits: `input`, `after:NAME` or `exchange`.
        noise: `fresh` for each release, or `once` a record (placement `input` only).
        own: Whether a client trains its tail on its own activations `clean` or as `released`.
    """

    mechanism: Literal["gaussian", "laplace"]
    noise_multiplier: float
    p: float
    radius: float | str
    clip: float | None = None
    placement: str = "input"
    noise: Literal["fresh", "once"] = "fresh"
    own: Literal["clean", "released"] = "clean"


@dataclass(frozen=True)
class TrainingSettings:
    """Sizes and rates of one run.

    Attributes:
        clients: N, number of clients.
        cohort: Number of clients sampled each round, 1 … N.
        rounds: T, number of rounds.
        tail_steps: τ', steps of the tail round on remote and own activations.
        full_steps: τ, local steps on the whole network.
        batch_size: Records a step.
        lr: Learning rate of plain SGD.
        seed: Seed of the run.
        evaluate_every: Rounds between evaluations; the last round is always evaluated.
        last_evaluations: Number of final evaluations whose mean is the run's accuracy.
        exchange_layer: Name of the block at whose end activations leave, or `auto`.
    """

    clients: int
    cohort: int
    rounds: int
    tail_steps: int
    full_steps: int
    batch_size: int
    lr: float
    seed: int
    evaluate_every: int = 1
    last_evaluations: int = 5
    exchange_layer: str = "auto"
