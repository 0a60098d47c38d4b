"""SCAFFOLD: local steps corrected by control variates (Karimireddy et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asfl_privacy.federated.client_states import ClientState
from asfl_privacy.federated.federation import Federation
from asfl_privacy.federated.methods.local_method import LocalMethod
from asfl_privacy.federated.phases import Delivery, Stage, State, Steps, Traffic, Update
from asfl_privacy.federated.private_updates import trained_names
from asfl_privacy.federated.server_step import server_step
from asfl_privacy.federated.traffic import count_traffic
from asfl_privacy.federated.weights import Weights

CONTROL = "control."
"""What the name of a control variate begins with, in the server's state and in each client's."""


@dataclass(frozen=True)
class Scaffold(LocalMethod):
    """y ← y − η(g(y) − c_i + c); c_i⁺ is the mean of the raw local gradients; the server steps along the mean update.

    c and c_i start at zero. After latent sharing the tail round is plain, and c_i⁺ is of the full steps alone.

    Guarantee:
        The first round is FedAvg's but for the mean, which is not weighted by records. c is the mean of all N clients'
        c_i after every round, whichever were sampled (a client that never was has c_i = 0). Under plain SGD c_i⁺ is
        Option II's c_i − c + (x − y_i)/(Kη), in exact arithmetic, x being where the corrected steps begin.

    Edge cases:
        A parameter that a step does not use (its gradient is None) stays as it is in that step, uncorrected.

    Source:
        Karimireddy et al. 2020, Algorithm 1; c_i⁺ as the mean of the raw gradients, which is Option II where that is
        defined and holds for momentum and weight decay too.
    """

    name: str = "scaffold"

    @property
    def in_the_clear(self) -> str:
        """See `LocalMethod`."""
        return "control variates"

    def corrected(self, federation: Federation) -> tuple[str, ...]:
        """Names of the parameters that are corrected: all that train, one that several blocks share once."""
        return tuple(name for name, value in federation.model.named_parameters() if value.requires_grad)

    def full_stage(self, plain: Stage, state: State, client: int, *, federation: Federation) -> Stage:
        """Full steps with c − c_i added to each gradient."""
        own = state.clients.get(client, {})
        correction: Weights = {}
        for name in self.corrected(federation):
            terms = [state.server.get(CONTROL + name), own.get(CONTROL + name)]
            if terms[0] is not None or terms[1] is not None:
                zero = torch.zeros_like(state.weights[name])
                c, c_i = (zero if term is None else term for term in terms)
                correction[name] = c - c_i
        return replace(plain, correction=correction or None, keep_gradient=True)

    def finish(
        self, update: Update, state: State, client: int, *, steps: Sequence[Steps], federation: Federation, round: int
    ) -> Update:
        """The client keeps c_i⁺ of what is corrected, beside what it kept of its releases."""
        gradient = steps[-1].mean_gradient
        assert gradient is not None  # full_stage asked for it
        kept = state.clients.get(client, {})
        controls = {CONTROL + name: gradient[name] for name in self.corrected(federation)}
        return replace(update, client_state={**kept, **controls})

    def aggregate(self, state: State, updates: Mapping[int, Update], *, federation: Federation, round: int) -> State:
        """The server's step x ← x + η_g·mean_S(y_i − x), and c ← c + (1/N)·Σ_S(c_i⁺ − c_i)."""
        options = federation.settings.options
        stepped = server_step(state, updates, trained=trained_names(federation.model), server_lr=options.server_lr)
        server = {**state.server}
        earlier = {client: state.clients.get(client, {}) for client in sorted(updates)}  # once: each look-up copies
        for name in self.corrected(federation):
            key = CONTROL + name
            changes = [_change(kept, updates[client], key=key) for client, kept in earlier.items()]
            total = torch.stack(changes).double().sum(0) / len(federation.clients)
            before = server.get(key, torch.zeros_like(state.weights[name]))
            server[key] = (before.double() + total).to(before.dtype)
        return replace(stepped, server=server)

    def traffic(
        self, state: State, cohort: Sequence[int], deliveries: Sequence[Delivery], *, federation: Federation
    ) -> Traffic:
        """Weights, and as many control variates as are corrected, each way; and the payloads."""
        plain = count_traffic(state.weights, cohort_size=len(cohort), deliveries=deliveries)
        size = sum(state.weights[name].nbytes for name in self.corrected(federation))
        return plain + Traffic(model=2 * len(cohort) * size)


def _change(earlier: ClientState, update: Update, *, key: str) -> Tensor:
    """c_i⁺ − c_i of one client."""
    assert update.client_state is not None  # finish gave it
    after = update.client_state[key]
    return after - earlier[key] if key in earlier else after
