"""A head on digits that the attacks share."""

import pytest
import torch
from torch import nn


@pytest.fixture(scope="session")
def conv_head():
    """A strided convolution with ReLU, 8×8 to 16×4×4, in eval mode, its weights fixed."""
    generator = torch.Generator().manual_seed(3)
    head = nn.Sequential(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU()).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return head
