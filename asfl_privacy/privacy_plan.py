"""The privacy of a run: the noise of every channel, and the budget of a record, from what was asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, cast

from asfl_privacy.accounting.budget import RecordBudget
from asfl_privacy.accounting.calibration import calibrate, least_factor
from asfl_privacy.accounting.published import published_noise_multiplier
from asfl_privacy.accounting.run_calibration import PlannedReleases, calibrate_run
from asfl_privacy.cells import Target
from asfl_privacy.config import SweepConfig, label_epsilon
from asfl_privacy.federated import Federation, Privacy
from asfl_privacy.federated.local_training import update_noise
from asfl_privacy.federated.private_steps import check_private_network
from asfl_privacy.federated.sharing import plan_head
from asfl_privacy.federated.steps import Pool
from asfl_privacy.mechanisms.label_randomiser import response_multiplier

SPARE = 1.5
"""A total with a filter is planned for this many times the mean number of releases, unless a number is given."""

ERROR_ROOM = 2.0**10
"""Room in a filter's budget for the sampler's error of later heads, whose tables differ from those of the first."""


def plan_privacy(config: SweepConfig, target: Target, *, federation: Federation) -> Privacy:
    """Find the noise multipliers with which a run keeps its promise; the head must hold the initial weights, evaluating.

    Args:
        config: The configuration.
        target: Mechanism, budget and placement, `auto` resolved.
        federation: Clients' sizes, by which a filter plans, and the head whose sampler's error is part of ε.

    Returns:
        The privacy of the run.

    Raises:
        ValueError: What calibration, certificate or split refuse; labels that use up the total alone.

    Guarantee:
        With a total: everything that a record may release over the run is together within (ε, δ), whatever is drawn;
        with a filter because records are held back at their budget.
    """
    labels = label_epsilon(config.labels)
    draft = Privacy(
        mechanism=cast(Literal["gaussian", "laplace"], target.mech),
        noise_multiplier=1.0,
        p=target.p,
        radius=target.radius,
        clip=config.clip,
        placement=target.placement,
        noise=config.noise,
        own=config.own,
        updates=config.updates,
        update_multiplier=None if config.updates == "none" else 1.0,
        update_clip=config.update_clip,
        noisy_training=config.calibration == "paper" or config.noisy_training == "yes",
        reproducible=config.reproducible == "yes",
    )
    if draft.shares_activations and labels is not None:
        draft = replace(draft, label_epsilon=labels)
    if target.epsilon is not None:
        return _for_one_release(config, target, draft=draft, federation=federation)
    if config.updates == "dp-sgd":
        _check_gradients(federation)
    for _ in range(2):  # the sampler's error hangs on the noise a little: plan with that of the first answer
        planned = _planned(config, target, draft=draft, federation=federation)
        draft = _for_a_total(target, planned, draft=draft, has_filter=config.filter == "individual")
    return draft


def _check_gradients(federation: Federation) -> None:
    """Refuse a network that DP-SGD cannot train while nothing has been released yet; it evaluates again afterwards."""
    client = federation.clients[0]
    federation.load(federation.initial_weights, training=True)
    pool = Pool(inputs=client.inputs[:2], labels=client.labels[:2])
    check_private_network(federation.model, pool)
    federation.load(federation.initial_weights, training=False)


def planned_notes(config: SweepConfig, privacy: Privacy) -> tuple[str, ...]:
    """What a filter was planned for, as a line for the reader; none without a filter."""
    if privacy.budget is None:
        return ()
    words = f"individual filter: budget of ε {config.total_epsilon[0]:g} a record, planned for"
    counts = []
    if privacy.planned_releases is not None:
        counts.append(f"{privacy.planned_releases} releases")
    if privacy.planned_steps is not None:
        counts.append(f"{privacy.planned_steps} noised steps")
    return (f"{words} {' and '.join(counts)}; records that need more are held back",)


def _for_one_release(config: SweepConfig, target: Target, *, draft: Privacy, federation: Federation) -> Privacy:
    """Noise for ε per release, the sampler's error taken off it."""
    assert target.epsilon is not None
    if config.calibration == "paper":
        z = published_noise_multiplier(target.mech, epsilon=target.epsilon, delta=target.delta)
        return _checked(replace(draft, noise_multiplier=z), federation=federation)
    epsilon = target.epsilon
    for _ in range(2):
        facts = calibrate(target.mech, epsilon=epsilon, delta=target.delta)
        draft = replace(draft, noise_multiplier=facts.noise_multiplier)
        epsilon = (target.epsilon - 4.0 * plan_head(federation, draft).epsilon_excess) * (1.0 - 2.0**-48)
    return _checked(draft, federation=federation)


def _checked(draft: Privacy, *, federation: Federation) -> Privacy:
    plan_head(federation, draft)
    return draft


def _planned(
    config: SweepConfig, target: Target, *, draft: Privacy, federation: Federation
) -> tuple[PlannedReleases, ...]:
    """How often one record is released in each channel, at most, or as planned where a filter holds records back."""
    has_filter, rounds = config.filter == "individual", config.rounds
    planned = []
    if draft.shares_activations and config.tail_steps > 0:
        plan = plan_head(federation, draft)
        most = 1 if config.noise == "once" else rounds
        if has_filter and config.noise == "fresh":
            most = config.planned_releases or _expected(federation, _share_rate)
        planned.append(
            PlannedReleases(
                channel="activations",
                mechanism=target.mech,
                num_releases=most,
                share=1.0 if config.updates == "none" else 1.0 - config.update_share,
                epsilon_excess=plan.epsilon_excess,
                tail_probability=plan.tail_probability,
            )
        )
    if draft.label_epsilon is not None:
        planned.append(
            PlannedReleases(
                channel="labels",
                mechanism="randomized-response",
                noise_multiplier=response_multiplier(draft.label_epsilon),
                num_classes=federation.data.num_classes,
            )
        )
    if config.updates != "none":
        noise = update_noise(draft)
        num_values = sum(p.numel() for p in federation.model.parameters() if p.requires_grad)
        most = rounds
        if config.updates == "dp-sgd":
            steps = config.tail_steps + config.full_steps
            if draft.shares_activations and not _tail_reads_raw(draft):
                steps = config.full_steps
            most = rounds * steps
            if has_filter:
                most = config.planned_steps or _expected(replace(federation, privacy=draft), _step_rate)
        planned.append(
            PlannedReleases(
                channel="updates",
                mechanism="gaussian",
                num_releases=most,
                share=config.update_share if draft.shares_activations else 1.0,
                epsilon_excess=noise.epsilon_excess(num_values),
                tail_probability=noise.tail_probability(num_values),
            )
        )
    return tuple(planned)


def _for_a_total(target: Target, planned: tuple[PlannedReleases, ...], *, draft: Privacy, has_filter: bool) -> Privacy:
    """Noise with which the planned releases are together within the total."""
    assert target.total_epsilon is not None
    found = calibrate_run(planned, total_epsilon=target.total_epsilon, delta=target.delta)
    multipliers, budget = dict(found.noise_multipliers), None
    if has_filter:
        free = [plan.channel for plan in planned if plan.noise_multiplier is None]

        def scaled(factor: float) -> dict[str, float]:
            return {channel: z * (factor if channel in free else 1.0) for channel, z in multipliers.items()}

        def spends(factor: float) -> float:
            return _budget(planned, scaled(factor)).total(delta=target.delta)

        multipliers = scaled(least_factor(spends, target=target.total_epsilon))
        budget = _budget(planned, multipliers)
    counts = {plan.channel: math.ceil(plan.num_releases) for plan in planned}
    updates = multipliers.get("updates")
    return replace(
        draft,
        noise_multiplier=multipliers.get("activations", updates or 1.0),
        update_multiplier=updates,
        budget=budget,
        planned_releases=counts.get("activations"),
        planned_steps=counts.get("updates"),
    )


def _budget(planned: tuple[PlannedReleases, ...], multipliers: dict[str, float]) -> RecordBudget:
    """What the planned releases cost, as the budget of a record."""
    sums = {"gaussian": 0.0, "pure": 0.0, "excess": 0.0, "tail": 0.0}
    for plan in planned:
        z, count = multipliers[plan.channel], math.ceil(plan.num_releases)
        if plan.mechanism == "gaussian":
            sums["gaussian"] += count / z**2
        else:
            sums["pure"] += count / z
        sums["excess"] += count * plan.epsilon_excess * ERROR_ROOM
        sums["tail"] += count * plan.tail_probability * ERROR_ROOM
    upward = 1.0 + 2.0**-48  # the last planned release must fit in spite of rounding; the total counts this budget
    return RecordBudget(**{f"{name}_budget": value * upward for name, value in sums.items()})


def _expected(federation: Federation, releases_a_round: Callable[[Federation, int], float]) -> int:
    """SPARE times the mean over records of the expected number of releases in a run, rounded up.

    It rests on how many records each client holds, which is public in this setting, not on their values.
    """
    settings = federation.settings
    sizes = [client.num_records for client in federation.clients]
    total = sum(size * releases_a_round(federation, size) for size in sizes)
    return max(1, math.ceil(SPARE * settings.rounds * settings.cohort / settings.clients * total / sum(sizes)))


def _share_rate(federation: Federation, num_records: int) -> float:
    """Chance that a record of a client of this size is shared in a round in which the client is sampled."""
    return min(1.0, _num_shared(federation) / num_records)


def _step_rate(federation: Federation, num_records: int) -> float:
    """Expected noised steps that a record of a client of this size enters in a round in which the client is sampled."""
    settings, privacy = federation.settings, federation.privacy
    shares = privacy is None or privacy.shares_activations
    tail_on_raw = shares and (privacy is None or _tail_reads_raw(privacy))
    full = settings.full_steps if shares else settings.full_steps + settings.tail_steps
    expected = full * min(1.0, settings.batch_size / num_records)
    if tail_on_raw and settings.tail_steps > 0:
        own = min(_num_shared(federation), num_records)
        in_a_step = min(1.0, settings.batch_size / (own + _num_shared(federation)))
        expected += own / num_records * settings.tail_steps * in_a_step
    return expected


def _tail_reads_raw(privacy: Privacy) -> bool:
    """Whether tail steps read what was not released: own activations, or own labels as they are."""
    return privacy.own == "clean" or privacy.label_epsilon is None


def _num_shared(federation: Federation) -> int:
    return math.ceil(federation.settings.tail_steps / 2) * federation.settings.batch_size
