"""Data and federations of the tasks, made by the package, and their folders for engines that do not know it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn
from workload import Task, Weights, build_network, records_file, save_task

from asfl_privacy.data import Dataset, load_dataset, make_dataset
from asfl_privacy.federated import Federation, Privacy, TrainingSettings
from asfl_privacy.federated.federation import build_federation
from asfl_privacy.models import Normalize

RADIUS, NOISE_MULTIPLIER = 0.1, 3.73  # σ/Δ of ε = 1, δ = 1e-5 a release
SHAPES = {"synthetic-8": (1, 8, 8), "synthetic-28": (1, 28, 28)}
CONSTANTS = {  # mean, std of each data set's channel
    "digits": (0.305, 0.376),
    "fashion-mnist": (0.286, 0.353),
    "synthetic-8": (0.5, 0.5),
    "synthetic-28": (0.5, 0.5),
}


@cache
def dataset_of(name: str) -> Dataset:
    """A data set by name; "synthetic-S" holds 60,000 records of S×S pixels around ten class means."""
    if name not in SHAPES:
        return load_dataset(name, root=Path("data"))
    rng, shape = np.random.default_rng(0), SHAPES[name]
    means = rng.random((10, *shape), dtype=np.float32)
    labels = rng.integers(10, size=62_000)
    inputs = np.clip(means[labels] + 0.3 * rng.standard_normal((62_000, *shape), dtype=np.float32), 0.0, 1.0)
    train, test = (inputs[:60_000], labels[:60_000]), (inputs[60_000:], labels[60_000:])
    return make_dataset(name, train=train, test=test, num_classes=10)


def image_data() -> str:
    """Fashion-MNIST where it can be had, else synthetic records of its shape."""
    try:
        dataset_of("fashion-mnist")
    except ValueError as error:
        print(f"synthetic records take Fashion-MNIST's place: {error}", flush=True)
        return "synthetic-28"
    return "fashion-mnist"


def __getattr__(name: str) -> Callable[..., nn.Sequential]:
    """Factories mlp_H_DATA, as the package's `module:factory` asks for them: the plain network behind a first block."""
    if not name.startswith("mlp_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _, hidden, data = name.split("_", 2)
    mean, std = CONSTANTS[data]

    def factory(*, input_shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
        plain = build_network(f"mlp-{hidden}", input_shape=input_shape, num_classes=num_classes)
        first = Normalize((mean,), (std,), ndim=len(input_shape))
        return nn.Sequential(OrderedDict(normalize=first, **dict(plain.named_children())))

    return factory


def privacy_of(task: Task) -> Privacy | None:
    """Gaussian releases at the task's placement, noise from the system's source, or none."""
    if not task.placement:
        return None
    return Privacy(
        mechanism="gaussian",
        noise_multiplier=NOISE_MULTIPLIER,
        p=2.0,
        radius=RADIUS,
        placement=task.placement,
        reproducible=False,
    )


def federation_of(task: Task, data: Dataset) -> Federation:
    """The package's federation of a task; one round more, before which a run is stopped, so that nothing evaluates."""
    settings = TrainingSettings(
        clients=task.clients,
        cohort=task.cohort,
        rounds=task.rounds + 1,
        tail_steps=task.tail_steps,
        full_steps=task.full_steps,
        batch_size=task.batch_size,
        lr=task.lr,
        seed=task.seed,
        evaluate_every=10**9,
        exchange_layer=task.exchange_layer,
    )
    model = "small-cnn" if task.model == "cnn" else f"task_data:{task.model.replace('-', '_')}_{task.data}"
    return build_federation(data, model_name=model, partition="iid", settings=settings, privacy=privacy_of(task))


def prepare(folder: Path, task: Task) -> Task:
    """Write the folder of a task, with `auto` decided, and its records where they are not there yet."""
    data = dataset_of(task.data)
    federation = federation_of(task, data)
    task = replace(task, exchange_layer=federation.split.exchange_layer)
    save_task(
        folder,
        task,
        order=torch.from_numpy(np.concatenate([client.records for client in federation.clients])),
        sizes=torch.tensor([client.num_records for client in federation.clients]),
        initial=plain_weights(federation.initial_weights),
    )
    if not records_file(folder, task).exists():
        mean, std = (torch.tensor(one).reshape(-1, 1, 1) for one in (data.mean, data.std))
        held = {name: getattr(data, name) for name in ("train_inputs", "train_labels", "test_inputs", "test_labels")}
        torch.save({**held, "mean": mean, "std": std}, records_file(folder, task))
    return task


def stored_dataset(folder: Path, task: Task) -> Dataset:
    """The data set of a task from its file."""
    raw = torch.load(records_file(folder, task), weights_only=True)
    mean, std = (tuple(raw.pop(name).flatten().tolist()) for name in ("mean", "std"))
    return Dataset(name=task.data, num_classes=10, mean=mean, std=std, **raw)


def plain_weights(weights: Weights) -> Weights:
    """Weights without those of the first block, which the plain network lacks."""
    return {name: value for name, value in weights.items() if not name.startswith("normalize.")}
