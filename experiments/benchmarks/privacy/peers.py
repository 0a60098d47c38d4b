"""What dp-accounting and opacus say of a composition, each in the way it is meant to be used.

`kind` is what a tool claims, not what holds. Sensitivity is 1 throughout, as in our events, so that no neighbouring
relation changes a Gaussian or a Laplace release. dp-accounting knows randomised response under REPLACE_ONE alone, where its
PLD accountant doubles a Gaussian's sensitivity by itself (so it is handed twice the noise) and its RDP accountant does not.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rows import ESTIMATE, LOWER, UPPER

from asfl_privacy.accounting import LossEvent

INTERVAL = 1e-4  # dp-accounting's own default grid of losses


class NoRuleError(Exception):
    """A tool has no rule for these events."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """An accountant of another library: its name in rows, what it claims, and how to ask it."""

    name: str
    kind: str
    ask: Callable[[Sequence[LossEvent], float], float]

    def epsilon(self, events: Sequence[LossEvent], *, delta: float) -> float:
        """Its ε.

        Raises:
            NoRuleError: where it has no rule.
        """
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # opacus notes where its grid of orders ends; the report shows what follows
            before = logging.root.manager.disable
            logging.disable(logging.WARNING)
            try:
                return float(self.ask(events, delta))
            finally:
                logging.disable(before)


def response_noise(event: LossEvent) -> float:
    """dp-accounting's parameter of randomised response: the probability that the output is drawn uniformly.

    Example:
        >>> event = LossEvent(mechanism="randomized-response", noise_multiplier=1.0, count=1, num_classes=2)
        >>> round(response_noise(event), 4)
        0.5379
    """
    k = int(event.num_classes or 2)
    return k / (math.exp(1.0 / float(event.noise_multiplier)) + k - 1.0)


def dp_accounting_epsilon(kind: str, events: Sequence[LossEvent], delta: float) -> float:
    """What PLDAccountant or RdpAccountant says, with its own defaults."""
    import dp_accounting  # type: ignore[import-untyped, unused-ignore]

    has_responses = any(event.mechanism == "randomized-response" for event in events)
    if has_responses and any(event.mechanism == "laplace" for event in events):
        raise NoRuleError("no neighbouring relation under which it knows Laplace and randomised response")
    relation = dp_accounting.NeighboringRelation
    factory = dp_accounting.pld.PLDAccountant if kind == "PLD" else dp_accounting.rdp.RdpAccountant
    accountant = factory(neighboring_relation=relation.REPLACE_ONE if has_responses else relation.ADD_OR_REMOVE_ONE)
    doubles = 2.0 if has_responses and kind == "PLD" else 1.0
    for event in events:
        z = float(event.noise_multiplier)
        if event.mechanism == "gaussian":
            one: Any = dp_accounting.GaussianDpEvent(doubles * z)
        elif event.mechanism == "laplace":
            one = dp_accounting.LaplaceDpEvent(z)
        else:
            one = dp_accounting.RandomizedResponseDpEvent(response_noise(event), int(event.num_classes or 2))
        accountant.compose(one, event.count)
    return float(accountant.get_epsilon(delta))


def composed_pld_epsilon(events: Sequence[LossEvent], delta: float, *, is_pessimistic: bool) -> float:
    """dp-accounting's privacy loss distributions, composed by hand: counts are not ignored, mixes are possible."""
    from dp_accounting.pld import privacy_loss_distribution as distributions  # type: ignore[import-untyped, unused-ignore]

    common = {"value_discretization_interval": INTERVAL, "pessimistic_estimate": is_pessimistic}
    dots = {"use_connect_dots": is_pessimistic}  # which has no optimistic form
    total: Any = None
    for event in events:
        z = float(event.noise_multiplier)
        if event.mechanism == "gaussian":
            one = distributions.from_gaussian_mechanism(z, **common, **dots)
        elif event.mechanism == "laplace":
            one = distributions.from_laplace_mechanism(z, **common, **dots)
        else:
            one = distributions.from_randomized_response(response_noise(event), int(event.num_classes or 2), **common)
        one = one.self_compose(event.count) if event.count > 1 else one
        total = one if total is None else total.compose(one)
    return float(total.get_epsilon_for_delta(delta))


def opacus_epsilon(kind: str, events: Sequence[LossEvent], delta: float, *, sampling_probability: float = 1.0) -> float:
    """What opacus' accountant of a kind says; Gaussians alone."""
    from opacus.accountants import GaussianAccountant, PRVAccountant, RDPAccountant

    if any(event.mechanism != "gaussian" for event in events):
        raise NoRuleError("knows Gaussian noise alone")
    accountant: Any = {"RDP": RDPAccountant, "PRV": PRVAccountant, "GDP": GaussianAccountant}[kind]()
    if kind == "GDP" and len(events) > 1:
        raise NoRuleError("knows one noise multiplier alone")
    accountant.history = [(float(event.noise_multiplier), sampling_probability, event.count) for event in events]
    return float(accountant.get_epsilon(delta=delta))


PEERS: tuple[Peer, ...] = (
    Peer(name="dp-accounting PLD", kind=UPPER, ask=lambda events, d: dp_accounting_epsilon("PLD", events, d)),
    Peer(
        name="dp-accounting PLD by hand",
        kind=UPPER,
        ask=lambda events, d: composed_pld_epsilon(events, d, is_pessimistic=True),
    ),
    Peer(
        name="dp-accounting PLD by hand, optimistic",
        kind=LOWER,
        ask=lambda events, d: composed_pld_epsilon(events, d, is_pessimistic=False),
    ),
    Peer(name="dp-accounting RDP", kind=UPPER, ask=lambda events, d: dp_accounting_epsilon("RDP", events, d)),
    Peer(name="opacus RDP", kind=UPPER, ask=lambda events, d: opacus_epsilon("RDP", events, d)),
    Peer(name="opacus PRV", kind=UPPER, ask=lambda events, d: opacus_epsilon("PRV", events, d)),
    Peer(name="opacus GDP", kind=ESTIMATE, ask=lambda events, d: opacus_epsilon("GDP", events, d)),
)
