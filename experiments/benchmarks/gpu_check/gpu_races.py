"""What the GPU check measures: one process per part, one line of JSON per measurement, so that a part cut short still counts.

    python gpu_races.py PART DEVICE QUICK

Parts: `eager` and `compiled` (64 clients, every variant, interleaved) and `scaling` (8 … 256 clients). Mini-batches are the
same in every variant, so that the weights must be the bare loop's up to rounding; their difference is part of the line.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.data import make_dataset
from asfl_privacy.execution import begin_run, run_rounds
from asfl_privacy.execution.choice import make_executor
from asfl_privacy.execution.client_work import repeatable_kernels
from asfl_privacy.federated import METHODS, TrainingSettings, build_federation
from asfl_privacy.federated.batched_steps import BatchedNetwork, batch_network, run_steps_batched
from asfl_privacy.federated.steps import Pool, Rule, draw_batch, run_steps
from asfl_privacy.federated.streams import numpy_stream
from asfl_privacy.federated.weights import Weights, read_weights
from asfl_privacy.models.nets import small_cnn

BARE = "bare loop"
RECORDS, LR = 128, 0.05


@dataclass(frozen=True)
class Work:
    """Local steps of some clients.

    Attributes:
        network: 2-convolution CNN for 28×28, on the device.
        initial: What every client starts from.
        pools: Each client's records, on the device.
        num_steps: Steps a client.
        batch_size: Records a step.
    """

    network: nn.Sequential
    initial: Weights
    pools: tuple[Pool, ...]
    num_steps: int
    batch_size: int

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.pools[0].inputs.device


Variant = Callable[[Work], list[Weights]]


def make_work(clients: int, *, device: str, num_steps: int, batch_size: int = 32) -> Work:
    """Uniform images and labels: the time of a step does not depend on what they show."""
    torch.manual_seed(0)
    network = small_cnn(input_shape=(1, 28, 28), num_classes=10, mean=(0.5,), std=(0.5,))[1:].to(device)
    inputs, labels = torch.rand(clients * RECORDS, 1, 28, 28), torch.randint(0, 10, (clients * RECORDS,))
    parts = zip(inputs.to(device).split(RECORDS), labels.to(device).split(RECORDS), strict=True)
    pools = tuple(Pool(inputs=x, labels=y) for x, y in parts)
    return Work(network, read_weights(network), pools, num_steps, batch_size)


def bare_loop(work: Work, *, autocast: torch.dtype | None = None) -> list[Weights]:
    """Client after client, as a careful user writes it: one network, one optimizer, data on the device."""
    optimizer, results = torch.optim.SGD(work.network.parameters(), lr=LR), []
    for client, pool in enumerate(work.pools):
        work.network.load_state_dict(work.initial)
        rng = _rng(client)
        for _ in range(work.num_steps):
            batch = draw_batch(len(pool.labels), batch_size=work.batch_size, rng=rng).to(work.device)
            optimizer.zero_grad()
            with torch.autocast(work.device.type, dtype=autocast, enabled=autocast is not None):
                loss = F.cross_entropy(work.network(pool.inputs[batch]), pool.labels[batch])
            loss.backward()
            optimizer.step()
        results.append(read_weights(work.network))
    return results


def one_by_one(work: Work) -> list[Weights]:
    """The package's own steps, client after client."""
    results = []
    for client, pool in enumerate(work.pools):
        work.network.load_state_dict(work.initial)
        run_steps(
            work.network, pool, num_steps=work.num_steps, batch_size=work.batch_size, rule=Rule(LR), rng=_rng(client)
        )
        results.append(read_weights(work.network))
    return results


def batched(prepared: BatchedNetwork, *, repeatable: bool = True) -> Variant:
    """The package's steps of all clients at once; with the kernels that the executor asks for, or whichever cuDNN takes."""

    def run(work: Work) -> list[Weights]:
        with repeatable_kernels(work.device if repeatable else torch.device("cpu")):
            return run_steps_batched(
                prepared,
                [work.initial] * len(work.pools),
                work.pools,
                rngs=[_rng(client) for client in range(len(work.pools))],
                num_steps=work.num_steps,
                batch_size=work.batch_size,
                rule=Rule(LR),
            )[0]

    return run


def whole_round(work: Work, executor: str) -> Variant:
    """A whole FedAvg round of the package: sampling, steps, averaging, one evaluation of ten records."""
    inputs = torch.cat([pool.inputs.cpu() for pool in work.pools])
    labels = torch.cat([pool.labels.cpu() for pool in work.pools])
    data = make_dataset("uniform", train=(inputs, labels), test=(inputs[:10], labels[:10]), num_classes=10)
    count = len(work.pools)
    settings = TrainingSettings(
        clients=count, cohort=count, rounds=1, tail_steps=0, full_steps=work.num_steps, batch_size=work.batch_size,
        lr=LR, seed=0,
    )  # fmt: skip
    federation = build_federation(
        data, model_name="small-cnn", partition="iid", settings=settings, privacy=None, device=work.device
    )
    method = METHODS["fedavg"]
    running = make_executor(executor, federation, method).__enter__()

    def run(work: Work) -> list[Weights]:
        done = run_rounds(federation, method, executor=running, start=begin_run(federation, ledger=None))
        return [done.state.weights]

    return run


def eager_variants(work: Work) -> dict[str, Variant]:
    """Everything that starts at once."""
    half = torch.bfloat16
    return {
        BARE: bare_loop,
        "bare loop, bf16": lambda work: bare_loop(work, autocast=half),
        "steps one by one": one_by_one,
        "batched": batched(batch_network(work.network)),
        "batched, channels_last (the executor's)": batched(batch_network(work.network, channels_last=True)),
        "the same, any kernels": batched(batch_network(work.network, channels_last=True), repeatable=False),
        "batched, bf16": batched(batch_network(work.network, autocast=half)),
        "batched, bf16, channels_last": batched(batch_network(work.network, autocast=half, channels_last=True)),
        "whole round, executor serial": whole_round(work, "serial"),
        "whole round, executor batched": whole_round(work, "batched"),
    }


def compiled_variants(work: Work) -> dict[str, Variant]:
    """What torch.compile must build first; on CUDA with CUDA graphs."""
    half = torch.bfloat16
    return {
        BARE: bare_loop,
        "batched, channels_last (the executor's)": batched(batch_network(work.network, channels_last=True)),
        "compiled": batched(batch_network(work.network, compile=True)),
        "compiled, channels_last": batched(batch_network(work.network, channels_last=True, compile=True)),
        "compiled, bf16, channels_last": batched(
            batch_network(work.network, autocast=half, channels_last=True, compile=True)
        ),
    }


def race(variants: dict[str, Variant], work: Work, *, repeats: int) -> Iterator[dict[str, object]]:
    """Warm each variant up once, then measure all of them in turn, again and again."""
    expected = bare_loop(work)
    for name, variant in list(variants.items()):
        started = time.perf_counter()
        try:
            found = variant(work)
        except Exception as error:  # one that fails is told of; the others go on
            del variants[name]
            yield {"variant": name, "clients": len(work.pools), "error": f"{type(error).__name__}: {error}"[:200]}
            continue
        _wait(work.device)
        off = _distance(expected, found) if len(found) == len(expected) else None
        yield {
            "variant": name,
            "clients": len(work.pools),
            "warmup_s": time.perf_counter() - started,
            "difference": off,
        }
    for _ in range(repeats):
        for name, variant in variants.items():
            yield {"variant": name, "clients": len(work.pools), **_measured(variant, work)}


def scaling(device: str, *, sizes: tuple[int, ...], num_steps: int, repeats: int) -> Iterator[dict[str, object]]:
    """The bare loop and the executor's steps at several numbers of clients."""
    whole = make_work(max(sizes), device=device, num_steps=num_steps)
    steps = batched(batch_network(whole.network, channels_last=True))
    for size in sizes:
        work = replace(whole, pools=whole.pools[:size])
        yield from race({BARE: bare_loop, "batched": steps}, work, repeats=repeats)


def _measured(variant: Variant, work: Work) -> dict[str, float]:
    """Seconds by the wall, between two waits for the device; on CUDA also between two of its own events, and peak MiB."""
    _wait(work.device)
    if work.device.type != "cuda":
        started = time.perf_counter()
        variant(work)
        return {"seconds": time.perf_counter() - started}
    torch.cuda.reset_peak_memory_stats()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    started = time.perf_counter()
    begin.record()
    variant(work)
    end.record()
    _wait(work.device)
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "device_s": begin.elapsed_time(end) / 1e3,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20,
    }


def _distance(first: list[Weights], second: list[Weights]) -> float:
    """‖difference‖ over ‖weights‖ of all clients' weights, in float64."""
    apart = sum(
        float((a[n].double() - b[n].double()).square().sum()) for a, b in zip(first, second, strict=True) for n in a
    )
    return (apart / sum(float(v.double().square().sum()) for a in first for v in a.values())) ** 0.5


def _rng(client: int):  # noqa: ANN202  # numpy's
    return numpy_stream(0, round=0, client=client, purpose="full steps")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(part: str, device: str, quick: bool) -> None:
    """Run a part and print its lines."""
    repeats, clients, num_steps = (2, 4, 2) if quick else (15, 64, 10)
    if part == "scaling":
        sizes = (2, 4) if quick else (8, 16, 32, 64, 128, 256)
        lines = scaling(device, sizes=sizes, num_steps=num_steps, repeats=min(repeats, 5))
    else:
        work = make_work(clients, device=device, num_steps=num_steps)
        variants = eager_variants(work) if part == "eager" else compiled_variants(work)
        lines = race(variants, work, repeats=repeats)
    for line in lines:
        print(json.dumps({"part": part, **line}), flush=True)
    sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], sys.argv[3] == "quick")
