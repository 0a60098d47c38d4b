"""Calibration of a whole run: one factor on the noise of several channels, so that all together stay within a total."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asfl_privacy.accounting.calibration import calibrate, least_factor
from asfl_privacy.accounting.checks import check_delta, check_num_releases, check_real
from asfl_privacy.accounting.columns import Column
from asfl_privacy.accounting.event import EventClass, make_event
from asfl_privacy.accounting.spending import spent_epsilon
from asfl_privacy.accounting.totals import tally_releases


@dataclass(frozen=True, kw_only=True)
class PlannedReleases:
    """The releases of one record that a channel is going to make.

    Args:
        channel: "activations", "labels" or "updates".
        mechanism: "gaussian", "laplace" or, for labels, "randomized-response".
        num_releases: T ≥ 1 of one record; a fraction rounds up.
        noise_multiplier: z where it is fixed beforehand (labels: 1/ε of one draw); None where it is to be found.
        num_classes: k ≥ 2 of randomised response, else None.
        share: weight > 0 of this channel among those to be found: a larger share gets less noise.
        epsilon_excess: e ≥ 0 of one release, see EventClass.
        tail_probability: τ in [0, 1) of one release, see EventClass.
    """

    channel: str
    mechanism: str
    num_releases: float = 1
    noise_multiplier: float | None = None
    num_classes: int | None = None
    share: float = 1.0
    epsilon_excess: float = 0.0
    tail_probability: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RunCalibration:
    """What was calibrated.

    Args:
        noise_multipliers: z of every channel, the fixed ones included.
        epsilon_alone: ε at ``delta`` of every channel's releases without the others.
        epsilon: ε at ``delta`` of everything together, recomputed from ``noise_multipliers``.
        delta: the δ of all figures.
    """

    noise_multipliers: Mapping[str, float]
    epsilon_alone: Mapping[str, float]
    epsilon: float
    delta: float


def calibrate_run(planned: Sequence[PlannedReleases], *, total_epsilon: float, delta: float) -> RunCalibration:
    """Find the noise of all channels of a run for one total (ε, δ) of a record.

    Args:
        planned: one entry per channel, at least one of them with ``noise_multiplier`` None. Its noise starts from the
            multiplier that would spend the whole total alone, divided by √share (Gaussian) or share (Laplace), shares
            normalised to add up to 1; then one common factor is sought for all channels.
        total_epsilon: ε > 0 of everything together.
        delta: δ in (0, 1); 0 is allowed without Gaussian releases and tail probabilities.

    Returns:
        The noise multipliers, the ε of each channel alone, and the joint ε.

    Raises:
        ValueError: if a value is out of range, a channel occurs twice, nothing is to be found, or the fixed channels
            alone use up the total.

    Guarantee:
        ``epsilon`` ≤ ``total_epsilon``, and it is what a ledger holding exactly these releases of one record answers at
        ``delta``; ≥ .999 of the total is used.

    Example:
        >>> found = calibrate_run(
        ...     [
        ...         PlannedReleases(channel="activations", mechanism="gaussian", num_releases=100),
        ...         PlannedReleases(channel="updates", mechanism="gaussian", num_releases=400),
        ...     ],
        ...     total_epsilon=8.0,
        ...     delta=1e-5,
        ... )
        >>> {channel: round(z, 1) for channel, z in found.noise_multipliers.items()}
        {'activations': 8.5, 'updates': 17.0}
    """
    target = check_real("total_epsilon", total_epsilon, minimum=0.0, exclusive=True, fix="pass e.g. total_epsilon=8.0")
    needs_delta = any(plan.mechanism == "gaussian" or plan.tail_probability for plan in planned)
    delta = check_delta(delta, zero_allowed=not needs_delta)
    starts = _starts(planned, target=target, delta=delta)
    fixed = {plan.channel: plan for plan in planned if plan.noise_multiplier is not None}

    def spends(factor: float, channels: Sequence[str] | None = None) -> float:
        return _spent(
            [
                (plan, starts[plan.channel] * (1.0 if plan.channel in fixed else factor))
                for plan in planned
                if channels is None or plan.channel in channels
            ],
            delta=delta,
        )

    if fixed and (alone := spends(1.0, tuple(fixed))) >= target:
        raise ValueError(
            f"total_epsilon is {target!r}: {' and '.join(fixed)} alone spend {alone!r}, so nothing is left for the other "
            "channels; ask for a larger total, or for a smaller epsilon of the labels"
        )
    factor = least_factor(spends, target=target)
    return RunCalibration(
        noise_multipliers={channel: z if channel in fixed else z * factor for channel, z in starts.items()},
        epsilon_alone={plan.channel: spends(factor, (plan.channel,)) for plan in planned},
        epsilon=spends(factor),
        delta=delta,
    )


def _starts(planned: Sequence[PlannedReleases], *, target: float, delta: float) -> dict[str, float]:
    """Noise multipliers to start from; every value of the plan is checked."""
    for plan in planned:
        check_num_releases(plan.num_releases)
        check_real("share", plan.share, minimum=0.0, exclusive=True, fix="pass e.g. share=1.0")
        _event(plan, 1.0 if plan.noise_multiplier is None else plan.noise_multiplier)
        if plan.noise_multiplier is None and plan.mechanism == "randomized-response":
            raise ValueError(
                "noise_multiplier is None: the epsilon of randomised labels is chosen beforehand; pass 1/epsilon of a draw"
            )
    channels = [plan.channel for plan in planned]
    if len(set(channels)) < len(channels):
        raise ValueError(
            f"planned names the channels {channels}: each may occur once; merge the entries of one channel"
        )
    whole = math.fsum(plan.share for plan in planned if plan.noise_multiplier is None)
    if whole == 0.0:
        raise ValueError(
            "planned fixes every noise_multiplier: there is nothing to find; pass noise_multiplier=None for a channel, or "
            "ask a ledger for the total"
        )
    starts = {}
    for plan in planned:
        if plan.noise_multiplier is not None:
            starts[plan.channel] = float(plan.noise_multiplier)
            continue
        alone = calibrate(plan.mechanism, total_epsilon=target, delta=delta, num_releases=plan.num_releases)
        share = plan.share / whole
        starts[plan.channel] = alone.noise_multiplier / (math.sqrt(share) if plan.mechanism == "gaussian" else share)
    return starts


def _spent(releases: Sequence[tuple[PlannedReleases, float]], *, delta: float) -> float:
    parts = {}
    for plan, multiplier in releases:
        every = check_num_releases(plan.num_releases)
        parts[_event(plan, multiplier)] = [Column(start=0, length=1, ids=None, counts=None, every=every)]
    tally = tally_releases(parts, distance=1.0)
    assert tally is not None
    return spent_epsilon(tally, delta=delta).high


def _event(plan: PlannedReleases, multiplier: float) -> EventClass:
    return make_event(
        channel=plan.channel,
        mechanism=plan.mechanism,
        noise_multiplier=multiplier,
        round_number=0,
        whole_record_multiplier=None,
        radius="any",
        num_classes=plan.num_classes,
        epsilon_excess=plan.epsilon_excess,
        tail_probability=plan.tail_probability,
    )
