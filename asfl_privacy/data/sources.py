"""Where data sets come from: bundled, installed on the system, downloaded, made by LEAF, or the user's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from asfl_privacy.data.cifar import cifar10, cifar100
from asfl_privacy.data.dataset import Dataset
from asfl_privacy.data.digits import digits, mnist5k
from asfl_privacy.data.fashion_mnist import fashion_mnist
from asfl_privacy.data.femnist import femnist
from asfl_privacy.data.own import own_dataset

SOURCES: dict[str, Callable[[Path], Dataset]] = {
    "digits": digits,
    "fashion-mnist": fashion_mnist,
    "mnist5k": mnist5k,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "femnist": femnist,
}
"""Data sets by name; each is given the folder in which files are looked for."""


def load_dataset(name: str, *, root: Path) -> Dataset:
    """Load a data set by name.

    Args:
        name: A name of `SOURCES`, or `module:name` for your own: a `Dataset`, a pair of pairs
            ((train_inputs, train_labels), (test_inputs, test_labels)), or a function without arguments that returns
            either. Naming a module runs its code.
        root: Folder in which files are looked for (torchvision's, LEAF's) and into which torchvision downloads.

    Returns:
        The data set.

    Raises:
        ValueError: An unknown name, or data that cannot be found or is malformed; the line says what to do.

    Example:
        >>> load_dataset("digits", root=Path("data")).input_shape
        (1, 8, 8)
    """
    if name in SOURCES:
        return SOURCES[name](root)
    if ":" in name:
        return own_dataset(name)
    raise ValueError(f"data {name!r} is unknown; use one of {', '.join(SOURCES)}, or your own as module:name")
