"""The facts of a run's statement: what the ledger's counts do not say of it."""

from __future__ import annotations

import json

import numpy as np
from numpy.typing import NDArray

import sensitivity
from asfl_privacy.accounting import Ledger, StatementFacts, statement_record
from asfl_privacy.cells import Target
from asfl_privacy.config import SweepConfig
from asfl_privacy.execution import Progress
from asfl_privacy.federated import Federation, Method, Privacy
from asfl_privacy.mechanisms import split_head
from asfl_privacy.mechanisms.families import FAMILIES
from asfl_privacy.mechanisms.release_sensitivity import BUDGET_S


def facts_of(
    config: SweepConfig, target: Target, *, method: Method, privacy: Privacy, federation: Federation, result: Progress
) -> StatementFacts:
    """What the statement of a finished run needs beside its ledger.

    Args:
        config: The configuration.
        target: The privacy asked for.
        method: What was run.
        privacy: The privacy planned.
        federation: Clients and network; the weights of the last round are loaded where a head was certified.
        result: What the run left.
    """
    plan = result.largest_plan
    certificate_method = None if plan is None else plan.certificate_method
    labels = "none" if not privacy.shares_activations else "clear" if privacy.label_epsilon is None else "randomized"
    return StatementFacts(
        delta=target.delta,
        num_records=federation.data.num_records,
        noise=config.noise,
        labels=labels,
        updates="clear" if privacy.updates == "none" else privacy.updates,
        also_in_the_clear=method.in_the_clear,
        unaccounted_choices=_choices(config, federation=federation),
        placement=target.placement if privacy.shares_activations else "model updates",
        total_epsilon=target.total_epsilon,
        held_back=result.held_back,
        certificate_method=certificate_method,
        certificate_tightness=None if certificate_method is None else _tightness(privacy, federation, result=result),
        rounding="none" if plan is None else plan.rounding,
        claimed_epsilon=target.epsilon if config.calibration == "paper" else None,
    )


def _choices(config: SweepConfig, *, federation: Federation) -> tuple[str, ...]:
    """What was looked at that no ledger counts."""
    if config.evaluate_on == "test":
        return ()
    count = len(federation.data.test_labels)
    return (f"accuracies are of {count} training records that were held out, and were not noised",)


def _tightness(privacy: Privacy, federation: Federation, *, result: Progress) -> float | None:
    """Certificate over the largest ratio found by search, at the last round's head; None where search finds none."""
    federation.load(result.state.weights, training=False)
    prefix, _ = split_head(federation.head_before_noise(), privacy.placement)
    p, q = privacy.p, FAMILIES[privacy.mechanism].norm
    shape, box = federation.input_shape, federation.data.input_box
    now = sensitivity.certify(prefix, p=p, q=q, input_shape=shape, input_box=box, budget_s=BUDGET_S)
    try:
        found = sensitivity.lower_bound(prefix, p=p, q=q, input_shape=shape, input_box=box).value
    except (ValueError, sensitivity.UnsupportedModuleError):  # what search cannot do the certificate does not need
        return None
    return now.value / found if found > 0.0 else None


def clients_of_records(federation: Federation) -> NDArray[np.int64]:
    """Which client holds each record of the data set, shape (records,); the number of clients for one that none holds."""
    holders = np.full(federation.data.num_records, len(federation.clients), dtype=np.int64)
    for client in federation.clients:
        holders[client.records] = client.number
    return holders


def statement_json(ledger: Ledger, *, facts: StatementFacts) -> str:
    """The statement as JSON text."""
    return json.dumps(statement_record(ledger, facts=facts), indent=1, ensure_ascii=False) + "\n"
