"""The sparse matrix of a zero-padded convolution, exact: every entry is a kernel entry."""

from __future__ import annotations

import math

import numpy as np
from scipy import sparse

from sensitivity.capturing.recording import Node
from sensitivity.composing.linear_map import TooLargeError
from sensitivity.operators.operator import weights_as_float64


def conv_matrix_of(node: Node, source: Node) -> sparse.csr_array:
    """Unrolled matrix of a recorded convolution over any number of axes, all groups.

    Args:
        node: the convolution.
        source: the node whose value it reads.

    Returns:
        Shape (outputs, inputs) in flat (channel, pixels…) order.

    Raises:
        TooLargeError: for a transposed convolution, whose matrix is not built here.
    """
    weight, _, stride, padding, dilation, transposed, _, groups = node.args[1:9]
    if transposed:
        raise TooLargeError("transposed convolution")
    W = weights_as_float64(weight)
    c_out, c_in_group, *taps = W.shape
    size_in, size_out = list(source.shape[2:]), list(node.shape[2:])
    axes = len(taps)

    def per_axis(values: list[int]) -> list[int]:
        return list(values) * (axes if len(values) == 1 else 1)

    stride, padding, dilation = per_axis(stride), per_axis(padding), per_axis(dilation)
    # Per axis, (output, tap) → pixel, and whether it is a real one.
    pixels, real = np.zeros((*size_out, *taps), dtype=np.int64), np.ones((*size_out, *taps), dtype=bool)
    for axis in range(axes):
        along = (
            np.arange(size_out[axis])[:, None] * stride[axis]
            + np.arange(taps[axis])[None, :] * dilation[axis]
            - padding[axis]
        )
        shape = [1] * (2 * axes)
        shape[axis], shape[axes + axis] = along.shape
        along = along.reshape(shape)
        real &= (along >= 0) & (along < size_in[axis])
        pixels = pixels * size_in[axis] + np.clip(along, 0, size_in[axis] - 1)
    num_pixels, num_places, num_taps = math.prod(size_in), math.prod(size_out), math.prod(taps)
    pixels, real = pixels.reshape(num_places, num_taps), real.reshape(num_places, num_taps)
    channels = np.arange(c_in_group) * num_pixels
    columns = (channels[None, :, None] + pixels[:, None, :]).reshape(num_places, -1)
    kept = np.broadcast_to(real[:, None, :], (num_places, c_in_group, num_taps)).reshape(num_places, -1)
    counts = kept.sum(axis=1)
    per_group = c_out // groups
    kernels = W.reshape(c_out, -1)
    indices, data = [], []
    for channel in range(c_out):
        offset = (channel // per_group) * c_in_group * num_pixels
        indices.append(columns[kept] + offset)
        data.append(np.broadcast_to(kernels[channel], kept.shape)[kept])
    indptr = np.concatenate([[0], np.cumsum(np.tile(counts, c_out))])
    made = sparse.csr_array(
        (np.concatenate(data), np.concatenate(indices), indptr),
        shape=(c_out * num_places, c_in_group * groups * num_pixels),
    )
    made.sort_indices()
    return made
