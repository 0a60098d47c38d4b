"""What a run is asked to do, as frozen facts already checked against each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from asfl_privacy.accounting.budget import RecordBudget
from asfl_privacy.federated.schedules import CONSTANT, Schedule
from asfl_privacy.federated.steps import Rule

UPDATES_ONLY = "updates"
"""The placement of a private run that shares no activations: its updates alone are noised."""


@dataclass(frozen=True)
class Privacy:
    """How what clients send is made private; all noise multipliers are fixed before the run.

    Attributes:
        mechanism: `gaussian` (ℓ2 sensitivity) or `laplace` (ℓ1 sensitivity).
        noise_multiplier: σ/Δ or b/Δ of every release, Δ the sensitivity at `radius`.
        p: Norm of the input distance: 1, 2 or inf.
        radius: Largest p-distance of two records that must look alike, in raw pixel units; `any` for any two.
        clip: Norm C (the mechanism's own) that each noised record is clipped to, or None.
        placement: Where the noise sits: `input`, `after:NAME` or `exchange`; `updates` where activations are not shared.
        noise: `fresh` for each release, or `once` a record (placement `input` only).
        own: Whether a client trains its tail on its own activations `clean` or as `released`.
        label_epsilon: ε of the randomised response that each record's label goes through once; None sends labels as
            they are.
        updates: `none` (sent as they are), `dp-sgd` (noised gradients of clipped records) or `dp-fedavg` (clipped,
            noised update of each client).
        update_multiplier: σ/(2C) of a noised gradient or update; None with `none`.
        update_clip: C, ℓ2 norm of a record's gradient or of a client's update.
        budget: What one record may spend before it is held back; None for no filter.
        planned_releases: Releases of one record's activations that the noise was calibrated for; None for one.
        planned_steps: Noised steps (or updates) of one record that it was calibrated for; None without such.
        noisy_training: Whether the noise layer also sits in the head while it trains, as PixelDP does.
        reproducible: Whether noise comes from the run's seed, for experiments, which voids every guarantee; otherwise it
            comes from the operating system's cryptographic source.
    """

    mechanism: Literal["gaussian", "laplace"]
    noise_multiplier: float
    p: float
    radius: float | str
    clip: float | None = None
    placement: str = "input"
    noise: Literal["fresh", "once"] = "fresh"
    own: Literal["clean", "released"] = "clean"
    label_epsilon: float | None = None
    updates: Literal["none", "dp-sgd", "dp-fedavg"] = "none"
    update_multiplier: float | None = None
    update_clip: float = 1.0
    budget: RecordBudget | None = None
    planned_releases: int | None = None
    planned_steps: int | None = None
    noisy_training: bool = False
    reproducible: bool = True

    @property
    def shares_activations(self) -> bool:
        """Whether private activations are released."""
        return self.placement != UPDATES_ONLY

    @property
    def sampler(self) -> str:
        """How the ledger names the source of the noise."""
        return "seeded" if self.reproducible else "lattice"


@dataclass(frozen=True)
class MethodOptions:
    """What single methods ask for besides sizes and rates; the others ignore it.

    Attributes:
        server_lr: η_g, step of the server along the mean update (SCAFFOLD, FedPVR, FedVARP).
        corrected_from: Name of the first block whose parameters FedPVR corrects, or `auto` for the last one alone.
        mu: μ, weight of MOON's contrastive loss.
        temperature: T of that loss.
        prototype_weight: λ, weight of FedProto's distance to the global prototypes.
        prototype_mean: How the server averages prototypes: by class counts (`weighted`, the paper) or `unweighted`
            (public code).
    """

    server_lr: float = 1.0
    corrected_from: str = "auto"
    mu: float = 1.0
    temperature: float = 0.5
    prototype_weight: float = 1.0
    prototype_mean: Literal["weighted", "unweighted"] = "weighted"


NO_OPTIONS = MethodOptions()
"""What methods do where nothing is asked."""


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
        lr: Learning rate of SGD in the first round.
        seed: Seed of the run.
        evaluate_every: Rounds between evaluations; the last round is always evaluated.
        last_evaluations: Number of final evaluations whose mean is the run's accuracy.
        exchange_layer: Name of the block at whose end activations leave, or `auto`; None for methods that cut the network
            nowhere.
        precision: Arithmetic of plain local steps: `float32`, or `bfloat16` where torch's autocast uses it. Noised steps,
            certificates, noise and releases are computed as always.
        momentum: Of local steps, in [0, 1).
        weight_decay: Of local steps, ≥ 0.
        schedule: Of the learning rate over rounds.
        options: What single methods ask for.
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
    exchange_layer: str | None = "auto"
    precision: Literal["float32", "bfloat16"] = "float32"
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: Schedule = CONSTANT
    options: MethodOptions = NO_OPTIONS

    def rule(self, round: int) -> Rule:
        """How local steps of a round move the parameters."""
        lr = self.lr * self.schedule.multiplier(round, rounds=self.rounds)
        return Rule(lr=lr, momentum=self.momentum, weight_decay=self.weight_decay)

    @property
    def autocast(self) -> torch.dtype | None:
        """Type that plain local steps compute in where that is safe; None for the network's own."""
        return torch.bfloat16 if self.precision == "bfloat16" else None
