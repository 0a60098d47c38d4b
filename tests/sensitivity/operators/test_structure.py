import math

import numpy as np
import pytest
import torch
from dense_oracle import EXACT_PAIRS, dense_matrix, dense_norm
from torch import nn
from torch.nn import functional as F  # noqa: N812

from sensitivity import UnsupportedModuleError, certify
from sensitivity.capturing.capture import record
from sensitivity.norms import NORMS
from sensitivity.operators.operator import Effort
from sensitivity.operators.rules import operator_of
from sensitivity.operators.structure import INDEXING, index_map, index_table

EFFORT = Effort(dense_entries=0, symbol_flops=1.0, flops=0.0)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


INDEX = torch.tensor([2, 0, 2, 2])
CASES = {
    "view": (lambda x: x.reshape(-1, 3, 4), (2, 6)),
    "flatten": (lambda x: x.flatten(1), (2, 3, 2)),
    "unflatten": (lambda x: x.unflatten(1, (2, 3)), (6,)),
    "permute": (lambda x: x.permute(0, 3, 1, 2), (2, 3, 2)),
    "transpose": (lambda x: x.transpose(1, 2), (2, 3)),
    "movedim": (lambda x: x.movedim(3, 1), (2, 3, 2)),
    "squeeze": (lambda x: x.squeeze(1), (1, 3)),
    "slice": (lambda x: x[:, 1::2], (5, 2)),
    "narrow": (lambda x: x.narrow(2, 1, 2), (2, 4)),
    "select": (lambda x: x[:, 1], (3, 2)),
    "split": (lambda x: x.split(2, 1)[1], (5, 2)),
    "split into sizes": (lambda x: x.split([1, 3], 1)[0], (4, 2)),
    "chunk": (lambda x: x.chunk(2, 2)[1], (2, 5)),
    "unbind": (lambda x: x.unbind(1)[2], (3, 2)),
    "flip": (lambda x: x.flip(1, 2), (2, 3)),
    "roll": (lambda x: x.roll((1, -2), (1, 2)), (2, 3)),
    "rot90": (lambda x: x.rot90(1, (1, 2)), (2, 3)),
    "tril": (lambda x: x.tril(), (3, 3)),
    "triu": (lambda x: x.triu(1), (3, 3)),
    "diagonal": (lambda x: x.diagonal(0, 1, 2), (3, 4)),
    "index without repeats": (lambda x: x[:, [2, 0]], (3, 2)),
    "index with repeats": (lambda x: x[:, INDEX], (3, 2)),
    "index by a mask": (lambda x: x[:, torch.tensor([True, False, True])], (3, 2)),
    "index by a mask of two dimensions": (lambda x: x[:, torch.eye(2, dtype=torch.bool)], (2, 2)),
    "index_select": (lambda x: x.index_select(2, INDEX), (2, 3)),
    "repeat": (lambda x: x.repeat(1, 3, 2), (2, 2)),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), (3, 2)),
    "expand": (lambda x: x.expand(-1, 4, -1), (1, 3)),
    "expand to the batch's size": (lambda x: x.expand(x.shape[0], 4, 3), (1, 3)),
    "unfold": (lambda x: x.unfold(1, 3, 1), (6,)),
    "im2col": (lambda x: F.unfold(x, 2, padding=1), (1, 3, 3)),
    "zero padding": (lambda x: F.pad(x, (1, 2, 0, 1)), (2, 3)),
    "constant padding": (lambda x: F.pad(x, (1, 2), value=3.0), (2, 3)),
    "cropping": (lambda x: F.pad(x, (-1, 2)), (2, 3)),
    "reflection 1d": (lambda x: F.pad(x, (2, 1), "reflect"), (1, 4)),
    "reflection 1d without channels": (lambda x: F.pad(x, (2, 1), "reflect"), (4,)),
    "reflection 2d": (nn.ReflectionPad2d((1, 2, 1, 0)), (1, 3, 3)),
    "reflection 3d": (nn.ReflectionPad3d(1), (1, 2, 2, 3)),
    "replication 1d": (nn.ReplicationPad1d((2, 1)), (2, 3)),
    "replication 2d": (nn.ReplicationPad2d((0, 3, 1, 1)), (1, 2, 3)),
    "replication 3d": (nn.ReplicationPad3d(1), (1, 2, 1, 2)),
    "circular 1d": (nn.CircularPad1d((2, 1)), (2, 3)),
    "circular 2d": (nn.CircularPad2d((1, 2, 3, 0)), (1, 3, 3)),
    "circular 3d": (nn.CircularPad3d(1), (1, 2, 1, 2)),
    "pixel_shuffle": (nn.PixelShuffle(2), (4, 2, 1)),
    "pixel_unshuffle": (nn.PixelUnshuffle(2), (1, 4, 2)),
    "channel_shuffle": (nn.ChannelShuffle(2), (4, 2, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_index_map_and_all_nine_norms_are_those_of_the_dense_matrix(name):
    """Mutations caught: counting repeated entries once, or taking padding for entries."""
    function, shape = CASES[name]
    head = Function(function)
    recording = record(head, input_shape=shape, dtype=torch.float32)
    dense = np.eye(math.prod(shape))
    bound = 1.0
    for index in recording.reachable()[1:]:
        node, source = recording.nodes[index], recording.nodes[recording.nodes[index].parents[0]]
        assert node.op in INDEXING
        reads = index_map(node, source)
        A = np.zeros((len(reads), math.prod(source.shape[1:])))
        A[np.flatnonzero(reads >= 0), reads[reads >= 0]] = 1.0
        dense = A @ dense
        bound *= operator_of(node, source=source, effort=EFFORT).table[1][1]
    truth = dense_matrix(head, shape)
    assert np.array_equal(dense, truth)
    assert bound == pytest.approx(dense_norm(truth, 2, 2), rel=1e-14)
    reads = np.where(truth.any(axis=1), truth.argmax(axis=1), -1)
    table = index_table(reads, num_in=truth.shape[1])
    for p, q in [*EXACT_PAIRS, (2, 2)]:
        value, norm = table[NORMS.index(p)][NORMS.index(q)], dense_norm(truth, p, q)
        assert norm * (1 - 1e-15) <= value <= norm * (1 + 1e-12), (p, q)
    # No entry is negative, so the ∞-ball's norms are taken at the vector of ones, and 2→1 is the transposed ∞→2.
    assert table[2][0] == truth.sum()
    assert table[2][1] == pytest.approx(np.linalg.norm(truth.sum(axis=1)), rel=1e-14)
    assert table[1][0] == pytest.approx(np.linalg.norm(truth.sum(axis=0)), rel=1e-14)


@pytest.mark.parametrize("name", CASES)
def test_heads_that_move_entries_are_certified_at_their_exact_norm(name):
    function, shape = CASES[name]
    head = Function(function)
    truth = dense_matrix(head, shape)
    for p, q in EXACT_PAIRS:
        assert certify(head, p=p, q=q, input_shape=shape).value == pytest.approx(dense_norm(truth, p, q), rel=1e-12)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.roll(13, 0),
        lambda x: x.roll(39),
        lambda x: x.roll((1, 13), (1, 0)),
        lambda x: x.roll(2, 0),
        lambda x: x.flip(0),
        lambda x: x.flip(0, 1),
        lambda x: x.rot90(1, (0, 1)),
        lambda x: x.rot90(2, (0, 1)),
        lambda x: x[torch.arange(13)],
        lambda x: x[torch.arange(12, -1, -1)],
        lambda x: x[torch.arange(12, -1, -1)[:, None], torch.arange(13)],
        lambda x: x[torch.arange(13) > 3],
        lambda x: x[torch.ones(13, dtype=torch.bool)],
        lambda x: x[x > 0],
        lambda x: x.index_select(0, torch.arange(12, -1, -1)),
        lambda x: x.permute(1, 0),
        lambda x: x.t(),
        lambda x: x.tril(),
        lambda x: x.diagonal(0, 0, 1),
        lambda x: x.unbind(0)[3],
        lambda x: x.split(1, 0)[0],
        lambda x: x[0],
        lambda x: x[-13:],
        lambda x: x[:13],
        lambda x: x.repeat(2, 1),
        lambda x: x.repeat(2, 1)[:13],
        lambda x: x.repeat_interleave(2, 0)[:13],
        lambda x: x.expand(13, 13, 13),
        lambda x: x.unfold(0, 13, 1),
        lambda x: F.pad(x.unsqueeze(1).transpose(0, 2), (13, 13), "circular"),
        lambda x: torch.cumsum(x, 0),
    ],
)
def test_operators_that_touch_the_batch_dimension_are_refused(function):
    """With as many numbers in a record as records in the recorded batch.

    Mutations caught: comparing shapes only; running roll, whose shift may be the batch size, on one batch size.
    """
    with pytest.raises(UnsupportedModuleError, match=r"batch|record"):
        certify(Function(function), p=1, q=1, input_shape=(13,))


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda mode: nn.Conv1d(2, 3, 3, padding=2, padding_mode=mode), (2, 5)),
        (lambda mode: nn.Conv2d(1, 2, 3, padding=(1, 2), stride=2, padding_mode=mode), (1, 4, 3)),
        (lambda mode: nn.Conv3d(1, 1, 2, padding=1, padding_mode=mode), (1, 2, 3, 2)),
        (lambda mode: nn.Conv1d(2, 2, 3, padding="same", dilation=2, groups=2, padding_mode=mode), (2, 5)),
    ],
    ids=["1d", "2d", "3d", "same"],
)
def test_padding_modes_of_convolutions_are_a_padding_before_a_convolution(layer, shape, mode):
    torch.manual_seed(0)
    head = layer(mode)
    recording = record(head, input_shape=shape, dtype=torch.float32)
    first, second = (recording.nodes[index] for index in recording.reachable()[1:3])
    assert second.op == "convolution"
    reads = index_map(first, recording.nodes[0])
    A = np.zeros((len(reads), math.prod(shape)))
    A[np.arange(len(reads)), reads] = 1.0
    conv = type(head)(
        head.in_channels,
        head.out_channels,
        head.kernel_size,
        stride=head.stride,
        dilation=head.dilation,
        groups=head.groups,
    )
    conv.load_state_dict(head.state_dict())
    W = dense_matrix(conv, first.shape[1:])
    truth = dense_matrix(head, shape)
    assert np.allclose(W @ A, truth, atol=1e-14)
    if len(shape) > 3:
        return
    for p, q in [*EXACT_PAIRS, (2, 2)]:
        bound = certify(head, p=p, q=q, input_shape=shape).value
        product = dense_norm(W, 2, 2) * dense_norm(A, 2, 2)
        assert dense_norm(truth, p, q) * (1 - 1e-12) <= bound
        if (p, q) == (2, 2):
            assert bound <= product * 1.2


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.pad(x, (1, 1), value=math.inf),
        lambda x: x.gather(1, torch.zeros(13, 2, dtype=torch.long)),
        lambda x: x.as_strided((13, 2), (3, 1)),
        lambda x: x.take(torch.arange(13)),
        lambda x: x.masked_fill(x > 0, 0.0),
        lambda x: torch.sort(x).values,
        lambda x: F.pad(x, (4, 0), "reflect"),
    ],
)
def test_what_is_no_known_index_operator_is_refused(function):
    with pytest.raises(UnsupportedModuleError, match=r"head \(Function\)"):
        certify(Function(function), p=1, q=1, input_shape=(3,))


def test_pieces_that_are_joined_again_move_as_the_whole():
    """Mutation caught: taking every piece of a split for the first."""
    head = Function(lambda x: torch.cat([*x.split([1, 2], 1), 3.0 * x.unbind(1)[2].unsqueeze(1)], 1))
    truth = dense_matrix(head, (3,))
    assert truth.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 3]]
    assert certify(head, p=math.inf, q=math.inf, input_shape=(3,)).value == 3.0
    assert certify(head, p=1, q=1, input_shape=(3,)).value >= 4.0


def test_a_head_that_keeps_nothing_of_its_input_does_not_move():
    assert certify(Function(lambda x: F.pad(x, (-3, 4))), p=1, q=1, input_shape=(3,)).value == 0.0


def test_a_single_entry_and_a_single_channel():
    for padding, norm in ((nn.ReplicationPad2d(1), 9.0), (nn.CircularPad2d(1), 9.0), (nn.ZeroPad2d(1), 1.0)):
        assert certify(padding, p=1, q=1, input_shape=(1, 1, 1)).value == norm
        assert certify(padding, p=2, q=2, input_shape=(1, 1, 1)).value == math.sqrt(norm)


@pytest.mark.parametrize("cut", [torch.triu, torch.tril])
@pytest.mark.parametrize("diagonal", [-1, 0, 5])
def test_a_triangle_cut_out_of_the_batch_is_refused(cut, diagonal):
    """Row 12 of a batch loses what rows 0 and 1 keep: x − ½·triu(x, −1) moves by 1 there, not by ½."""

    class Cut(nn.Module):
        def forward(self, x):
            return x - 0.5 * cut(x, diagonal)

    with pytest.raises(UnsupportedModuleError, match="triangle"):
        certify(Cut(), p=2, q=2, input_shape=6)
