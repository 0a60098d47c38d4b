"""What can be refused by looking at the module tree and at torch's settings, before anything runs."""

from __future__ import annotations

import inspect
import math

import torch
from torch import nn
from torch.nn.modules import module as module_globals
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from sensitivity.capturing.recording import place_of
from sensitivity.errors import UnsupportedModuleError

HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks")
GLOBAL_HOOK_TABLES = ("_global_forward_hooks", "_global_forward_pre_hooks")
_FULL_PRECISION = ("none", "ieee")  # "none" inherits, and nothing above asks for less
_PRECISION_SETTINGS = {
    "cpu": ("mkldnn.matmul.fp32_precision", "mkldnn.conv.fp32_precision"),
    "cuda": ("cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision"),
}
_BATCH_STATISTICS = nn.modules.batchnorm._NormBase
_RANDOM_IN_TRAINING = (nn.modules.dropout._DropoutNd, nn.RReLU)


def require_certifiable_tree(head: object) -> nn.Module:
    """Refuse a head whose modules cannot be certified whatever they compute.

    Args:
        head: what the caller passed.

    Returns:
        The head, typed.

    Raises:
        UnsupportedModuleError: for a module that is quantised, scripted, compiled, lazy, hooked, random or mixes
            records in its present mode, and while autocast, TF32 or another reduced precision is active where the head
            runs; the message names it.
        ValueError: for something that is no module.

    Edge cases: modules in the tree that forward never calls are refused too.
    """
    if not isinstance(head, nn.Module):
        raise ValueError(f"head is a {type(head).__name__}: only a torch.nn.Module can be certified; wrap it in one")
    for table in GLOBAL_HOOK_TABLES:
        if getattr(module_globals, table, {}):
            raise UnsupportedModuleError(
                "a global forward hook is set: hooks can change outputs; remove it before certifying"
            )
    if parametrize._cache_enabled:
        raise UnsupportedModuleError(
            "torch.nn.utils.parametrize.cached() is active: cached weights may be older than the parameters; certify "
            "and release outside it"
        )
    named = named_tensors(head)
    settings = precision_problem({tensor.device.type for _, tensor in named})
    if settings is not None:
        raise UnsupportedModuleError(settings)
    for path, module in head.named_modules():
        problem = _problem(module)
        if problem is not None:
            raise UnsupportedModuleError(f"{place_of(path, type(module).__name__)} {problem}")
    for name, tensor in named:
        problem = _tensor_problem(tensor)
        if problem is not None:
            raise UnsupportedModuleError(f"head tensor {name!r} {problem}")
    return head


def precision_problem(devices: set[str]) -> str | None:
    """Why torch's present settings round more coarsely than the element type says, or None.

    Args:
        devices: device types of the head's tensors.

    Returns:
        The setting, the rule and the fix in one line.

    Edge cases: a head without tensors may run anywhere and counts as on the CPU; autocast is looked for on CUDA too.

    Example:
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     print(precision_problem({"cpu"}))
        autocast is active on cpu: it runs layers in half precision, which no bound covers; certify and release outside it
    """
    if math.ulp(0.0) * 1.0 == 0.0:
        return (
            "small numbers are flushed to 0 in this process (torch.set_flush_denormal): bounds below 1e-308 would be lost; "
            "switch that off"
        )
    for device in sorted(devices | {"cpu", "cuda"}):
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            return (
                f"autocast is active on {device}: it runs layers in half precision, which no bound covers; certify and "
                "release outside it"
            )
    for device in sorted(devices or {"cpu"}):
        for name in _PRECISION_SETTINGS.get(device, ()):
            setting = _setting(name)
            if setting not in _FULL_PRECISION:
                return (
                    f"torch.backends.{name} is {setting!r} and the head is on {device}: its products would be rounded "
                    "to fewer digits than any bound covers; set it to 'ieee'"
                )
    return None


def _setting(name: str) -> object:
    """One of torch.backends' settings, by its dotted name."""
    found: object = torch.backends
    for part in name.split("."):
        found = getattr(found, part)
    return found


def named_tensors(head: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every tensor of a module tree: parameters, buffers and plain tensor attributes, each with its path."""
    found: list[tuple[str, torch.Tensor]] = []
    for path, module in head.named_modules():
        prefix = f"{path}." if path else ""
        tables = (module._parameters, module._buffers, module.__dict__)
        for table in tables:
            found.extend((prefix + name, value) for name, value in table.items() if isinstance(value, torch.Tensor))
    return found


def input_dtype(head: nn.Module) -> torch.dtype:
    """Element type that the head's input must have: that of its first floating parameter, else buffer, else float32."""
    tensors = [*head.parameters(), *head.buffers()]
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)


def _problem(module: nn.Module) -> str | None:
    """Rule and fix for a module that cannot be certified, or None."""
    origin = type(module).__module__
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        return "is not initialised: a lazy module has no weights yet; run it once on a batch"
    if "quantized" in origin or origin.startswith("torch.ao.nn"):
        return "is quantised: its rounding has no Lipschitz bound; use the float module"
    if isinstance(module, torch.jit.ScriptModule):
        return "is scripted: what it runs cannot be recorded; use the eager module"
    if origin.startswith("torch._dynamo"):
        return "is compiled: what it runs cannot be recorded; certify the original module"
    if any(getattr(module, table, None) for table in HOOK_TABLES):
        return (
            "has a forward hook: hooks can change outputs; remove it, and use torch.nn.utils.parametrizations for "
            "weight norms"
        )
    if inspect.iscoroutinefunction(module.forward):
        return "has an asynchronous forward: it cannot be recorded; use a plain method"
    if isinstance(module, _BATCH_STATISTICS):
        return _batch_statistics_problem(module)
    if module.training and isinstance(module, _RANDOM_IN_TRAINING) and getattr(module, "p", 1.0) != 0.0:
        return "is in train mode: it draws a new random map on every call, so no fixed bound exists; call .eval()"
    return None


def _batch_statistics_problem(module: nn.modules.batchnorm._NormBase) -> str | None:
    name = type(module).__name__
    if "InstanceNorm" in name:
        if module.training and module.track_running_stats:
            return "is in train mode: it updates its running statistics in forward; call .eval()"
        return None
    if module.running_mean is None or module.running_var is None:
        return (
            "has track_running_stats=False: its output mixes records, so no per-record bound exists; use running "
            "statistics"
        )
    if module.training:
        return "is in train mode: its output mixes records, so no per-record bound exists; call .eval()"
    return None


def _tensor_problem(tensor: torch.Tensor) -> str | None:
    if is_lazy(tensor):
        return "is not initialised: a lazy module has no weights yet; run it once on a batch"
    if tensor.is_quantized:
        return "is quantised: its rounding has no Lipschitz bound; use the float module"
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        return f"is a {type(tensor).__name__}: its operators cannot be recorded; use plain tensors and parameters"
    if tensor.is_complex():
        return f"is {tensor.dtype}: only real weights have a bound here; use float32 or float64"
    if tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float64):
        return f"is {tensor.dtype}: half precision rounds too coarsely to certify; call .float()"
    if tensor.layout != torch.strided or tensor.is_meta:
        return (
            f"has layout {tensor.layout} on {tensor.device}: only dense tensors with values can be certified; make it "
            "dense"
        )
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor.detach()).all()):
        return "holds NaN or infinity: no bound exists for such weights; train again or clip them"
    return None
