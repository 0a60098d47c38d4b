"""Random operators with the nine norms of their matrices, or of their Jacobians at many records, as the slow twin."""

from __future__ import annotations

import copy
import functools
import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

NORMS = (1, 2, math.inf)
NINE = [(p, q) for p in NORMS for q in NORMS]
LARGEST_SIDE = 14  # brute force over 2^13 sign vectors
MODES = ("zeros", "reflect", "replicate", "circular")
Made = tuple[nn.Module, tuple[int, ...]]


class Function(nn.Module):
    """A function of the input alone."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x):
        return self.function(self, x)


@functools.cache
def sign_vectors(n: int) -> np.ndarray:
    """Columns: all sign vectors with first entry 1; the others give the same norms."""
    bits = (np.arange(2 ** (n - 1))[None, :] >> np.arange(n - 1)[:, None]) & 1
    return np.concatenate([np.ones((1, bits.shape[1])), 2.0 * bits - 1.0])


def over_signs(A: np.ndarray, q: int) -> float:
    """‖A‖_{∞→q}: over every corner of the cube, or, for more than 14 columns, what climbing from corner to corner reaches."""
    if q == 1 and A.shape[0] < A.shape[1]:
        A = A.T  # ∞→1 is its own dual
    if A.shape[1] <= LARGEST_SIDE:
        return float(np.linalg.norm(A @ sign_vectors(A.shape[1]), ord=q, axis=0).max())
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(A.shape[1], 64))
    for _ in range(12):
        moved = A @ signs
        signs = np.where(A.T @ (np.sign(moved) if q == 1 else moved) >= 0.0, 1.0, -1.0)
    return float(np.linalg.norm(A @ signs, ord=q, axis=0).max())


def true_norm(A: np.ndarray, p: float, q: float) -> float:
    """‖A‖_{p→q}; exact, but for the NP-hard three of more than 14 columns or rows, which may come out too small."""
    if p == 1:
        return float(np.linalg.norm(A, ord=q, axis=0).max())
    if q == math.inf:
        return float(np.linalg.norm(A, ord=2 if p == 2 else 1, axis=1).max())
    if (p, q) == (2, 2):
        return float(np.linalg.norm(A, 2))
    return over_signs(A.T, 2) if (p, q) == (2, 1) else over_signs(A, int(q))


def jacobians(head: nn.Module, shape: tuple[int, ...], *, seed: int) -> list[np.ndarray]:
    """Jacobians in float64 at records of many sizes, spread, equal and with one entry far ahead; shape (outputs, inputs)."""
    net, size = copy.deepcopy(head).double(), math.prod(shape)
    random = np.random.default_rng(seed)
    records = [random.normal(size=size) * scale for scale in (0.0, 0.05, 0.3, 1.0, 1.0, 1.5, 2.5, 6.0)]
    records += [np.full(size, at) for at in (-1.5, -0.3, 1e-9, 0.7, 1.4, 2.0, 2.4)]
    records += [np.where(np.arange(size) == random.integers(size), 6.0, 0.0) for _ in range(2)]
    batch = torch.from_numpy(np.stack(records)).reshape(-1, *shape)
    found = torch.func.vmap(torch.func.jacrev(lambda x: net(x[None])[0].reshape(-1)))(batch)
    return list(found.detach().reshape(len(records), -1, size).numpy())


def steps(random: np.random.Generator, low: int, high: int, dims: int) -> tuple[int, ...]:
    return tuple(int(n) for n in random.integers(low, high, size=dims))


def extents(random: np.random.Generator, dims: int) -> tuple[int, ...]:
    """Sizes of an image of at most about 12 pixels."""
    return steps(random, 1, {1: 10, 2: 5, 3: 4}[dims], dims)


def linear(random: np.random.Generator) -> Made:
    n, m = steps(random, 1, 13, 2)
    layer: nn.Module = nn.Linear(n, m, bias=bool(random.integers(2)))
    kind = random.integers(4)
    if kind == 0:
        layer = nn.utils.parametrizations.weight_norm(layer).double()
    elif kind == 1:
        layer = nn.utils.parametrizations.spectral_norm(layer).double()
    return layer.eval(), ((n,) if random.random() < 0.7 or n > 6 else (2, n))


def convolution(random: np.random.Generator) -> Made:
    dims, groups = int(random.integers(1, 4)), int(random.choice([1, 1, 2]))
    mode = MODES[int(random.integers(4))]
    padding: object = steps(random, 0, 3, dims)
    stride = steps(random, 1, 4, dims)
    if random.random() < 0.2:
        padding, stride = "same", (1,) * dims
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](
        groups * int(random.integers(1, 3)),
        groups * int(random.integers(1, 3)),
        steps(random, 1, 4, dims),
        stride=stride,
        padding=padding,
        dilation=steps(random, 1, 3, dims),
        groups=groups,
        bias=bool(random.integers(2)),
        padding_mode=mode,
    )
    if random.random() < 0.15:
        layer = nn.utils.parametrizations.weight_norm(layer).double()
    return layer, (layer.in_channels, *extents(random, dims))


def transposed_convolution(random: np.random.Generator) -> Made:
    dims, groups = int(random.integers(1, 4)), int(random.choice([1, 1, 2]))
    stride, dilation = steps(random, 1, 4, dims), steps(random, 1, 3, dims)
    layer = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1](
        groups * int(random.integers(1, 3)),
        groups * int(random.integers(1, 3)),
        steps(random, 1, 4, dims),
        stride=stride,
        padding=steps(random, 0, 3, dims),
        output_padding=tuple(int(random.integers(max(s, d))) for s, d in zip(stride, dilation, strict=True)),
        dilation=dilation,
        groups=groups,
    )
    return layer, (layer.in_channels, *extents(random, dims))


def average_pool(random: np.random.Generator) -> Made:
    dims = int(random.integers(1, 4))
    kernel = steps(random, 1, 4, dims)
    options: dict[str, object] = {"count_include_pad": bool(random.integers(2)), "ceil_mode": bool(random.integers(2))}
    if dims > 1:
        options["divisor_override"] = [None, 3][int(random.integers(2))]
    layer = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[dims - 1](
        kernel,
        stride=steps(random, 1, 4, dims),
        padding=tuple(int(random.integers(k // 2 + 1)) for k in kernel),
        **options,
    )
    return layer, (int(random.integers(1, 3)), *extents(random, dims))


def adaptive_average_pool(random: np.random.Generator) -> Made:
    dims = int(random.integers(1, 4))
    layer = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[dims - 1](steps(random, 1, 4, dims))
    return layer, (int(random.integers(1, 3)), *extents(random, dims))


def fixed_normalisation(random: np.random.Generator) -> Made:
    dims, channels = int(random.integers(1, 4)), int(random.integers(1, 4))
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
    instance = bool(random.integers(2))
    layer = kinds[dims - 1 + 3 * instance](
        channels, eps=float(10.0 ** random.uniform(-6, 0)), affine=bool(random.integers(2)), track_running_stats=True
    )
    layer.running_var.uniform_(1e-3, 4.0)
    layer.running_mean.normal_()
    return layer.eval(), (channels, *extents(random, dims))


def padding(random: np.random.Generator) -> Made:
    dims = int(random.integers(1, 4))
    kinds = [
        *((nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d), (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)),
        (nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d),
        (nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d),
    ]
    return kinds[int(random.integers(4))][dims - 1](steps(random, 0, 3, 2 * dims)), (1, *extents(random, dims))


def rearrangement(random: np.random.Generator) -> Made:
    c, h, w = 2 * int(random.integers(1, 3)), *steps(random, 1, 5, 2)
    picked = torch.from_numpy(random.integers(0, h, size=4))
    shift = int(random.integers(-2, 3))
    functions = [
        lambda _, x: x.permute(0, 2, 3, 1),
        lambda _, x: x.flatten(1),
        lambda _, x: x[:, ::2, 1:],
        lambda _, x: x[:, :, picked],
        lambda _, x: x.index_select(2, picked),
        lambda _, x: x.roll(shift, 2).flip(3),
        lambda _, x: x.tril(shift),
        lambda _, x: x.repeat(1, 1, 2, 1),
        lambda _, x: x.repeat_interleave(2, 3),
        lambda _, x: x.unfold(2, 2, 1),
        lambda _, x: F.unfold(x, 2, padding=1),
        lambda _, x: F.pad(x, (1, -1, shift, 1), value=2.0),
        lambda _, x: F.pixel_unshuffle(x, 2),
        lambda _, x: F.channel_shuffle(x, 2),
        lambda _, x: torch.cat(x.chunk(2, 1)[::-1], 2),
        lambda _, x: torch.stack(x.unbind(2), -1),
    ]
    return Function(functions[int(random.integers(len(functions)))]), (c, h, w)


def reduction(random: np.random.Generator) -> Made:
    dims = [(1,), (2,), (-1,), (1, 2), (2, 3), (1, 2, 3)][int(random.integers(6))]
    keep = bool(random.integers(2))
    functions = [
        lambda _, x: x.mean(dims, keepdim=keep),
        lambda _, x: x.sum(dims, keepdim=keep),
        lambda _, x: x.cumsum(dims[0]),
        lambda _, x: x - x.mean(dims, keepdim=True).expand_as(x),
    ]
    return Function(functions[int(random.integers(4))]), steps(random, 1, 4, 3)


def joined(random: np.random.Generator) -> Made:
    """Sums and concatenations of layers and constants."""
    n = int(random.integers(1, 7))
    layers = {"a": nn.Linear(n, n), "b": nn.Linear(n, n, bias=False)}
    scale = float(random.normal())
    functions = [
        lambda net, x: x + net.a(x),
        lambda net, x: torch.sub(net.a(x), net.b(x), alpha=scale),
        lambda net, x: torch.cat([net.a(x), x], 1),
        lambda net, x: torch.stack([net.a(x), net.b(x)], 1),
        lambda net, x: net.a(x).add_(x).mul_(scale),
        lambda net, x: torch.rsub(net.a(x), x, alpha=scale) / 0.3,
        lambda net, x: net.a(x) * net.b.weight[0] + net.a(x),
        lambda net, x: x @ net.b.weight - net.a(net.a(x)),
    ]
    return Function(functions[int(random.integers(8))], **layers), (n,)


def merged(random: np.random.Generator) -> Made:
    """Two or three linear operators in a row."""
    first, shape = convolution(random)
    dims = len(shape) - 1
    pool = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[dims - 1](2, stride=1, padding=1)
    second = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](first.out_channels, 1, 2, padding=1)
    chains = [[first, pool], [first, second], [first, second, pool], [first, nn.Flatten(), nn.LazyLinear(3)]]
    head = nn.Sequential(*chains[int(random.integers(4))])
    if any(parameter.dtype == torch.float64 for parameter in first.parameters()):
        head = head.double()
    return head, shape


def max_pool(random: np.random.Generator) -> Made:
    dims = int(random.integers(1, 4))
    kernel = steps(random, 1, 4, dims)
    layer = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[dims - 1](
        kernel,
        stride=steps(random, 1, 4, dims),
        padding=tuple(int(random.integers(k // 2 + 1)) for k in kernel),
        dilation=steps(random, 1, 3, dims),
        ceil_mode=bool(random.integers(2)),
    )
    return layer, (int(random.integers(1, 3)), *extents(random, dims))


def adaptive_max_pool(random: np.random.Generator) -> Made:
    dims = int(random.integers(1, 4))
    if random.random() < 0.25:
        name, axis = ("amax", "amin")[int(random.integers(2))], int(random.integers(1, 3))
        return Function(lambda _, x: getattr(x, name)(axis)), steps(random, 1, 4, 2)
    layer = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)[dims - 1](steps(random, 1, 4, dims))
    return layer, (int(random.integers(1, 3)), *extents(random, dims))


def activation(random: np.random.Generator) -> Made:
    scale = float(random.uniform(0.2, 2.5))
    layers = [
        *(nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(scale), nn.LeakyReLU(-scale), nn.PReLU(init=-scale), nn.ELU(scale)),
        *(nn.CELU(scale), nn.SELU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU(), nn.Mish(), nn.Tanh()),
        *(nn.Sigmoid(), nn.LogSigmoid(), nn.Hardtanh(-scale, scale), nn.Hardsigmoid(), nn.Hardswish(), nn.Softsign()),
        *(nn.Softshrink(scale), nn.Tanhshrink(), nn.Threshold(scale, scale), Function(lambda _, x: x.abs())),
        *(Function(lambda _, x: torch.erf(x)), Function(lambda _, x: torch.sin(x)), Function(lambda _, x: 0.5 - x)),
        *(Function(lambda _, x: x.clamp(-scale, scale / 2)), Function(lambda _, x: torch.atan(x)), nn.Dropout(0.3)),
    ]
    return layers[int(random.integers(len(layers)))].eval(), steps(random, 1, 4, int(random.integers(1, 3)))


def own_normalisation(random: np.random.Generator) -> Made:
    eps, channels = float(10.0 ** random.uniform(-5, 0)), 2 * int(random.integers(1, 3))
    length = int(random.integers(2, 4))
    layer = [
        nn.LayerNorm(length, eps=eps),
        nn.LayerNorm((channels, length), eps=eps),
        nn.RMSNorm(length, eps=eps),
        nn.GroupNorm(2, channels, eps=eps),
        nn.GroupNorm(1, channels, eps=eps),
        nn.InstanceNorm1d(channels, eps=eps, affine=bool(random.integers(2))),
    ][int(random.integers(6))]
    return layer.eval(), (channels, length)


def softmax(random: np.random.Generator) -> Made:
    dim = int(random.integers(1, 3))
    layers = [nn.Softmax(dim), nn.Softmin(dim), nn.LogSoftmax(dim), Function(lambda _, x: x.logsumexp(dim))]
    return layers[int(random.integers(4))], steps(random, 1, 5, 2)


LINEAR = {
    maker.__name__: maker
    for maker in (
        *(linear, convolution, transposed_convolution, average_pool, adaptive_average_pool, fixed_normalisation),
        *(padding, rearrangement, reduction, joined, merged),
    )
}
CURVED = {maker.__name__: maker for maker in (max_pool, adaptive_max_pool, activation, own_normalisation, softmax)}


def drawn(family: str, seed: int) -> Made:
    """The operator of a seed: the first that its maker draws which runs on its input."""
    maker, attempt = {**LINEAR, **CURVED}[family], 0
    while True:
        random = np.random.default_rng([seed, attempt])
        torch.manual_seed(1000 * seed + attempt)
        attempt += 1
        try:
            head, shape = maker(random)
            with torch.no_grad():
                dtype = next((parameter.dtype for parameter in head.parameters()), torch.float32)
                made = head(torch.randn(2, *shape, dtype=dtype))
        except (RuntimeError, ValueError, IndexError, NotImplementedError):
            continue  # a window larger than its input, say
        if made[0].numel() == 0 or made[0].numel() > 150 or not bool(made.isfinite().all()):
            continue
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.mul_(float(2.0 ** random.uniform(-3, 3)))
        if random.random() < 0.4:
            head = head.double()
        return head, shape
