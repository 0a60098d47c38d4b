"""The federation: each client's records, the network they train, and the settings of the run."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asfl_privacy.data import Dataset, parse_partition, partition_records
from asfl_privacy.federated.settings import Privacy, TrainingSettings
from asfl_privacy.federated.streams import SERVER, numpy_stream, torch_seed
from asfl_privacy.federated.weights import Weights, load_weights, read_weights
from asfl_privacy.models import Split, build_model, split_model


@dataclass(frozen=True)
class Client:
    """One client's records.

    Attributes:
        number: 0 … N − 1.
        records: Indices of its records in the data set, by which the ledger counts, shape (n,).
        inputs: Shape (n, *input_shape), raw pixel units.
        labels: Shape (n,).
    """

    number: int
    records: NDArray[np.int64]
    inputs: Tensor
    labels: Tensor

    @property
    def num_records(self) -> int:
        """Number of records the client holds."""
        return int(self.records.shape[0])


class Clients(Sequence[Client]):
    """The clients by number, made when they are asked for: ten thousand cost no more than the data they share.

    Args:
        shares: For each client the sorted indices of its records in the data set.
        inputs: Of the data set, shape (records, *input_shape).
        labels: Shape (records,).
        device: Where training runs.

    Guarantee:
        The data are held once, ordered by client, and a client's records are a view of them.
    """

    def __init__(
        self, shares: Sequence[NDArray[np.int64]], *, inputs: Tensor, labels: Tensor, device: torch.device
    ) -> None:
        self._records = np.concatenate(shares)
        self._bounds = np.concatenate([[0], np.cumsum([len(share) for share in shares])])
        order = torch.from_numpy(self._records)
        self._inputs, self._labels = inputs[order].to(device), labels[order].to(device)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @overload
    def __getitem__(self, number: int) -> Client: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[Client, ...]: ...
    def __getitem__(self, number: int | slice) -> Client | tuple[Client, ...]:
        if isinstance(number, slice):
            return tuple(self[one] for one in range(*number.indices(len(self))))
        if not -len(self) <= number < len(self):
            raise IndexError(f"client {number} must lie in 0 to {len(self) - 1}")
        number %= len(self)
        rows = slice(int(self._bounds[number]), int(self._bounds[number + 1]))
        return Client(number=number, records=self._records[rows], inputs=self._inputs[rows], labels=self._labels[rows])


@dataclass(frozen=True)
class Federation:
    """Everything that stays the same over a run.

    Attributes:
        data: The data set; test records are evaluated by the server.
        clients: The clients, by number.
        settings: Sizes and rates.
        privacy: How releases are made private, or None for clean activations.
        model: Scratch network: phases load weights into it before they compute and rely on nothing left in it.
        split: Head and tail of `model`.
        frozen: Modules that the model's factory put in evaluation mode; they stay in it.
        initial_weights: Weights that round 0 starts from.
        device: Where training runs.
    """

    data: Dataset
    clients: Sequence[Client]
    settings: TrainingSettings
    privacy: Privacy | None
    model: nn.Sequential
    split: Split
    frozen: tuple[nn.Module, ...]
    initial_weights: Weights
    device: torch.device

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one record."""
        return self.data.input_shape

    def load(self, weights: Weights, *, training: bool) -> None:
        """Copy weights into the scratch network and set its mode."""
        load_weights(self.model, weights)
        for module in (self.split.head, self.split.tail, *self.model.modules()):
            wanted = training and module not in self._frozen
            if module.training != wanted:
                module.training = wanted

    @cached_property
    def _frozen(self) -> frozenset[nn.Module]:
        return frozenset(self.frozen)

    def head_before_noise(self) -> nn.Sequential:
        """The head as noised activations are computed, on the CPU whatever the device: a copy where that is another.

        A certificate's claim about the forward pass is that of the CPU: a GPU may round products to TF32, and cuDNN may
        choose Winograd or FFT, which no error model covers.
        """
        head = self.split.head
        return head if self.device.type == "cpu" else copy.deepcopy(head).cpu()

    def replica(self) -> Federation:
        """The same federation with a scratch network of its own, for another thread."""
        model, split, frozen = copy.deepcopy((self.model, self.split, self.frozen))  # one call keeps them one network
        return replace(self, model=model, split=split, frozen=frozen)


def build_federation(
    data: Dataset,
    *,
    model_name: str,
    partition: str,
    settings: TrainingSettings,
    privacy: Privacy | None,
    device: torch.device | str = "cpu",
) -> Federation:
    """Spread the records over the clients and build the network, all from the settings' seed.

    Args:
        data: The data set.
        model_name: As `asfl_privacy.models.build_model` takes it.
        partition: As `asfl_privacy.data.parse_partition` takes it.
        settings: Sizes and rates.
        privacy: How releases are made private, or None.
        device: Where training runs.

    Returns:
        The federation.

    Raises:
        ValueError: A cohort larger than the clients, or whatever the data, partition, model or split refuse.
    """
    if not 1 <= settings.cohort <= settings.clients:
        raise ValueError(
            f"cohort {settings.cohort} must lie in 1 to {settings.clients}, the number of clients; "
            "sample fewer or add clients"
        )
    shares = partition_records(
        data.train_labels.numpy(),
        num_clients=settings.clients,
        scheme=parse_partition(partition),
        rng=numpy_stream(settings.seed, round=-1, client=SERVER, purpose="partition"),
        groups=None if data.train_groups is None else data.train_groups.numpy(),
    )
    target = torch.device(device)
    clients = Clients(shares, inputs=data.train_inputs, labels=data.train_labels, device=target)
    model = build_model(
        model_name, data=data, seed=torch_seed(settings.seed, round=-1, client=SERVER, purpose="weights")
    ).to(target)
    return Federation(
        data=data,
        clients=clients,
        settings=settings,
        privacy=privacy,
        model=model,
        split=split_model(
            model,
            settings.exchange_layer or "auto",
            input_shape=data.input_shape,
            may_mix=settings.exchange_layer is None,
        ),
        frozen=tuple(module for module in model.modules() if not module.training),
        initial_weights=read_weights(model),
        device=target,
    )


def sample_cohort(federation: Federation, *, round: int) -> tuple[int, ...]:
    """The clients of a round, drawn without replacement, in ascending order."""
    settings = federation.settings
    rng = numpy_stream(settings.seed, round=round, client=SERVER, purpose="cohort")
    return tuple(sorted(int(c) for c in rng.choice(settings.clients, size=settings.cohort, replace=False)))
