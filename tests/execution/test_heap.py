"""keep_freed_memory: harmless everywhere, and effective where glibc is."""

import platform
import subprocess
import sys

import pytest

from asfl_privacy.execution import heap
from asfl_privacy.execution.heap import keep_freed_memory

FAULTS = """
import resource, sys
import torch
from asfl_privacy.execution.heap import keep_freed_memory
torch.set_num_threads(1)
assert sys.argv[1] == "plain" or keep_freed_memory()
parts = [torch.ones(1 << 20) for _ in range(8)]  # first touched here, in either way
del parts
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
total = 0.0
for _ in range(50):
    parts = [torch.ones(1 << 20) for _ in range(8)]  # 32 MiB in all, freed each time
    total += float(sum(part.sum() for part in parts))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, total)
"""


def faults(how: str) -> tuple[int, float]:
    done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
    count, total = done.stdout.split()
    return int(count), float(total)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone has these options")
def test_freed_pages_are_used_again_and_values_stay() -> None:
    """Catches an option glibc refuses (a threshold above 32 MiB, say), and numbers that stand for other options."""
    plain, kept = faults("plain"), faults("kept")
    assert kept[1] == plain[1] == 50 * 8 * 2.0**20
    # Pages are taken from the system once instead of 50 times; huge pages make both fewer, and a system that takes idle
    # pages back gives some of them twice.
    assert kept[0] < plain[0] / 2


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap.sys, "platform", "darwin")
    assert keep_freed_memory() is False


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a call into a C library that has no such function, as musl."""

    class Bare:
        pass

    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: Bare())
    monkeypatch.setattr(heap.sys, "platform", "linux")
    assert keep_freed_memory() is False
