"""Global generators: what a network draws from torch's, NumPy's and Python's, which all parts of a process share."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import torch
from torch import nn

from asfl_privacy.federated import Federation
from asfl_privacy.mechanisms.plain_modules import is_plain
from asfl_privacy.models import OWN_LAYERS

DRAWING = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d, nn.RNNBase)
"""torch's own layers that may draw in training."""


def refuse_unseeded_draws(federation: Federation) -> None:
    """Refuse a network that draws from a generator which no seed of the run reaches.

    Raises:
        ValueError: Blocks that draw from NumPy's or Python's global generator in a first forward pass.
    """
    moved = generators_moved(federation)
    for name in ("numpy", "random"):
        if name in moved:
            raise ValueError(
                f"the network draws from the global generator of {name}, which no seed of the run reaches, so no two runs "
                "would be alike; draw from torch's"
            )


def generators_moved(federation: Federation) -> frozenset[str]:
    """Which global generators a forward pass in training mode draws from: `torch`, `numpy`, `random`; all put back."""
    layers = federation.model.modules()
    if is_plain(federation.model, also=OWN_LAYERS) and not any(isinstance(layer, DRAWING) for layer in layers):
        return frozenset()
    twin = federation.replica()
    twin.load(federation.initial_weights, training=True)
    for_torch, for_numpy, for_python = torch.default_generator.get_state(), _numpy_state(), random.getstate()
    with (
        torch.no_grad(),
        contextlib.suppress(Exception),
    ):  # whatever blocks refuse: training tells, and names the client
        twin.model(federation.data.train_inputs[:2].to(federation.device))
    moved = {
        "torch": not torch.equal(for_torch, torch.default_generator.get_state()),
        "numpy": _words(for_numpy) != _words(_numpy_state()),
        "random": for_python != random.getstate(),
    }
    torch.default_generator.set_state(for_torch)
    np.random.set_state(for_numpy)  # noqa: NPY002 - it is that generator which is looked at
    random.setstate(for_python)
    return frozenset(name for name, has_moved in moved.items() if has_moved)


def _numpy_state() -> dict[str, Any]:
    state: dict[str, Any] = np.random.get_state(legacy=False)  # noqa: NPY002 - see above
    return state


def _words(state: dict[str, Any]) -> tuple[bytes, int, int]:
    return state["state"]["key"].tobytes(), int(state["state"]["pos"]), int(state["has_gauss"])
