"""Which head `bound` looks at: a built-in network, a factory's network, or a factory's head as it is."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asfl_privacy.data import Dataset, import_object, load_dataset
from asfl_privacy.models import NETS, build_model, read_projection, split_model

DEFAULT_CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What may be bounded.

    Attributes:
        model: as the factory made it.
        input_shape: shape of one record.
        blocks: named parts in the order in which they run, as far as each reads what the one before gave.
        has_tail: whether the last block is a tail that stays with its client.
    """

    model: nn.Module
    input_shape: tuple[int, ...]
    blocks: tuple[tuple[str, nn.Module], ...]
    has_tail: bool

    @property
    def exchange_layers(self) -> tuple[str, ...]:
        """Blocks at whose end activations may leave."""
        names = tuple(name for name, _ in self.blocks)
        return names[:-1] if self.has_tail else names

    def head(self, exchange_layer: str) -> tuple[str, nn.Module]:
        """The exchange layer and the head that ends there, in evaluation mode; "" for the whole model.

        Raises:
            ValueError: for a block that cannot end the head.
        """
        if self.has_tail and type(self.model) is nn.Sequential:
            split = split_model(self.model, exchange_layer, input_shape=self.input_shape)
            return split.exchange_layer, split.head.eval()
        if exchange_layer == "auto":
            return "", self.model.eval()
        if exchange_layer not in self.exchange_layers:
            known = ", ".join(self.exchange_layers)
            raise ValueError(
                f"exchange layer {exchange_layer!r} is no block at which this {type(self.model).__name__} can be cut; "
                + (f"use one of {known}" if known else "its children do not run one after the other; leave --until out")
            )
        cut = self.exchange_layers.index(exchange_layer) + 1
        return exchange_layer, nn.Sequential(OrderedDict(self.blocks[:cut])).eval()


def find_subject(
    model: str, *, data: str | None, data_root: Path, input_shape: tuple[int, ...] | None, seed: int
) -> Subject:
    """Build what --model names.

    Args:
        model: a built-in network, or module:factory. A factory may take input_shape and num_classes. One that takes
            num_classes and returns a Sequential of two blocks or more makes a network with a tail; anything else is a
            head as it is.
        data: data set that gives shape, classes and constants; None for digits, unless there is an input shape.
        data_root: folder of data sets.
        input_shape: shape of one record, or None for that of the data. Without data a built-in network normalises by
            mean 0 and deviation 1, and there are 10 classes.
        seed: of the initial weights.

    Returns:
        The subject.

    Raises:
        ValueError: an unknown model or data set, shapes that disagree, or a factory that fails.
    """
    records = None
    if data is not None or input_shape is None:
        records = load_dataset(data or "digits", root=data_root)
        if input_shape is not None and input_shape != records.input_shape:
            raise ValueError(
                f"input shape {input_shape} is not that of data {records.name}, {records.input_shape}; give one of "
                "--input-shape and --data"
            )
    shape = records.input_shape if records is not None else input_shape
    if shape is None:
        raise ValueError("bound needs the shape of one record; give --input-shape or --data")
    if read_projection(model)[1] is not None:
        if records is None:
            raise ValueError(f"model {model!r}: a projection is built for a data set; give --data")
        return _network(build_model(model, data=records, seed=seed), shape)
    if ":" not in model:
        if records is not None:
            return _network(build_model(model, data=records, seed=seed), shape)
        if model not in NETS:
            raise ValueError(
                f"model {model!r} is unknown; use one of {', '.join(sorted(NETS))}, or your own as module:factory"
            )
        return _network(
            _made(NETS[model], model, seed, input_shape=shape, num_classes=10, mean=(0.0,), std=(1.0,)), shape
        )
    factory = import_object(model, what="model")
    if not callable(factory):
        raise ValueError(f"model {model!r} is a {type(factory).__name__}; it must be a function")
    wanted = _keywords(factory)
    if records is not None and {"input_shape", "num_classes"} <= wanted:
        return _network(build_model(model, data=records, seed=seed), shape)
    offered: dict[str, Any] = {"input_shape": shape, "num_classes": _num_classes(records)}
    made = _made(factory, model, seed, **{name: value for name, value in offered.items() if name in wanted})
    if "num_classes" in wanted and type(made) is nn.Sequential and len(made) >= 2:
        return _network(made, shape)
    return Subject(model=made, input_shape=shape, blocks=_chain(made, shape), has_tail=False)


def _network(model: nn.Module, shape: tuple[int, ...]) -> Subject:
    return Subject(model=model, input_shape=shape, blocks=tuple(model.named_children()), has_tail=True)


def _num_classes(records: Dataset | None) -> int:
    return DEFAULT_CLASSES if records is None else records.num_classes


def _keywords(factory: Any) -> set[str]:  # noqa: ANN401 - any callable
    """Which of our keywords a factory takes by name."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return set()
    named = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return {name for name in ("input_shape", "num_classes") if takes_any or name in named}


def _made(factory: Any, name: str, seed: int, **keywords: Any) -> nn.Module:  # noqa: ANN401 - any callable
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            made = factory(**keywords)
        except (Exception, SystemExit) as error:  # the user's factory may fail in any way; the line says how
            if name in NETS and isinstance(error, ValueError):
                raise
            shown = (str(error).splitlines() or [""])[0]
            raise ValueError(
                f"model {name!r}: the factory failed ({type(error).__name__}: {shown}); it is called with "
                f"{' and '.join(keywords) or 'nothing'}"
            ) from error
    if not isinstance(made, nn.Module):
        raise ValueError(f"model {name!r} gives a {type(made).__name__}; it must give a torch.nn.Module")
    return made


def _chain(model: nn.Module, shape: tuple[int, ...]) -> tuple[tuple[str, nn.Module], ...]:
    """Children that run one after the other from the input on, each once and on what the one before returned.

    A Sequential's do by definition. Elsewhere one record is run, and objects are compared; the heads that are bounded
    are then sequences of these children, whatever else the model does.
    """
    if type(model) is nn.Sequential:
        return tuple((name, child) for name, child in model._modules.items() if child is not None)
    calls: list[tuple[str, object, int, object, int]] = []  # what it read and gave, each with the writes to it so far
    hooks = [
        child.register_forward_hook(
            lambda _, given, gives, name=name: calls.append(
                (name, given[0] if len(given) == 1 else None, _writes(*given[:1]), gives, _writes(gives))
            )
        )
        for name, child in model.named_children()
    ]
    modes = {module: module.training for module in model.modules()}
    record = torch.zeros(1, *shape, dtype=next((p.dtype for p in model.parameters()), torch.float32))
    try:
        with torch.no_grad():
            model.eval()(record)
    except (Exception, SystemExit):  # certify says in one line what does not run
        return ()
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training
    found: list[tuple[str, nn.Module]] = []
    names = [name for name, *_ in calls]
    value, writes = record, 0  # a value written to since is not what the one before returned
    for name, given, given_writes, gives, gives_writes in calls:
        is_next = given is value and given_writes == writes and names.count(name) == 1
        if not is_next or not isinstance(gives, Tensor):
            break
        found.append((name, model.get_submodule(name)))
        value, writes = gives, gives_writes
    return tuple(found)


def _writes(value: object = None) -> int:
    """How often a tensor was written to in place."""
    return value._version if isinstance(value, Tensor) else 0
