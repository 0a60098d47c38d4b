"""The grid: every cell of a sweep, private cells after the unnoised references."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from asfl_privacy.config import NORMS, SweepConfig
from asfl_privacy.federated import METHODS
from asfl_privacy.federated.settings import UPDATES_ONLY

GAUSSIAN_EPSILONS = (1.0, 4.0, 16.0, 64.0)
LAPLACE_EPSILONS = (0.25, 1.0, 4.0, 16.0)
DEFAULT_DELTA = 1e-5
LADDER_EPSILON = 4.0
LADDER_DELTAS = (1e-4, 1e-7, 1e-10)
DEFAULT_NORMS = {"gaussian": "2", "laplace": "1"}


@dataclass(frozen=True, kw_only=True)
class Target:
    """The privacy that a cell asks for.

    Attributes:
        mech: `gaussian` or `laplace`.
        epsilon: ε of one release at the radius, or None where a total is asked.
        total_epsilon: ε of the whole run, or None.
        delta: δ of the Gaussian mechanism; 0 for Laplace.
        radius: R, or `any`.
        norm: p as text: `1`, `2` or `inf`.
        placement: As asked; `auto` until it is resolved; `updates` where updates alone are noised.
    """

    mech: str
    epsilon: float | None
    total_epsilon: float | None
    delta: float
    radius: float | str
    norm: str
    placement: str

    @property
    def p(self) -> float:
        """The norm as a number."""
        return NORMS[self.norm]

    @property
    def label(self) -> str:
        """The target in short, for messages and folders."""
        asked = f"eps{self.epsilon:g}" if self.epsilon is not None else f"total{self.total_epsilon:g}"
        delta = [f"delta{self.delta:g}"] if self.delta else []
        radius = self.radius if isinstance(self.radius, str) else f"{self.radius:g}"
        return "-".join([self.mech, asked, *delta, f"R{radius}", f"l{self.norm}", self.placement])


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a grid.

    Attributes:
        method: `asfl`, `fedavg`, …
        seed: Seed of the run.
        exchange_layer: Block name or `auto`; None for methods that cut the network nowhere.
        target: The privacy asked for; None for a reference without noise.
    """

    method: str
    seed: int
    exchange_layer: str | None
    target: Target | None

    @property
    def mech(self) -> str:
        """`gaussian`, `laplace` or `none`."""
        return "none" if self.target is None else self.target.mech

    @property
    def label(self) -> str:
        """What messages and folders call the cell, seed left out."""
        parts = [self.method, "unnoised" if self.target is None else self.target.label, self.exchange_layer]
        return "-".join(part for part in parts if part)


def make_cells(config: SweepConfig) -> tuple[Cell, ...]:
    """Expand a configuration into its cells.

    Args:
        config: The grid. Without ε, total ε and δ the Gaussian grid is ε ∈ {1, 4, 16, 64} at δ = 1e-5 and the δ ladder
            {1e-4, 1e-7, 1e-10} at ε = 4; the Laplace grid is ε ∈ {.25, 1, 4, 16}.

    Returns:
        For each setting all seeds; unnoised runs of the methods that share (for each exchange layer), FedAvg and the
        other methods come first. A setting asked for twice is run once.

    Example:
        >>> grid = SweepConfig(mech="gaussian", epsilon=4, seeds=1, exchange_layer="conv2")
        >>> [cell.label for cell in make_cells(grid)]
        ['asfl-unnoised-conv2', 'fedavg-unnoised', 'asfl-gaussian-eps4-delta1e-05-R1-l2-auto-conv2']
    """
    seeds = range(config.seed, config.seed + config.seeds)
    return tuple(dict.fromkeys(replace(first, seed=seed) for first in _settings(config) for seed in seeds))


def _settings(config: SweepConfig) -> Iterator[Cell]:
    """The first seed's cells, references first."""
    sharing = [method for method in config.methods if METHODS[method].shares]
    others = dict.fromkeys(("fedavg", *(method for method in config.methods if method not in sharing)))
    shared = list(itertools.product(sharing, config.exchange_layer))
    for method, exchange_layer in shared:
        yield Cell(method=method, seed=config.seed, exchange_layer=exchange_layer, target=None)
    for method in others:
        cuts: Sequence[str | None] = config.exchange_layer if METHODS[method].cuts_network else (None,)
        for cut in cuts:
            yield Cell(method=method, seed=config.seed, exchange_layer=cut, target=None)
    for method, exchange_layer in shared:
        for target in _targets(config):
            yield Cell(method=method, seed=config.seed, exchange_layer=exchange_layer, target=target)
    if config.updates != "none":
        for method, target in itertools.product(others, list(_targets(config))):
            alone = replace(target, mech="gaussian", placement=UPDATES_ONLY)
            yield Cell(method=method, seed=config.seed, exchange_layer=None, target=alone)


def _targets(config: SweepConfig) -> Iterator[Target]:
    for mech in config.mech:
        if mech == "none":
            continue
        norms = config.norm or (DEFAULT_NORMS[mech],)
        for radius, norm, placement in itertools.product(config.radius, norms, config.placement):
            for epsilon, total_epsilon, delta in _budgets(config, mech):
                yield Target(
                    mech=mech,
                    epsilon=epsilon,
                    total_epsilon=total_epsilon,
                    delta=delta,
                    radius=radius,
                    norm=norm,
                    placement=placement,
                )


def _budgets(config: SweepConfig, mech: str) -> Iterator[tuple[float | None, float | None, float]]:
    """(ε, total ε, δ) of every cell of one mechanism, from weak to strong privacy where it is the default."""
    asked = bool(config.epsilon or config.total_epsilon)
    if mech == "laplace":
        deltas: tuple[float, ...] = (0.0,) if config.updates == "none" else config.delta or (DEFAULT_DELTA,)
        epsilons = config.epsilon if asked else LAPLACE_EPSILONS
    else:
        deltas = config.delta or (DEFAULT_DELTA,)
        epsilons = config.epsilon if asked else GAUSSIAN_EPSILONS
    for epsilon in epsilons:
        for delta in deltas:
            yield epsilon, None, delta
    for total_epsilon in config.total_epsilon:
        for delta in deltas:
            yield None, total_epsilon, delta
    if mech == "gaussian" and not asked and not config.delta:
        for delta in LADDER_DELTAS:
            yield LADDER_EPSILON, None, delta
