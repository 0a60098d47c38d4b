"""Caps on every linear layer of a head, shared out so that their product keeps the whole head under its cap.

The head is read as a sequence of blocks: nested Sequentials are flattened; a block is a linear layer, a fixed module
(activation, pooling, frozen normalisation), or a module with linear layers inside, such as a residual block. Norms run
p → … → q along the sequence: p up to the first linear layer, q after the last, 2 between if p ≠ q. With a_i the
certified norms of the fixed blocks and V_b(c) that of block b whose layers have norm c, any weights under the caps give
 ‖head‖_{p→q} ≤ Π a_i · c^k · Π V_b(c),
and c is the largest cap for which the right side, rounded up, is at most the head's cap. V_b(c) is the plain product
bound of a copy of the block whose layers have a single entry c, so that each has norm exactly c from p to p. a_i and
V_b are products of what `certify` with method="fast" takes for each operator, so that its certificate of the whole
head, which is the least over more routes than this one, is at most the cap too.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from sensitivity.capturing.capture import record
from sensitivity.capturing.inspection import input_dtype, named_tensors
from sensitivity.capturing.recording import leaves_of, place_of
from sensitivity.certification import FAST_EFFORT, certify
from sensitivity.composing.norm_dp import compose
from sensitivity.control.layers import ScalableLayer, require_cap, scalable_layers
from sensitivity.control.weight_caps import WeightCap
from sensitivity.errors import UnsupportedModuleError
from sensitivity.norms import Norm, parse_pair
from sensitivity.rounding import mul_up
from sensitivity.shapes import parse_input_shape

CAPPED_TYPES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d)
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LayerCap:
    """What `register_cap` keeps one layer under.

    Attributes:
        name: path of the layer in the head.
        p: norm of the layer's input.
        q: norm of its output.
        cap: bound on its p→q norm.
    """

    name: str
    p: float
    q: float
    cap: float


@dataclass(frozen=True, kw_only=True)
class _Block:
    path: str
    module: nn.Module
    shape: Shape
    layers: tuple[ScalableLayer, ...]

    @property
    def is_layer(self) -> bool:
        return bool(self.layers) and self.layers[0].module is self.module


def register_cap(
    head: nn.Module, *, p: Norm, q: Norm, input_shape: int | Sequence[int], cap: float
) -> tuple[LayerCap, ...]:
    """Parametrise every linear layer of a head so that the head's p→q norm stays at or below `cap` in training.

    Each layer's weight becomes a differentiable function of the stored one (torch.nn.utils.parametrize): for 2→2 the
    weight times min(1, c/σ) with a certified σ, for 1→q with columns scaled to norm ≤ c, for p→∞ with rows scaled; so
    the optimiser sees the cap, and the head is inside it at every moment, not only after a projection. Register before
    making the optimiser, since the stored weights get new names. With the cap fixed before training, noise can be
    fixed before it too, from cap·R for records at distance R: noise multipliers are then known beforehand and rounds
    compose non-adaptively. Noise that follows each round's certificate has ratios that vary with the data, and needs
    the accountant's filter. The cap must not be chosen by looking at private data.

    Args:
        head: the module, in the mode in which it will release.
        p: norm of the input distance: 1, 2, math.inf or "inf".
        q: norm of the output distance: p ≤ q.
        input_shape: shape of one record, batch dimension excluded.
        cap: the largest norm allowed for the whole head; positive and finite.

    Returns:
        The layers with their norms and caps, in order. Their caps are equal; what the rest of the head adds is taken
        off beforehand.

    Raises:
        UnsupportedModuleError: for a head that `certify` refuses, a layer that cannot be capped, a trainable tensor
            that is no weight or bias of a linear layer, such as the gain of a normalisation, or a weight or bias that
            is used elsewhere than in its own layer.
        ValueError: for a bad argument, p > q, or a cap that the rest of the head already exceeds. The head is then as
            it was.

    Guarantee: whatever finite values the stored weights take, every layer's norm is at most its cap, with the
        effective weight rounded to its element type; so is the head's norm at most `cap`, and with it
        `certify(head, …, method="fast").value`, as long as the rest of the head (frozen weights, buffers, modes) stays.
        The certificate remains the authority: take one before releasing.

    Edge cases: layers inside the cap keep their weights bit for bit. A head with branches needs p = q, unless they lie
        between the first and the last linear layer. Linear layers must be called as modules. To bake the weights in:
        torch.nn.utils.parametrize.remove_parametrizations(layer, "weight"). Forward passes in training bound the
        weights anew, which costs milliseconds a layer; `cap_sensitivity` costs nothing in the forward pass.

    Source: T. Miyato et al. (2018), Spectral normalization, ICLR, for the parametrisation; its power iteration is a
        lower bound of the wrong operator for convolutions, and is replaced by certified bounds.

    Example:
        >>> head = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> [layer.cap for layer in register_cap(head, p=2, q=2, input_shape=4, cap=0.25)]
        [0.5, 0.5]
        >>> with torch.no_grad():
        ...     _ = head[0].parametrizations.weight.original.mul_(100.0)
        >>> certify(head, p=2, q=2, input_shape=4).value <= 0.25
        True
    """
    limit = require_cap(cap)
    p_norm, q_norm = parse_pair(p, q)
    if p_norm > q_norm:
        raise ValueError(
            f"p={p!r}, q={q!r}: norms with p > q are NP-hard to keep layer by layer; use cap_sensitivity after each step"
        )
    shape = parse_input_shape(input_shape)
    certify(head, p=p_norm, q=q_norm, input_shape=shape, method="fast")  # refuses what no one can bound
    layers = scalable_layers(head)
    _require_cappable(head, layers)
    blocks, shapes = _blocks(head, layers, shape)
    _require_confined(head, layers, shape)
    norms = _norms_along(blocks, p_norm, q_norm)
    layer_cap = _largest_cap(blocks, norms, shapes, limit, input_dtype(head))
    made = []
    for block, (r, s) in zip(blocks, norms, strict=True):
        for layer in block.layers:
            fact = LayerCap(name=layer.path, p=r, q=s, cap=layer_cap)
            if fact not in made:
                made.append(fact)
    if len({fact.name for fact in made}) < len(made):
        raise UnsupportedModuleError(
            "a linear layer is used both at an end of the head and inside it, in different norms; use two layers, or "
            "cap_sensitivity"
        )
    parametrisations = [(head.get_submodule(fact.name) if fact.name else head, fact) for fact in made]
    prepared = [
        (module, WeightCap(module, p=fact.p, q=fact.q, cap=fact.cap, record_shape=shapes[module]))
        for module, fact in parametrisations
    ]
    for module, parametrisation in prepared:
        parametrize.register_parametrization(module, "weight", parametrisation)
    return tuple(made)


def _require_cappable(head: nn.Module, layers: tuple[ScalableLayer, ...]) -> None:
    """Refuse trainable parameters that no cap would hold, ties, and layers without a parametrisation."""
    allowed, owners = set[int](), dict[int, str]()
    for layer in layers:
        if type(layer.module) not in CAPPED_TYPES:
            raise UnsupportedModuleError(
                f"{place_of(layer.path, type(layer.module).__name__)} has no cap here: Linear, Conv1d/2d and "
                "ConvTranspose1d/2d have; use cap_sensitivity"
            )
        mode = getattr(layer.module, "padding_mode", "zeros")
        if mode != "zeros":
            raise UnsupportedModuleError(
                f"{place_of(layer.path, type(layer.module).__name__)} pads with {mode!r}: columns are counted for zeros "
                "here; use padding_mode='zeros', or cap_sensitivity"
            )
        if id(layer.weight) in owners:
            raise UnsupportedModuleError(
                f"layers {owners[id(layer.weight)]!r} and {layer.path!r} share a weight, which a parametrisation would "
                "untie; use cap_sensitivity"
            )
        owners[id(layer.weight)] = layer.path
        allowed |= {id(parameter) for parameter in layer.module.parameters(recurse=False)}
    for name, tensor in named_tensors(head):
        if tensor.requires_grad and id(tensor) not in allowed:
            raise UnsupportedModuleError(
                f"head tensor {name!r} is trainable and no weight or bias of a linear layer: training could raise the "
                "norm past any cap; freeze it with requires_grad_(False), or use cap_sensitivity after each step"
            )


def _require_confined(head: nn.Module, layers: tuple[ScalableLayer, ...], input_shape: Shape) -> None:
    """Refuse weights and biases of the layers that anything else reads: record the head, change them, record again."""
    twin = copy.deepcopy(head)
    paths = {layer.path for layer in layers}
    with torch.no_grad():
        for path in paths:
            for parameter in twin.get_submodule(path).parameters(recurse=False):
                parameter.copy_(0.5 * parameter + 1.0)
    before, after = (record(net, input_shape=input_shape, dtype=input_dtype(head)) for net in (head, twin))
    for old, new in zip(before.nodes, after.nodes, strict=True):
        pairs = zip(leaves_of((old.args, old.kwargs)), leaves_of((new.args, new.kwargs)), strict=True)
        changed = any(not torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))
        if changed and new.path not in paths:
            raise UnsupportedModuleError(
                f"{place_of(new.path, new.module)} reads a weight or bias of a linear layer ({new.op}): a cap on the layer "
                "would not hold it there; use weights in their own layers alone, or cap_sensitivity"
            )


def _blocks(
    head: nn.Module, layers: tuple[ScalableLayer, ...], input_shape: Shape
) -> tuple[list[_Block], dict[nn.Module, Shape]]:
    """The head in sequence, with the shape of one record at every block and every layer."""
    shapes: dict[nn.Module, Shape] = {}

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen = tuple(inputs[0].shape[1:])
        if shapes.setdefault(module, seen) != seen:
            raise UnsupportedModuleError(
                f"a {type(module).__name__} runs on records of shape {shapes[module]} and of shape {seen}: one cap would "
                "have to hold for both; use two layers, or cap_sensitivity"
            )

    hooks = [layer.module.register_forward_pre_hook(note) for layer in layers]
    try:
        device = next((tensor.device for _, tensor in named_tensors(head)), torch.device("cpu"))
        x = torch.zeros(2, *input_shape, dtype=input_dtype(head), device=device)
        blocks = []
        with torch.no_grad():
            for path, module in _flattened(head):
                inside = tuple(layer for layer in layers if any(layer.module is part for part in module.modules()))
                blocks.append(_Block(path=path, module=module, shape=tuple(x.shape[1:]), layers=inside))
                x = module(x)
    finally:
        for hook in hooks:
            hook.remove()
    for layer in layers:
        if layer.module not in shapes:
            raise UnsupportedModuleError(
                f"{place_of(layer.path, type(layer.module).__name__)} is never called as a module, so how its weight is "
                "used is unknown; call it, or freeze it"
            )
    return blocks, shapes


def _flattened(module: nn.Module, path: str = "") -> list[tuple[str, nn.Module]]:
    if type(module) is not nn.Sequential:
        return [(path, module)]
    found: list[tuple[str, nn.Module]] = []
    for name, child in module._modules.items():  # named_children would leave repeated modules out
        if child is not None:
            found.extend(_flattened(child, f"{path}.{name}" if path else name))
    return found


def _norms_along(blocks: list[_Block], p: float, q: float) -> list[tuple[float, float]]:
    """(norm in, norm out) of every block."""
    with_layers = [number for number, block in enumerate(blocks) if block.layers]
    first, last = with_layers[0], with_layers[-1]
    if p == q:
        return [(p, p)] * len(blocks)
    changing = {first, last} if (p, q) == (1, math.inf) else ({first} if p == 1 else {last})
    for number in changing:
        if not blocks[number].is_layer:
            raise UnsupportedModuleError(
                f"{place_of(blocks[number].path, type(blocks[number].module).__name__)} has branches where the norm "
                f"changes from {p} to {q}: the caps of its layers would not multiply; use p = q, or cap_sensitivity"
            )
    norms: list[tuple[float, float]] = []
    for number in range(len(blocks)):
        enters = p if number <= first else (2 if number <= last else q)
        leaves = p if number < first else (2 if number < last else q)
        norms.append((enters, leaves))
    return norms


def _largest_cap(
    blocks: list[_Block],
    norms: list[tuple[float, float]],
    shapes: dict[nn.Module, Shape],
    limit: float,
    dtype: torch.dtype,
) -> float:
    """The largest common cap c with Π a_i · c^k · Π V_b(c) ≤ limit, to a relative 2⁻²⁴, never above it."""
    fixed, num_layers, branched = 1.0, 0, list[tuple[_Block, float]]()
    for block, (r, _) in zip(blocks, norms, strict=True):
        if block.is_layer:
            num_layers += 1
        elif block.layers:
            branched.append((block, r))
        else:
            fixed = mul_up(fixed, _plain_product(block.module, block.shape, r, dtype))

    def total(c: float) -> float:
        bound = fixed
        for _ in range(num_layers):
            bound = mul_up(bound, c)
        for block, r in branched:
            bound = mul_up(bound, _branched_bound(block, r, c, shapes, dtype))
        return bound

    if total(2.0**-30) > limit:
        raise ValueError(
            f"cap={limit} cannot be met: with every layer's norm at 2^-30, the least that is tried, the bound is still "
            f"{total(2.0**-30)}; raise the cap, or shorten skip connections and fixed layers"
        )
    if not branched and num_layers == 1 and fixed == 1.0:
        return limit
    low, high = 2.0**-30, 2.0**-29
    while total(high) <= limit:
        low, high = high, 2.0 * high
        if high > 2.0**60:
            return low
    for _ in range(24):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if total(middle) <= limit else (low, middle)
    return low


def _branched_bound(block: _Block, r: float, c: float, shapes: dict[nn.Module, Shape], dtype: torch.dtype) -> float:
    """Product bound of the block for any weights under the cap: that of a copy whose layers have norm exactly c."""
    twin = copy.deepcopy(block.module)
    prefixes = {id(module): path for path, module in block.module.named_modules()}
    with torch.no_grad():
        for layer in block.layers:
            copied = twin.get_submodule(prefixes[id(layer.module)])
            weight: torch.Tensor = copied.weight  # type: ignore[assignment]
            probe = WeightCap(copied, p=2, q=2, cap=c, record_shape=shapes[layer.module])
            ones = torch.ones(1, *probe.record_shape, dtype=weight.dtype, device=weight.device)
            for tap in np.ndindex(*weight.shape[2:]):
                weight.zero_()
                weight[(0, 0, *tap)] = _rounded_up(c, weight.dtype)
                if bool((probe.apply_layer(weight, ones) != 0.0).any()):
                    break
            else:
                return math.inf
    return _plain_product(twin, block.shape, r, dtype)


def _plain_product(module: nn.Module, shape: Shape, r: float, dtype: torch.dtype) -> float:
    """The product of the bounds that method="fast" takes for each operator, from norm r to norm r."""
    recording = record(module, input_shape=shape, dtype=dtype)
    return compose(recording, p=r, q=r, effort=FAST_EFFORT, same_norm=True).value


def _rounded_up(value: float, dtype: torch.dtype) -> torch.Tensor:
    nearest = torch.tensor(value, dtype=dtype)
    return nearest if float(nearest) >= value else torch.nextafter(nearest, torch.tensor(math.inf, dtype=dtype))
