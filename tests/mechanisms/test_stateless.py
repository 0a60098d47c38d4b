"""run_stateless: what a block keeps of a record is found, wherever it keeps it."""

import array
import functools
import io
import pathlib
import random
import struct
import threading
import types
from collections import deque

import numpy as np
import pytest
import torch
import torch.nn.utils.prune
from torch import nn

from asfl_privacy.mechanisms import run_stateless
from asfl_privacy.mechanisms.stateless import holdings_digest

MEMORY = {"last": 0.0}
COUNT = 0


class Helper:
    """Something of the user's that is no module."""

    kept = 0.0


class Named(str):
    """Text that can carry attributes."""


class OwnPath(pathlib.PurePosixPath):
    """A path that carries more than its text."""


class OwnRandom(random.Random):
    """A generator that carries more than its state."""


class Keeper(nn.Module):
    """Adds what it kept of the last batch, and keeps the mean of this one where ``keep`` puts it."""

    kept_by_class = 0.0

    def __init__(self, keep):
        super().__init__()
        self.keep = keep
        self.plain = self.chosen = None
        self.register_buffer("hidden", torch.zeros(1), persistent=False)
        self.weight = nn.Parameter(torch.zeros(1))
        self.items = [1, {"deep": (2, deque([3.0]))}]
        self.array = np.zeros(2)
        self.bare = types.SimpleNamespace(value=0.0)
        self.bank = [torch.zeros(1), torch.ones(1)]
        self.chosen = self.bank[0]
        self.loose = [nn.BatchNorm1d(3)]
        self.call = functools.partial(max, [0.0])
        self.one, self.zero = [], []
        self.pair, self.same = (1, 2), tuple(range(1, 3))
        self.bits, self.pairs = [self.zero] * 4, [self.pair] * 4
        self.view = torch.zeros(2)[:1]
        self.helper = Helper()
        self.stream, self.window, self.append = io.BytesIO(), np.zeros(8)[:2], [].append
        self.failure = ValueError(0.0)
        self.folder, self.coin = OwnPath("a"), OwnRandom(0)

    def forward(self, x):
        self.keep(self, float(x.detach().mean()))
        return x


def in_class(module, mean):
    Keeper.kept_by_class = mean


def in_global_dict(module, mean):
    MEMORY["last"] = mean


def in_global_number(module, mean):
    global COUNT
    COUNT += 1


def in_a_closure():
    last = [0.0]

    def keep(module, mean):
        last[0] = mean

    return keep


def nan_with(number):
    return struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000000 | number))[0]


def in_place(module, mean):
    module.weight.data.fill_(mean)


PLACES = {
    "plain attribute": lambda module, mean: setattr(module, "plain", mean),
    "plain tensor": lambda module, mean: setattr(module, "plain", torch.tensor(mean)),
    "new attribute": lambda module, mean: setattr(module, "late", mean),
    "buffer that is not in the state_dict": lambda module, mean: module.hidden.fill_(mean),
    "parameter, past its version counter": in_place,
    "attribute of a parameter": lambda module, mean: setattr(module.weight, "last", mean),
    "deep container": lambda module, mean: module.items[1]["deep"][1].append(mean),
    "array": lambda module, mean: module.array.fill(mean),
    "object": lambda module, mean: setattr(module.bare, "value", mean),
    "choice among known tensors": lambda module, mean: setattr(module, "chosen", module.bank[mean > 0.0]),
    "module that is no submodule": lambda module, mean: module.loose[0].running_mean.fill_(mean),
    "which of two empty lists": lambda module, mean: module.bits.__setitem__(0, module.one),
    "which of two equal tuples": lambda module, mean: module.pairs.__setitem__(0, module.same),
    "two names for one list": lambda module, mean: setattr(module, "one", module.zero),
    "bits of a NaN": lambda module, mean: setattr(module, "plain", nan_with(1 if module.plain is None else 2)),
    "bits of a NaN in a tuple": lambda module, mean: setattr(module, "plain", (nan_with(3),)),
    "attribute of text": lambda module, mean: setattr(module, "plain", Named("a")),
    "class of a helper": lambda module, mean: setattr(Helper, "kept", mean),
    "gradient": lambda module, mean: setattr(module.weight, "grad", torch.full((1,), mean)),
    "flag of a tensor": lambda module, mean: module.bank[0].requires_grad_(True),
    "memory beside a view": lambda module, mean: module.view.as_strided((1,), (1,), 1).fill_(mean),
    "stride of a single entry": lambda module, mean: setattr(module, "view", torch.zeros(2).as_strided((1,), (7,))),
    "sign bit": lambda module, mean: setattr(module, "view", torch.full((1,), -0.0)),
    "array of Python's own": lambda module, mean: setattr(module, "plain", array.array("d", [mean])),
    "slice": lambda module, mean: setattr(module, "plain", slice(int(8 * mean))),
    "room of a queue": lambda module, mean: setattr(module, "plain", deque(maxlen=3)),
    "constant of a function": lambda module, mean: setattr(module, "plain", eval(f"lambda: {mean}")),
    "stream of bytes": lambda module, mean: module.stream.write(b"1"),
    "array beside a window": lambda module, mean: module.window.base.fill(mean),
    "list of a bound method": lambda module, mean: module.append(mean),
    "arguments of an error": lambda module, mean: setattr(module.failure, "args", (mean,)),
    "attribute of an own path": lambda module, mean: setattr(module.folder, "last", mean),
    "attribute of an own generator": lambda module, mean: setattr(module.coin, "last", mean),
    "name like a mark of the compiler": lambda module, mean: setattr(module.weight, "_dynamo_last", mean),
    "mark of the compiler": lambda module, mean: setattr(module.weight, "_dynamo_static_input_type", mean),
    "hook of a parameter": lambda module, mean: module.weight.register_hook(functools.partial(max, mean)),
    "partial": lambda module, mean: module.call.args[0].append(mean),
    "hook": lambda module, mean: module.register_forward_hook(lambda *_: None),
    "class": in_class,
    "global container": in_global_dict,
    "global number": in_global_number,
    "closure": in_a_closure(),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_block_that_keeps_something_is_refused_by_name(place):
    """Catches: comparing the state_dict alone, types alone, or attributes without what they hold."""
    module = nn.Sequential()
    module.add_module("first", nn.ReLU())
    module.add_module("keeper", nn.Sequential(Keeper(PLACES[place])))
    with pytest.raises(ValueError, match="head block keeper changed itself while running") as caught:
        run_stateless(module.eval(), torch.rand(4, 3))
    assert "\n" not in str(caught.value)


def test_a_module_without_blocks_is_refused_too():
    with pytest.raises(ValueError, match="the head changed itself"):
        run_stateless(Keeper(PLACES["plain attribute"]), torch.rand(4, 3))


def test_batch_norm_is_refused_in_train_mode_only():
    module = nn.Sequential(nn.BatchNorm1d(3))
    x = torch.rand(4, 3)
    assert torch.equal(run_stateless(module.eval(), x), module(x).detach())
    with pytest.raises(ValueError, match="head block 0"):
        run_stateless(module.train(), x)


def test_modules_that_keep_nothing_run_as_they_are():
    """Catches: refusing what does not change: NaN, shared blocks, cycles, parametrized weights, in-place layers."""
    shared = nn.Linear(3, 3)
    keeper = Keeper(lambda module, mean: None)
    keeper.plain, keeper.hidden[0] = float("nan"), float("nan")
    keeper.items.append(keeper.items)
    module = nn.Sequential(
        shared, nn.ReLU(inplace=True), keeper, shared, nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    ).eval()
    x = torch.randn(4, 3)
    before = x.clone()
    for _ in range(3):
        found = run_stateless(module, x)
        assert torch.equal(found, module(before.clone()).detach())
        assert not found.requires_grad
    assert torch.equal(x, before)


class Holder(nn.Module):
    """Uses what it holds in ways that leave traces, none of them of a record."""

    def __init__(self):
        super().__init__()
        self.generators = [torch.Generator(), np.random.default_rng(0), random.Random(0)]
        self.path = pathlib.Path("some") / "folder"
        self.lock = threading.Lock()
        self.linear = nn.utils.prune.l1_unstructured(nn.Linear(3, 3), "weight", amount=1)

    def forward(self, x):
        torch.rand(1, generator=self.generators[0])
        self.generators[1].random(), self.generators[2].random(), str(self.path), hash(self.path)
        with self.lock:
            return self.linear(x)


def test_ordinary_things_that_a_head_holds_do_not_cost_it_its_run():
    """Catches: comparing addresses in a pickle, text that a path keeps of itself, and flags that no_grad decides."""
    module = nn.Sequential(Holder(), nn.MultiheadAttention(3, 1).out_proj, nn.GRUCell(3, 3)).eval()
    for _ in range(20):
        run_stateless(module, torch.rand(4, 3))
        assert holdings_digest(module) == holdings_digest(module)


def test_inputs_survive_a_first_layer_in_place():
    x = torch.tensor([[-1.0, 2.0]])
    assert run_stateless(nn.ReLU(inplace=True), x).tolist() == [[0.0, 2.0]]
    assert x.tolist() == [[-1.0, 2.0]]
