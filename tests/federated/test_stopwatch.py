"""A phase's seconds are those of its own work, on a device that answers before it has done what was asked too."""

import pytest
import torch
from federations import make_tiny

from asfl_privacy.execution import rounds, run_serially
from asfl_privacy.federated import METHODS, local_training, sharing
from asfl_privacy.federated.stopwatch import Stopwatch


class Device:
    """A clock, and a device that does what was launched only when it is waited for."""

    def __init__(self):
        self.now, self.launched, self.waits = 0.0, 0.0, []

    def clock(self):
        return self.now

    def synchronize(self, device):
        self.now, self.launched = self.now + self.launched, 0.0
        self.waits.append(device)


@pytest.fixture
def device(monkeypatch):
    one = Device()
    monkeypatch.setattr(torch.cuda, "synchronize", one.synchronize)
    return one


def test_on_cuda_a_kernel_counts_for_the_phase_that_launched_it(device):
    """By hand: 5 s launched before, 2 and 3 s within. Catches: no wait at the beginning, none at the end."""
    watch = Stopwatch(torch.device("cuda:0"), clock=device.clock)
    device.launched = 5.0
    with watch.phase("head"):
        device.launched += 2.0
    with watch.phase("tail"):
        device.launched += 3.0
    assert watch.seconds == {"head": 2.0, "tail": 3.0}
    assert set(device.waits) == {torch.device("cuda:0")}


def test_a_phase_that_fails_on_cuda_is_timed_to_its_end_as_well(device):
    watch = Stopwatch(torch.device("cuda"), clock=device.clock)

    def fail():
        device.launched += 2.0
        raise ValueError("fails")

    with pytest.raises(ValueError, match="fails"), watch.phase("head"):
        fail()
    assert watch.seconds == {"head": 2.0}


@pytest.mark.parametrize("where", [None, torch.device("cpu")])
def test_on_the_cpu_nothing_is_waited_for(device, where):
    watch = Stopwatch(where, clock=device.clock)
    device.launched = 5.0
    with watch.phase("head"):
        device.now += 1.5
    assert (watch.seconds, device.waits) == ({"head": 1.5}, [])


def test_phases_add_up_by_name_and_with_other_work():
    now = iter([0.0, 1.0, 10.0, 12.0])
    watch = Stopwatch(clock=lambda: next(now))
    for _ in range(2):
        with watch.phase("head"):
            pass
    watch.add_all({"head": 4.0, "tail": 0.5})
    assert watch.seconds == {"head": 7.0, "tail": 0.5}


def test_every_phase_of_a_run_knows_the_device(digits, monkeypatch):
    """Catches: a stopwatch made without the federation's device, whose phases would end before the GPU does."""
    made = []

    class Noted(Stopwatch):
        def __init__(self, device=None, **options):
            made.append(device)
            super().__init__(device, **options)

    for module in (rounds, local_training, sharing):
        monkeypatch.setattr(module, "Stopwatch", Noted)
    federation = make_tiny(digits, rounds=1)
    run_serially(federation, METHODS["asfl"], ledger=None)
    assert len(made) >= 5  # of the run, and of sharing and training of two clients
    assert all(device == federation.device for device in made)
