"""Certificates of the benchmark's heads beside peers and lower bounds found by search.

    python experiments/benchmarks/sensitivity/run.py [--only NAME ...] [--steps 20000] [--out reports/sensitivity]
        [--cache DIR] [--resume]

Each head, pair of norms and tool gives one row of OUT/rows.csv, written as soon as it is known; OUT/report.md and the
figure are made from the rows alone. --resume goes on after a killed run, keeping the rows that the same code made of the
same weights. Peers that are not installed get a row that says so; all of them at once:

    pip install mlxtend deel-torchlip==1.0.5 orthogonium==0.0.4 eclipse-nn==0.1.7

Heads are trained once, by the fixed recipe of heads.py, and cached. Everything runs on one thread.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from heads import HEADS, HeadSpec
from memory import ABOUT, NAME, measure
from peers import PEERS
from report import is_beaten, write_report
from rows import EXACT, FAILED, LOWER, MEMORY, REFUSES, UPPER, Answer, Row, Source, read_rows, source_of, write_rows
from torch import nn
from training import MissingDataError, digest, prepare
from truth import spectral_norm

from sensitivity import UnsupportedModuleError, certify, lower_bound

NORMS = {"1": 1.0, "2": 2.0, "inf": math.inf}
THREE = (("1", "1"), ("1", "2"), ("2", "2"))
NINE = tuple((p, q) for p in NORMS for q in NORMS)
ORDER = (*(spec.name for spec in HEADS), NAME)


@dataclass(frozen=True)
class Question:
    """One row to come: who is asked about which norms."""

    p: str
    q: str
    tool: str
    ask: Callable[[], Answer]
    steps: int | None = None


def questions_about(spec: HeadSpec, head: nn.Module, *, steps: int) -> Iterator[Question]:
    """All that is asked about a head, in a fixed order."""
    shape = spec.input_shape
    for p, q in NINE if spec.all_norms else THREE:
        for tool, method in (("certificate", "auto"), ("fast", "fast"), ("product", "product")):
            if method != "product" or p == q:
                yield Question(p, q, tool, partial(certified, head, p=p, q=q, input_shape=shape, method=method))
        if isinstance(head, nn.Conv2d) and p == q == "2":
            yield Question(p, q, "true norm", partial(true_norm, head, input_shape=shape))
        length = math.ceil(steps / spec.pairs)
        search = partial(found, head, p=p, q=q, input_shape=shape, num_starts=spec.pairs, num_steps=length)
        yield Question(p, q, "lower bound", search, steps=spec.pairs * length)
        for peer in PEERS:
            if (p, q) in peer.pairs:
                yield Question(p, q, peer.name, partial(peer.ask, head, input_shape=shape, p=p, q=q))


def questions_about_memory() -> Iterator[Question]:
    """Peak memory of certifying the activation-size head."""
    for p, q in THREE:
        yield Question(p, q, "peak memory", partial(peak_memory, p=p, q=q))


def certified(head: nn.Module, *, p: str, q: str, input_shape: tuple[int, ...], method: str) -> Answer:
    """Our bound."""
    certificate = certify(head, p=NORMS[p], q=NORMS[q], input_shape=input_shape, method=method)
    return Answer(UPPER, certificate.value, certificate.method)


def found(head: nn.Module, *, p: str, q: str, input_shape: tuple[int, ...], num_starts: int, num_steps: int) -> Answer:
    """The best pair found."""
    best = lower_bound(
        head, p=NORMS[p], q=NORMS[q], input_shape=input_shape, num_starts=num_starts, num_steps=num_steps
    )
    return Answer(LOWER, best.value, f"{num_starts} starts × {num_steps} gradient steps")


def true_norm(conv: nn.Conv2d, *, input_shape: tuple[int, ...]) -> Answer:
    """The largest singular value of a convolution."""
    value, how = spectral_norm(conv, input_shape=input_shape)
    return Answer(EXACT, value, how)


def peak_memory(*, p: str, q: str) -> Answer:
    """Megabytes that a fresh process takes to certify the activation-size head."""
    value, megabytes = measure(p=p, q=q)
    return Answer(MEMORY, megabytes, f"the certificate is {value:.6g}")


def answer(question: Question) -> tuple[Answer, float]:
    """What the tool says, and the seconds it took; a refusal or a failure is an answer too."""
    started = time.perf_counter()
    try:
        given = question.ask()
    except UnsupportedModuleError as error:
        given = Answer(REFUSES, None, str(error))
    except (ValueError, RuntimeError, MemoryError) as error:  # one head must not end a run of hours
        given = Answer(FAILED, None, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return given, time.perf_counter() - started


class Ledger:
    """The rows so far, on disk after each one."""

    def __init__(self, path: Path, *, source: Source, kept: list[Row]) -> None:
        self.path, self.source = path, source
        self.rows = {row.key: row for row in kept if row.head in ORDER}

    def work_through(
        self, questions: Iterator[Question], *, name: str, about: str, weights: str, acc: float | None
    ) -> None:
        """Ask what has no row yet from the same code, weights, versions and number of steps."""
        for question in questions:
            key = (name, question.p, question.q, question.tool)
            old = self.rows.get(key)
            if old and (old.code, old.digest, old.versions, old.steps) == (
                self.source.code,
                weights,
                self.source.versions,
                question.steps,
            ):
                continue
            given, seconds = answer(question)
            self.rows[key] = Row(
                head=name,
                about=about,
                digest=weights,
                accuracy=acc,
                p=question.p,
                q=question.q,
                tool=question.tool,
                kind=given.kind,
                value=given.value,
                seconds=seconds,
                steps=question.steps,
                note=given.note,
                **asdict(self.source),
            )
            write_rows(self.path, sorted(self.rows.values(), key=lambda row: ORDER.index(row.head)))
            shown = "–" if given.value is None else f"{given.value:.6g}"
            print(
                f"{name:14} {question.p}→{question.q:3} {question.tool:28} {shown:>12} {seconds:8.2f} s  "
                f"{given.kind}; {given.note}"[:200]
                + self._objection(key),
                flush=True,
            )

    def _objection(self, key: tuple[str, str, str, str]) -> str:
        """What a found pair says against the row."""
        found, row = self.rows.get((*key[:3], "lower bound")), self.rows[key]
        if found is None or found.value is None or not is_beaten(row, found=found.value):
            return ""
        assert row.value is not None
        word = "UNSOUND" if row.kind == UPPER else "too small"
        return f"; {word}: a found pair reaches {found.value / row.value:.4g} times that"


def main(arguments: list[str]) -> None:
    """Measure, write rows, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=ORDER, default=ORDER, help=", ".join(ORDER))
    parser.add_argument("--steps", type=int, default=20_000, help="gradient steps of each search, over all its starts")
    parser.add_argument(
        "--out", type=Path, default=Path("reports/sensitivity"), help="folder of rows, report and figure"
    )
    parser.add_argument("--cache", type=Path, help="folder of trained heads; default: OUT/cache")
    parser.add_argument("--resume", action="store_true", help="go on with the rows that are there")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps {options.steps} is no count: a search takes at least one gradient step; pass 20000")
    path = options.out / "rows.csv"
    if path.exists() and not options.resume:
        parser.error(f"{path} exists: a new run would replace it; pass --resume to go on, or another --out")
    source = source_of(" ".join(["python", "experiments/benchmarks/sensitivity/run.py", shlex.join(arguments)]).strip())
    ledger = Ledger(path, source=source, kept=read_rows(path) if path.exists() else [])
    certify(nn.Sequential(nn.Conv2d(1, 1, 3), nn.ReLU()), p=2, q=2, input_shape=(1, 5, 5))  # imports are not timed
    for spec in HEADS:
        if spec.name in options.only:
            try:
                head, accuracy = prepare(spec, cache=options.cache or options.out / "cache")
            except MissingDataError as error:
                print(f"{spec.name} is left out: {error}", flush=True)
                continue
            questions = questions_about(spec, head, steps=options.steps)
            ledger.work_through(questions, name=spec.name, about=spec.words, weights=digest(head), acc=accuracy)
    if NAME in options.only:
        ledger.work_through(questions_about_memory(), name=NAME, about=ABOUT, weights="", acc=None)
    write_report(options.out)


if __name__ == "__main__":
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped, unused-ignore]  # of scikit-learn

    torch.set_num_threads(1)
    with threadpool_limits(limits=1):
        main(sys.argv[1:])
