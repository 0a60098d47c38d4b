"""NoiseLayer: a torch module that adds fresh noise on every call, in train and in eval mode."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from asfl_privacy.mechanisms.guards import check_activations, check_resolution
from asfl_privacy.mechanisms.mechanism import Mechanism


class NoiseLayer(nn.Module):
    """Adds the mechanism's noise to each coordinate of each row.

    Args:
        mechanism: Gaussian or Laplace.
        generator: source of randomness, advanced by every call; None draws from the operating system. Whoever knows the
            seed can subtract the noise, so a generator is for experiments only.

    Guarantee:
        Noise is fresh and independent over calls, rows and coordinates, in train and eval mode alike. Without a
        generator, copies, forks and processes never share noise; with one, a copy keeps drawing from the same
        generator, and a forked or pickled layer is refused. A layer alone does not see what runs before it: a
        certificate is checked by the head that ``insert_noise`` makes.

    Edge cases:
        No parameters and no buffers: the state_dict is empty. Half precision, autocast, integers, empty batches, NaN
        and inf are refused. Under ``torch.utils.checkpoint`` the layer runs again in the backward pass and draws other
        noise there: keep it outside checkpointed blocks.

    Example:
        >>> from asfl_privacy.mechanisms import Gaussian
        >>> layer = NoiseLayer(Gaussian(noise_stddev=1.0)).eval()
        >>> x = torch.zeros(2, 3)
        >>> bool((layer(x) == layer(x)).any())
        False
    """

    def __init__(self, mechanism: Mechanism, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if not isinstance(mechanism, Mechanism):
            raise ValueError(
                f"mechanism is a {type(mechanism).__name__}: a noise mechanism is due; pass Gaussian.calibrate(...)"
            )
        self.mechanism = mechanism
        self.generator = generator
        self._process = os.getpid()

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        """Return activations + noise; see the class."""
        if self.generator is not None and os.getpid() != self._process:
            raise ValueError(
                "this NoiseLayer was made in another process: both would draw the same noise from its generator; "
                "make the layer in each process, or pass generator=None"
            )
        check_activations(activations)
        check_resolution(activations, noise_stddev=self.mechanism.noise_stddev)
        return activations + self.mechanism.sample_like(activations.detach(), generator=self.generator)

    def extra_repr(self) -> str:
        """The mechanism, for print(model)."""
        return f"{self.mechanism.family}, noise_stddev={self.mechanism.noise_stddev:.6g}"

    def __deepcopy__(self, memo: dict[int, Any]) -> NoiseLayer:
        """A copy that shares the generator, since two copies of its state would draw the same noise."""
        twin = NoiseLayer(self.mechanism, generator=self.generator)
        memo[id(self)] = twin
        twin.training, twin._process = self.training, self._process
        return twin

    def __getstate__(self) -> dict[str, Any]:
        if self.generator is not None:
            raise ValueError(
                "this NoiseLayer holds a generator: a pickled copy would draw the same noise in another process; "
                "make the layer there, or pass generator=None"
            )
        return dict(self.__dict__)
