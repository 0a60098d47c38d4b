"""What input entries reach, and that no entry is led by one whose bound is too small for it."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import sparse
from torch import nn

from sensitivity import UnsupportedModuleError
from sensitivity.capturing.capture import record
from sensitivity.composing.boxes import boxes_of, local_slopes
from sensitivity.composing.linear_map import Work
from sensitivity.composing.network import build_network, with_slopes
from sensitivity.composing.norm_dp import compose
from sensitivity.composing.relaxed import program_of
from sensitivity.operators.operator import Effort
from sensitivity.semidefinite.constraints import Slopes, WholeNorm, Windows
from sensitivity.semidefinite.footprints import Footprint, Grids, Reach, leaders
from sensitivity.semidefinite.lifting import multipliers
from sensitivity.semidefinite.program import Program, restricted
from sensitivity.semidefinite.response import columns_up

EFFORT = Effort(dense_entries=20_000, symbol_flops=2e6)
Box = tuple[np.ndarray, np.ndarray]


def program_for(head: nn.Module, shape: tuple[int, ...], box: Box | None = None) -> tuple[Program, Grids]:
    recording = record(head.double().eval(), input_shape=shape, dtype=torch.float64)
    composed = compose(recording, p=2, q=2, effort=EFFORT, same_norm=False)
    slopes = {}
    if box is not None:
        low, high = (side.reshape(-1) for side in box)
        slopes = local_slopes(recording, boxes_of(recording, tables=composed.tables, low=low, high=high))
    network = build_network(recording, tables=composed.tables, joint=composed.joint, work=Work(flops=1e10))
    program, grids, _ = program_of(with_slopes(network, slopes))
    return program, grids


def dense(A: sparse.csr_array | np.ndarray) -> np.ndarray:
    return A if isinstance(A, np.ndarray) else A.toarray()


class Secants:
    """One column of a program for chosen secants: ends of slopes, one entry per window, a direction per whole norm."""

    def __init__(self, program: Program, random: np.random.Generator) -> None:
        self.program, self.random = program, random
        self.reads = [{i: dense(A) for i, A in terms.items()} for terms in program.reads]

    def largest(self, *, q: float, restarts: int = 3) -> float:
        """What coordinate ascent reaches: a lower bound on the largest ‖y‖_q."""
        return max((self._climbed(q) for _ in range(restarts)), default=0.0)

    def _climbed(self, q: float) -> float:
        chosen = [self._start(constraint) for constraint in self.program.constraints]
        best = self._value(chosen, q)
        for _ in range(2):
            for k, constraint in enumerate(self.program.constraints):
                for o in range(0 if isinstance(constraint, WholeNorm) else constraint.size):
                    for option in self._options(constraint, o):
                        before, chosen[k][o] = chosen[k][o], option
                        value = self._value(chosen, q)
                        best, chosen[k][o] = (value, option) if value > best else (best, before)
        return best

    def _options(self, constraint: object, o: int) -> list[int]:
        if isinstance(constraint, Slopes):
            return [0, 1]
        assert isinstance(constraint, Windows)
        entries = constraint.pattern.indices[constraint.pattern.indptr[o] : constraint.pattern.indptr[o + 1]]
        return [*entries.tolist(), *([-1] if constraint.counts[o] > entries.size else [])]

    def _start(self, constraint: object) -> np.ndarray:
        if isinstance(constraint, WholeNorm):
            return self.random.normal(size=constraint.size)
        options = [self._options(constraint, o) for o in range(constraint.size)]
        return np.array([self.random.choice(row) for row in options], dtype=np.int64)

    def _value(self, chosen: list[np.ndarray], q: float) -> float:
        written = [np.ones(1)]
        for k, terms in enumerate(self.reads):
            last = k == len(chosen)
            size = self.program.num_out if last else self.program.constraints[k].num_read
            read = sum((A @ written[i] for i, A in terms.items()), np.zeros(size))
            if last:
                break
            constraint = self.program.constraints[k]
            if isinstance(constraint, Slopes):
                written.append(np.where(chosen[k], constraint.high, constraint.low) * read)
            elif isinstance(constraint, Windows):
                written.append(np.append(read, 0.0)[chosen[k]])
            else:
                assert isinstance(constraint, WholeNorm)
                size = max(float(np.linalg.norm(chosen[k])), 1e-300)
                written.append(constraint.factor * float(np.linalg.norm(read)) * chosen[k] / size)
        return float(np.linalg.norm(read, ord=q))


def assert_led_from_above(program: Program, grids: Grids, *, seed: int, most: int = 4) -> int:
    """For some led entries: the leader's bound is at or above what secants of the entry itself reach."""
    random = np.random.default_rng(seed)
    reach = Reach(program)
    footprints = [reach.footprint(column) for column in range(program.num_in)]
    wider = replace(program, constraints=tuple(constraint.vanishing() for constraint in program.constraints))
    count = 0
    for leading in (program, wider):  # entries of the program itself are bounded in both cases
        leader = leaders(leading, grids, footprints)
        assert (leader[leader] == leader).all()
        led = np.flatnonzero(leader != np.arange(program.num_in))
        count = max(count, len(led))
        for column in random.permutation(led)[:most]:
            own = restricted(program, footprints[column].kept, rows=footprints[column].rows)
            first = footprints[leader[column]]
            other = restricted(leading, first.kept, rows=first.rows)
            for q in (1.0, 2.0):
                reached = Secants(own, random).largest(q=q)
                if reached == 0.0:
                    continue
                bound = columns_up(other, multipliers(other, p=2.0, q=q, steps=40, fixed=True), q=q)
                assert bound is None or bound[0] >= reached * (1 - 1e-12)
    return count


CONVS = {
    "two convolutions": (
        nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv1d(2, 1, 3, padding=1)),
        (1, 12),
    ),
    "stride 2 of an odd size": (
        nn.Sequential(nn.Conv1d(2, 2, 3, stride=2, padding=1), nn.ReLU(), nn.Conv1d(2, 2, 2)),
        (2, 13),
    ),
    "no padding, dilation": (
        nn.Sequential(nn.Conv1d(1, 2, 3, dilation=2), nn.LeakyReLU(-0.4), nn.Conv1d(2, 1, 3)),
        (1, 24),
    ),
    "two dimensions, groups": (
        nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, groups=2), nn.ReLU(), nn.Conv2d(2, 1, (1, 2), stride=(1, 2))),
        (2, 5, 8),
    ),
    "three dimensions": (nn.Sequential(nn.Conv3d(1, 1, 2), nn.ReLU(), nn.Conv3d(1, 1, (1, 2, 1))), (1, 4, 8, 5)),
    "slopes without 0": (
        nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.LeakyReLU(0.3), nn.Conv1d(2, 1, 3, padding=1)),
        (1, 12),
    ),
    "transposed": (
        nn.Sequential(nn.ConvTranspose1d(1, 1, 3), nn.ReLU(), nn.Conv1d(1, 1, 3, padding=1)),
        (1, 12),
    ),
    "maximum pool": (
        nn.Sequential(nn.Conv2d(1, 1, (1, 2)), nn.ReLU(), nn.MaxPool2d((1, 3), 1), nn.Conv2d(1, 1, (2, 2))),
        (1, 4, 20),
    ),
    "average pool": (
        nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.ReLU(), nn.AvgPool1d(2), nn.Conv1d(2, 1, 3, padding=1)),
        (1, 16),
    ),
}


@pytest.mark.parametrize("name", CONVS)
def test_inner_entries_lead_and_are_bounded_from_above(name: str) -> None:
    """Catches: shifts that leave a grid, strides of another layer, slopes without 0 treated as if they had it, windows."""
    torch.manual_seed(3)
    head, shape = CONVS[name]
    for layer in head:
        if hasattr(layer, "weight"):
            layer.reset_parameters()
    program, grids = program_for(head, shape)
    led = assert_led_from_above(program, grids, seed=1)
    assert led >= shape[0] * 2  # and most of a grid is led: sharing that never happens would pass the test above


def random_net(seed: int) -> tuple[nn.Module, tuple[int, ...], Box | None]:
    """Everything that could spoil shift invariance: borders, odd sizes, weights that agree by accident, local slopes."""
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    dims = int(random.choice([1, 1, 2, 2, 3]))
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    average, maximum = ((nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d))
    shape = (
        int(random.integers(1, 3)),
        *(int(n) for n in random.integers(*((6, 15), (4, 8), (2, 5))[dims - 1], size=dims)),
    )
    channels, layers = shape[0], list[nn.Module]()
    for _ in range(int(random.integers(2, 4))):
        kind, size = random.integers(8), int(random.integers(1, 4))
        if kind < 5:
            layer = convolution(
                channels,
                channels if random.random() < 0.2 else 2,
                size,
                stride=int(random.choice([1, 1, 2, 3])),
                padding=int(random.integers(0, 2)),
                dilation=int(random.choice([1, 1, 2])),
                padding_mode=str(random.choice(["zeros", "zeros", "zeros", "circular", "reflect", "replicate"])),
            )
        elif kind == 5:
            layer = transposed(channels, 2, size, stride=int(random.integers(1, 3)))
        elif kind == 6:
            layer = average[dims - 1](
                size, stride=int(random.integers(1, 3)), padding=size // 2, ceil_mode=bool(seed % 2)
            )
        else:
            layer = maximum[dims - 1](
                size, stride=int(random.integers(1, 3)), padding=size // 2, ceil_mode=bool(seed % 2)
            )
        if hasattr(layer, "weight"):
            channels = layer(torch.zeros(1, channels, *[9] * dims)).shape[1]
            choice = random.integers(4)
            if choice == 0:
                layer.weight.data *= torch.rand_like(layer.weight) < 0.5
            elif choice == 1:
                layer.weight.data = torch.randint(-1, 2, layer.weight.shape).float()
            elif choice == 2:
                layer.weight.data.fill_(0.5)
        layers.append(layer)
        activation = (nn.ReLU(), nn.LeakyReLU(-0.5), nn.LeakyReLU(0.3), nn.GELU(), nn.PReLU(channels))[
            random.integers(5)
        ]
        if isinstance(activation, nn.PReLU):
            activation.weight.data = torch.randn(channels)
        layers.append(activation)
    head = nn.Sequential(*layers)
    if seed % 5 == 0:
        head = nn.Sequential(*head, nn.Flatten(), nn.Linear(head(torch.zeros(1, *shape)).numel(), 3))
    box = None
    if seed % 4 == 1:
        low = random.normal(size=shape)
        box = (low, low + random.random(shape))
    return head, shape, box


def random_net_program(seed: int) -> tuple[Program, Grids]:
    """The first of many nets whose layers fit their images and that shares a bound."""
    for attempt in range(seed, seed + 60_000, 199):
        try:
            program, grids = program_for(*random_net(attempt))
        except (RuntimeError, UnsupportedModuleError):  # the layers shrank the image to nothing
            continue
        shared = np.unique(leaders(program, grids, footprints_of(program))).size < program.num_in
        if program.constraints and shared:
            return program, grids
    raise AssertionError("no net among 300 shares a bound")


@pytest.mark.parametrize("seed", range(28))
def test_no_led_entry_of_a_random_net_exceeds_its_leader(seed: int) -> None:
    """Catches: an axis not checked, sizes not divisible by strides, per-entry slopes taken as one, windows at borders."""
    program, grids = random_net_program(seed)
    assert_led_from_above(program, grids, seed=seed, most=2)


@pytest.mark.parametrize("seed", range(8))
def test_a_footprint_is_all_that_an_entry_can_move(seed: int) -> None:
    """Against dense products of ones: what is left out is 0 for every secant, and stays out of the restricted program."""
    program, _ = random_net_program(seed + 100)
    reach = Reach(program)
    for column in range(0, program.num_in, 7):
        found = reach.footprint(column)
        moved = [np.eye(program.num_in)[column] > 0]
        for k, terms in enumerate(program.reads):
            count = len(program.constraints)
            size = program.num_out if k == count else program.constraints[k].num_read
            read = np.zeros(size, dtype=bool)
            for i, A in terms.items():
                read |= (dense(A) != 0.0) @ moved[i]
            assert set(np.flatnonzero(read)) <= set(found.rows[k].tolist())
            if k == count:
                break
            constraint = program.constraints[k]
            if isinstance(constraint, Windows):
                moved.append(constraint.pattern.toarray() @ read > 0)
            else:
                moved.append(read if isinstance(constraint, Slopes) else np.full(constraint.size, read.any()))
            assert set(np.flatnonzero(moved[-1])) <= set(found.kept[k + 1].tolist())
        assert found.size == sum(part.size for part in (*found.kept, *found.rows))


def test_footprints_that_reach_the_same_share_a_key() -> None:
    program = Program(
        num_in=4,
        num_out=2,
        reads=(
            {0: sparse.csr_array(np.array([[1.0, 2.0, 0.0, 0.0], [0.0, 0.0, 3.0, 0.0]]))},
            {1: sparse.csr_array(np.eye(2))},
        ),
        constraints=(Slopes(low=np.zeros(2), high=np.ones(2)),),
    )
    reach = Reach(program)
    keys = [reach.footprint(column).key for column in range(4)]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
    assert [part.tolist() for part in reach.footprint(3).kept] == [[3], []]
    assert [part.tolist() for part in reach.footprint(2).rows] == [[1], [1]]


def chain(W: np.ndarray, V: np.ndarray, slopes: Slopes, shapes: tuple[tuple[int, ...], ...]) -> tuple[Program, Grids]:
    program = Program(
        num_in=W.shape[1],
        num_out=V.shape[0],
        reads=({0: sparse.csr_array(W)}, {1: sparse.csr_array(V)}),
        constraints=(slopes,),
    )
    return program, Grids(x=shapes[0], u=(shapes[1], shapes[2]), z=(shapes[1],))


def footprints_of(program: Program) -> list[Footprint]:
    reach = Reach(program)
    return [reach.footprint(column) for column in range(program.num_in)]


def diagonal(n: int) -> tuple[np.ndarray, Slopes]:
    return np.eye(n), Slopes(low=np.zeros(n), high=np.ones(n))


def test_equal_entries_share_and_one_that_differs_ends_all_sharing() -> None:
    """Six pixels that are scaled alike are one; a single other weight, slope, or explicit zero elsewhere is seen."""
    eye, slopes = diagonal(6)
    shapes = ((1, 6), (1, 6), (1, 6))
    alike = chain(eye, eye, slopes, shapes)
    assert np.unique(leaders(*alike, footprints_of(alike[0]))).size == 1
    for place in range(6):
        other = eye.copy()
        other[place, place] = 1.0 + 1e-15 if place else 2.0
        for W, V in ((other, eye), (eye, other)):
            made = chain(W, V, slopes, shapes)
            assert np.unique(leaders(*made, footprints_of(made[0]))).size == 6
        high = np.ones(6)
        high[place] = 1.5
        made = chain(eye, eye, Slopes(low=np.zeros(6), high=high), shapes)
        assert np.unique(leaders(*made, footprints_of(made[0]))).size == 6


def test_explicit_zeros_are_entries_like_others() -> None:
    """A stored 0 changes what a column reaches, never what its bound must cover."""
    eye, slopes = diagonal(4)
    program, grids = chain(eye, eye, slopes, ((1, 4), (1, 4), (1, 4)))
    rows, columns = np.array([0, 1, 2, 3, 0]), np.array([0, 1, 2, 3, 2])
    stored = sparse.csr_array((np.array([1.0, 1.0, 1.0, 1.0, 0.0]), (rows, columns)), shape=(4, 4))
    assert stored.nnz == 5
    with_zero = Program(num_in=4, num_out=4, reads=({0: stored}, program.reads[1]), constraints=program.constraints)
    found = footprints_of(with_zero)
    assert found[2].rows[0].tolist() == [0, 2]
    leader = leaders(with_zero, grids, found)
    for column in range(4):
        assert set(found[leader[column]].rows[0].tolist()) != set() and found[leader[column]].size >= 4  # noqa: PT018


def test_other_channels_do_not_lead() -> None:
    """Two channels, weights 1 and 5: pixels follow pixels of their own channel alone."""
    W = np.diag(np.repeat([1.0, 5.0], 4))
    _, slopes = diagonal(8)
    made = chain(W, np.eye(8), slopes, ((2, 4), (2, 4), (2, 4)))
    leader = leaders(*made, footprints_of(made[0]))
    assert [int(c) // 4 for c in leader] == [0] * 4 + [1] * 4
    assert np.unique(leader).size == 2


def test_a_larger_footprint_leads_only_where_nothing_need_move() -> None:
    """[[1, 1], …] bidiagonal: column 0 moves one row, others two. With slopes in [−1, 1] column 0 may follow; with
    slopes in [1, 2] it must not, since a second row that cannot stand still may cancel what the first one does."""
    n = 5
    W = np.eye(n) + np.diag(-np.ones(n - 1), 1)
    V = np.eye(n) + np.diag(np.ones(n - 1), 1)
    shapes = ((1, n), (1, n), (1, n))
    moving = chain(W, V, Slopes(low=np.ones(n), high=np.full(n, 1.01)), shapes)
    leader = leaders(*moving, footprints_of(moving[0]))
    assert leader[0] == 0
    still = chain(W, V, Slopes(low=-np.ones(n), high=np.ones(n)), shapes)
    assert leaders(*still, footprints_of(still[0]))[0] != 0
    assert_led_from_above(*moving, seed=0)
    assert_led_from_above(*still, seed=0)


def test_an_entry_that_would_leave_the_grid_follows_nobody() -> None:
    """Five taps on four pixels: columns 1 and 2 both reach all four, but the shift of one to the other leaves the grid,
    and the tap of 9 touches column 2 alone."""
    taps = [0.1, 1.0, 1.0, 1.0, 9.0]
    W = np.array([[taps[r - c + 2] if abs(r - c) < 3 else 0.0 for r in range(4)] for c in range(4)])
    _, slopes = diagonal(4)
    for matrix in (W, W.T):
        made = chain(matrix, np.eye(4), slopes, ((1, 4), (1, 4), (1, 4)))
        assert_led_from_above(*made, seed=0)
        leader = leaders(*made, footprints_of(made[0]))
        assert leader[1] == 1
        assert leader[2] == 2


def test_windows_at_irregular_places_end_all_sharing() -> None:
    """Windows of three entries each, one of them with its middle entry elsewhere: the same counts, but no shifts."""
    pattern = np.zeros((4, 7))
    for o, entries in enumerate(([0, 1, 3], [1, 2, 4], [2, 4, 5], [3, 4, 6])):
        pattern[o, entries] = 1.0
    program = Program(
        num_in=7,
        num_out=4,
        reads=({0: sparse.csr_array(np.eye(7))}, {1: sparse.csr_array(np.eye(4))}),
        constraints=(Windows(pattern=sparse.csr_array(pattern), counts=np.full(4, 3.0)),),
    )
    grids = Grids(x=(1, 7), u=((1, 7), (1, 4)), z=((1, 4),))
    assert leaders(program, grids, footprints_of(program)).tolist() == list(range(7))


def test_a_skip_is_reached_whatever_the_branch_beside_it_does() -> None:
    """Column 0 reaches y₀ directly and nothing else; column 1 reaches it through the knot alone."""
    program = Program(
        num_in=2,
        num_out=2,
        reads=(
            {0: sparse.csr_array(np.array([[0.0, 1.0]]))},
            {0: sparse.csr_array(np.array([[1.0, 0.0], [0.0, 0.0]])), 1: sparse.csr_array(np.array([[1.0], [1.0]]))},
        ),
        constraints=(Slopes(low=np.zeros(1), high=np.ones(1)),),
    )
    first, second = footprints_of(program)
    assert [part.tolist() for part in (*first.rows, *first.kept)] == [[], [0], [0], []]
    assert [part.tolist() for part in (*second.rows, *second.kept)] == [[0], [0, 1], [1], [0]]


@pytest.mark.parametrize("missing", ["grids", "rank"])
def test_without_shapes_every_entry_leads_itself(missing: str) -> None:
    eye, slopes = diagonal(6)
    program, grids = chain(eye, eye, slopes, ((1, 6), (1, 6), (1, 6)))
    other = None if missing == "grids" else Grids(x=(1, 6), u=((1, 6), (6,)), z=((1, 6),))
    assert leaders(program, other, footprints_of(program)).tolist() == list(range(6))
    assert np.unique(leaders(program, grids, footprints_of(program))).size == 1
    assert math.prod(grids.all[0]) == 6
