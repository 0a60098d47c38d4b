"""How long a ledger takes to record and total a run, beside numpy's own count of the same ids.

    python experiments/benchmarks/privacy/ledger_speed.py [--rounds 1000] [--records 60000] [--repeats 3]

Each line is one way in which rounds name records ("all": the same range every round; "half": half of twice as many ids,
sorted; "any order": all of them, shuffled) and one noise multiplier for all rounds, or another one every round. Seconds
are of the process (best of the repeats): record() of every round, epsilon() once, and the floor, one numpy.bincount of
every round's ids added up. Printed beside them: the ratio of each to the floor, the most memory that the process has held
so far (all cases up to this line), and the bytes of the file a release. Everything runs on one thread.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray

from asfl_privacy.accounting import Ledger

DISTINCT = 50  # lists of ids made per case; rounds take them in turn


def main() -> None:
    """Print one line for every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--records", type=int, default=60_000)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    header = ("records", "multipliers", "record s", "total s", "floor s", "ratios", "peak MiB", "bytes/release", "ε")
    print("{:>10} {:>11} {:>9} {:>8} {:>8} {:>9} {:>9} {:>14} {:>9}".format(*header))
    for found in measure(rounds=asked.rounds, records=asked.records, repeats=asked.repeats):
        ratios = f"{found.recorded / found.floor:.2f} {found.totalled / found.floor:.2f}"
        print(
            f"{found.name:>10} {found.multipliers:>11} {found.recorded:>9.3f} {found.totalled:>8.3f} {found.floor:>8.3f} "
            f"{ratios:>9} {found.peak_mib:>9.0f} {found.bytes_per_release:>14.4f} {found.epsilon:>9.4f}",
            flush=True,
        )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One case: its name, number of multipliers, seconds, memory, bytes of the file a release, and ε."""

    name: str
    multipliers: int
    recorded: float
    totalled: float
    floor: float
    peak_mib: float
    bytes_per_release: float
    epsilon: float


def measure(*, rounds: int, records: int, repeats: int) -> Iterator[Measured]:
    """All cases in turn."""
    for name, ids in cases(records).items():
        for varies in (False, True):
            yield measured(name, ids, varies=varies, rounds=rounds, repeats=repeats)


def cases(records: int) -> dict[str, list[NDArray[np.int64]]]:
    """Lists of ids by name."""
    rng = np.random.default_rng(0)
    return {
        "all": [np.arange(records)],
        "half": [np.sort(rng.choice(2 * records, records, replace=False)) for _ in range(DISTINCT)],
        "any order": [rng.permutation(records) for _ in range(DISTINCT)],
    }


def measured(name: str, ids: list[NDArray[np.int64]], *, varies: bool, rounds: int, repeats: int) -> Measured:
    """One case."""
    found = []
    for _ in range(repeats):
        ledger = Ledger(p=2, radius=0.1)

        def record(ledger: Ledger = ledger) -> None:
            for number in range(rounds):
                ledger.record(
                    channel="activations",
                    mechanism="gaussian",
                    noise_multiplier=50.0 + (number / rounds if varies else 0.0),
                    round=number,
                    records=ids[number % len(ids)],
                )

        found.append((seconds(record), seconds(partial(ledger.epsilon, delta=1e-5))))
    peak = peak_mib()
    recorded, totalled = (min(column) for column in zip(*found, strict=True))
    floor = min(seconds(lambda: count(ids, rounds=rounds)) for _ in range(repeats))
    epsilon = ledger.epsilon(delta=1e-5).high
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.json"
        ledger.save(path)
        size = path.stat().st_size / ledger.counts.releases
        assert Ledger.load(path).epsilon(delta=1e-5).high == epsilon
    return Measured(
        name=name,
        multipliers=rounds if varies else 1,
        recorded=recorded,
        totalled=totalled,
        floor=floor,
        peak_mib=peak,
        bytes_per_release=size,
        epsilon=epsilon,
    )


def count(ids: list[NDArray[np.int64]], *, rounds: int) -> NDArray[np.int64]:
    """Releases of every id, by numpy alone."""
    size = 1 + max(int(each.max()) for each in ids)
    total = np.zeros(size, dtype=np.int64)
    for number in range(rounds):
        total += np.bincount(ids[number % len(ids)], minlength=size)
    return total


def seconds(work: Callable[[], object]) -> float:
    """Processor time of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def peak_mib() -> float:
    """The most memory that the process has held so far; from /proc where it is, since ru_maxrss outlives an exec."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024.0
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0


if __name__ == "__main__":
    main()
