"""Activation checkpointing: the recomputed block gets the noise that was released."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from asfl_privacy.mechanisms import Gaussian, NoiseLayer
from asfl_privacy.mechanisms.replay import CAPACITY


class Recorded(nn.Module):
    """Keeps every output of the layer it wraps."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.outputs = layer, []

    def forward(self, x):
        self.outputs.append(self.layer(x))
        return self.outputs[-1] ** 2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_block_gets_the_noise_that_was_released(use_reentrant):
    """d(x + z)²/dx = 2(x + z). Catches a second draw in the backward pass: its gradient belongs to other noise."""
    recorded = Recorded(NoiseLayer(Gaussian(noise_stddev=1.0)))
    x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
    checkpoint(recorded, x, use_reentrant=use_reentrant).sum().backward()
    first, again = recorded.outputs
    assert torch.equal(first, again)
    assert torch.allclose(x.grad, 2 * first)


def test_two_calls_on_the_same_values_draw_anew_inside_checkpoints_too():
    """Catches a cache that answers outside the backward pass: the same noise sent twice, or one noise for equal rows."""
    recorded = Recorded(NoiseLayer(Gaussian(noise_stddev=1.0)))
    x = torch.ones(2, 3, requires_grad=True)
    for _ in range(2):
        checkpoint(recorded, x, use_reentrant=False)
    plain = recorded.layer(x)
    assert not torch.equal(recorded.outputs[0], recorded.outputs[1])
    assert not (plain == recorded.outputs[1]).any()


def test_a_recomputation_past_the_memory_is_refused_not_redrawn():
    layer = NoiseLayer(Gaussian(noise_stddev=1.0))
    x = torch.ones(1, 3, requires_grad=True)
    first = checkpoint(lambda v: layer(v) ** 2, x, use_reentrant=False)
    for number in range(CAPACITY):
        checkpoint(lambda v: layer(v) ** 2, torch.full((1, 3), 2.0 + number), use_reentrant=False)
    with pytest.raises(ValueError, match="is not kept"):
        first.sum().backward()


def test_nothing_is_kept_outside_checkpointed_blocks_and_copies_keep_nothing():
    import copy
    import pickle

    layer = NoiseLayer(Gaussian(noise_stddev=1.0))
    layer(torch.ones(2, 3))
    assert not layer._replay._kept
    checkpoint(layer, torch.ones(2, 3, requires_grad=True), use_reentrant=False)
    assert layer._replay._kept
    assert not copy.deepcopy(layer)._replay._kept
    assert not pickle.loads(pickle.dumps(layer))._replay._kept
