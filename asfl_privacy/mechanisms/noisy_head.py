"""NoisyHead: a head with noise between its blocks that checks, on every call, what the noise was calibrated for."""

from collections import OrderedDict

import torch
from torch import nn

from asfl_privacy.mechanisms.mechanism import Mechanism
from asfl_privacy.mechanisms.noise_layer import NoiseLayer
from asfl_privacy.mechanisms.placement import split_head


class NoisyHead(nn.Sequential):
    """Blocks with a NoiseLayer among them; made by ``insert_noise``.

    Guarantee:
        Where the layer's mechanism carries a certificate, every call checks it against the blocks that stand before the
        layer at that moment and against the shape of the raw inputs, before anything runs. Outside the claim: blocks
        that are called one by one, past this container.

    Edge cases:
        Without a NoiseLayer (sliced away or replaced) every call is refused. Copies check their own blocks.
    """

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the noised activations.

        Args:
            inputs: raw inputs, shape (batch, *input_shape).

        Returns:
            The activations at the end of the head, shape (batch, ...).

        Raises:
            ValueError: if no NoiseLayer is left, or the layer refuses its activations.
            StaleCertificateError: if blocks, weights, hooks or the input shape differ from those certified.
        """
        blocks = list(self._modules.items())
        cuts = [position for position, (_, block) in enumerate(blocks) if isinstance(block, NoiseLayer)]
        if not cuts:
            raise ValueError(
                "this NoisyHead holds no NoiseLayer: its output would leave without noise; insert the noise again, or "
                "call the plain head where clean activations are meant"
            )
        for cut in cuts:
            layer = blocks[cut][1]
            assert isinstance(layer, NoiseLayer)
            if layer.mechanism.certificate is not None:
                prefix = nn.Sequential(OrderedDict(blocks[:cut]))
                prefix.training = self.training
                prefix._forward_pre_hooks = self._forward_pre_hooks  # they change the inputs, so they are checked too
                layer.mechanism.certificate.check(prefix, input_shape=tuple(inputs.shape[1:]))
        activations = inputs
        for _, block in blocks:
            activations = block(activations)
        return activations


def insert_noise(
    head: nn.Sequential, mechanism: Mechanism, *, placement: str, generator: torch.Generator | None = None
) -> NoisyHead:
    """A head with noise at ``placement``; modules and parameter names are shared with ``head``.

    Args:
        head: nn.Sequential of named blocks.
        mechanism: Gaussian or Laplace. With a certificate attached, every call checks that the blocks before the noise
            and the shape of the raw inputs are still the certified ones.
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
    if mechanism.certificate is not None:
        mechanism.certificate.check(prefix)
    name = "noise"
    while name in head._modules:
        name += "_"
    layer = NoiseLayer(mechanism, generator=generator)
    noisy = NoisyHead(OrderedDict([*prefix._modules.items(), (name, layer), *rest._modules.items()]))
    layer.training = noisy.training = head.training
    return noisy
