"""SplitFed: clients train the head, the server the tail, and activations and gradients cross at every step."""

from __future__ import annotations

import copy
import math
from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from asfl_privacy.federated.federation import Federation
from asfl_privacy.federated.methods.local_method import LocalMethod
from asfl_privacy.federated.phases import Delivery, State, Traffic
from asfl_privacy.federated.sharing import label_dtype
from asfl_privacy.federated.traffic import count_traffic
from asfl_privacy.mechanisms import ReleasePlan


@dataclass(frozen=True)
class SplitFed(LocalMethod, ABC):
    """What both versions have in common: what crosses between client and server, and that nothing of it is noised.

    A step is the client's forward pass of the head, the server's forward and backward pass of the tail, and the client's
    backward pass from the activation's gradient. By the chain rule that is a step of the whole network, and as such it is
    computed here: an optimizer moves each parameter by itself, so two of them, one a half, move them alike.

    Source:
        Thapa, Mahawaga Arachchige, Camtepe & Sun 2022, `SplitFed: When federated learning meets split learning`.
    """

    @property
    def in_the_clear(self) -> str:
        """See `LocalMethod`."""
        return "activations and labels of every step, and get their gradients,"

    @property
    def cuts_network(self) -> bool:
        """See `LocalMethod`."""
        return True

    @property
    def exposes_records(self) -> bool:
        """Whether clients send something of single records that nothing noises, so that no private run is possible."""
        return True

    def prepare(self, state: State, *, federation: Federation, round: int) -> ReleasePlan | None:
        """Refuse what would break the claim; nothing is noised.

        Raises:
            ValueError: A private run, or parameters or buffers that head and tail have in common.
        """
        if federation.privacy is not None:
            raise ValueError(
                f"method {self.name} in a private run: its clients send the server activations and labels of every step, "
                "which nothing noises, so no guarantee would hold; use method asfl or fedavg, or mech none with updates none"
            )
        refuse_ties(federation)
        return None

    def traffic(
        self, state: State, cohort: Sequence[int], deliveries: Sequence[Delivery], *, federation: Federation
    ) -> Traffic:
        """2·P_head a client, two activations and a label a record and step, and the payloads.

        A payload goes to the server, where both tails are that train on it; a client without a partner sends its own for
        its tail alone.
        """
        settings = federation.settings
        weights = {name: state.weights[name] for name in federation.split.head.state_dict()}
        total = count_traffic(weights, cohort_size=len(cohort), deliveries=deliveries)
        sizes = [federation.clients[client].num_records for client in cohort]
        rows = steps_per_round(self, federation) * sum(min(settings.batch_size, size) for size in sizes)
        label = label_dtype(federation.data.num_classes).itemsize
        crossing = activation_bytes(federation, autocast=settings.autocast)
        total += Traffic(activations=2 * rows * crossing, labels=rows * label)
        if self.shares and settings.tail_steps:
            with_partner = {delivery.payload.sender for delivery in deliveries}
            wanted = math.ceil(settings.tail_steps / 2) * settings.batch_size
            alone = sum(min(wanted, size) for c, size in zip(cohort, sizes, strict=True) if c not in with_partner)
            total += Traffic(activations=alone * activation_bytes(federation, autocast=None), labels=alone * label)
        return total


@dataclass(frozen=True)
class SplitFedV1(SplitFed):
    """Each client's head trains against a tail of its own on the server; both halves are averaged, weighted by records.

    Guarantee:
        Weights, draws and evaluations are FedAvg's, bit for bit, with momentum, weight decay and batch norm too; after
        latent sharing they are ASFL's. Only what crosses the network differs.

    Source:
        Thapa et al. 2022, SplitFedV1 (Algorithms 1 and 2 there).
    """

    name: str = "splitfed-v1"


def steps_per_round(method: LocalMethod, federation: Federation) -> int:
    """Steps that a client takes on its own records: τ' + τ, or τ after a tail round."""
    settings = federation.settings
    return settings.full_steps if method.shares else settings.tail_steps + settings.full_steps


def refuse_ties(federation: Federation) -> None:
    """Refuse halves that share memory: trained in two places, what they share would be two tensors from the first step on.

    Raises:
        ValueError: A parameter or buffer of the tail lies in memory that the head's use too.
    """
    in_head = {pointer: name for name, pointer in _memory(federation.split.head).items()}
    for name, pointer in _memory(federation.split.tail).items():
        if pointer in in_head:
            raise ValueError(
                f"{name} of the tail and {in_head[pointer]} of the head are one tensor: head and tail train in two places, "
                "where it cannot be one; choose an exchange layer that leaves both on one side"
            )


def activation_bytes(federation: Federation, *, autocast: torch.dtype | None) -> int:
    """Bytes of one record's activation at the exchange layer, in the type in which it is computed."""
    head = copy.deepcopy(federation.split.head).eval()  # a copy: blocks may keep something of what they see
    inputs = federation.clients[0].inputs[:1].clone()
    with torch.no_grad(), torch.autocast(federation.device.type, dtype=autocast, enabled=autocast is not None):
        activation: torch.Tensor = head(inputs)
    return activation.numel() * activation.element_size()


def _memory(part: nn.Module) -> dict[str, int]:
    """Where each parameter and buffer lies, by name."""
    tensors = [*part.named_parameters(remove_duplicate=False), *part.named_buffers(remove_duplicate=False)]
    return {name: value.untyped_storage().data_ptr() for name, value in tensors if value.numel()}
