"""The paper's tables and figures, one file each: material in, what is shown out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from asfl_privacy.reporting.exhibits.exhibit import Exhibit, Material
from asfl_privacy.reporting.exhibits.methods import methods_exhibit


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
}
"""By the name that `asfl-privacy report --as` takes."""

__all__ = ["EXHIBITS", "Exhibit", "Kind", "Material"]
