"""Which networks batched steps hold for: tried on made-up records, and otherwise a reason to train client by client."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from asfl_privacy.federated.batched_steps import batch_network, run_steps_batched
from asfl_privacy.federated.steps import Pool, Rule, run_steps
from asfl_privacy.federated.weights import Weights, read_weights
from asfl_privacy.mechanisms import NoiseLayer
from asfl_privacy.mechanisms.stateless import run_stateless

_POOL_SIZES = (5, 3, 2)
"""Records of the made-up clients: one pool larger than a batch, one as large, one smaller."""
_BATCH_SIZE = 3
_NUM_STEPS = 2
_RULE = Rule(lr=0.1)
_TOLERANCE = 1e-9
"""Largest distance in float64 from what `run_steps` leaves, relative to how far a parameter moved."""
_DRAWING = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.RReLU,
)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState)


def supports_batching(network: nn.Module, pool: Pool) -> str | None:
    """Why a network's clients must be trained one by one; None where `run_steps_batched` does the same at once.

    Args:
        network: In the mode in which it trains; left as it is.
        pool: Gives the shapes and types of its inputs; its values are not used.

    Returns:
        The reason, or None.

    Guarantee:
        None is returned only where, on made-up records of clients with three different weights and batch sizes, both
        ways leave the same weights up to rounding; where torch's global generators did not move and no block has a
        generator among its attributes; and where no block keeps anything but BatchNorm's statistics.

    Edge cases:
        The trial runs in float64: a network that works in float32 alone is trained one by one. Training that fails on
        the made-up records by itself is a reason too: it then fails client by client, where its message names the client.

    Example:
        >>> pool = Pool(inputs=torch.zeros(4, 3), labels=torch.zeros(4, dtype=torch.int64))
        >>> supports_batching(nn.Linear(3, 2), pool)
        >>> supports_batching(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), pool)
        'layer 1 is Dropout: it draws from a generator, and clients at once would draw other numbers'
    """
    for name, module in network.named_modules():
        if _draws(module):
            where = f"layer {name}" if name else "the network"
            kind = type(module).__name__
            return f"{where} is {kind}: it draws from a generator, and clients at once would draw other numbers"
    if not any(parameter.requires_grad for parameter in network.parameters()):
        return "no parameter trains"
    kept = [p for p in network.parameters() if p.dtype not in (torch.float32, torch.float64)]
    if kept:
        return f"a parameter is {kept[0].dtype}: what rounding alone changes is known for float32 and float64"
    try:
        # in float64, as in float32 a gradient that is truly 0 (of a bias before BatchNorm) is rounding alone
        return _probe(copy.deepcopy(network).double(), pool)
    except Exception as error:  # the network's own code may fail in any way; the line says how
        line = (str(error).splitlines() or [""])[0]
        return f"a step on made-up records failed ({type(error).__name__}: {line})"


def _draws(module: nn.Module) -> bool:
    """Whether a block is known to draw, or holds a generator from which it could."""
    if isinstance(module, NoiseLayer):
        return True
    if isinstance(module, _DRAWING) and module.training:
        return True
    return any(isinstance(value, _GENERATORS) for value in vars(module).values())


def _probe(network: nn.Module, pool: Pool) -> str | None:
    """A reason that shows in two steps of three made-up clients."""
    device = pool.inputs.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        before = _generator_states(device)
        run_stateless(_without_statistics(network), _inputs(pool, count=2, seed=0))
        starts, pools = _clients(network, pool)
        slow = _one_by_one(network, starts, pools)
        if any(not torch.equal(a, b) for a, b in zip(before, _generator_states(device), strict=True)):
            return "a step moves torch's generator: clients at once would draw other numbers"
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # vmap warns where it would go through clients one by one, slowly
            fast, _ = run_steps_batched(
                batch_network(network),
                starts,
                pools,
                rngs=_rngs(),
                num_steps=_NUM_STEPS,
                batch_size=_BATCH_SIZE,
                rule=_RULE,
            )
    return _difference(starts, slow, fast)


def _one_by_one(network: nn.Module, starts: Sequence[Weights], pools: Sequence[Pool]) -> list[Weights]:
    results = []
    for start, pool, rng in zip(starts, pools, _rngs(), strict=True):
        twin = copy.deepcopy(network)
        twin.load_state_dict(start)
        run_steps(twin, pool, num_steps=_NUM_STEPS, batch_size=_BATCH_SIZE, rule=_RULE, rng=rng)
        results.append(read_weights(twin))
    return results


def _difference(starts: Sequence[Weights], slow: Sequence[Weights], fast: Sequence[Weights]) -> str | None:
    """A reason where some entry differs by more than rounding."""
    for start, theirs, mine in zip(starts, slow, fast, strict=True):
        for name, value in theirs.items():
            if not value.is_floating_point():
                if not torch.equal(value, mine[name]):
                    return f"{name} is not what one client after the other leaves"
                continue
            moved = float((value - start[name]).abs().max()) if value.numel() else 0.0
            off = float((value - mine[name]).abs().max()) if value.numel() else 0.0
            size = float(value.abs().max()) if value.numel() else 0.0
            if not off <= _TOLERANCE * (moved + 1e-4 * size):  # NaN fails too
                return f"{name} differs by {off:.3g} from what one client after the other leaves"
    return None


def _clients(network: nn.Module, pool: Pool) -> tuple[list[Weights], list[Pool]]:
    """Made-up weights and pools of three clients, which do not depend on any record."""
    starts: list[Weights] = []
    pools: list[Pool] = []
    own = read_weights(network)
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        num_classes = copy.deepcopy(network)(_inputs(pool, count=2, seed=0)).shape[1]
    for seed, count in enumerate(_POOL_SIZES):
        generator = torch.Generator().manual_seed(seed)
        starts.append(
            {
                name: value + 0.1 * value.abs().mean() * torch.randn(value.shape, generator=generator).to(value)
                if name in trained
                else value
                for name, value in own.items()
            }
        )
        inputs = _inputs(pool, count=count, seed=seed + 1)
        labels = (torch.arange(count, device=inputs.device) + seed) % num_classes
        pools.append(Pool(inputs=inputs, labels=labels))
    return starts, pools


def _inputs(pool: Pool, *, count: int, seed: int) -> Tensor:
    """Made-up records like the pool's: uniform, or coin flips where they are no floats."""
    drawn = torch.rand((count, *pool.inputs.shape[1:]), generator=torch.Generator().manual_seed(seed))
    if pool.inputs.is_floating_point():
        return drawn.double().to(pool.inputs.device)
    return (drawn > 0.5).to(pool.inputs)


def _without_statistics(network: nn.Module) -> nn.Module:
    """A copy whose BatchNorm is in evaluation mode: what it keeps is known, and averaged with the weights."""
    twin = copy.deepcopy(network)
    for module in twin.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.training = False
    return twin


def _generator_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _rngs() -> list[np.random.Generator]:
    return [np.random.default_rng(seed) for seed in range(len(_POOL_SIZES))]
