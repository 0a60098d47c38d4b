"""ε and its time: our accountant beside dp-accounting's and opacus', over 10 to 10,000 releases.

    python experiments/benchmarks/privacy/accountants.py [--quick]

Seconds are of the process (best of up to three calls within two seconds); ours are asked at a δ that is one float further
each time, so that nothing is remembered. "Ledger" records the releases one round at a time and then asks for the total.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from peers import PEERS, NoRuleError, Peer
from rows import EXACT, FAILED, LOWER, MEASURED, MISSING, REFUSES, UPPER, Row
from truth import exact_epsilon

from asfl_privacy.accounting import Ledger, LossEvent, compose

COUNTS = (10, 100, 1000, 10_000)
QUICK_COUNTS = (10, 100, 1000)
REPEATS, ENOUGH_S = 3, 2.0
EPSILON, SECONDS = "ε", "s"
OUR_HIGH, OUR_LOW, LEDGER, TRUTH = "ours, high", "ours, low", "ours, Ledger", "truth"


@dataclass(frozen=True, kw_only=True)
class Family:
    """A composition for every number of releases: its name, its events, and δ."""

    name: str
    events: Callable[[int], list[LossEvent]]
    delta: float = 1e-5


def gaussian(z: float, count: int) -> LossEvent:
    """Gaussian releases with σ/Δ = z."""
    return LossEvent(mechanism="gaussian", noise_multiplier=z, count=count)


def laplace(z: float, count: int) -> LossEvent:
    """Laplace releases with b/Δ = z."""
    return LossEvent(mechanism="laplace", noise_multiplier=z, count=count)


def response(z: float, count: int, k: int) -> LossEvent:
    """Draws of k-ary randomised response with ε0 = 1/z."""
    return LossEvent(mechanism="randomized-response", noise_multiplier=z, count=count, num_classes=k)


FAMILIES = (
    Family(name="Gaussian, σ/Δ = 10", events=lambda t: [gaussian(10.0, t)]),
    Family(name="Gaussian, σ/Δ = 10, δ = 1e-10", events=lambda t: [gaussian(10.0, t)], delta=1e-10),
    Family(name="Laplace, ε0 = .1", events=lambda t: [laplace(10.0, t)]),
    Family(name="Laplace, ε0 = .1, δ = 1e-10", events=lambda t: [laplace(10.0, t)], delta=1e-10),
    Family(name="Laplace, ε0 = 1", events=lambda t: [laplace(1.0, t)]),
    Family(name="randomised response, k = 2, ε0 = .1", events=lambda t: [response(10.0, t, 2)]),
    Family(name="randomised response, k = 10, ε0 = 1", events=lambda t: [response(1.0, t, 10)]),
    Family(
        name="Gaussian, σ/Δ = 10, and one label, k = 10, ε0 = 1",
        events=lambda t: [gaussian(10.0, t), response(1.0, 1, 10)],
    ),
    Family(
        name="Gaussian, σ/Δ = 10, and as many Laplace, ε0 = .05",
        events=lambda t: [gaussian(10.0, t), laplace(20.0, t)],
    ),
    Family(
        name="unequal rounds: Laplace, ten ε0 from .05 to .14",
        events=lambda t: [laplace(100.0 / (5 + number), t // 10) for number in range(10)],
    ),
)


def measure(*, counts: Sequence[int]) -> Iterator[Row]:
    """All rows, case by case."""
    warm_up()
    for family, count in itertools.product(FAMILIES, counts):
        yield from rows_of(family, count)


def warm_up() -> None:
    """Ask everybody once, so that no import is timed."""
    few = [gaussian(5.0, 2)]
    compose(few, delta=1e-5)
    for peer in PEERS:
        with contextlib.suppress(ModuleNotFoundError):
            peer.epsilon(few, delta=1e-5)


def rows_of(family: Family, count: int) -> Iterator[Row]:
    """The rows of one family at one number of releases."""
    events, delta = family.events(count), family.delta

    def row(tool: str, kind: str, value: float | None, *, quantity: str = EPSILON, note: str = "") -> Row:
        return Row(
            benchmark="accountants",
            case=family.name,
            tool=tool,
            quantity=quantity,
            kind=kind,
            value=value,
            at=count,
            note=note,
        )

    exact = exact_epsilon(events, delta=delta)
    if exact is not None:
        yield row(TRUTH, EXACT, exact, note="mpmath, 60 digits")
    bracket = compose(events, delta=delta)
    yield row(OUR_LOW, LOWER, bracket.low)
    yield row(OUR_HIGH, UPPER, bracket.high)
    shifted = itertools.count(1)
    compose_s = best_seconds(lambda: compose(events, delta=delta * (1.0 + next(shifted) * 2.0**-52)))
    yield row(OUR_HIGH, MEASURED, compose_s, quantity=SECONDS)
    totals: list[float] = []
    ledger_s = best_seconds(lambda: totals.append(ledger_total(events, delta=delta * (1.0 + next(shifted) * 2.0**-52))))
    yield row(LEDGER, UPPER, totals[-1])
    yield row(LEDGER, MEASURED, ledger_s, quantity=SECONDS, note="a round for each release, and the total")
    for peer in PEERS:
        answers: list[float] = []

        def ask(peer: Peer = peer, answers: list[float] = answers) -> None:
            answers.append(peer.epsilon(events, delta=delta))

        try:
            taken = best_seconds(ask)
        except NoRuleError as error:
            yield row(peer.name, REFUSES, None, note=str(error))
        except ModuleNotFoundError as error:
            yield row(peer.name, MISSING, None, note=f"{error.name} is not installed")
        except Exception as error:  # another project's code may raise anything
            yield row(peer.name, FAILED, None, note=f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
        else:
            yield row(peer.name, peer.kind, answers[-1])
            yield row(peer.name, MEASURED, taken, quantity=SECONDS)


def best_seconds(act: Callable[[], object]) -> float:
    """Processor time of the quickest of up to three calls; one that takes long is not repeated."""
    best, spent = math.inf, 0.0
    for _ in range(REPEATS):
        start = time.process_time()
        act()
        taken = time.process_time() - start
        best, spent = min(best, taken), spent + taken
        if spent > ENOUGH_S:
            break
    return best


def ledger_total(events: Sequence[LossEvent], *, delta: float) -> float:
    """ε of a ledger of one record that gets every release in a round of its own."""
    ledger = Ledger(p=2, radius=1.0)
    releases = (event for event in events for _ in range(event.count))
    for number, event in enumerate(releases):
        ledger.record(
            channel="labels" if event.num_classes else "activations",
            mechanism=event.mechanism,
            noise_multiplier=float(event.noise_multiplier),
            num_classes=event.num_classes,
            round=number,
            records=[0],
        )
    return ledger.epsilon(delta=delta).high


def main() -> None:
    """Print one line a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10 to 1,000 releases")
    options = parser.parse_args()
    for row in measure(counts=QUICK_COUNTS if options.quick else COUNTS):
        shown = row.kind if row.value is None else f"{row.value:.6g} {row.quantity}"
        print(f"{row.case:55} × {row.at:<7g} {row.tool:38} {shown} {row.note}", flush=True)


if __name__ == "__main__":
    main()
