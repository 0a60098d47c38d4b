"""The paper's tables and figures, one file each: material in, what is shown out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from asfl_privacy.reporting.exhibits.convergence import convergence_exhibit
from asfl_privacy.reporting.exhibits.exchange_layers import exchange_layers_exhibit
from asfl_privacy.reporting.exhibits.exhibit import Exhibit, Material
from asfl_privacy.reporting.exhibits.grid import grid_exhibit
from asfl_privacy.reporting.exhibits.latent import latent_exhibit
from asfl_privacy.reporting.exhibits.local_time import local_time_exhibit
from asfl_privacy.reporting.exhibits.methods import methods_exhibit
from asfl_privacy.reporting.exhibits.privacy import privacy_exhibit


@dataclass(frozen=True)
class Kind:
    """One exhibit.

    Attributes:
        build: Makes it of its material.
        about: What it shows, for lists.
    """

    build: Callable[[Material], Exhibit]
    about: str


EXHIBITS: Final[Mapping[str, Kind]] = {
    "methods": Kind(methods_exhibit, "methods without noise: accuracy, rounds to a target, bytes (Table 1)"),
    "local-time": Kind(local_time_exhibit, "local computation of a round, relative to FedAvg (Table 2)"),
    "latent": Kind(latent_exhibit, "class centroids of the clients in the latent space, and their scatter (Figure 3)"),
    "privacy": Kind(privacy_exhibit, "accuracy with noise against the methods without, break-even ε (Table 3)"),
    "exchange-layer": Kind(
        exchange_layers_exhibit, "accuracy and bytes by exchange layer, the automatic one (Figure 4)"
    ),
    "grid": Kind(grid_exhibit, "any grid of settings: activations exchanged, ε by layer or radius, own activations"),
    "convergence": Kind(convergence_exhibit, "gradients, disagreement, drift by round; decay of ‖∇F‖² (convergence)"),
}
"""By the name that `asfl-privacy report --as` takes."""

__all__ = ["EXHIBITS", "Exhibit", "Kind", "Material"]
