"""The GPU check: every CUDA test and the GPU benchmark, in at most eight minutes, as a block for experiments/LOG.md.

    python experiments/benchmarks/gpu_check/run.py

Runs the tests marked `cuda`, then 64 clients of a 2-convolution CNN (28×28, batch 32, 10 steps) batched against a bare loop
on the same GPU (client after client, torch.optim.SGD, data on the device): with and without compile and CUDA graphs, bf16
and channels_last, interleaved, medians; then 8 to 256 clients. Each part has its own seconds, after which it is ended and
what it has measured counts. Exits with 0 where every test passed and the target of 8× is met, with 1 where not, and with 2
on a machine without CUDA. Prints Markdown; progress goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[2]
SECONDS = {"tests": 210, "eager": 70, "scaling": 60, "compiled": 110}
"""Most seconds of each part: 450 in all."""
TARGET = 8.0
BARE, OURS = "bare loop", "batched, channels_last (the executor's)"

Line = dict[str, object]


def run_for(command: Sequence[str], *, seconds: float) -> tuple[str, int | None]:
    """A command's standard output and exit code; None where its time ran out and it was ended, with all that it started."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        return process.communicate(timeout=seconds)[0], process.returncode
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0], None


def run_tests(*, seconds: float) -> tuple[str, bool]:
    """The line that sums the CUDA tests up, and whether all of them ran and passed."""
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "cuda" in path.read_text("utf-8")]
    # inductor warns of unused TF32 and the like: told of, no failure
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-W", "default", "-p", "no:cacheprovider", *files]
    output, code = run_for(command, seconds=seconds)
    lines = output.strip().splitlines()
    sys.stderr.write("\n".join(lines[-60:]) + "\n")
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    summary = lines[-1] if lines else "pytest said nothing"
    if code is None:
        summary = f"cut off after {seconds:.0f} s at: {summary}"
    return "\n".join([f"CUDA tests: {summary}", *(f"- {line}" for line in failed)]), code == 0


def measure(part: str, *, device: str, quick: bool, seconds: float) -> list[Line]:
    """The lines that a part printed within its time."""
    command = [sys.executable, str(FOLDER / "gpu_races.py"), part, device, "quick" if quick else "full"]
    output, code = run_for(command, seconds=seconds)
    lines: list[Line] = []
    for text in output.splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # a line that was cut
            lines.append(json.loads(text))
    if code != 0:
        why = f"cut off after {seconds:.0f} s" if code is None else f"ended with code {code}"
        lines.append({"part": part, "note": why})
    return lines


def median(lines: Sequence[Line], variant: str, *, clients: int, key: str = "seconds") -> float | None:
    """Median of a variant's measurements; None where there is none."""
    found = [
        float(line[key])  # type: ignore[arg-type]
        for line in lines
        if line.get("variant") == variant and line.get("clients") == clients and key in line
    ]
    return statistics.median(found) if found else None


def ratio_of(lines: Sequence[Line], variant: str, *, clients: int) -> float | None:
    """How many times faster than the bare loop of the same part."""
    bare, mine = (median(lines, name, clients=clients) for name in (BARE, variant))
    return None if bare is None or mine is None else bare / mine


def variants_table(lines: Sequence[Line]) -> list[str]:
    """Every variant of a part: median, device time, ratio, memory, difference from the bare loop's weights."""
    measured = [line for line in lines if "variant" in line]
    rows = [
        "| variant | ms | by CUDA events | bare / this | peak MiB | difference | first call |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(str(line["variant"]) for line in measured):
        mine = [line for line in measured if line["variant"] == name]
        clients = int(mine[0]["clients"])  # type: ignore[call-overload]
        error = next((line["error"] for line in mine if "error" in line), None)
        if error is not None:
            rows.append(f"| {name} | failed: {' '.join(str(error).split()).replace('|', '/')} | | | | | |")
            continue
        warmup = next((line for line in mine if "warmup_s" in line), {})
        cells = (
            _shown(median(lines, name, clients=clients), 1e3, ".1f"),
            _shown(median(lines, name, clients=clients, key="device_s"), 1e3, ".1f"),
            _shown(ratio_of(lines, name, clients=clients), 1.0, ".2f"),
            _shown(median(lines, name, clients=clients, key="peak_mib"), 1.0, ".0f"),
            _shown(warmup.get("difference"), 1.0, ".1e"),
            _shown(warmup.get("warmup_s"), 1.0, ".2f") + " s",
        )
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows + [f"\n{line['part']}: {line['note']}" for line in lines if "note" in line]


def scaling_table(lines: Sequence[Line]) -> list[str]:
    """Clients by rows: both medians and their ratio."""
    rows = ["| clients | bare loop, ms | batched, ms | bare / batched | peak MiB |", "|---|---|---|---|---|"]
    for clients in sorted({int(line["clients"]) for line in lines if "clients" in line}):  # type: ignore[call-overload]
        cells = (
            _shown(median(lines, BARE, clients=clients), 1e3, ".1f"),
            _shown(median(lines, "batched", clients=clients), 1e3, ".1f"),
            _shown(ratio_of(lines, "batched", clients=clients), 1.0, ".2f"),
            _shown(median(lines, "batched", clients=clients, key="peak_mib"), 1.0, ".0f"),
        )
        rows.append(f"| {clients} | {' | '.join(cells)} |")
    return rows + [f"\n{line['part']}: {line['note']}" for line in lines if "note" in line]


def verdict(ratio: float | None) -> str:
    """The target, and whether it is met."""
    if ratio is None:
        return f"Target ≥ {TARGET:g}× the bare loop: not measured."
    return f"Target ≥ {TARGET:g}× the bare loop: {ratio:.2f}×, {'met' if ratio >= TARGET else 'MISSED'}."


def _shown(value: object, factor: float, form: str) -> str:
    return "–" if value is None else format(float(value) * factor, form)  # type: ignore[arg-type]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help=argparse.SUPPRESS)  # a dry run of the script itself
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: no CUDA device on this machine; nothing was checked", file=sys.stderr)
        return 2
    began = time.perf_counter()
    name = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU ({platform.machine()})"
    summary, passed = run_tests(seconds=SECONDS["tests"])
    parts = {}
    for part in ("eager", "scaling", "compiled"):
        print(f"{part} …", file=sys.stderr)
        parts[part] = measure(part, device=options.device, quick=options.quick, seconds=SECONDS[part])
    clients = 4 if options.quick else 64
    ratio = ratio_of(parts["eager"], OURS, clients=clients)
    best = [
        (found, str(line["variant"]))
        for part in ("eager", "compiled")
        for line in parts[part]
        if "warmup_s" in line
        and str(line["variant"]).startswith(("batched", "compiled"))
        and (found := ratio_of(parts[part], str(line["variant"]), clients=clients)) is not None
    ]
    block = [
        f"## {datetime.date.today().isoformat()}: GPU check on {name}",
        "",
        f"`experiments/benchmarks/gpu_check/run.py`, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"{time.perf_counter() - began:.0f} s in all. {clients} clients × {2 if options.quick else 10} steps × batch 32, "
        "2-convolution CNN on 28×28; medians of interleaved runs; `difference` is that of the weights from the bare loop's.",
        "",
        summary,
        "",
        f"{verdict(ratio)}" + (f" Best: {max(best)[1]}, {max(best)[0]:.2f}×." if best else ""),
        "",
        *variants_table(parts["eager"]),
        "",
        *variants_table(parts["compiled"]),
        "",
        *scaling_table(parts["scaling"]),
    ]
    print("\n".join(block))
    return 0 if passed and ratio is not None and ratio >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
