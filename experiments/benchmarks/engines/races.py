"""What runs against what: each race is a list of entries whose runs are interleaved and compared with the first entry's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from workload import Task

BARE, SERIAL = "bare loop", "ours, serial"
ENGINES, FIXED, CLIENTS, SIZE, RELEASE, LOCAL = "engines", "fixed", "clients", "size", "release", "local"


@dataclass(frozen=True)
class Engine:
    """How a tool is started: its script, its environment ("" for the package's own), and the script's last arguments."""

    tool: str
    script: str
    environment: str = ""
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """One engine with its task in a race."""

    engine: Engine
    task: Task
    tool: str = ""

    @property
    def name(self) -> str:
        """What its rows call it."""
        return self.tool or self.engine.tool


@dataclass(frozen=True)
class Race:
    """Entries that are run in turn; the first is the floor.

    Attributes:
        race: One of the names above.
        case: The task, in words.
        entries: Who runs what.
        at: What the case is plotted over, or None.
    """

    race: str
    case: str
    entries: tuple[Entry, ...]
    at: float | None = None


def ours(executor: str, workers: int = 1) -> Engine:
    """The package under one of its executors."""
    words = "" if workers == 1 else f", {workers} workers"
    return Engine(f"ours, {executor}{words}", "engine_ours.py", arguments=(executor, str(workers)))


def blazefl(kind: str, workers: int = 1) -> Engine:
    """BlazeFL under one of its trainers."""
    words = kind if workers == 1 else f"{workers} {kind}"
    return Engine(f"BlazeFL, {words}", "engine_blazefl.py", "blazefl", (kind, str(workers)))


def flower(actors: int) -> Engine:
    """Flower's simulation."""
    return Engine(
        f"Flower, {actors} actor{'s' if actors > 1 else ''}", "engine_flower.py", "flower", arguments=(str(actors),)
    )


FLOOR = Engine(BARE, "engine_bare.py")
OURS = (ours("serial"), ours("threads", 2), ours("processes", 2), ours("batched"), ours("batched", 2))
PEERS = (
    flower(1),
    flower(2),
    Engine("pfl-research", "engine_pfl.py", "pfl"),
    blazefl("serial"),
    blazefl("threads", 2),
    blazefl("processes", 2),
)


def same_task(race: str, case: str, task: Task, engines: Sequence[Engine], *, at: float | None = None) -> Race:
    """A race of engines on one task."""
    return Race(race, case, tuple(Entry(engine, task) for engine in engines), at=at)


def races(*, image: str, quick: bool) -> list[Race]:
    """All races, the peers' first.

    Args:
        image: Data set of the convolutional network's tasks.
        quick: Fewer rounds, engines and sizes.
    """
    cnn = Task(data=image, model="cnn", rounds=3 if quick else 9)
    tiny = Task(data="digits", model="mlp-32", rounds=6 if quick else 41)
    asfl_cnn = replace(cnn, method="asfl", tail_steps=10, exchange_layer="conv1", rounds=3 if quick else 7)
    asfl_tiny = replace(tiny, method="asfl", tail_steps=10, exchange_layer="fc1")
    all_engines = (FLOOR, *PEERS, *OURS)
    ours_alone = (FLOOR, *OURS)
    most = (FLOOR, PEERS[0], PEERS[2], PEERS[4], OURS[0], OURS[1], OURS[3]) if quick else all_engines
    some = (FLOOR, PEERS[2], PEERS[4], OURS[0], OURS[3]) if quick else all_engines
    few = (FLOOR, OURS[0]) if quick else ours_alone
    found = [
        same_task(ENGINES, "FedAvg, CNN", cnn, most),
        same_task(ENGINES, "FedAvg, tiny model", tiny, some),
        same_task(ENGINES, "ASFL, CNN", asfl_cnn, few),
        same_task(FIXED, "FedAvg, tiny model, no steps", replace(tiny, full_steps=0), few if quick else all_engines),
    ]
    if not quick:
        found.insert(3, same_task(ENGINES, "ASFL, tiny model", asfl_tiny, ours_alone))
    return [
        *found,
        *_local(cnn, quick=quick),
        *_release(asfl_cnn, quick=quick),
        *_size(quick=quick),
        *_clients(quick=quick),
    ]


def _local(cnn: Task, *, quick: bool) -> list[Race]:
    """ASFL's round against FedAvg's at equal total steps, by exchange layer."""
    rounds = 3 if quick else 7
    fedavg = replace(cnn, full_steps=20, rounds=rounds)
    split = {
        block: replace(cnn, method="asfl", tail_steps=10, full_steps=10, exchange_layer=block, rounds=rounds)
        for block in ("conv1", "conv2")
    }
    found = []
    for engine in (OURS[0],) if quick else (FLOOR, OURS[0], OURS[3]):
        entries = [Entry(engine, fedavg, "FedAvg, 20 full steps")]
        entries += [Entry(engine, task, f"ASFL, 10 + 10, exchange after {block}") for block, task in split.items()]
        found.append(Race(LOCAL, f"CNN, {engine.tool}", tuple(entries)))
    return found


def _release(asfl: Task, *, quick: bool) -> list[Race]:
    """A round's seconds with a private release against one without noise, by exchange layer and placement."""
    found = []
    for block in ("conv1",) if quick else ("conv1", "conv2"):
        clean = replace(asfl, exchange_layer=block)
        entries = [Entry(OURS[0], clean, "no noise")]
        entries += [
            Entry(OURS[0], replace(clean, placement=placement), f"Gaussian, placement {placement}")
            for placement in ("input", "exchange")
        ]
        found.append(Race(RELEASE, f"ASFL, CNN, exchange after {block}, {SERIAL}", tuple(entries)))
    return found


def _size(*, quick: bool) -> list[Race]:
    """Networks of one hidden layer, 784 inputs wide, of growing size."""
    found = []
    for hidden in (1024,) if quick else (16, 64, 256, 1024, 4096):
        count = 784 * hidden + hidden + 10 * hidden + 10
        rounds = 3 if quick or hidden > 1000 else 9
        task = Task(data="synthetic-28", model=f"mlp-{hidden}", rounds=rounds)
        engines = (FLOOR, OURS[0]) if quick else (FLOOR, *OURS)
        found.append(same_task(SIZE, f"FedAvg, {count:,} parameters", task, engines, at=count))
    return found


def _clients(*, quick: bool) -> list[Race]:
    """Federations of growing size, at most 50 clients a round."""
    found = []
    for clients in (10_000,) if quick else (10, 100, 1_000, 10_000):
        task = Task(
            data="synthetic-8",
            model="mlp-32",
            clients=clients,
            cohort=min(50, clients),
            rounds=11 if quick else 31,
        )
        engines = (FLOOR, OURS[0]) if quick else (FLOOR, OURS[0], OURS[1], OURS[2])
        found.append(same_task(CLIENTS, f"{clients:,} clients, {task.cohort} a round", task, engines, at=clients))
    return found
