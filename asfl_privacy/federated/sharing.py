"""Activation sharing: what a client computes, releases and receives before its tail round (Algorithm 1, lines 2–4)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asfl_privacy.federated.client_states import ClientState
from asfl_privacy.federated.federation import Client, Federation
from asfl_privacy.federated.pairing import draw_pairing
from asfl_privacy.federated.phases import Charge, Collected, Delivery, Payload, Remaining, State
from asfl_privacy.federated.settings import Privacy
from asfl_privacy.federated.steps import Pool
from asfl_privacy.federated.stopwatch import Stopwatch
from asfl_privacy.federated.streams import SERVER, noise_source, numpy_stream
from asfl_privacy.mechanisms import (
    ReleasePlan,
    add_noise,
    finish_both,
    finish_release,
    noised_and_clean,
    payload_bytes,
    plan_release,
    run_stateless,
    split_head,
)
from asfl_privacy.mechanisms.guards import is_finite
from asfl_privacy.mechanisms.label_randomiser import released_labels, remember_none, response_multiplier

NOISED_INPUTS = "noised_inputs"
RANDOMIZED_LABELS = "randomized_labels"


def plan_sharing(state: State, *, federation: Federation) -> ReleasePlan | None:
    """Bound the head as it is now and fix the noise of the round's releases; None without private activations."""
    if federation.privacy is None or not federation.privacy.shares_activations:
        return None
    federation.load(state.weights, training=False)
    return plan_head(federation, federation.privacy)


def plan_head(federation: Federation, privacy: Privacy) -> ReleasePlan:
    """The plan of a release of the scratch network's head with the weights that are in it, which must be evaluating."""
    return plan_release(
        federation.head_before_noise(),
        mechanism=privacy.mechanism,
        noise_multiplier=privacy.noise_multiplier,
        p=privacy.p,
        radius=privacy.radius,
        clip=privacy.clip,
        placement=privacy.placement,
        input_shape=federation.input_shape,
        input_box=federation.data.input_box,
    )


@torch.no_grad()
def collect_activations(
    state: State,
    client: int,
    *,
    federation: Federation,
    plan: ReleasePlan | None,
    round: int,
    remaining: Remaining = None,
) -> Collected:
    """Activations of ⌈τ'/2⌉ mini-batches, each record at most once, under the round's global head.

    Args:
        state: The round's state; its weights give the head.
        client: Client number.
        federation: The federation.
        plan: Noise of the round, or None for clean activations.
        remaining: How many more releases each record may take; records without one are held back.
        round: Round number.

    Returns:
        The payload that may leave, the client's own activations for its tail round, and what the client keeps. A client
        whose records are all held back sends nothing.

    Raises:
        ValueError: Activations that are not finite, inputs outside the box, or a stale certificate.
    """
    if plan is None and federation.privacy is not None:
        raise ValueError(
            "this run is private but its plan noises no activations: they would leave as they are; run method fedavg, or "
            "give a placement for the noise of activations"
        )
    federation.load(state.weights, training=False)
    head = federation.split.head
    holder = federation.clients[client]
    chosen = _draw_shared(holder, federation=federation, remaining=remaining, round=round)
    if not len(chosen):
        return Collected()
    kept = client_state = state.clients.get(client, {})
    watch = Stopwatch(federation.device)
    inputs, labels = holder.inputs[chosen], holder.labels[chosen]
    charges: tuple[Charge, ...] = ()
    if plan is None:
        with watch.phase("head"):
            released = clean = run_stateless(head, inputs)
    else:
        with watch.phase("noise"):
            client_state, noised, before = _noised(
                holder, chosen, plan, client_state, federation=federation, round=round
            )
        own_is_clean = federation.privacy is not None and federation.privacy.own == "clean"
        with watch.phase("head"):
            if own_is_clean:  # what ran before the noise has seen the clean records already
                released, clean = finish_both(plan, head, noised, before)
            else:
                released = clean = finish_release(plan, head, noised)
        charges = (_activation_charge(plan, holder, chosen, federation=federation),)
    # As they are sent: a layout in memory that stays here and is lost on the way would give sums another order.
    released, clean = released.contiguous(), clean.contiguous()
    if not is_finite(clean):  # what is released was looked at where it was made
        raise ValueError("activations are not finite: training diverged; lower lr")
    with watch.phase("noise"):
        client_state, sent_labels, label_charges = _sent_labels(
            holder, chosen, client_state, federation=federation, round=round
        )
    with watch.phase("exchange"):
        num_bytes = payload_bytes(plan, released)
    payload = Payload(
        sender=client,
        activations=released,
        labels=sent_labels.to(label_dtype(federation.data.num_classes)),
        records=holder.records[chosen.cpu().numpy()],
        charges=charges + label_charges,
        num_bytes=num_bytes,
    )
    own_is_released = federation.privacy is not None and federation.privacy.own == "released"
    own = Pool(
        inputs=clean,
        labels=sent_labels if own_is_released else labels,
        noisy=_noisy(own_is_released, federation=federation, num_own=len(labels)),
        # released activations beside labels that went nowhere in the clear read nothing unreleased
        records=None if own_is_released and label_charges else payload.records,
    )
    return Collected(
        payload=payload, own=own, client_state=None if client_state is kept else client_state, seconds=watch.seconds
    )


def route_activations(payloads: Mapping[int, Payload], *, federation: Federation, round: int) -> tuple[Delivery, ...]:
    """Random pairs swap their payloads; an odd number of clients forms one cycle of three."""
    rng = numpy_stream(federation.settings.seed, round=round, client=SERVER, purpose="pairing")
    pairing = draw_pairing(sorted(payloads), rng=rng)
    return tuple(Delivery(payload=payloads[sender], receiver=pairing[sender]) for sender in sorted(pairing))


def tail_pool(own: Pool, received: Payload | None) -> Pool:
    """I_i ∪ I_j: the client's own activations and the partner's; its own alone where it has no partner."""
    if received is None:
        return own
    if received.activations.shape[1:] != own.inputs.shape[1:]:
        raise ValueError(
            f"client {received.sender} sent activations of shape {tuple(received.activations.shape[1:])} a record, and this "
            f"client's have {tuple(own.inputs.shape[1:])}: a tail takes one shape; cut both networks at the same layer"
        )
    noisy = None
    if own.noisy is not None:
        noisy = torch.cat([own.noisy, torch.ones(len(received.labels), dtype=torch.bool, device=own.noisy.device)])
    return replace(
        own,
        received=received.activations.to(own.inputs.dtype),
        labels=torch.cat([own.labels, received.labels.to(own.labels.dtype)]),
        noisy=noisy,
    )


def label_dtype(num_classes: int) -> torch.dtype:
    """The smallest type that labels are sent in."""
    return torch.uint8 if num_classes <= 256 else torch.int32


def _noisy(own_is_released: bool, *, federation: Federation, num_own: int) -> Tensor | None:
    """Which labels of the own pool are randomised; None where no label of the run is."""
    if federation.privacy is None or federation.privacy.label_epsilon is None:
        return None
    return torch.full((num_own,), own_is_released, dtype=torch.bool, device=federation.device)


def _draw_shared(holder: Client, *, federation: Federation, remaining: Remaining, round: int) -> Tensor:
    """Positions of the records that the client shares this round, without replacement, from those not held back."""
    settings = federation.settings
    rng = numpy_stream(settings.seed, round=round, client=holder.number, purpose="share")
    wanted = math.ceil(settings.tail_steps / 2) * settings.batch_size
    left = np.arange(holder.num_records)
    if remaining is not None:
        left = np.flatnonzero(remaining[holder.records] > 0)
    drawn: NDArray[np.int64] = rng.choice(len(left), size=min(wanted, len(left)), replace=False)
    return torch.from_numpy(left[drawn]).to(holder.labels.device)


def _activation_charge(plan: ReleasePlan, holder: Client, chosen: Tensor, *, federation: Federation) -> Charge:
    assert federation.privacy is not None
    return Charge(
        channel="activations",
        mechanism=plan.mechanism.family,
        noise_multiplier=plan.noise_multiplier,
        whole_record_multiplier=plan.whole_record_multiplier,
        records=holder.records[chosen.cpu().numpy()],
        once=federation.privacy.noise == "once",
        sampler=federation.privacy.sampler,
        epsilon_excess=plan.epsilon_excess,
        tail_probability=plan.tail_probability,
    )


def _noised(
    holder: Client,
    chosen: Tensor,
    plan: ReleasePlan,
    client_state: ClientState,
    *,
    federation: Federation,
    round: int,
) -> tuple[ClientState, Tensor, Tensor]:
    """The chosen records with noise at the plan's placement, and without; `once` draws for all records and keeps it."""
    head, privacy = federation.head_before_noise(), federation.privacy
    assert privacy is not None
    seed = federation.settings.seed if privacy.reproducible else None
    if privacy.noise == "fresh":
        source = noise_source(seed=seed, client=holder.number, round=round, purpose="noise")
        noised, before = noised_and_clean(plan, head, holder.inputs[chosen].cpu(), source=source)
        return client_state, noised.to(federation.device), before.to(federation.device)
    if NOISED_INPUTS not in client_state:
        source = noise_source(seed=seed, client=holder.number, round=-1, purpose="noise once")
        kept = add_noise(plan, head, holder.inputs.cpu(), source=source)
        client_state = {**client_state, NOISED_INPUTS: kept.to(federation.device)}
    prefix, _ = split_head(federation.split.head, plan.placement)
    return client_state, client_state[NOISED_INPUTS][chosen], run_stateless(prefix, holder.inputs[chosen])


def _sent_labels(
    holder: Client, chosen: Tensor, client_state: ClientState, *, federation: Federation, round: int
) -> tuple[ClientState, Tensor, tuple[Charge, ...]]:
    """The labels of the chosen records as they are sent: in the clear, or randomised once each and remembered."""
    privacy, num_classes = federation.privacy, federation.data.num_classes
    if privacy is None or privacy.label_epsilon is None:
        return client_state, holder.labels[chosen], ()
    seed = federation.settings.seed if privacy.reproducible else None
    release = released_labels(
        client_state.get(RANDOMIZED_LABELS, remember_none(holder.num_records)),
        positions=chosen.cpu().numpy(),
        labels=holder.labels[chosen],
        num_classes=num_classes,
        epsilon=privacy.label_epsilon,
        source=noise_source(seed=seed, client=holder.number, round=round, purpose="labels"),
    )
    multiplier = response_multiplier(privacy.label_epsilon)
    charge = Charge(
        channel="labels",
        mechanism="randomized-response",
        noise_multiplier=multiplier,
        whole_record_multiplier=multiplier,
        num_classes=num_classes,
        records=holder.records[chosen.cpu().numpy()],
        once=True,
        sampler=privacy.sampler,
    )
    return {**client_state, RANDOMIZED_LABELS: release.remembered}, release.noisy, (charge,)
