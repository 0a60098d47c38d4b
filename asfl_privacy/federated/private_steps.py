"""DP-SGD: local steps whose every gradient sum is clipped record by record and noised."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.accounting.checks import check_integer, check_real
from asfl_privacy.federated.private_updates import AddNoise, check_clip_norm, noised_sum
from asfl_privacy.federated.steps import Pool, Rule, draw_rows, take_step
from asfl_privacy.mechanisms.stateless import run_stateless

RecordLosses = Callable[[Tensor, Tensor], Tensor]
"""Takes logits (n, k) and the pool rows they belong to (n,); returns one loss a row (n,), each of its own row alone."""

_HARMLESS = "Full backward hook is firing when gradients are computed with respect to module outputs"
"""Torch on hooks of the first layer, whose input needs no gradient; the hook reads the output's, which is there."""
_PROBE_ROWS = 3
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}


@dataclass(frozen=True)
class PrivateSteps:
    """What steps leave besides the network.

    Attributes:
        num_remote: How many of the records drawn were remote.
        participations: How often each own row entered a noised sum: each is one Gaussian release with multiplier
            `noise_multiplier_of(σ, clip=C)`, shape (num_own,).
    """

    num_remote: int
    participations: NDArray[np.int64]


def run_private_steps(
    network: nn.Module,
    pool: Pool,
    *,
    num_steps: int,
    batch_size: int,
    rule: Rule,
    rng: np.random.Generator,
    clip: float,
    add_noise: AddNoise,
    losses: RecordLosses | None = None,
    allowance: NDArray[np.int64] | None = None,
    spacing: float | None = None,
) -> PrivateSteps:
    """Take SGD steps on noised sums of clipped per-record gradients.

    Each step draws a mini-batch as `run_steps` does, clips every record's gradient over all trained parameters together
    to ℓ2 norm C, sums, adds noise, divides by the number of records drawn, and steps.

    Args:
        network: What is trained, in place, in the mode it is in; only its own parameters move.
        pool: What is drawn from. Rows from `num_own` on are what others released, so nobody is charged for them.
        num_steps: Number of steps; 0 leaves the network as it was.
        batch_size: Records a step, at most the pool.
        rule: How a step moves the parameters; momentum and weight decay work on what is noised already.
        rng: Source of the mini-batches.
        clip: C > 0.
        add_noise: Adds noise of standard deviation σ to each coordinate of a float64 vector, in the units of the sum.
        losses: Loss of each row; None for cross-entropy on the pool's labels.
        allowance: How often each own row may still take part (budget), ≥ 0, shape (num_own,); None for no limit.
        spacing: Power of two on whose multiples the sum lies before noise, for a sampler on a lattice; None for the finest.

    Returns:
        How many drawn records were remote, and how often each own row took part.

    Raises:
        ValueError: A network without per-record gradients or that keeps something of a batch (named, before any step), a
            gradient or noise that is not finite, or an argument out of range. The network is then as it was, nothing has
            left, and nothing need be charged.

    Guarantee:
        Neighbouring pools differ in the values of one own row. Which rows a step draws and admits, the divisor and the
        noise do not depend on values. Steps without that row are the same function of the weights before them; in a step
        with it the exact sums differ by at most 2C (not C) in ℓ2. So, whatever is known of the draws, the row's loss is
        that of as many adaptive Gaussian releases as it has participations, multiplier σ/(2C) each. No amplification by
        sampling is claimed. It assumes that a record's gradient depends on no other row, which is tested on a probe bit
        for bit before the first step, and noise as the caller states it.

    Edge cases:
        A row past its allowance is drawn and contributes zero; the divisor stays. A block that the network does not
        use receives noise. In-place activations of torch are computed out of place.

    Source:
        Abadi et al. (2016), Algorithm 1, with batches of fixed size drawn without replacement; per-record gradients by
        Opacus; composition by Dong, Roth & Su (2022), Corollary 3.3.
    """
    check_integer("num_steps", num_steps, minimum=0)
    check_integer("batch_size", batch_size, minimum=1)
    check_real("lr", rule.lr, minimum=0.0, exclusive=True, fix="pass e.g. Rule(lr=0.1)")
    check_clip_norm(clip)
    remaining = _checked_allowance(allowance, pool=pool, num_steps=num_steps)
    participations = np.zeros(pool.num_own, dtype=np.int64)
    if num_steps == 0:
        return PrivateSteps(num_remote=0, participations=participations)
    twin = copy_for_gradients(network)  # what Opacus hangs on modules and parameters goes with the copy
    kept = _buffers(twin)
    gradients = _checked_gradients(twin, pool, losses=losses)
    parameters = {name: value for name, value in twin.named_parameters() if value.requires_grad}
    sizes = [parameter.numel() for parameter in parameters.values()]
    num_remote, directions = 0, dict[str, Tensor]()
    for _ in range(num_steps):
        batch = draw_rows(pool, batch_size=batch_size, rng=rng)
        drawn = batch.numpy()
        num_own = int((drawn < pool.num_own).sum())
        num_remote += len(drawn) - num_own
        contributes = remaining[drawn] > 0
        remaining[drawn] -= contributes
        own = drawn[contributes & (drawn < pool.num_own)]  # no repeats: drawn without replacement
        participations[own] += 1
        batch = batch.to(pool.labels.device)
        rows = gradients(pool.rows(batch, num_own=num_own), _losses_of(batch, pool=pool, losses=losses))
        if not contributes.all():  # not a product with the mask: 0·NaN is NaN
            rows[torch.from_numpy(~contributes).to(rows.device)] = 0.0
        step = noised_sum(rows, clip=clip, add_noise=add_noise, spacing=spacing) / len(batch)
        pieces = torch.split(step, sizes)
        gradients_by_name = {
            name: piece.reshape(value.shape).to(value.dtype)
            for (name, value), piece in zip(parameters.items(), pieces, strict=True)
        }
        take_step(parameters, gradients_by_name, rule=rule, correction=None, directions=directions)
    for name, buffer in _buffers(twin).items():
        if not torch.equal(buffer, kept[name]):
            raise ValueError(
                f"buffer {name} changed in training: it would carry raw data past the noise; use a layer without running "
                "statistics, such as GroupNorm"
            )
    with torch.no_grad():
        for theirs, mine in zip(network.parameters(), twin.parameters(), strict=True):
            theirs.copy_(mine)
    return PrivateSteps(num_remote=num_remote, participations=participations)


def check_private_network(network: nn.Module, pool: Pool) -> None:
    """Refuse a network without per-record gradients before anything is released; made-up records alone are run.

    Args:
        network: What is going to be trained, in training mode.
        pool: Gives the shapes and types of its inputs and labels.

    Raises:
        ValueError: As `run_private_steps` before its first step.
    """
    _checked_gradients(copy_for_gradients(network), pool, losses=None)


def copy_for_gradients(network: nn.Module) -> nn.Module:
    """A copy whose in-place activations work out of place, once every block can give per-record gradients.

    Raises:
        ValueError: A block, by name, that mixes records, or that Opacus cannot do record by record.
    """
    from opacus.validators import ModuleValidator  # imports for seconds, so only where it is used

    for name, module in network.named_modules():
        where = f"layer {name or 'the network itself'} is {type(module).__name__}"
        trained = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (
            module.training or module.running_mean is None or module.running_var is None
        ):
            raise ValueError(
                f"{where} in train mode: its output mixes records, so no per-record gradient exists; use GroupNorm"
            )
        if trained and type(module) in ModuleValidator.VALIDATORS:
            for refusal in ModuleValidator.VALIDATORS[type(module)](module):
                raise ValueError(
                    f"{where}: Opacus has no per-record gradient for it ({_first_line(refusal)}); replace it as "
                    "opacus.validators.ModuleValidator.fix does, or freeze its parameters"
                )
        if trained and (not module.training or list(module.buffers())):
            raise ValueError(
                f"{where} with parameters that train {'and buffers' if module.training else 'in eval mode'}: Opacus has no "
                "per-record gradient for it; call .requires_grad_(False) on it, or use a layer such as GroupNorm"
            )
        for parameter in trained:
            if parameter.dtype not in _TOLERANCE:
                raise ValueError(f"{where} of {parameter.dtype}: DP-SGD needs float32 or float64; call .float()")
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise ValueError("the network has no parameter that trains: DP-SGD has nothing to do; unfreeze a layer")
    twin = copy.deepcopy(network)
    for module in twin.modules():
        if type(module).__module__.startswith("torch.nn.") and getattr(module, "inplace", False):
            setattr(module, "inplace", False)  # noqa: B010 its hooks' views must not be overwritten
    return twin


def _checked_gradients(
    network: nn.Module, pool: Pool, *, losses: RecordLosses | None
) -> Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]:
    """Opacus's per-record gradients as a function of inputs and losses, once they pass a probe of made-up records.

    The probe is data-independent. Each row must equal torch's own gradient of that record's loss, and, bit for bit, what
    it was before another record of the batch changed. The network must not change itself.
    """
    from opacus.grad_sample import GradSampleModule

    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    first, second = _probes(pool)

    def cross_entropy(logits: Tensor) -> Tensor:
        return F.cross_entropy(
            logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device), reduction="none"
        )

    try:
        with _fixed_draws(pool.inputs.device):
            run_stateless(network, first)
        with _fixed_draws(pool.inputs.device):
            logits = network(first.clone())
            slow = _slow_gradients(cross_entropy(logits), parameters)
        wrapped = GradSampleModule(network, loss_reduction="sum", strict=True)

        def gradients(inputs: Tensor, loss_of: Callable[[Tensor], Tensor]) -> Tensor:
            return _gradient_rows(wrapped, parameters, inputs, loss_of)

        with _fixed_draws(pool.inputs.device):
            fast = gradients(first.clone(), cross_entropy)
        with _fixed_draws(pool.inputs.device):
            moved = gradients(second.clone(), cross_entropy)
        _check_losses(pool, num_classes=logits.shape[1], like=logits, losses=losses)
    except Exception as error:  # the network's own code may fail in any way; the line says how
        raise ValueError(
            f"DP-SGD on {type(network).__name__} failed on a probe before any step ({type(error).__name__}: "
            f"{_first_line(error)}); use layers that Opacus supports"
        ) from error
    tolerance = _TOLERANCE[parameters[0].dtype]
    if not bool(((fast - slow).norm(dim=1) <= tolerance * (slow.norm(dim=1) + 1e-6)).all()):  # NaN fails too
        raise ValueError(
            f"per-record gradients of {type(network).__name__} differ from torch's by {float((fast - slow).abs().max()):.3g}"
            ": records are mixed, or a parameter is used outside its own module; use standard layers"
        )
    if not torch.equal(fast[:-1], moved[:-1]):
        raise ValueError(
            f"per-record gradients of {type(network).__name__} change with another record of the batch: clipping cannot "
            "bound what one record does; remove what mixes records"
        )
    return gradients


def _check_losses(pool: Pool, *, num_classes: int, like: Tensor, losses: RecordLosses | None) -> None:
    """Refuse losses of one row that change with another row's logits."""
    rows = torch.arange(_PROBE_ROWS, device=pool.labels.device) % len(pool.labels)
    logits = torch.rand(_PROBE_ROWS, num_classes, generator=torch.Generator().manual_seed(1)).to(like)
    moved = torch.cat([logits[:-1], 1.0 - logits[-1:]])
    loss_of = _losses_of(rows, pool=pool, losses=losses)
    if not torch.equal(loss_of(logits)[:-1], loss_of(moved)[:-1]):
        raise ValueError("a row's loss changes with another row's logits: return one loss a row, of its own row alone")


def _losses_of(batch: Tensor, *, pool: Pool, losses: RecordLosses | None) -> Callable[[Tensor], Tensor]:
    """Losses of a batch's rows as a function of its logits."""

    def loss_of(logits: Tensor) -> Tensor:
        if losses is None:
            return F.cross_entropy(logits, pool.labels[batch], reduction="none")
        values = losses(logits, batch)
        if values.shape != batch.shape:
            raise ValueError(f"losses have shape {tuple(values.shape)}: one a row is due, {len(batch)}; drop the mean")
        return values

    return loss_of


def _gradient_rows(
    wrapped: nn.Module, parameters: Sequence[nn.Parameter], inputs: Tensor, loss_of: Callable[[Tensor], Tensor]
) -> Tensor:
    """One row a record: its gradient over all parameters, shape (n, d)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_HARMLESS, category=UserWarning)
        loss_of(wrapped(inputs)).sum().backward()  # type: ignore[no-untyped-call]  # torch's
    parts, totals = [], []
    for parameter in parameters:
        sample = getattr(parameter, "grad_sample", None)
        if isinstance(sample, list):
            raise ValueError(
                "a parameter's gradients come in several parts: Opacus lost count of its uses; use it once"
            )
        unused = torch.zeros_like(parameter.detach())  # where the network does not use it
        parts.append((unused.expand(len(inputs), *unused.shape) if sample is None else sample).reshape(len(inputs), -1))
        totals.append((unused if parameter.grad is None else parameter.grad).flatten())
        parameter.grad = None
        parameter.grad_sample = None  # type: ignore[attr-defined]  # Opacus hangs it there
    rows, total = torch.cat(parts, dim=1).detach(), torch.cat(totals)
    scale = rows.norm(dim=1).sum() + total.norm()
    if bool((rows.sum(0) - total).norm() > _TOLERANCE[rows.dtype] * scale):  # false where a row is not finite
        raise ValueError(
            "per-record gradients do not sum to the batch's: a parameter is used outside its own module, where Opacus does "
            "not see it; use standard layers"
        )
    return rows


def _slow_gradients(losses: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    """Torch's gradient of each record's loss, one after the other, shape (n, d)."""
    rows = []
    for loss in losses:
        parts = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        filled = [torch.zeros_like(p) if part is None else part for p, part in zip(parameters, parts, strict=True)]
        rows.append(torch.cat([part.flatten() for part in filled]))
    return torch.stack(rows)


def _probes(pool: Pool) -> tuple[Tensor, Tensor]:
    """Two batches of made-up records that differ in the last one."""
    shape = (_PROBE_ROWS, *pool.inputs.shape[1:])
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    first = drawn.to(pool.inputs) if pool.inputs.is_floating_point() else (drawn > 0.5).to(pool.inputs)
    return first, torch.cat([first[:-1], 1 - first[-1:]])


@contextmanager
def _fixed_draws(device: torch.device) -> Iterator[None]:
    """The same draws of torch's global generators each time, which are left as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def _checked_allowance(allowance: NDArray[np.int64] | None, *, pool: Pool, num_steps: int) -> NDArray[np.int64]:
    """How often each pool row may take part; remote rows have no limit."""
    limits = np.full(len(pool.labels), num_steps, dtype=np.int64)
    if allowance is not None:
        asked = np.asarray(allowance)
        if asked.dtype.kind not in "iu" or asked.shape != (pool.num_own,) or bool((asked < 0).any()):
            raise ValueError(
                f"allowance is {asked.dtype} of shape {asked.shape}: one count ≥ 0 an own row is due, {pool.num_own}; pass "
                "how often each may still take part"
            )
        limits[: pool.num_own] = np.minimum(asked, num_steps)
    return limits


def _buffers(network: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in network.named_buffers()}


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
