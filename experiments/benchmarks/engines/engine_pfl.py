"""pfl-research: its SimulatedBackend and FederatedAveraging in one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from workload import Clock, Records, Task, batches, finish, load_records, load_task, network_of


class Trained(nn.Module):
    """The network with the two methods that pfl asks for."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.num_steps = network, 0

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """What a step minimises."""
        self.num_steps += 1
        return F.cross_entropy(self.network(inputs), labels)

    def metrics(self, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
        """Nothing: no evaluation is asked for."""
        return {}


class Drawn(Dataset):
    """A client's records, from which each step's mini-batch is drawn anew."""

    def __init__(self, records: Records, task: Task, *, client: int, round: int) -> None:
        super().__init__((records.inputs[client], records.labels[client]), user_id=str(client))
        self.task, self.client, self.round = task, client, round

    def iter(self, batch_size: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Mini-batches of one round."""
        inputs, labels = self.raw_data
        num_steps = max(self.task.num_steps, 1)  # pfl fails on an empty data set; it takes no more steps than asked
        for batch in batches(len(labels), self.task, num_steps=num_steps, round=self.round, client=self.client):
            yield inputs[batch], labels[batch]


class Tick(TrainingProcessCallback):
    """Stamps the clock, and knows which round the clients are in."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.round = clock, 0

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        """Before the first round."""
        self.clock.tick()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """After each round."""
        self.round = central_iteration + 1
        self.clock.tick()
        return False, Metrics()


def main(folder: Path, out: Path) -> None:
    """Run a task."""
    task, records = load_task(folder), load_records(folder)
    network, clock = network_of(task, records), Clock(task)
    tick, trained = Tick(clock), Trained(network)

    def dataset_of(client: int) -> Drawn:
        return Drawn(records, task, client=client, round=tick.round)

    users = FederatedDataset(dataset_of, get_user_sampler("minimize_reuse", list(range(task.clients))))
    model = PyTorchModel(
        trained,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=task.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=task.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=users, val_data=users, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=None,
            local_num_steps=task.num_steps,
            local_learning_rate=task.lr,
            local_batch_size=task.batch_size,
        ),
        callbacks=[tick],
        send_metrics_to_platform=False,
    )
    finish(
        out,
        clock=clock,
        weights=network.state_dict(),
        task=task,
        records=records,
        steps=trained.num_steps,
        versions={"pfl": version("pfl")},
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
