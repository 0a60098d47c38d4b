"""Build a network by name, with seeded weights, and check that it fits the data."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from asfl_privacy.data import Dataset, import_object
from asfl_privacy.models.nets import NETS
from asfl_privacy.models.projection import add_projection, read_projection

MAX_BLOCK_NAME = 60


def build_model(name: str, *, data: Dataset, seed: int) -> nn.Sequential:
    """Make the network `name` for a data set.

    Args:
        name: A name of `NETS`, or `module:factory` for your own: a function that takes the keywords input_shape and
            num_classes and returns an `nn.Sequential` whose children are the named blocks. Naming a module runs its
            code. Its inputs are in raw pixel units; normalisation belongs inside, as the first block. Any of them
            followed by `+projection:WIDTH` is that network, its other blocks with the same initial weights, with a
            projection head of so many features before its last block (`add_projection`).
        data: What it must fit.
        seed: Seed of the initial weights; torch's global generator is left as it was.

    Returns:
        The network in training mode, except for modules that the factory put in evaluation mode.

    Raises:
        ValueError: An unknown name, a factory that fails, blocks that are missing, a network that does not turn a batch
            of the data's records into finite logits of shape (batch, num_classes), or one that takes no projection.

    Example:
        >>> from pathlib import Path
        >>> from asfl_privacy.data import load_dataset
        >>> net = build_model("small-cnn", data=load_dataset("digits", root=Path("data")), seed=0)
        >>> [block for block, _ in net.named_children()]
        ['normalize', 'conv1', 'conv2', 'fc1', 'classifier']
    """
    base, width = read_projection(name)
    factory = _factory(base, data=data)  # before the seed: importing a module may draw from torch's generator
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = factory()
        except (Exception, SystemExit) as error:  # the user's factory may fail in any way; the line says how
            if base in NETS:
                raise
            raise ValueError(
                f"model {base!r}: the factory failed ({type(error).__name__}: {_first_line(error)}); it is called "
                "with input_shape and num_classes"
            ) from error
        checked = _checked(model, name=base, data=data)
        if width is None:
            return checked
        try:
            grown = add_projection(checked, width)
        except ValueError as error:
            raise ValueError(f"model {name!r}: {error}") from error
        return _checked(grown, name=name, data=data)


def _factory(name: str, *, data: Dataset) -> Callable[[], object]:
    """What makes the network when it is called."""
    if name in NETS:
        constants = {"mean": data.mean, "std": data.std}
        return partial(NETS[name], input_shape=data.input_shape, num_classes=data.num_classes, **constants)
    if ":" not in name:
        raise ValueError(
            f"model {name!r} is unknown; use one of {', '.join(sorted(NETS))}, or your own as module:factory"
        )
    made = import_object(name, what="model")
    if not callable(made):
        raise ValueError(f"model {name!r} is a {type(made).__name__}; it must be a function")
    return partial(made, input_shape=data.input_shape, num_classes=data.num_classes)


def block_names(model: nn.Sequential) -> tuple[str, ...]:
    """Names of the blocks from input to output.

    Raises:
        ValueError: One module that stands as two blocks, which torch's own iterators leave out the second time.
    """
    first: dict[nn.Module | None, str] = {}
    for name, block in model._modules.items():
        if block in first:
            raise ValueError(
                f"block {name} is the same module as block {first[block]}: head and tail would share it; build one of each"
            )
        first[block] = name
    return tuple(first.values())


def _checked(model: object, *, name: str, data: Dataset) -> nn.Sequential:
    """The network, once it is a sequence of blocks that maps a batch of the data to finite logits."""
    if type(model) is not nn.Sequential or len(model) < 2:
        raise ValueError(
            f"model {name!r} gives a {type(model).__name__}; it must be an nn.Sequential of at least two named blocks, "
            "so that it can be split between them"
        )
    modes = {module: module.training for module in model.modules()}
    for block in block_names(model):
        if not block.isprintable() or len(block) > MAX_BLOCK_NAME:
            raise ValueError(
                f"model {name!r}: block name {block[:MAX_BLOCK_NAME]!r} must be printable and of at most "
                f"{MAX_BLOCK_NAME} characters; rename it"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"model {name!r} has no parameter to train; leave requires_grad on for some")
    batch = data.train_inputs[:2].clone()  # a block may work in place
    model.eval()
    try:
        with torch.no_grad():
            logits = model(batch)
    except Exception as error:  # the user's blocks may fail in any way; the line says how
        raise ValueError(
            f"model {name!r} does not fit data {data.name}: a batch of shape {tuple(batch.shape)} fails with "
            f"{_first_line(error)}; change the model or the data"
        ) from error
    finally:
        for module, training in modes.items():
            module.training = training
    expected = (batch.shape[0], data.num_classes)
    if not isinstance(logits, torch.Tensor) or tuple(logits.shape) != expected:
        shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise ValueError(
            f"model {name!r} does not fit data {data.name}: it gives {shape} where logits of shape {expected} are due; "
            "end it with one output a class"
        )
    if not bool(torch.isfinite(logits).all()):
        raise ValueError(
            f"model {name!r} gives logits that are not finite on data {data.name}; check its initial weights"
        )
    for parameter_name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"model {name!r}: parameter {parameter_name} is {parameter.dtype}; parameters must be float32, call .float()"
            )
    _refuse_odd_entries(model, name=name)
    return model


def _refuse_odd_entries(model: nn.Module, *, name: str) -> None:
    """Refuse entries that copies and averages of the network would not treat as what they are."""
    entries = [(entry, value) for entry, value in (*model.named_parameters(), *model.named_buffers())]
    for entry, value in entries:
        if value.is_complex():
            raise ValueError(
                f"model {name!r}: {entry} is {value.dtype}; clients' networks are averaged as real numbers, keep its real and "
                "imaginary parts as two buffers"
            )
    spans = sorted((*_span(value), entry) for entry, value in entries if value.numel())
    for (_, end, one), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise ValueError(
                f"model {name!r}: {one} and {other} share memory but are two tensors, so a copy of the network would lose the "
                "tie; tie weights by assigning the same nn.Parameter to both"
            )
    if any(type(module).get_extra_state is not nn.Module.get_extra_state for module in model.modules()):
        raise ValueError(
            f"model {name!r} keeps an extra state, which clients would hand on to each other; keep it in buffers"
        )


def _span(value: torch.Tensor) -> tuple[int, int]:
    """First and last byte, and one, of a tensor's memory."""
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr(), value.data_ptr() + (last + 1) * value.element_size()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
