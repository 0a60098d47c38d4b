"""Values that share memory, tensors and layers used more than once: what runs counts, or it is refused."""

import itertools
import math

import pytest
import torch
from random_operators import NINE, Function, true_norm
from torch import nn
from torch.nn import functional as F  # noqa: N812

from sensitivity import UnsupportedModuleError, certify

SIGNS = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=4)), dtype=torch.float64)


def bounds(head):
    return {(p, q): certify(head, p=p, q=q, input_shape=4).value for p, q in NINE}


def head_of(function):
    torch.manual_seed(0)
    return Function(function, a=nn.Linear(4, 4, bias=False), b=nn.Linear(4, 4, bias=False)).double()


def reached(head, p, q):
    """The largest ratio over pairs of records, far, close, along one entry and along every sign vector; really run."""
    random = torch.Generator().manual_seed(1)
    first = torch.randn(200, 4, generator=random, dtype=torch.float64)
    moves = torch.randn(200, 4, generator=random, dtype=torch.float64)
    moves[:40], moves[40:56] = torch.eye(4, dtype=torch.float64).repeat(10, 1), SIGNS
    best = 0.0
    for scale in (1e-3, 1.0, 30.0):
        with torch.no_grad():
            moved = head(first + scale * moves) - head(first.clone())
        ratios = torch.linalg.vector_norm(moved.reshape(200, -1), q, dim=1) / torch.linalg.vector_norm(
            scale * moves, p, dim=1
        )
        best = max(best, float(ratios.max()))
    return best


def name_alias(net, x):
    y = x
    y.mul_(3.0)
    return x + y


def copy_before_a_write(net, x):
    y = 1.0 * x
    z = y + 0.0
    y.mul_(7.0)
    return y + z


def returned_view(net, x):
    v = (1.0 * x).view(-1, 2, 2)
    v.mul_(5.0)
    return v


def through(alias):
    def function(net, x):
        y = 1.0 * x
        alias(y).mul_(7.0)
        return y

    return function


def added_to_the_input(net, x):
    x += net.a(x)
    return x + net.a(x)


def doubled_in_place(net, x):
    y = net.a(x)
    y += x
    y += y
    return y


def constant_overwritten_after_use(net, x):
    w = torch.full((4,), 6.0, dtype=x.dtype)
    y = x * w
    w.zero_()
    return y + x * w


def constant_written_through_a_view(net, x):
    w = torch.ones(4, dtype=x.dtype)
    w[:2].mul_(6.0)
    return x * w


def constant_as_out(net, x):
    w = torch.ones(4, dtype=x.dtype)
    torch.mul(w, 6.0, out=w)
    return x * w


def input_as_out(net, x):
    torch.mul(x, 3.0, out=x)
    return x


FOLLOWED = {
    "x + x": (lambda net, x: x + x, 2.0),
    "x − (−3)·x": (lambda net, x: torch.sub(x, x, alpha=-3), 4.0),
    "x.add_(x)": (lambda net, x: x.add_(x), 2.0),
    "cat of one tensor": (lambda net, x: torch.cat([x, x, x], 1), 3.0),
    "stack of one tensor": (lambda net, x: torch.stack([x, x], 1), 2.0),
    "overlapping pieces": (lambda net, x: torch.cat([x.view(-1, 4), x[:, :2]], 1), 2.0),
    "another name": (name_alias, 6.0),
    "a copy before a write": (copy_before_a_write, 8.0),
    "a view that is written and returned": (returned_view, 5.0),
    "the input as out": (input_as_out, 3.0),
    "relu in place on the input of a residual": (lambda net, x: F.relu(x, inplace=True) + x, 2.0),
    "identity shares memory": (through(nn.Identity()), 7.0),
    "dropout in eval mode shares memory": (through(lambda y: F.dropout(y, 0.5, training=False)), 7.0),
    "to() shares memory": (through(lambda y: y.to(y.dtype)), 7.0),
    "clone shares none": (through(lambda y: y.clone()), 1.0),
    "a copying reshape shares none": (through(lambda y: y.view(-1, 2, 2).transpose(1, 2).reshape(-1, 4)), 1.0),
    "padding by nothing shares none": (through(lambda y: F.pad(y, (0, 0))), 1.0),
    "a constant overwritten after its use": (constant_overwritten_after_use, 6.0),
    "a constant written through a view": (constant_written_through_a_view, 6.0),
    "a constant as out": (constant_as_out, 6.0),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_shared_memory_that_is_followed_has_its_exact_norm(name):
    """Hand work for 1→1; all nine against pairs. Mutations caught: reading a value before or after its overwriting."""
    function, truth = FOLLOWED[name]
    head = head_of(function)
    found = bounds(head)
    assert found[1, 1] == pytest.approx(truth, rel=1e-12)
    for (p, q), bound in found.items():
        assert bound >= reached(head, p, q) * (1 - 1e-12), (p, q)


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: F.relu_(net.a(x)) + x,
        added_to_the_input,
        doubled_in_place,
        lambda net, x: net.a(net.a(net.a(x))),
        lambda net, x: net.a(x) + net.a(x.flip(1)),
        lambda net, x: net.a(torch.relu(net.a(x))) - net.b(net.a(x)),
        lambda net, x: F.linear(F.linear(x, net.a.weight), net.a.weight.t()),
        lambda net, x: F.linear(x, net.a.weight[:2]) + F.linear(x, net.a.weight[2:]),
    ],
)
def test_layers_and_weights_used_more_than_once_count_each_time(function):
    """Mutation caught: bounding a module once however often it runs."""
    head = head_of(function)
    for (p, q), bound in bounds(head).items():
        found = reached(head, p, q)
        assert found * (1 - 1e-12) <= bound <= 12.0 * found, (p, q)


def test_weights_shared_between_layers_move_together():
    """Two layers with one parameter, and a tied transposed one, against their dense products."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4, bias=False).double(), nn.Linear(4, 4, bias=False).double()
    second.weight = first.weight
    W = first.weight.detach().numpy()
    tied = Function(lambda net, x: F.linear(net.a(x), net.a.weight.t()), a=first)
    for head, A in ((nn.Sequential(first, second), W @ W), (tied, W.T @ W)):
        for (p, q), bound in bounds(head).items():
            assert true_norm(A, p, q) * (1 - 1e-13) <= bound <= 1.3 * true_norm(A, p, q), (p, q)
    with torch.no_grad():
        before = bounds(nn.Sequential(first, second))[2, 2]
        first.weight.mul_(3.0)
    assert bounds(nn.Sequential(first, second))[2, 2] == pytest.approx(9.0 * before, rel=1e-6)


def view_read_after_its_base_was_written(net, x):
    y = 1.0 * x
    v = y.view(-1, 2, 2)
    y.mul_(5.0)
    return v


def other_piece(net, x):
    first, second = (1.0 * x).chunk(2, 1)
    first.mul_(9.0)
    return second


def pieces_joined(net, x):
    first, second = (1.0 * x).split(2, 1)
    torch.relu_(first)
    return torch.cat([first, 5.0 * second], 1)


def entry_set(net, x):
    y = 1.0 * x
    y[:, 0] = 8.0 * x[:, 1]
    return y


def input_entry_set(net, x):
    x[:, 0] = 9.0 * x[:, 0]
    return x


def copied_into(net, x):
    y = torch.zeros_like(x)
    y.copy_(7.0 * x)
    return y


def out_of(operator):
    def function(net, x):
        y = torch.empty(x.shape[0], 4, dtype=x.dtype)
        operator(x, y)
        return y

    return function


REFUSED = {
    "base written, view read": view_read_after_its_base_was_written,
    "view written, base read": through(lambda y: y.view(-1, 2, 2)),
    "transpose": through(lambda y: y.view(-1, 2, 2).transpose(1, 2)),
    "diagonal": through(lambda y: y.view(-1, 2, 2).diagonal(0, 1, 2)),
    "select": through(lambda y: y.select(1, 2)),
    "narrow": through(lambda y: y.narrow(1, 0, 2)),
    "unsqueeze": through(lambda y: y.unsqueeze(1)),
    "unbind": through(lambda y: y.unbind(1)[0]),
    "chunk": through(lambda y: y.chunk(2, 1)[1]),
    "as_strided": through(lambda y: torch.as_strided(y, (y.shape[0], 2), (4, 1))),
    "data": through(lambda y: y.data),
    "detach": through(lambda y: y.detach()),
    "contiguous, which copies for some layouts": through(lambda y: y.contiguous()),
    "another piece": other_piece,
    "pieces joined again": pieces_joined,
    "an entry set": entry_set,
    "an entry of the input set": input_entry_set,
    "copy_": copied_into,
    "out of add": out_of(lambda x, y: torch.add(x, x, alpha=4, out=y)),
    "out of clamp": out_of(lambda x, y: torch.clamp(x, min=0.0, out=y)),
    "out of mm": out_of(lambda x, y: torch.mm(x, torch.eye(4, dtype=x.dtype) * 6.0, out=y)),
    "out of cat": out_of(lambda x, y: torch.cat([x[:, :2], 2.0 * x[:, 2:]], 1, out=y)),
    "a product with itself": lambda net, x: x * x,
    "many at once": lambda net, x: torch._foreach_mul_([x], [7.0]) or x,
    "index_add": lambda net, x: x.index_add(1, torch.tensor([0, 0]), x[:, :2]),
    "lerp": lambda net, x: (1.0 * x).lerp_(9.0 * x, 0.5),
}


@pytest.mark.parametrize("name", REFUSED)
def test_shared_memory_that_is_not_followed_is_refused_in_one_line(name):
    """Mutation caught: certifying the value as it was before another name overwrote it."""
    head = head_of(REFUSED[name])
    for p, q in ((1, 1), (math.inf, 2)):
        with pytest.raises(UnsupportedModuleError) as refusal:
            certify(head, p=p, q=q, input_shape=4)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["squeeze_", "unsqueeze_", "transpose_", "swapaxes_", "swapdims_"])
def test_a_shape_changed_in_place_is_refused(name):
    """Mutation caught: the head goes on seeing the old sizes, and another branch is certified (1 for 4, 4 or 100)."""

    def function(net, x):
        y = (1.0 * x).view(-1, 1, 4)
        getattr(y, name)(*((1, 2) if name.startswith(("transpose", "swap")) else (1,)))
        return y * float(y.shape[1]) if y.dim() == 3 else 100.0 * y

    assert reached(head_of(function), 1, 1) > 3.9
    with pytest.raises(UnsupportedModuleError, match="shape"):
        certify(head_of(function), p=1, q=1, input_shape=4)
