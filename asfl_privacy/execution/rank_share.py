"""A rank's share: the work of its own clients, and what stays with them between collect and train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from torch import Tensor

from asfl_privacy.execution.executor import Executor, Failure
from asfl_privacy.execution.rank_channel import Channel, Shipment
from asfl_privacy.execution.rank_messages import shapes_of
from asfl_privacy.execution.ranks import clients_of, rank_of
from asfl_privacy.federated import Collected, Delivery, Payload, State, Update
from asfl_privacy.federated.phases import Remaining
from asfl_privacy.federated.steps import Pool
from asfl_privacy.mechanisms import ReleasePlan

ALL_CLIENTS = -1
"""Stands for the client where a rank's whole share failed at once."""

Answers = dict[int, Collected | Update | Failure]


@dataclass(frozen=True)
class Shared:
    """What a phase needs on every rank, whoever its clients are."""

    weights: dict[str, Tensor]
    server: Mapping[str, Tensor]
    plan: ReleasePlan | None

    def is_same(self, other: Shared | None) -> bool:
        """Whether these are the very same objects."""
        if other is None:
            return False
        return self.weights is other.weights and self.server is other.server and self.plan is other.plan


@dataclass(frozen=True)
class Order:
    """What rank 0 says to all ranks.

    Attributes:
        phase: What to do; `stop` ends a rank's service.
        round: Round number.
        cohort: All clients of the phase, whoever works for them.
        remaining: As the phase takes it.
        deliveries: For train, who receives what; activations and labels are stand-ins.
        shared: None where it is that of the order before.
        kept_follows: Ranks to which rank 0 next sends what their clients keep.
    """

    phase: Literal["collect", "train", "stop"]
    round: int = -1
    cohort: tuple[int, ...] = ()
    remaining: Remaining = None
    deliveries: tuple[Delivery, ...] = ()
    shared: Shared | None = None
    kept_follows: tuple[int, ...] = ()


class Share:
    """The clients of one rank.

    Args:
        channel: To the other ranks.
        within: Does the clients' work; made with `tolerate_failures=True`.
    """

    def __init__(self, channel: Channel, *, within: Executor) -> None:
        self._channel = channel
        self._within = within
        self._held: dict[int, Collected] = {}

    def carry_out(self, order: Order, state: State, *, plan: ReleasePlan | None) -> Answers:
        """The phase of this rank's clients.

        Returns:
            An answer for each of its clients in the cohort: of what was collected stand-ins, while the rest is held here.
            Where their work failed as a whole, a `Failure` of `ALL_CLIENTS`.

        Raises:
            WorkerDiedError: A rank that payloads come from or go to has ended.
        """
        received = {}
        if order.phase == "collect":
            self._held = {}
        else:
            received = self._exchange(order.deliveries)
        mine = clients_of(self._channel.rank, order.cohort)
        if not mine:
            return {}
        try:
            if order.phase == "collect":
                collected = self._within.collect(state, mine, plan=plan, remaining=order.remaining, round=order.round)
                self._held = {c: answer for c, answer in collected.items() if isinstance(answer, Collected)}
                return {client: stand_in(answer) for client, answer in collected.items()}
            return {
                **self._within.train(
                    state,
                    mine,
                    plan=plan,
                    collected=self._held,
                    received=received,
                    remaining=order.remaining,
                    round=order.round,
                )
            }
        except Exception as error:  # rank 0 must hear of it: it waits for an answer
            return {ALL_CLIENTS: Failure(ALL_CLIENTS, error)}

    def _exchange(self, deliveries: Sequence[Delivery]) -> dict[int, Payload]:
        """Send what this rank's clients give, and receive what they get."""
        me = self._channel.rank
        travelling = [one for one in deliveries if rank_of(one.payload.sender) != rank_of(one.receiver)]
        shipments = [
            Shipment(
                sender=rank_of(one.payload.sender),
                receiver=rank_of(one.receiver),
                shapes=shapes_of([one.payload.activations, one.payload.labels]),
            )
            for one in travelling
        ]
        outgoing = {}
        for place, one in enumerate(travelling):
            if rank_of(one.payload.sender) == me:
                payload = self._payload_of(one.payload.sender)
                outgoing[place] = [payload.activations, payload.labels]
        received = {
            one.receiver: without_records(self._payload_of(one.payload.sender))
            for one in deliveries
            if rank_of(one.payload.sender) == rank_of(one.receiver) == me
        }
        for place, (activations, labels) in self._channel.exchange(shipments, outgoing).items():
            one = travelling[place]
            received[one.receiver] = replace(one.payload, activations=activations, labels=labels)
        return received

    def _payload_of(self, client: int) -> Payload:
        payload = self._held[client].payload
        assert payload is not None  # rank 0 announces what this rank said that it holds
        return payload


def stand_in(answer: Collected | Failure) -> Collected | Failure:
    """What rank 0 is told of what a client collected: all but values that stay with it, which are on the meta device."""
    if isinstance(answer, Failure):
        return answer
    payload, own = answer.payload, answer.own
    if payload is not None:
        payload = replace(payload, activations=payload.activations.to("meta"), labels=payload.labels.to("meta"))
    if own is not None:
        own = Pool(inputs=own.inputs.to("meta"), labels=own.labels.to("meta"))
    return replace(answer, payload=payload, own=own)


def without_records(payload: Payload) -> Payload:
    """A payload without what is never sent."""
    return replace(payload, records=np.empty(0, dtype=np.int64), charges=())
