"""The grid: every cell of a sweep, private cells after the unnoised references."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from asfl_privacy.config import NORMS, SweepConfig

GAUSSIAN_EPSILONS = (1.0, 4.0, 16.0, 64.0)
LAPLACE_EPSILONS = (0.25, 1.0, 4.0, 16.0)
DEFAULT_DELTA = 1e-5
LADDER_EPSILON = 4.0
LADDER_DELTAS = (1e-4, 1e-7, 1e-10)
DEFAULT_NORMS = {"gaussian": "2", "laplace": "1"}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a grid; privacy fields are None for a reference without noise.

    Attributes:
        method: `asfl`, `fedavg`, …
        mech: `gaussian`, `laplace` or `none`.
        seed: Seed of the run.
        exchange_layer: Block name or `auto`; None for methods that share nothing.
        epsilon: ε asked for one release at the radius.
        total_epsilon: ε asked for the whole run, instead of `epsilon`.
        delta: δ of the Gaussian mechanism; 0 for Laplace.
        radius: R, or `any`.
        norm: p as text: `1`, `2` or `inf`.
        placement: As asked; `auto` until it is resolved.
    """

    method: str
    mech: str
    seed: int
    exchange_layer: str | None = None
    epsilon: float | None = None
    total_epsilon: float | None = None
    delta: float | None = None
    radius: float | str | None = None
    norm: str | None = None
    placement: str | None = None

    @property
    def p(self) -> float | None:
        """The norm as a number."""
        return None if self.norm is None else NORMS[self.norm]

    @property
    def label(self) -> str:
        """What messages and folders call the cell, seed left out."""
        if self.mech == "none":
            parts = [self.method, "unnoised"]
        else:
            asked = f"eps{self.epsilon:g}" if self.epsilon is not None else f"total{self.total_epsilon:g}"
            parts = [self.method, self.mech, asked]
            parts += [f"delta{self.delta:g}"] if self.delta else []
            parts += [f"R{self.radius}" if self.radius == "any" else f"R{self.radius:g}", f"l{self.norm}", str(self.placement)]
        parts += [self.exchange_layer] if self.exchange_layer else []
        return "-".join(parts)


def make_cells(config: SweepConfig) -> tuple[Cell, ...]:
    """Expand a configuration into its cells.

    Args:
        config: The grid. Without ε, total ε and δ the Gaussian grid is ε ∈ {1, 4, 16, 64} at δ = 1e-5 and the δ ladder
            {1e-4, 1e-7, 1e-10} at ε = 4; the Laplace grid is ε ∈ {.25, 1, 4, 16}.

    Returns:
        For each setting all seeds; unnoised ASFL (for each exchange layer) and FedAvg come first. A setting asked for
        twice is run once.

    Example:
        >>> [cell.label for cell in make_cells(SweepConfig(mech="gaussian", epsilon=4, seeds=1, exchange_layer="conv2"))]
        ['asfl-unnoised-conv2', 'fedavg-unnoised', 'asfl-gaussian-eps4-delta1e-05-R1-l2-auto-conv2']
    """
    seeds = range(config.seed, config.seed + config.seeds)
    settings = [*_references(config), *_private(config)]
    return tuple(dict.fromkeys(replace(setting, seed=seed) for setting in settings for seed in seeds))


def _references(config: SweepConfig) -> Iterator[Cell]:
    if "asfl" in config.method:
        for exchange_layer in config.exchange_layer:
            yield Cell(method="asfl", mech="none", seed=0, exchange_layer=exchange_layer)
    yield Cell(method="fedavg", mech="none", seed=0)


def _private(config: SweepConfig) -> Iterator[Cell]:
    if "asfl" not in config.method:
        return
    for mech in config.mech:
        if mech == "none":
            continue
        for exchange_layer in config.exchange_layer:
            for radius in config.radius:
                for norm in config.norm or (DEFAULT_NORMS[mech],):
                    for placement in config.placement:
                        for epsilon, total_epsilon, delta in _budgets(config, mech):
                            yield Cell(
                                method="asfl",
                                mech=mech,
                                seed=0,
                                exchange_layer=exchange_layer,
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
        deltas: tuple[float, ...] = (0.0,)
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

