"""Activation sharing: what a client computes, releases and receives before its tail round (Algorithm 1, lines 2–4)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asfl_privacy.federated.federation import Client, Federation
from asfl_privacy.federated.pairing import draw_pairing
from asfl_privacy.federated.phases import ClientState, Collected, Delivery, Payload, State
from asfl_privacy.federated.settings import Privacy
from asfl_privacy.federated.steps import Pool
from asfl_privacy.federated.streams import SERVER, numpy_stream, torch_stream
from asfl_privacy.mechanisms import ReleasePlan, add_noise, finish_release, plan_release, run_stateless

NOISED_INPUTS = "noised_inputs"


def plan_sharing(state: State, *, federation: Federation) -> ReleasePlan | None:
    """Bound the head as it is now and fix the noise of the round's releases; None without privacy."""
    if federation.privacy is None:
        return None
    federation.load(state.weights, training=False)
    return plan_head(federation, federation.privacy)


def plan_head(federation: Federation, privacy: Privacy) -> ReleasePlan:
    """The plan of a release of the scratch network's head with the weights that are in it, which must be evaluating."""
    return plan_release(
        federation.split.head,
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
    state: State, client: int, *, federation: Federation, plan: ReleasePlan | None, round: int
) -> Collected:
    """Activations of ⌈τ'/2⌉ mini-batches, each record at most once, under the round's global head.

    Args:
        state: The round's state; its weights give the head.
        client: Client number.
        federation: The federation.
        plan: Noise of the round, or None for clean activations.
        round: Round number.

    Returns:
        The payload that may leave, the client's own activations for its tail round, and what the client keeps.

    Raises:
        ValueError: Activations that are not finite, inputs outside the box, or a stale certificate.
    """
    federation.load(state.weights, training=False)
    head = federation.split.head
    holder = federation.clients[client]
    chosen = _draw_shared(holder, federation=federation, round=round)
    inputs, labels = holder.inputs[chosen], holder.labels[chosen]
    client_state = state.clients.get(client, {})
    if plan is None:
        released = clean = run_stateless(head, inputs)
    else:
        client_state, noised = _noised(holder, chosen, plan, client_state, federation=federation, round=round)
        released = finish_release(plan, head, noised)
        own_is_clean = federation.privacy is not None and federation.privacy.own == "clean"
        # The same blocks see clean and noised records: one that keeps something would carry it into a later payload.
        clean = run_stateless(head, inputs) if own_is_clean else released
    if not bool(torch.isfinite(released).all() and torch.isfinite(clean).all()):
        raise ValueError("activations are not finite: training diverged; lower lr")
    payload = Payload(
        sender=client,
        activations=released,
        labels=labels.to(label_dtype(federation.data.num_classes)),
        records=holder.records[chosen.cpu().numpy()],
    )
    own = Pool(inputs=clean, labels=labels, num_own=len(labels))
    return Collected(payload=payload, own=own, client_state=client_state)


def route_activations(payloads: Mapping[int, Payload], *, federation: Federation, round: int) -> tuple[Delivery, ...]:
    """Random pairs swap their payloads; an odd number of clients forms one cycle of three."""
    rng = numpy_stream(federation.settings.seed, round=round, client=SERVER, purpose="pairing")
    pairing = draw_pairing(sorted(payloads), rng=rng)
    return tuple(Delivery(payload=payloads[sender], receiver=pairing[sender]) for sender in sorted(pairing))


def tail_pool(own: Pool, received: Payload | None) -> Pool:
    """I_i ∪ I_j: the client's own activations and the partner's; its own alone where it has no partner."""
    if received is None:
        return own
    return Pool(
        inputs=torch.cat([own.inputs, received.activations]),
        labels=torch.cat([own.labels, received.labels.to(own.labels.dtype)]),
        num_own=own.num_own,
    )


def label_dtype(num_classes: int) -> torch.dtype:
    """The smallest type that labels are sent in."""
    return torch.uint8 if num_classes <= 256 else torch.int32


def _draw_shared(holder: Client, *, federation: Federation, round: int) -> Tensor:
    """Positions of the records that the client shares this round, without replacement."""
    settings = federation.settings
    rng = numpy_stream(settings.seed, round=round, client=holder.number, purpose="share")
    wanted = math.ceil(settings.tail_steps / 2) * settings.batch_size
    drawn: NDArray[np.int64] = rng.choice(holder.num_records, size=min(wanted, holder.num_records), replace=False)
    return torch.from_numpy(drawn).to(holder.labels.device)


def _noised(
    holder: Client,
    chosen: Tensor,
    plan: ReleasePlan,
    client_state: ClientState,
    *,
    federation: Federation,
    round: int,
) -> tuple[ClientState, Tensor]:
    """The chosen records with noise at the plan's placement; with `once`, noise is drawn for all records and kept."""
    seed, head = federation.settings.seed, federation.split.head
    assert federation.privacy is not None
    if federation.privacy.noise == "fresh":
        generator = torch_stream(seed, round=round, client=holder.number, purpose="noise")
        return client_state, add_noise(plan, head, holder.inputs[chosen], generator=generator)
    if NOISED_INPUTS not in client_state:
        generator = torch_stream(seed, round=-1, client=holder.number, purpose="noise once")
        kept = add_noise(plan, head, holder.inputs, generator=generator)
        client_state = {**client_state, NOISED_INPUTS: kept}
    return client_state, client_state[NOISED_INPUTS][chosen]
