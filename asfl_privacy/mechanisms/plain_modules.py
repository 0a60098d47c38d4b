"""Plain modules: networks of torch's own layers alone, which keep nothing in training but parameters and buffers."""

from collections.abc import Collection

from torch import Tensor, nn
from torch.nn.modules import module as _torch_module

_REGISTRIES = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
_TABLES = {name for name, value in vars(nn.Identity()).items() if isinstance(value, (dict, set))} - _REGISTRIES
"""Tables of hooks, which every torch module holds."""


def is_plain(network: nn.Module, *, also: Collection[type] = ()) -> bool:
    """Whether a network is made of torch's own layers, by exact type, without hooks and without overrides.

    Args:
        network: The network.
        also: Further exact types that are known to keep nothing.

    Returns:
        True where nothing but parameters and buffers can differ after a forward and a backward pass; False where that is
        not known.

    Example:
        >>> is_plain(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        True
        >>> layer = nn.ReLU()
        >>> layer.forward = lambda x: x
        >>> is_plain(nn.Sequential(nn.Linear(2, 2), layer))
        False
    """
    if _torch_module._has_any_global_hook():  # type: ignore[no-untyped-call]  # torch has no types for it
        return False
    return all(_is_plain_layer(module, also=also) for module in network.modules())


def _is_plain_layer(module: nn.Module, *, also: Collection[type]) -> bool:
    kind = type(module)
    if getattr(nn, kind.__name__, None) is not kind and kind not in also:
        return False
    for name, value in vars(module).items():
        if name in _TABLES:
            if value:
                return False
        elif callable(value) and name not in _REGISTRIES:
            return False
    if module._non_persistent_buffers_set:  # statistics that weights do not hold would pile up
        return False
    if any(buffer is not None and type(buffer) is not Tensor for buffer in module._buffers.values()):
        return False
    return all(
        type(parameter) is nn.Parameter
        and parameter._backward_hooks is None
        and parameter._post_accumulate_grad_hooks is None
        for parameter in module._parameters.values()
        if parameter is not None
    )
