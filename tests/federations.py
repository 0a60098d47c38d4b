"""Small federations for the tests of this room and of execution."""

import math
from collections import OrderedDict
from dataclasses import replace

import torch
from torch import Tensor, nn

from asfl_privacy.data import Dataset
from asfl_privacy.federated import Federation, Privacy, TrainingSettings, build_federation
from asfl_privacy.federated.steps import Pool


def make_federation(data: Dataset, *, privacy: Privacy | None = None, **changes: object) -> Federation:
    """Six clients of skewed digits, three rounds; anything can be changed by keyword."""
    model_name = changes.pop("model_name", "small-cnn")
    partition = changes.pop("partition", "dirichlet:0.5")
    settings = {
        "clients": 6,
        "cohort": 4,
        "rounds": 3,
        "tail_steps": 4,
        "full_steps": 3,
        "batch_size": 16,
        "lr": 0.1,
        "seed": 0,
        "exchange_layer": "conv2",
    } | changes
    return build_federation(
        data, model_name=model_name, partition=partition, settings=TrainingSettings(**settings), privacy=privacy
    )


def gaussian(**changes: object) -> Privacy:
    """Gaussian noise at the input for records within an ℓ2 distance of 1."""
    return Privacy(
        **{"mechanism": "gaussian", "noise_multiplier": 2.0, "p": 2.0, "radius": 1.0, "placement": "input", **changes}
    )


def tiny_net(*, input_shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """64 numbers to 8, then to the classes: named `federations:tiny_net`, for tests that run many federations."""
    size = math.prod(input_shape)
    body = nn.Sequential(nn.Flatten(), nn.Linear(size, 8), nn.ReLU())
    return nn.Sequential(OrderedDict(body=body, out=nn.Linear(8, num_classes)))


def few_records(data: Dataset, count: int = 48) -> Dataset:
    """The first records of a data set."""
    return replace(data, train_inputs=data.train_inputs[:count], train_labels=data.train_labels[:count])


def make_tiny(data: Dataset, *, privacy: Privacy | None = None, **changes: object) -> Federation:
    """Two clients of 24 records each and a network of 610 parameters; anything can be changed by keyword."""
    sizes = {"clients": 2, "cohort": 2, "tail_steps": 2, "full_steps": 2, "batch_size": 8}
    names = {"model_name": "federations:tiny_net", "exchange_layer": "body", "partition": "iid"}
    return make_federation(few_records(data), privacy=privacy, **(sizes | names | changes))


def all_rows(pool: Pool) -> Tensor:
    """The inputs of a pool, own and received ones joined."""
    return pool.inputs if pool.received is None else torch.cat([pool.inputs, pool.received])
