"""Certificates against heads that change where no fingerprint of parameters and attributes looks."""

import dataclasses
import functools
from collections import OrderedDict, deque
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from sensitivity import StaleCertificateError, UnsupportedModuleError, certify


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.act = function

    def forward(self, x):
        return self.act(x)


class Reading(nn.Module):
    """Multiplies by what `read` finds in `config`."""

    def __init__(self, config, read):
        super().__init__()
        self.config, self.read = config, read

    def forward(self, x):
        return x * self.read(self.config)


class Gain:
    def __init__(self, gain):
        self.gain = gain

    def apply(self, x):
        return x * self.gain


@dataclasses.dataclass(slots=True)
class Slots:
    gain: float = 1.0


def keyword_only(scale):
    def function(x, *, scale=scale):
        return x * scale

    return function


def class_attribute():
    class Head(nn.Module):
        gain = 1.0

        def forward(self, x):
            return x * self.gain

    return Head(), lambda: setattr(Head, "gain", 100.0)


def class_property():
    class Head(nn.Module):
        gain = property(lambda self: 1.0)

        def forward(self, x):
            return x * self.gain

    return Head(), lambda: setattr(Head, "gain", property(lambda self: 100.0))


def static_method():
    class Head(nn.Module):
        @staticmethod
        def change(x):
            return x

        def forward(self, x):
            return self.change(x)

    return Head(), lambda: setattr(Head, "change", staticmethod(lambda x: 100 * x))


def attribute(before, after):
    head = Applied(before)
    return head, lambda: setattr(head, "act", after)


def patched(before, after):
    head = nn.Identity()
    head.forward = before
    return head, lambda: setattr(head, "forward", after)


def config(value, read, change):
    head = Reading(value, read)
    return head, lambda: change(head)


def plain_list_of_modules():
    head = Applied(None)
    hidden = [nn.Linear(4, 4)]
    head.act = lambda x: hidden[0](x)
    return head, lambda: hidden[0].weight.data.mul_(100.0)


def default_argument():
    head = Applied(lambda x, layer=nn.Linear(4, 4): layer(x))  # noqa: B008
    return head, lambda: head.act.__defaults__[0].weight.data.mul_(100.0)


def order_of_modules():
    head = nn.Sequential(OrderedDict(a=nn.Linear(4, 4), b=nn.ReLU()))

    def change():
        layer = head.a
        del head.a
        head.a = layer

    return head, change


CASES = {
    "builtin": lambda: attribute(torch.sigmoid, torch.tanh),
    "partial": lambda: attribute(
        functools.partial(F.leaky_relu, negative_slope=0.1), functools.partial(F.leaky_relu, negative_slope=50.0)
    ),
    "bound method": lambda: attribute(Gain(1.0).apply, Gain(100.0).apply),
    "keyword-only default": lambda: attribute(keyword_only(1.0), keyword_only(100.0)),
    "patched builtin": lambda: patched(torch.sigmoid, torch.tanh),
    "patched partial": lambda: patched(
        functools.partial(torch.mul, other=torch.tensor(1.0)), functools.partial(torch.mul, other=torch.tensor(100.0))
    ),
    "class attribute": class_attribute,
    "property": class_property,
    "static method": static_method,
    "plain list of modules": plain_list_of_modules,
    "default argument": default_argument,
    "order of modules": order_of_modules,
    "slots": lambda: config(Slots(), lambda c: c.gain, lambda head: setattr(head.config, "gain", 100.0)),
    "deque": lambda: config(deque([1.0]), lambda c: c[0], lambda head: head.config.append(head.config.popleft() + 1)),
    "range": lambda: config(range(1), len, lambda head: setattr(head, "config", range(3))),
    "fraction": lambda: config(Fraction(1, 2), float, lambda head: setattr(head, "config", Fraction(100))),
    "class": lambda: config(int, lambda c: c(1.5), lambda head: setattr(head, "config", float)),
    "deep dict": lambda: config(
        {"a": {"b": {"c": {"d": {"e": 1.0}}}}},
        lambda c: c["a"]["b"]["c"]["d"]["e"],
        lambda head: head.config["a"]["b"]["c"]["d"].update(e=100.0),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_head_that_computes_something_else_makes_the_certificate_stale(case):
    """Mutation caught: checking attributes and parameters only, without recording forward again."""
    head, change = case()
    certificate = certify(head.eval(), p=1, q=1, input_shape=4)
    certificate.check(head)
    change()
    with pytest.raises(StaleCertificateError, match="certify it again"):
        certificate.check(head)


def test_a_patched_class_of_torch_makes_the_certificate_stale(monkeypatch):
    head = nn.Sequential(nn.ReLU())
    certificate = certify(head, p=1, q=1, input_shape=4)
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: 100 * x)
    with pytest.raises(StaleCertificateError, match="what forward computes"):
        certificate.check(head)


def test_a_switch_that_only_other_batch_sizes_feel_is_seen():
    """Mutations caught: a remembered verdict, or a check at one batch size."""

    class Switched(nn.Module):
        flag = False

        def forward(self, x):
            return x * 100 if self.flag and x.shape[0] > 100 else x

    inner = Switched()
    for head in (inner, Applied(lambda x: inner(x))):
        Switched.flag = False
        certificate = certify(head, p=1, q=1, input_shape=4)
        Switched.flag = True
        with pytest.raises(UnsupportedModuleError, match="batch size"):
            certify(head, p=1, q=1, input_shape=4)
        with pytest.raises(StaleCertificateError, match="refused today"):
            certificate.check(head)


def test_cached_parametrisations_are_refused():
    """Mutation caught: certifying a cached weight that is older than its parameters."""
    head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    certificate = certify(head, p=1, q=1, input_shape=4)
    with nn.utils.parametrize.cached():
        with pytest.raises(UnsupportedModuleError, match="cached"):
            certify(head, p=1, q=1, input_shape=4)
        with pytest.raises(StaleCertificateError, match="cached"):
            certificate.check(head)
    certificate.check(head)
