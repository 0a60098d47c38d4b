"""NoiseLayer: a torch module that adds fresh noise on every call, in train and in eval mode."""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from asfl_privacy.mechanisms.guards import check_activations, check_resolution
from asfl_privacy.mechanisms.mechanism import Mechanism
from asfl_privacy.mechanisms.placement import split_head
from sensitivity import Certificate


class NoiseLayer(nn.Module):
    """Adds the mechanism's noise to each coordinate of each row.

    Args:
        mechanism: Gaussian or Laplace.
        generator: source of randomness, advanced by every call; None draws from the operating system. Whoever knows the
            seed can subtract the noise, so a generator is for experiments only.
        certificate: the certificate behind the mechanism's sensitivity; with ``certified`` it is checked on every call.
        certified: the module the certificate speaks of (what runs before this layer).

    Guarantee:
        Noise is fresh and independent over calls, rows and coordinates, in train and eval mode alike. Without a
        generator, copies, forks and processes never share noise; with one, a copy keeps drawing from the same
        generator, and a forked or pickled layer is refused.

    Edge cases:
        No parameters and no buffers: the state_dict is empty. Half precision, autocast, integers, empty batches, NaN
        and inf are refused.

    Example:
        >>> from asfl_privacy.mechanisms import Gaussian
        >>> layer = NoiseLayer(Gaussian(noise_stddev=1.0)).eval()
        >>> x = torch.zeros(2, 3)
        >>> bool((layer(x) == layer(x)).any())
        False
    """

    def __init__(
        self,
        mechanism: Mechanism,
        *,
        generator: torch.Generator | None = None,
        certificate: Certificate | None = None,
        certified: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(mechanism, Mechanism):
            raise ValueError(
                f"mechanism is a {type(mechanism).__name__}: a noise mechanism is due; pass Gaussian.calibrate(...)"
            )
        self.mechanism = mechanism
        self.generator = generator
        self.certificate = mechanism.certificate if certificate is None else certificate
        self._certified = (certified,)  # in a tuple, so that it is no submodule and adds nothing to the state_dict
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
        (certified,) = self._certified
        if self.certificate is not None and certified is not None:
            self.certificate.check(certified)
        return activations + self.mechanism.sample_like(activations.detach(), generator=self.generator)

    def extra_repr(self) -> str:
        """The mechanism, for print(model)."""
        return f"{self.mechanism.family}, noise_stddev={self.mechanism.noise_stddev:.6g}"

    def __deepcopy__(self, memo: dict[int, Any]) -> NoiseLayer:
        """A copy that shares the generator, since two copies of its state would draw the same noise."""
        twin = NoiseLayer(self.mechanism, generator=self.generator, certificate=self.certificate)
        memo[id(self)] = twin
        twin._certified = (copy.deepcopy(self._certified[0], memo),)  # the copied weights are those to check
        twin.training, twin._process = self.training, self._process
        return twin

    def __getstate__(self) -> dict[str, Any]:
        if self.generator is not None:
            raise ValueError(
                "this NoiseLayer holds a generator: a pickled copy would draw the same noise in another process; "
                "make the layer there, or pass generator=None"
            )
        return dict(self.__dict__)


def insert_noise(
    head: nn.Sequential, mechanism: Mechanism, *, placement: str, generator: torch.Generator | None = None
) -> nn.Sequential:
    """A head with noise at ``placement``; modules and parameter names are shared with ``head``.

    Args:
        head: nn.Sequential of named blocks.
        mechanism: Gaussian or Laplace. With a certificate attached, every call checks that the weights before the noise
            are still the certified ones.
        placement: "input", "after:NAME" or "exchange" (the end of the head).
        generator: see NoiseLayer; a known seed voids privacy.

    Returns:
        A new nn.Sequential; its state_dict has the keys of the head's.

    Raises:
        ValueError: if the head is no nn.Sequential or has no such placement (the message lists the valid ones).
        StaleCertificateError: if the weights differ from those certified.

    Example:
        >>> from asfl_privacy.mechanisms import Gaussian
        >>> head = nn.Sequential(OrderedDict(flat=nn.Flatten(), fc=nn.Linear(4, 2)))
        >>> list(insert_noise(head, Gaussian(noise_stddev=1.0), placement="after:flat")._modules)
        ['flat', 'noise', 'fc']
    """
    prefix, rest = split_head(head, placement)
    certificate = mechanism.certificate
    if certificate is not None:
        certificate.check(prefix)
    name = "noise"
    while name in head._modules:
        name += "_"
    layer = NoiseLayer(mechanism, generator=generator, certified=None if certificate is None else prefix)
    noisy = nn.Sequential(OrderedDict([*prefix._modules.items(), (name, layer), *rest._modules.items()]))
    layer.training = noisy.training = head.training
    return noisy
