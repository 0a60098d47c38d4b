"""The audit: seven parts share alpha, and each says what it saw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn

from asfl_privacy.accounting.checks import check_integer, check_real
from asfl_privacy.audit.claim import Claim
from asfl_privacy.audit.family import check_family
from asfl_privacy.audit.freshness import check_freshness, check_lattice
from asfl_privacy.audit.likelihood import bound_epsilon
from asfl_privacy.audit.pair import Pair, draw_pair
from asfl_privacy.audit.pairs import check_pairs
from asfl_privacy.audit.probe import Layer, NoiseOf, Probe, RefusedError, as_found, make_probe
from asfl_privacy.audit.randomness import untouched_randomness
from asfl_privacy.audit.report import AuditReport, Breach, PartResult
from asfl_privacy.audit.residuals import Residuals, gather
from asfl_privacy.audit.reuse import check_reuse
from asfl_privacy.audit.scale import check_scale, non_finite
from asfl_privacy.audit.significance import Evidence
from asfl_privacy.audit.tap import check_tap

PARTS = ("scale", "pairs", "family", "reuse", "likelihood", "tap", "freshness")
MODES = ("train", "eval")
NUM_RESIDUALS = 2**17
NUM_PAIRS = 2048


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """What one part saw."""

    evidence: list[Evidence]
    notes: list[str]
    epsilon_low: float = 0.0


def run(
    layer: Layer,
    claim: Claim,
    *,
    alpha: float = 1e-6,
    tap: Layer | None = None,
    noise_of: NoiseOf | None = None,
    parts: tuple[str, ...] = PARTS,
    modes: tuple[str, ...] = MODES,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    num_residuals: int = NUM_RESIDUALS,
    num_pairs: int = NUM_PAIRS,
) -> AuditReport:
    """Test a noise layer against its claim.

    Args:
        layer: module or callable, inputs (batch, *claim.input_shape) → outputs of equal shape, noise included.
        claim: what is claimed of one release.
        alpha: probability of any breach reported of an honest layer, over all parts and tests together.
        tap: the deterministic part before the noise (clip, truncation, a head); None where output = input + noise.
        noise_of: (inputs, outputs) → residuals, float64 on the CPU, where outputs − tap(inputs) is not the noise.
        parts: those to run; alpha is shared evenly among them.
        modes: "train" and "eval"; a plain callable has one mode.
        seed: of the test inputs. The noise is the layer's own.
        dtype: of the inputs; None takes that of the layer's parameters, else float32.
        num_residuals: least number of residual scalars from large batches, and about each input of the worst pair.
        num_pairs: records sent of the worst pair, more where records are small.

    Returns:
        The report.

    Raises:
        ValueError: for arguments out of range, a layer that refuses every batch, or outputs without residuals.

    Guarantee:
        An honest layer (independent noise of exactly the claimed law, fresh from a source that no seed, fork or copy
        repeats, added to values that keep the claim) is reported with probability at most alpha. ``epsilon_low`` exceeds
        its ε with probability at most alpha. Modes, buffers and all global random states are afterwards as before; a
        generator that the layer keeps has advanced. A pass is evidence, never a proof.

    Edge cases:
        A layer that raises has released nothing: a note. NaN or inf from finite inputs is a breach. Without a tap, a
        claimed clip is tested by inputs far outside it. Noise from torch's global generator is a breach of freshness,
        since whoever sets or knows its seed can subtract the noise. Records of few coordinates give reuse little to see.

    Source:
        Likelihood ratio and group pairs: Dong, Roth & Su (2022); bounds: Clopper & Pearson (1934); Massart (1990).

    Example:
        >>> numbers = np.random.default_rng()
        >>> def layer(x):
        ...     return x + torch.from_numpy(numbers.normal(0.0, 2.0, tuple(x.shape))).to(x.dtype)
        >>> claim = Claim(family="gaussian", scale=2.0, sensitivity=1.0, input_shape=(8, 8))
        >>> run(layer, claim, parts=("scale", "pairs", "family", "reuse")).passed
        True
        >>> weak = Claim(family="gaussian", scale=4.0, sensitivity=1.0, input_shape=(8, 8))
        >>> report = run(layer, weak)
        >>> report.passed, report.breaches[0].part, report.epsilon_low > report.epsilon_claimed
        (False, 'scale', True)
    """
    alpha = check_real("alpha", alpha, minimum=0.0, exclusive=True, fix="pass e.g. alpha=1e-6")
    if alpha >= 1.0:
        raise ValueError(f"alpha is {alpha!r}: a probability of false alarms is < 1; pass e.g. alpha=1e-6")
    if not isinstance(claim, Claim):
        raise ValueError(
            f"claim is a {type(claim).__name__}: a Claim is due; pass audit.Claim(...) or audit.claim_of(...)"
        )
    _check_names("parts", parts, PARTS)
    _check_names("modes", modes, MODES)
    for name, number in (("num_residuals", num_residuals), ("num_pairs", num_pairs)):
        check_integer(name, number, minimum=64)
    check_integer("seed", seed, minimum=0)
    probe = make_probe(layer, claim, tap=tap, noise_of=noise_of, dtype=dtype)
    has_modes = isinstance(layer, nn.Module) or isinstance(tap, nn.Module)
    chosen_modes = tuple(modes) if has_modes else ("call",)
    share = alpha / len(parts)
    with untouched_randomness(), as_found(layer, tap):
        residuals = gather(probe, modes=chosen_modes, num_residuals=num_residuals, stream=np.random.default_rng(seed))
        broken = non_finite(residuals.calls)
        residuals.calls = [call for call in residuals.calls if np.isfinite(call.u).all()]
        outcomes = {
            name: _outcome(
                name,
                probe,
                residuals,
                modes=chosen_modes,
                alpha=share,
                num_residuals=num_residuals,
                num_pairs=num_pairs,
                stream=np.random.default_rng([seed, number]),  # leaving one part out changes no other
            )
            for number, name in enumerate(PARTS)
            if name in parts
        }
    breaches = [_breach("scale", evidence) for evidence in broken]
    for name, outcome in outcomes.items():
        limit = share / max(1, len(outcome.evidence))
        # NaN compares false, so it is a breach
        breaches += [_breach(name, evidence) for evidence in outcome.evidence if not evidence.p_value > limit]
    dependent = {"pairs", "reuse"} & {breach.part for breach in breaches}
    if "likelihood" in outcomes and dependent:
        outcomes["likelihood"].notes.append("residuals are dependent, so no lower bound on ε is stated")
    assert claim.delta is not None  # resolved by the claim
    return AuditReport(
        passed=not breaches,
        breaches=tuple(breaches),
        epsilon_claimed=claim.epsilon,
        epsilon_low=0.0 if dependent else max(outcome.epsilon_low for outcome in outcomes.values()),
        delta=claim.delta,
        alpha=alpha,
        num_residuals=residuals.count,
        parts=tuple(
            PartResult(
                name=name,
                ran=bool(outcome.evidence),
                num_tests=sum(evidence.num_tests for evidence in outcome.evidence),
                notes=tuple(dict.fromkeys(outcome.notes)),
            )
            for name, outcome in outcomes.items()
        ),
    )


def _outcome(
    name: str,
    probe: Probe,
    residuals: Residuals,
    *,
    modes: tuple[str, ...],
    alpha: float,
    num_residuals: int,
    num_pairs: int,
    stream: np.random.Generator,
) -> _Outcome:
    """What one part saw."""
    claim = probe.claim
    if name == "likelihood":
        pair = partial(draw_pair, probe, mode=modes[-1], num_pairs=num_pairs, num_scalars=num_residuals, stream=stream)
        return _likelihood(pair, claim=claim, alpha=alpha, stream=stream)
    if name == "tap":
        return _tap(probe, modes=modes, stream=stream)
    if name == "freshness":
        evidence, notes = check_freshness(probe, mode=modes[-1], stream=stream)
        if claim.spacing is not None and residuals.calls:
            evidence += check_lattice(residuals)
        return _Outcome(evidence=evidence, notes=notes)
    if not residuals.calls:
        return _Outcome(evidence=[], notes=["no call gave finite residuals"])
    if name == "scale":
        return _Outcome(evidence=check_scale(residuals, claim=claim), notes=residuals.notes)
    if name == "pairs":
        return _Outcome(evidence=check_pairs(residuals, claim=claim), notes=[])
    if name == "family":
        return _Outcome(evidence=check_family(residuals, claim=claim), notes=[])
    return _Outcome(evidence=check_reuse(residuals), notes=[])


def _likelihood(
    draw: Callable[[], Pair | None], *, claim: Claim, alpha: float, stream: np.random.Generator
) -> _Outcome:
    try:
        pair = draw()
    except RefusedError as error:
        return _Outcome(evidence=[], notes=[f"the worst pair was refused: {error}"])
    if pair is None:
        return _Outcome(evidence=[], notes=["the claim names neither sensitivity nor clip, so no worst pair is known"])
    meaning = f"lower bound on ε at δ = {claim.delta:g}"
    if not (np.isfinite(pair.first).all() and np.isfinite(pair.second).all()):
        worst = Evidence(
            where=pair.where, observed=float("nan"), expected=0.0, p_value=0.0, num_tests=1, meaning="noise of the pair"
        )
        return _Outcome(evidence=[worst], notes=[])
    bounds = bound_epsilon(pair, claim=claim, alpha=alpha, stream=stream)
    if not bounds:
        return _Outcome(evidence=[], notes=["no two inputs tried were told apart before the noise"])
    claimed = claim.epsilon
    assert claimed is not None  # a distance is known, so the claim has an ε
    evidence = [
        Evidence(
            where=bound.where,
            observed=bound.epsilon,
            expected=claimed,
            p_value=alpha / len(bounds) if bound.epsilon > claimed else 1.0,
            num_tests=1,
            meaning=meaning,
        )
        for bound in bounds
    ]
    return _Outcome(evidence=evidence, notes=[], epsilon_low=max(bound.epsilon for bound in bounds))


def _tap(probe: Probe, *, modes: tuple[str, ...], stream: np.random.Generator) -> _Outcome:
    found = [check_tap(probe, mode=mode, stream=stream) for mode in modes]
    evidence = [item for items, _ in found for item in items]
    notes = [note for _, more in found for note in more]
    if not evidence and not notes:
        notes.append("no tap= is given and no clip claimed")
    return _Outcome(evidence=evidence, notes=notes)


def _breach(part: str, evidence: Evidence) -> Breach:
    return Breach(
        part=part,
        where=evidence.where,
        observed=evidence.observed,
        expected=evidence.expected,
        p_value=evidence.p_value,
        meaning=evidence.meaning,
    )


def _check_names(name: str, given: object, known: tuple[str, ...]) -> None:
    if (
        not isinstance(given, tuple | list)
        or not given
        or len(set(given)) != len(given)
        or not set(given) <= set(known)
    ):
        raise ValueError(
            f"{name} is {given!r}: it must name some of {', '.join(known)}, each once; pass {name}={known!r}"
        )
