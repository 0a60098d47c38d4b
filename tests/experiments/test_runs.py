"""Worker processes of the paper's recipes: none outlives the command that started it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import PAPER

COMMAND = """
import os, sys, time
from pathlib import Path
from runs import open_runs

if __name__ == "__main__":
    with open_runs(Path(sys.argv[1]), workers=1) as opened:
        pid = opened.pool.submit(os.getpid).result()
        opened.pool.submit(time.sleep, 600)
        print(pid, flush=True)
        time.sleep(600)
"""


def is_alive(pid):
    """Neither gone nor a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="reads /proc of Linux")
def test_a_killed_command_leaves_no_worker_that_trains_on(tmp_path):
    """Catches: what was queued going on for hours beside the next command."""
    script = tmp_path / "command.py"
    script.write_text(COMMAND, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PAPER), *sys.path])}
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, env=environment
    ) as running:
        try:
            worker = int(running.stdout.readline())
        finally:
            running.kill()
    until = time.monotonic() + 30
    while is_alive(worker):
        assert time.monotonic() < until
        time.sleep(0.05)
