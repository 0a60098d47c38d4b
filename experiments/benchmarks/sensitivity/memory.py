"""Peak memory of certifying an activation-size head, measured in a process of its own."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

ABOUT = "3×3 convolutions 64→64→64 with ReLUs on 64×64×64, at initialisation; peak memory of a fresh process"
NAME = "memory-64x64x64"


def measure(*, p: str, q: str) -> tuple[float, float]:
    """Certify in a fresh process.

    Args:
        p: norm of the input.
        q: norm of the output.

    Returns:
        The certified value, and the process' peak resident memory in MB (10⁶ bytes), libraries included.

    Raises:
        RuntimeError: with the child's last line, if it fails.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    child = subprocess.run([sys.executable, __file__, p, q], capture_output=True, text=True, env=environment)
    if child.returncode != 0:
        raise RuntimeError((child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1])
    value, peak = child.stdout.split()
    return float(value), float(peak)


def _peak() -> float:
    """Peak resident memory of this process, in MB.

    Linux hands the parent's peak on to getrusage of what it starts, so the kernel's own mark of this address space is
    read where there is one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def _child(p: str, q: str) -> None:
    import torch
    from torch import nn

    from sensitivity import certify

    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()).eval()
    norms = {"1": 1.0, "2": 2.0, "inf": float("inf")}
    certificate = certify(head, p=norms[p], q=norms[q], input_shape=(64, 64, 64))
    print(certificate.value, _peak())


if __name__ == "__main__":
    _child(sys.argv[1], sys.argv[2])
