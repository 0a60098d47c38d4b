"""Random heads of mixed operators: no pair and no dense matrix beats a certificate."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from sensitivity import UnsupportedModuleError

SCRIPT = Path(__file__).resolve().parents[2] / "experiments" / "fuzz" / "fuzz_certificates.py"
HEADS_A_TEST = 40
NUM_TESTS = 9


@pytest.fixture(scope="module")
def fuzz():
    spec = importlib.util.spec_from_file_location("fuzz_certificates", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("part", range(NUM_TESTS))
def test_no_certificate_of_a_random_head_is_beaten(fuzz, part):
    held, dtypes, beaten = 0, set(), []
    for seed in range(part * HEADS_A_TEST, (part + 1) * HEADS_A_TEST):
        case = fuzz.random_case(seed)
        try:
            words = fuzz.violation(case, num_starts=4, num_steps=12)
        except UnsupportedModuleError:
            continue
        held += 1
        dtypes |= {parameter.dtype for parameter in case.head.parameters()}
        if words:
            beaten.append((seed, words))
    assert beaten == []
    assert held >= 0.85 * HEADS_A_TEST  # 9 × 34 > 300 heads at least
    assert dtypes >= {torch.float32, torch.float64}


@pytest.mark.parametrize(("blind", "word"), [((), "pair"), (("search",), "apart"), (("search", "corners"), "matrix")])
def test_a_certificate_that_is_too_small_is_noticed_by_each_check_alone(fuzz, monkeypatch, blind, word):
    """Mutation caught: a certificate of .9 times its value."""

    class TooSmall:
        value, slack = 0.9, 0.0

        def map(self, radius):
            return 0.9 * radius

    monkeypatch.setattr(fuzz, "certify", lambda *_, **__: TooSmall())
    if "search" in blind:
        weak = fuzz.lower_bound(nn.Identity(), p=2, q=2, input_shape=4, num_starts=1, num_steps=1)
        object.__setattr__(weak, "value", 0.0)
        monkeypatch.setattr(fuzz, "lower_bound", lambda *_, **__: weak)
    if "corners" in blind:
        monkeypatch.setattr(fuzz, "wide_pairs", lambda *_: [])
    case = fuzz.Case(seed=0, head=nn.Identity(), input_shape=(4,), p=2, q=2, method="auto", box=None, linear=True)
    assert word in fuzz.violation(case, num_starts=2, num_steps=2)


@pytest.mark.parametrize(("box", "span"), [(None, 1.0 + 1e-9), ((-1.0, 0.5), 0.3536)])
def test_a_diameter_that_is_too_small_is_noticed(fuzz, monkeypatch, box, span):
    """Sigmoid's outputs span 1, and .35345 over the box. Mutation caught: a diameter of .97 times its value, which no
    ratio of close pairs shows."""
    case = fuzz.Case(seed=0, head=nn.Sigmoid(), input_shape=(1,), p=2, q=2, method="auto", box=box, linear=False)
    assert fuzz.violation(case, num_starts=2, num_steps=2) is None
    honest = fuzz.certify

    def too_small(*args, **named):
        certificate = honest(*args, **named)
        return replace(certificate, diameter=0.97 * certificate.diameter, rounding=None)

    monkeypatch.setattr(fuzz, "certify", too_small)
    words = fuzz.violation(case, num_starts=2, num_steps=2)
    assert words is not None
    assert "apart" in words
    assert honest(case.head, p=2, q=2, input_shape=(1,), input_box=box).diameter <= span
