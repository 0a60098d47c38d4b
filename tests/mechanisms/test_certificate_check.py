"""A certificate is compared with the head before every release, and what forward computes is recorded once a head."""

import pytest
import torch
from torch import nn

import sensitivity
from asfl_privacy.mechanisms.certificate_check import check_certificate
from asfl_privacy.mechanisms.stateless import holdings_digest
from sensitivity import Certificate, StaleCertificateError


class Scaled(nn.Module):
    """Reads a global, a list two levels down and its own code."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.settings = {"deep": [{"factor": 1.0}]}

    def forward(self, x):
        return self.linear(x) * self.settings["deep"][0]["factor"] * FACTOR


FACTOR = 1.0


def certified():
    head = nn.Sequential(Scaled()).eval()
    return head, sensitivity.certify(head, p=2, q=2, input_shape=(4,), budget_s=0.01)


@pytest.fixture
def count_checks(monkeypatch):
    calls, whole = [], Certificate.check
    monkeypatch.setattr(Certificate, "check", lambda self, head: (calls.append(head), whole(self, head)))
    return calls


def test_an_unchanged_head_is_recorded_once(count_checks):
    head, certificate = certified()
    for _ in range(3):
        check_certificate(certificate, head)
    assert len(count_checks) == 1
    other, certificate_of_other = certified()
    check_certificate(certificate_of_other, other)
    check_certificate(certificate, head)
    assert len(count_checks) == 2


def weight(head, monkeypatch):
    with torch.no_grad():
        head[0].linear.weight[0, 0] += 1e-6


def deep_setting(head, monkeypatch):
    head[0].settings["deep"][0]["factor"] = 3.0


def named_global(head, monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", 2.0)


def code(head, monkeypatch):
    monkeypatch.setattr(Scaled, "forward", lambda self, x: 2.0 * self.linear(x))


def hook(head, monkeypatch):
    head[0].linear.register_forward_hook(lambda module, given, result: 2.0 * result)


def mode(head, monkeypatch):
    head.train()


def other_instance(head, monkeypatch):
    head[0].linear = nn.Linear(4, 3)


def instance_forward(head, monkeypatch):
    head[0].linear.forward = lambda x: 2.0 * x[:, :3]


@pytest.mark.parametrize(
    "change", [weight, deep_setting, named_global, code, hook, mode, other_instance, instance_forward]
)
def test_every_change_after_a_passed_check_is_refused(change, monkeypatch):
    """Catches a check that is skipped because the head passed before."""
    head, certificate = certified()
    check_certificate(certificate, head)
    check_certificate(certificate, head)
    change(head, monkeypatch)
    with pytest.raises(StaleCertificateError):
        check_certificate(certificate, head)


def test_settings_that_round_coarsely_are_refused_after_a_passed_check():
    head, certificate = certified()
    check_certificate(certificate, head)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(StaleCertificateError, match="autocast"):
        check_certificate(certificate, head)


def test_another_heads_certificate_does_not_pass():
    """Catches a memory of heads that forgets which certificate they were compared with."""
    head, certificate = certified()
    other, certificate_of_other = certified()
    check_certificate(certificate, head)
    check_certificate(certificate_of_other, other)
    with pytest.raises(StaleCertificateError):
        check_certificate(certificate, other)


def test_digests_tell_where_one_part_ends():
    """Catches parts joined without their lengths."""
    first, second = nn.Module(), nn.Module()
    first.a, second.a = ["x", "yz"], ["xy", "z"]
    assert holdings_digest(first) != holdings_digest(second)
