"""A client's local steps, plain or private, and the update that leaves afterwards."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asfl_privacy.federated.correction import record_losses
from asfl_privacy.federated.federation import Federation
from asfl_privacy.federated.phases import Charge, Remaining, Stage, State, Steps, Update
from asfl_privacy.federated.private_steps import run_private_steps
from asfl_privacy.federated.private_updates import AddNoise, privatize_update, trained_names
from asfl_privacy.federated.settings import Privacy
from asfl_privacy.federated.steps import Pool, run_steps
from asfl_privacy.federated.stopwatch import Stopwatch
from asfl_privacy.federated.streams import noise_source, numpy_stream, torch_stream
from asfl_privacy.federated.weights import Weights, read_weights
from asfl_privacy.mechanisms import ReleasePlan, insert_noise, make_mechanism
from asfl_privacy.mechanisms.label_randomiser import transition_matrix
from asfl_privacy.mechanisms.lattice import LatticeNoise, WordSource, round_scale_up, truncate
from asfl_privacy.mechanisms.mechanism import scale_for
from asfl_privacy.mechanisms.plain_modules import is_plain
from asfl_privacy.models import OWN_LAYERS

RESOLUTION = 26
"""Bits by which the lattice of update noise is finer than its standard deviation."""


def run_stages(
    stages: tuple[Stage, ...],
    state: State,
    client: int,
    *,
    federation: Federation,
    plan: ReleasePlan | None,
    remaining: Remaining,
    round: int,
) -> tuple[Update, tuple[Steps, ...]]:
    """A client's local work from the round's global network to the update that leaves.

    Args:
        stages: In order; each goes on from what the one before left.
        state: The round's state.
        client: Client number.
        federation: The federation.
        plan: Noise of the round, or None.
        remaining: How many more noised steps each record of the data set may enter, or None.
        round: Round number.

    Returns:
        The update, and what each stage left.
    """
    federation.load(state.weights, training=True)
    watch, done = Stopwatch(federation.device), []
    for stage in stages:
        with watch.phase(stage.part):
            steps = local_steps(
                federation.split.tail
                if stage.part == "tail"
                else trained_network(federation, plan, client=client, round=round),
                stage,
                client=client,
                federation=federation,
                remaining=remaining,
                round=round,
            )
        remaining = steps.remaining
        done.append(steps)
    weights = read_weights(federation.model)
    update = finish_update(
        weights, state, client, federation=federation, steps=tuple(done), remaining=remaining, round=round
    )
    return replace(update, seconds=watch.seconds), tuple(done)


def local_steps(
    network: nn.Module,
    stage: Stage,
    *,
    client: int,
    federation: Federation,
    remaining: Remaining,
    round: int,
) -> Steps:
    """Steps of a network on a pool: plain SGD, or DP-SGD where updates are protected by it and the pool holds raw records.

    Args:
        network: The scratch network or a part of it, changed in place.
        stage: What is asked; own rows of its pool without `records` are released already and cost nothing more.
        client: Client number.
        federation: The federation.
        remaining: How many more noised steps each record of the data set may enter, or None.
        round: Round number.

    Raises:
        ValueError: A correction or another objective where the steps are noised or the network is another.
    """
    settings, privacy = federation.settings, federation.privacy
    pool, num_steps, purpose = stage.pool, stage.num_steps, stage.purpose
    rng = numpy_stream(settings.seed, round=round, client=client, purpose=purpose)
    drawn = num_steps * min(settings.batch_size, len(pool.labels))
    transition = None
    if pool.noisy is not None and privacy is not None and privacy.label_epsilon is not None:
        transition = transition_matrix(federation.data.num_classes, epsilon=privacy.label_epsilon).to(federation.device)
    if privacy is None or privacy.updates != "dp-sgd" or pool.records is None or num_steps == 0:
        names = _names(network, federation=federation)
        correction = None
        if stage.correction is not None:
            correction = {theirs: stage.correction[name] for theirs, name in names.items() if name in stage.correction}
        twin = network if is_plain(network, also=OWN_LAYERS) else _copy(network)
        if federation.device.type == "cuda":
            _put_channels_last(twin)
        taken = run_steps(
            twin,
            pool,
            rng=rng,
            num_steps=num_steps,
            batch_size=settings.batch_size,
            rule=settings.rule(round),
            transition=transition,
            autocast=settings.autocast,
            correction=correction,
            objective=stage.objective,
            keep_gradient=stage.keep_gradient,
        )
        if twin is not network:  # whatever else the steps left in the copy goes with it
            network.load_state_dict(twin.state_dict())
        return Steps(
            drawn=drawn,
            drawn_remote=taken.num_remote,
            charges=(),
            remaining=remaining,
            mean_gradient=None
            if taken.mean_gradient is None
            else {names[theirs]: value for theirs, value in taken.mean_gradient.items()},
        )
    if stage.correction is not None or stage.objective is not None or stage.keep_gradient:
        raise ValueError(
            "updates dp-sgd noises plain gradients alone, and this method's steps are others; use method fedavg, asfl or "
            "fedvarp, or updates none"
        )
    noise = update_noise(privacy)
    done = run_private_steps(
        network,
        pool,
        rng=rng,
        clip=privacy.update_clip,
        add_noise=noise_adder(noise, _source(federation, client=client, purpose=f"{purpose} noise", round=round)),
        losses=_row_losses(pool, transition=transition),
        allowance=None if remaining is None else remaining[pool.records],
        spacing=noise.spacing,
        num_steps=num_steps,
        batch_size=settings.batch_size,
        rule=settings.rule(round),
    )
    num_values = sum(p.numel() for p in network.parameters() if p.requires_grad)
    if remaining is not None:
        remaining = remaining.copy()
        remaining[pool.records] -= done.participations
    named = np.repeat(pool.records, done.participations)
    charges = (_update_charge(privacy, noise, records=named, num_values=num_values),) if len(named) else ()
    return Steps(drawn=drawn, drawn_remote=done.num_remote, charges=charges, remaining=remaining)


def finish_update(
    weights: Weights,
    state: State,
    client: int,
    *,
    federation: Federation,
    steps: tuple[Steps, ...],
    remaining: Remaining,
    round: int,
) -> Update:
    """The client's update as it leaves: its weights after the steps, clipped and noised with `dp-fedavg`.

    A client one of whose records has spent its budget sends the weights that it received.
    """
    privacy, holder = federation.privacy, federation.clients[client]
    charges = tuple(charge for done in steps for charge in done.charges)
    if privacy is not None and privacy.updates == "dp-fedavg":
        if remaining is not None and int(remaining[holder.records].min()) < 1:
            weights = dict(state.weights)
        else:
            noise, names = update_noise(privacy), trained_names(federation.model)
            weights = privatize_update(
                weights,
                old_weights=state.weights,
                parameters=names,
                clip=privacy.update_clip,
                add_noise=noise_adder(noise, _source(federation, client=client, purpose="update noise", round=round)),
                spacing=noise.spacing,
            )
            num_values = sum(state.weights[name].numel() for name in names)
            whole = _update_charge(privacy, noise, records=holder.records, num_values=num_values)
            charges = (replace(whole, client_multiplier=privacy.update_multiplier),)
    return Update(
        weights=weights,
        num_records=holder.num_records,
        drawn=sum(done.drawn for done in steps),
        drawn_remote=sum(done.drawn_remote for done in steps),
        charges=charges,
    )


def own_records(federation: Federation, client: int) -> Pool:
    """What a client's full steps draw from: its own records, in the clear."""
    holder = federation.clients[client]
    return Pool(inputs=holder.inputs, labels=holder.labels, records=holder.records)


def trained_network(federation: Federation, plan: ReleasePlan | None, *, client: int, round: int) -> nn.Module:
    """The scratch network as local steps train it: with the noise layer in its head where PixelDP's recipe is asked."""
    if plan is None or federation.privacy is None or not federation.privacy.noisy_training:
        return federation.model
    mechanism = make_mechanism(plan.mechanism.family, scale=plan.scale)
    generator = torch_stream(federation.settings.seed, round=round, client=client, purpose="training noise")
    head = insert_noise(federation.split.head, mechanism, placement=plan.placement, generator=generator)
    return nn.Sequential(OrderedDict(head=head, tail=federation.split.tail))


def update_noise(privacy: Privacy) -> LatticeNoise:
    """The Gaussian on the lattice that noised sums of gradients and updates get: σ = z·2C.

    Clipped rows are truncated toward zero onto the lattice, which keeps their norm ≤ C, so 2C needs no inflation.
    """
    assert privacy.update_multiplier is not None
    stddev = scale_for(privacy.update_multiplier, sensitivity=2.0 * privacy.update_clip)
    spacing = math.ldexp(1.0, math.frexp(stddev)[1] - RESOLUTION)
    return LatticeNoise(
        family="gaussian",
        scale=round_scale_up(stddev),
        spacing=spacing,
        sensitivity=2.0 * privacy.update_clip,
    )


def _names(network: nn.Module, *, federation: Federation) -> dict[str, str]:
    """What the federation's network calls the parameters of one that is made of its blocks."""
    names = {id(parameter): name for name, parameter in federation.model.named_parameters()}
    return {theirs: names.get(id(parameter), theirs) for theirs, parameter in network.named_parameters()}


def _copy(network: nn.Module) -> nn.Module:
    """A copy to train: what blocks keep beside their parameters and buffers, a record say, must not outlive the steps."""
    try:
        return copy.deepcopy(network)
    except Exception as error:  # the user's blocks may hold anything; the line says how it failed
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"the network cannot be copied ({type(error).__name__}: {reason}), so what it keeps in training could leave with "
            "a later payload; hold nothing in its blocks that copy.deepcopy refuses"
        ) from error


def _put_channels_last(network: nn.Module) -> None:
    """Lay the kernels of image convolutions out with channels last; torch's convolutions then take images the same way."""
    for parameter in network.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def noise_adder(noise: LatticeNoise, source: WordSource) -> AddNoise:
    """A function that adds the noise to a vector of multiples of its spacing, float64."""

    def add(total: Tensor) -> Tensor:
        cells = noise.release(truncate(total, spacing=noise.spacing), source)  # on the lattice already: nothing is lost
        return (torch.from_numpy(cells).double() * noise.spacing).to(total.device)

    return add


def _source(federation: Federation, *, client: int, purpose: str, round: int) -> WordSource:
    assert federation.privacy is not None
    seed = federation.settings.seed if federation.privacy.reproducible else None
    return noise_source(seed=seed, client=client, round=round, purpose=purpose)


def _row_losses(pool: Pool, *, transition: Tensor | None) -> Callable[[Tensor, Tensor], Tensor] | None:
    if transition is None or pool.noisy is None:
        return None
    noisy = pool.noisy

    def losses(logits: Tensor, rows: Tensor) -> Tensor:
        return record_losses(logits, pool.labels[rows], transition=transition, noisy=noisy[rows])

    return losses


def _update_charge(privacy: Privacy, noise: LatticeNoise, *, records: NDArray[np.int64], num_values: int) -> Charge:
    assert privacy.update_multiplier is not None
    return Charge(
        channel="updates",
        mechanism="gaussian",
        noise_multiplier=privacy.update_multiplier,
        whole_record_multiplier=privacy.update_multiplier,
        records=records,
        once=False,
        sampler=privacy.sampler,
        epsilon_excess=noise.epsilon_excess(num_values),
        tail_probability=noise.tail_probability(num_values),
    )
