"""The batched executor: the local steps of many clients at once, as one network with stacked weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn

from asfl_privacy.execution.client_work import named, repeatable_kernels
from asfl_privacy.execution.executor import Failure
from asfl_privacy.execution.serial import SerialExecutor
from asfl_privacy.execution.threads import ThreadsExecutor
from asfl_privacy.federated import Collected, Federation, Method, Payload, State, Update
from asfl_privacy.federated.batched_steps import BatchedNetwork, batch_network, run_steps_batched
from asfl_privacy.federated.batching_support import supports_batching
from asfl_privacy.federated.local_training import finish_update, own_records
from asfl_privacy.federated.phases import Remaining, Stage, StagedMethod, Steps
from asfl_privacy.federated.steps import Pool
from asfl_privacy.federated.stopwatch import Stopwatch
from asfl_privacy.federated.streams import numpy_stream
from asfl_privacy.federated.weights import Weights
from asfl_privacy.mechanisms import ReleasePlan
from asfl_privacy.mechanisms.label_randomiser import transition_matrix

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

MOST_TOGETHER, MOST_CONVOLUTIONS = 64, 4
"""Clients whose steps are taken together: many where only memory is at stake; few where a core's cache must hold the
images of all of them."""


class BatchedExecutor:
    """The local steps of groups of clients at once; what is released is collected client by client, as always.

    Args:
        federation: Clients, network and settings.
        method: Whose phases are run; one whose local work is stages of plain steps.
        workers: Threads that groups, and clients where they collect, are spread over; on a GPU there is one.
        tolerate_failures: Whether a failed client is answered for by a `Failure`.
        compile: Whether torch.compile fuses the steps, with CUDA graphs on a GPU.

    Raises:
        ValueError: Local steps that cannot be taken together; the line says why.

    Guarantee:
        Draws, releases and charges are those of the serial executor, bit for bit, and the weights are within rounding of
        its own: sums run in another order. Which clients are grouped does not depend on the number of workers.
    """

    name = "batched"

    def __init__(
        self,
        federation: Federation,
        method: Method,
        *,
        workers: int = 1,
        tolerate_failures: bool = False,
        compile: bool = False,
    ) -> None:
        reason = why_not_batched(federation, method)
        if reason is not None or not isinstance(method, StagedMethod):
            raise ValueError(f"executor batched: {reason}; use executor serial, threads or processes")
        self._federation = federation
        self._method: StagedMethod = method
        self._one_by_one: SerialExecutor | ThreadsExecutor
        if workers == 1 or federation.device.type != "cpu":
            self._one_by_one = SerialExecutor(federation, method, tolerate_failures=tolerate_failures)
            workers = 1
        else:
            self._one_by_one = ThreadsExecutor(federation, method, workers=workers, tolerate_failures=tolerate_failures)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="group")
        convolves = any(isinstance(module, CONVOLUTIONS) for module in federation.model.modules())
        self._together = MOST_CONVOLUTIONS if convolves and federation.device.type == "cpu" else MOST_TOGETHER
        self._tolerate_failures = tolerate_failures
        federation.load(federation.initial_weights, training=True)
        self._networks = {
            part: self._prepared(network, compile=compile)
            for part, network in (("tail", federation.split.tail), ("full", federation.model))
        }

    def collect(
        self, state: State, cohort: Sequence[int], *, plan: ReleasePlan | None, remaining: Remaining, round: int
    ) -> dict[int, Collected | Failure]:
        """See `Executor`."""
        return self._one_by_one.collect(state, cohort, plan=plan, remaining=remaining, round=round)

    def train(
        self,
        state: State,
        cohort: Sequence[int],
        *,
        plan: ReleasePlan | None,
        collected: Mapping[int, Collected],
        received: Mapping[int, Payload],
        remaining: Remaining,
        round: int,
    ) -> dict[int, Update | Failure]:
        """See `Executor`."""
        alike: dict[tuple[tuple[str, int], ...], dict[int, tuple[Stage, ...]]] = {}
        alone: list[int] = []
        for client in cohort:
            try:
                with named(round, client=client):
                    stages = self._method.stages(
                        state,
                        client,
                        federation=self._federation,
                        own=collected[client].own,
                        received=received.get(client),
                    )
            except Exception:  # it shows again one by one
                if not self._tolerate_failures:
                    raise
                alone.append(client)
                continue
            alike.setdefault(tuple((stage.part, stage.num_steps) for stage in stages), {})[client] = stages

        def train(group: dict[int, tuple[Stage, ...]]) -> dict[int, Update]:
            with named(round), repeatable_kernels(self._federation.device):
                return self._train_together(state, group, remaining=remaining, round=round)

        groups = [group for work in alike.values() for group in self._groups(work)]
        futures = [self._pool.submit(train, group) for group in groups]
        answers: dict[int, Update | Failure] = {}
        try:
            for group, future in zip(groups, futures, strict=True):
                try:
                    answers |= future.result()
                except Exception:  # whose it was shows one by one
                    if not self._tolerate_failures:
                        raise
                    alone += group
            if alone:
                answers |= self._one_by_one.train(
                    state,
                    tuple(alone),
                    plan=plan,
                    collected=collected,
                    received=received,
                    remaining=remaining,
                    round=round,
                )
        finally:
            for future in futures:
                future.cancel()
        return {client: answers[client] for client in cohort}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the threads to end."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._one_by_one.__exit__(kind, error, trace)

    def _groups(self, work: Mapping[int, tuple[Stage, ...]]) -> Iterator[dict[int, tuple[Stage, ...]]]:
        """Clients whose steps are taken together, in order."""
        clients = list(work)
        for first in range(0, len(clients), self._together):
            yield {client: work[client] for client in clients[first : first + self._together]}

    def _train_together(
        self, state: State, work: Mapping[int, tuple[Stage, ...]], *, remaining: Remaining, round: int
    ) -> dict[int, Update]:
        """Updates of clients whose stages have the same parts and numbers of steps."""
        settings, clients = self._federation.settings, list(work)
        starts: list[Weights] = [self._method.start(state, client) for client in clients]
        weights = starts
        done: list[tuple[Steps, ...]] = [() for _ in clients]
        watch = Stopwatch(self._federation.device)
        for stages in zip(*work.values(), strict=True):
            first = stages[0]
            with named(round), watch.phase(first.part):
                weights, taken = run_steps_batched(
                    self._networks[first.part],
                    weights,
                    [stage.pool for stage in stages],
                    rngs=[
                        numpy_stream(settings.seed, round=round, client=client, purpose=first.purpose)
                        for client in clients
                    ],
                    num_steps=first.num_steps,
                    batch_size=settings.batch_size,
                    rule=settings.rule(round),
                    transition=self._transition([stage.pool for stage in stages]),
                    corrections=[stage.correction for stage in stages],
                    keep_gradient=first.keep_gradient,
                )
            for i, stage in enumerate(stages):
                drawn = stage.num_steps * min(settings.batch_size, len(stage.pool.labels))
                one = Steps(
                    drawn=drawn,
                    drawn_remote=taken[i].num_remote,
                    charges=(),
                    remaining=remaining,
                    mean_gradient=taken[i].mean_gradient,
                )
                done[i] += (one,)
        seconds = {part: spent / len(clients) for part, spent in watch.seconds.items()}
        updates = {}
        for client, start, trained, steps in zip(clients, starts, weights, done, strict=True):
            with named(round, client=client):
                begun = replace(state, weights=start)
                update = finish_update(
                    trained, begun, client, federation=self._federation, steps=steps, remaining=remaining, round=round
                )
                update = self._method.finish(
                    update, state, client, steps=steps, federation=self._federation, round=round
                )
            updates[client] = replace(update, seconds=seconds)
        return updates

    def _transition(self, pools: Sequence[Pool]) -> Tensor | None:
        privacy = self._federation.privacy
        if privacy is None or privacy.label_epsilon is None or all(pool.noisy is None for pool in pools):
            return None
        matrix = transition_matrix(self._federation.data.num_classes, epsilon=privacy.label_epsilon)
        return matrix.to(self._federation.device)

    def _prepared(self, network: nn.Module, *, compile: bool) -> BatchedNetwork:
        return batch_network(
            network,
            autocast=self._federation.settings.autocast,
            channels_last=self._federation.device.type == "cuda",
            compile=compile,
        )


def why_not_batched(federation: Federation, method: Method) -> str | None:
    """Why the clients' steps cannot be taken together; None where they can."""
    if not isinstance(method, StagedMethod):
        return f"method {method.name} does other local work than plain steps"
    privacy = federation.privacy
    if privacy is not None and privacy.updates == "dp-sgd":
        return "updates dp-sgd clips every record's gradient, client by client"
    if privacy is not None and privacy.noisy_training:
        return "PixelDP's training draws noise for each client's head"
    first = method.stages(State(federation.initial_weights), 0, federation=federation, own=None, received=None)
    if any(stage.objective is not None for stage in first):
        return f"method {method.name} minimises more than the loss, client by client"
    own, probe = own_records(federation, 0), federation.replica()
    probe.load(federation.initial_weights, training=False)
    with torch.no_grad():
        activations = probe.split.head(own.inputs[:2].clone())  # a block may work in place
    probe.load(federation.initial_weights, training=True)
    return supports_batching(probe.model, own) or supports_batching(
        probe.split.tail, Pool(inputs=activations, labels=own.labels[:2])
    )
