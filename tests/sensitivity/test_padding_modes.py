"""Every padding mode of Conv1d, Conv2d and Conv3d against the dense matrix, in all nine norms."""

import itertools

import pytest
import torch
from dense_oracle import dense_matrix
from random_operators import MODES, NINE, true_norm
from torch import nn

from sensitivity import UnsupportedModuleError, certify, operator_norm

KINDS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
SIZES = {1: (5,), 2: (4, 3), 3: (2, 3, 2)}
OPTIONS = {
    "plain": {"padding": 1},
    "wide": {"padding": {1: 3, 2: (3, 2), 3: (1, 2, 1)}},
    "strided": {"padding": 1, "stride": 2},
    "dilated": {"padding": 1, "dilation": {1: 2, 2: (2, 1), 3: (1, 2, 1)}},
    "same": {"padding": "same"},
    "grouped": {"padding": 1, "groups": 2},
}


def padded(dims, mode, name):
    torch.manual_seed(dims)
    options = {key: value[dims] if isinstance(value, dict) else value for key, value in OPTIONS[name].items()}
    channels = 2 if "groups" in options else 1
    return KINDS[dims](channels, 2, 2 if name == "wide" else 3, padding_mode=mode, **options), (channels, *SIZES[dims])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dims", KINDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_no_padded_convolution_has_a_norm_above_its_certificate(name, dims, mode):
    """Mutations caught: other modes taken for zeros; an entry that two taps read counted once."""
    layer, shape = padded(dims, mode, name)
    try:
        with torch.no_grad():
            layer(torch.zeros(1, *shape))
    except RuntimeError:  # torch refuses to reflect or wrap more than there is
        with pytest.raises(UnsupportedModuleError, match="does not run"):
            certify(layer, p=1, q=1, input_shape=shape)
        return
    W = dense_matrix(layer, shape)
    names = [MODES.index(mode), dims - 1, list(OPTIONS).index(name)]
    turned = [*NINE[sum(names) % 3 :: 3], (2, 2)]  # each mode and number of axes meets all nine
    for p, q in turned:
        truth, bound = true_norm(W, p, q), operator_norm(layer, p=p, q=q, input_shape=shape)
        assert bound >= truth * (1 - 1e-13), (p, q)
        if p == 1 or q == float("inf"):
            assert bound <= truth * (1 + 1e-6), (p, q)
        elif (p, q) == (2, 2):
            assert bound <= truth * (1 + 1e-5), (p, q)


def test_torch_refuses_no_more_than_a_few_of_these():
    refused = 0
    for name, dims, mode in itertools.product(OPTIONS, KINDS, MODES):
        layer, shape = padded(dims, mode, name)
        try:
            layer(torch.zeros(1, *shape))
        except RuntimeError:
            refused += 1
    assert refused <= 4


@pytest.mark.parametrize("dims", KINDS)
def test_transposed_convolutions_know_zeros_alone(dims):
    with pytest.raises(ValueError, match="zeros"):
        getattr(nn, f"ConvTranspose{dims}d")(1, 1, 3, padding_mode="circular")
