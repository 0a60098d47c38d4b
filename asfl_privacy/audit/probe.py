"""The probe: calls the layer under audit and returns its residuals, leaving the layer as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from asfl_privacy.audit.claim import Claim

Layer = Callable[[torch.Tensor], torch.Tensor]
NoiseOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class RefusedError(Exception):
    """The layer raised an error instead of answering, so nothing was released."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """How a layer is called.

    Args:
        layer: inputs → outputs, noise included.
        claim: what is claimed of it.
        tap: inputs → outputs without the noise, or None.
        noise_of: (inputs, outputs) → residuals, or None for outputs − tap(inputs), or outputs − inputs without a tap.
        dtype: of the inputs.
        device: of the inputs.
    """

    layer: Layer
    claim: Claim
    tap: Layer | None
    noise_of: NoiseOf | None
    dtype: torch.dtype
    device: torch.device

    @property
    def clips_unseen(self) -> bool:
        """Whether the layer is said to clip and no tap shows it: then only inputs inside the clip have residuals."""
        return self.claim.clip is not None and self.tap is None and self.noise_of is None

    def tensor(self, inputs: np.ndarray) -> torch.Tensor:
        """The inputs in the layer's type, on its device."""
        return torch.from_numpy(np.ascontiguousarray(inputs)).to(dtype=self.dtype, device=self.device)

    def outputs(self, inputs: torch.Tensor) -> torch.Tensor:
        """The layer's outputs, float64, in memory of their own.

        Raises:
            RefusedError: if the layer raises.
            ValueError: if it returns no tensor, or another number of rows.
        """
        return self._apply(self.layer, inputs, name="layer")

    def tapped(self, inputs: torch.Tensor) -> torch.Tensor:
        """The tap's outputs, like ``outputs``; the inputs themselves where there is no tap."""
        return inputs.detach().double().cpu() if self.tap is None else self._apply(self.tap, inputs, name="tap")

    def residuals(self, inputs: torch.Tensor, outputs: torch.Tensor) -> np.ndarray:
        """The noise in the outputs, in units of the claimed scale, shape (rows, width).

        Raises:
            ValueError: if the shapes of outputs and tap differ.
        """
        if self.noise_of is not None:
            # in double precision, so that the subtraction itself adds no rounding
            found = self._checked(self.noise_of(inputs.detach().double().cpu(), outputs.clone()), inputs, "noise_of")
        else:
            centre = self.tapped(inputs)
            if centre.shape != outputs.shape:
                what = "its inputs" if self.tap is None else "tap's outputs"
                raise ValueError(
                    f"layer returns shape {tuple(outputs.shape)}: residuals are taken against {what} of shape "
                    f"{tuple(centre.shape)}; pass tap= (the part before the noise) or noise_of=, and its input_shape"
                )
            found = outputs - centre
        return found.flatten(1).numpy() / self.claim.scale

    def _apply(self, function: Layer, inputs: torch.Tensor, *, name: str) -> torch.Tensor:
        given = inputs.clone()  # a layer may work in place
        try:
            with torch.no_grad():
                answer = function(given)
        except Exception as error:  # the layer is somebody's code and may fail in any way; the line says how
            raise RefusedError(f"{type(error).__name__}: {error}".splitlines()[0][:200]) from error
        return self._checked(answer, inputs, name)

    def _checked(self, answer: object, inputs: torch.Tensor, name: str) -> torch.Tensor:
        if not isinstance(answer, torch.Tensor):
            raise ValueError(f"{name} returns a {type(answer).__name__}: a tensor is due; wrap it to return one tensor")
        if answer.dim() < 1 or len(answer) != len(inputs) or answer.is_complex():
            raise ValueError(
                f"{name} returns {answer.dtype} of shape {tuple(answer.shape)} for a batch of {len(inputs)}: one real "
                "row per record is due; wrap it so that the batch comes first"
            )
        kept = answer.detach().to(device="cpu", dtype=torch.float64, copy=True)  # a layer may reuse its buffer
        return kept if kept.dim() > 1 else kept.unsqueeze(1)


@contextmanager
def as_found(*functions: object) -> Iterator[None]:
    """Modes and buffers of every module among ``functions`` are as before afterwards."""
    modules = [part for function in functions if isinstance(function, nn.Module) for part in function.modules()]
    modes = [(module, module.training) for module in modules]
    buffers = [(buffer, buffer.detach().clone()) for module in modules for buffer in module.buffers(recurse=False)]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def set_mode(mode: str, *functions: object) -> None:
    """Put every module among ``functions`` into train or eval mode."""
    for function in functions:
        if isinstance(function, nn.Module):
            function.train(mode == "train")


def make_probe(
    layer: Layer, claim: Claim, *, tap: Layer | None, noise_of: NoiseOf | None, dtype: torch.dtype | None
) -> Probe:
    """A probe whose inputs have the type and the device of the layer's parameters.

    Args:
        layer: module or callable.
        claim: what is claimed.
        tap: see Probe.
        noise_of: see Probe.
        dtype: None takes that of the first floating parameter or buffer, else float32.

    Raises:
        ValueError: if something is not callable, or dtype is not a floating type.
    """
    for name, function in (("layer", layer), ("tap", tap), ("noise_of", noise_of)):
        if not callable(function) and not (function is None and name != "layer"):
            raise ValueError(f"{name} is a {type(function).__name__}: it must be callable; pass a module or a function")
    states = [*layer.parameters(), *layer.buffers()] if isinstance(layer, nn.Module) else []
    floats = [state for state in states if state.is_floating_point()]
    chosen = dtype or (floats[0].dtype if floats else torch.float32)
    if not chosen.is_floating_point:
        raise ValueError(f"dtype is {chosen}: activations are floating numbers; pass dtype=torch.float32")
    device = states[0].device if states else torch.device("cpu")
    return Probe(layer=layer, claim=claim, tap=tap, noise_of=noise_of, dtype=chosen, device=device)
