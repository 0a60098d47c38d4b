"""Evaluation on the test records: the global network, batches spread over threads, and what a method itself measures."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch

from asfl_privacy.execution.client_work import global_draws
from asfl_privacy.federated import Federation, Method, State
from asfl_privacy.federated.steps import evaluate_batch
from asfl_privacy.federated.streams import SERVER
from asfl_privacy.federated.weights import Weights
from asfl_privacy.mechanisms.plain_modules import is_plain
from asfl_privacy.models import OWN_LAYERS

BATCH_SIZE = 1024


class Evaluator:
    """Evaluates weights on the federation's test records; a context manager that ends its threads.

    Args:
        federation: Its test records are kept on its device.
        threads: Threads that batches are spread over, each with a replica of the network; 1 on a GPU, and for a network
            with blocks that are not torch's own, which may keep something or draw from what threads share.

    Guarantee:
        The result does not depend on the number of threads: batches are the same and are added up in order. Nothing of a
        test record reaches training: the network that trains is never run here, and what blocks may keep of one
        evaluation is gone before the next. A network that draws in evaluation draws the same in the same round.
    """

    def __init__(self, federation: Federation, *, threads: int = 1) -> None:
        self._federation = federation
        self._is_plain = is_plain(federation.model, also=OWN_LAYERS)
        threads = threads if federation.device.type == "cpu" and self._is_plain else 1
        data, device = federation.data, federation.device
        self._batches = list(
            zip(
                torch.split(data.test_inputs.to(device), BATCH_SIZE),
                torch.split(data.test_labels.to(device), BATCH_SIZE),
                strict=True,
            )
        )
        self._num_records = len(data.test_labels)
        threads = max(1, min(threads, len(self._batches)))
        self._networks = [federation.replica() for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="evaluation")

    def evaluate(self, weights: Weights, *, round: int) -> tuple[float, float]:
        """Accuracy (0–1) and mean cross-entropy of the network with these weights, in evaluation mode."""
        if not self._is_plain:
            self._networks = [self._federation.replica()]
            with global_draws(self._federation, client=SERVER, round=round):
                return self._total({0: self._evaluate_share(weights, self._networks[0], 0)})
        parts = [
            self._pool.submit(self._evaluate_share, weights, federation, first)
            for first, federation in enumerate(self._networks)
        ]
        return self._total({number: part.result() for number, part in enumerate(parts)})

    def measures(self, method: Method, state: State, *, round: int) -> dict[str, float]:
        """What the method itself measures, by column; empty for nothing."""
        if not self._is_plain:
            self._networks = [self._federation.replica()]
        with global_draws(self._federation, client=SERVER, round=round):
            return dict(method.measures(state, federation=self._networks[0]))

    def _total(self, shares: Mapping[int, Mapping[int, tuple[int, float]]]) -> tuple[float, float]:
        """Mean over all records, added up in the order of the batches."""
        found = {number: result for share in shares.values() for number, result in share.items()}
        correct, loss = 0, 0.0
        for number in sorted(found):
            correct += found[number][0]
            loss += found[number][1]
        return correct / self._num_records, loss / self._num_records

    def _evaluate_share(self, weights: Weights, federation: Federation, first: int) -> dict[int, tuple[int, float]]:
        """Records right and summed loss of every batch that is one thread's, by the number of the batch."""
        federation.load(weights, training=False)
        found = {}
        for number in range(first, len(self._batches), len(self._networks)):
            inputs, labels = self._batches[number]
            found[number] = evaluate_batch(federation.model, inputs=inputs, labels=labels)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
