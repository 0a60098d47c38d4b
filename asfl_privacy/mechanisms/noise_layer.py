"""NoiseLayer: a torch module that adds fresh noise on every call, in train and in eval mode."""

from __future__ import annotations

import functools
import math
import os
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import nn

from asfl_privacy.accounting.rationals import fraction_up
from asfl_privacy.mechanisms.guards import check_activations, check_resolution
from asfl_privacy.mechanisms.lattice import LatticeNoise, SystemSource, plan_lattice, round_scale_up, truncate
from asfl_privacy.mechanisms.mechanism import Mechanism
from asfl_privacy.mechanisms.replay import Replay

FINEST = 37
"""Bits by which the lattice is finer than the scale where no sensitivity is known."""


class NoiseLayer(nn.Module):
    """Adds the mechanism's noise to each coordinate of each row, on a lattice.

    Args:
        mechanism: Gaussian or Laplace; its sensitivity, where it has one, is that of a row of what comes in.
        generator: source of randomness, advanced by every call; None draws from the operating system's cryptographic
            source. Whoever knows the seed can subtract the noise, and float noise leaks through low-order bits, so a
            generator is for experiments only.

    Guarantee:
        Without a generator, activations are truncated toward zero onto a lattice and integer noise with the law of the
        rounded mechanism is added there; the scale is raised by what truncation adds to the sensitivity (at most 2⁻¹⁰ of
        it) and to 10 significant bits, so one call is as private as the mechanism says, up to the sampler's error
        (``lattice_for``). Where the mechanism has no sensitivity, truncation adds up to 2⁻³⁶·scale a number to whatever
        the caller's is. A vector counts as one record. Noise is fresh and independent over calls, rows and coordinates,
        in train and eval mode alike; copies, forks, processes and ``torch.manual_seed`` never make two calls share it.
        With a generator, a copy keeps drawing from the same generator, and a forked or pickled layer is refused. A layer
        alone does not see what runs before it: a certificate is checked by the head that ``insert_noise`` makes.

    Edge cases:
        No parameters and no buffers: the state_dict is empty. Gradients pass unchanged. Half precision, autocast,
        integers, empty batches, NaN and inf are refused. Under ``torch.utils.checkpoint`` the second run of a block, in
        the backward pass, gets the very noise of the first: it is kept, at most 256 calls back. On CUDA noise is drawn
        on the host and copied.

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
        self._replay = Replay()

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        """Return activations + noise; see the class."""
        if self.generator is not None and os.getpid() != self._process:
            raise ValueError(
                "this NoiseLayer was made in another process: both would draw the same noise from its generator; "
                "make the layer in each process, or pass generator=None"
            )
        check_activations(activations)
        plain = activations.detach()
        noised = self._replay.recall(plain)
        if noised is None:
            noised = self._noised(plain)
            self._replay.keep(plain, noised)
        result: torch.Tensor = _PassThrough.apply(activations, noised)
        return result

    def lattice_for(self, num_values: int) -> LatticeNoise:
        """Spacing, scale and sampler's error of a call without generator on rows of this many numbers."""
        return _lattice(self.mechanism.family, self.mechanism.scale, self.mechanism.sensitivity, num_values)

    def _noised(self, plain: torch.Tensor) -> torch.Tensor:
        check_resolution(plain, noise_stddev=self.mechanism.noise_stddev)
        if self.generator is not None:
            return plain + self.mechanism.sample_like(plain, generator=self.generator)
        lattice = self.lattice_for(plain[0].numel() if plain.dim() > 1 else plain.numel())
        cells = lattice.release(truncate(plain, spacing=lattice.spacing), SystemSource())
        exponent = round(math.log2(lattice.spacing))
        kind = np.float64 if plain.dtype == torch.float64 else np.float32
        values = torch.from_numpy(np.ldexp(cells.astype(kind), exponent))
        check_activations(values, what="noised activations")
        return values.to(plain.device)

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
        return {**self.__dict__, "_replay": Replay()}


class _PassThrough(torch.autograd.Function):
    """The noised values, bit for bit, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, activations: torch.Tensor, noised: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        return noised.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        return gradients[0], None


@functools.lru_cache(maxsize=64)
def _lattice(family: str, scale: float, sensitivity: float | None, num_values: int) -> LatticeNoise:
    if sensitivity is None:  # nothing to take a share of: the finest lattice, which moves a value by σ·2⁻³⁶ at most
        stepped = round_scale_up(scale)
        spacing = math.ldexp(1.0, math.frexp(stepped)[1] - FINEST)
        return LatticeNoise(family=family, scale=stepped, spacing=spacing, sensitivity=scale)
    z = fraction_up(Fraction(scale) / Fraction(sensitivity))
    return plan_lattice(family, sensitivity=sensitivity, noise_multiplier=z, num_values=num_values, clip_only=False)
