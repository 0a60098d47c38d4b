"""The privacy statement: what a run promises, to whom, under which assumptions, and what it does not cover.

`statement_record` gathers every figure and sentence from the ledger and its facts alone; statement.json is that record
and statement.md is written from nothing else.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from asfl_privacy.accounting.bracket import EpsilonBracket
from asfl_privacy.accounting.checks import number_words
from asfl_privacy.accounting.ledger import Ledger
from asfl_privacy.accounting.statement_facts import StatementFacts
from asfl_privacy.accounting.statement_sentences import assumptions_of, not_covered_of, warnings_of

FORMAT, VERSION = "asfl-privacy statement", 1
DISTANCES = (1.0, 2.0, 5.0, 10.0, math.inf)
ADVERSARY = (
    "every recipient of activations, any number of recipients that collude, and the server. All releases of a record are "
    "counted; no amplification by sampling is claimed, because a recipient sees what it received"
)
REPRODUCE_ONLY = (
    "REPRODUCE ONLY, no guarantee: the noise came from a seed, so that the run can be repeated; whoever knows or guesses "
    "the seed can remove it. The figures are what the same run would promise with noise from the system's cryptographic "
    "source."
)


def statement_record(ledger: Ledger, *, facts: StatementFacts) -> dict[str, Any]:
    """Everything a statement says, as plain JSON values; infinity is written "inf".

    Args:
        ledger: what was released.
        facts: what the ledger does not know.

    Returns:
        format, version, reproduce_only, privacy_unit, relation, adversary, mechanisms, placement, noise, released,
        delta, per_release and total (by channel and jointly; record- and client-level), distances, budget,
        records_held_back, certificate, assumptions, not_covered, warnings.

    Raises:
        ValueError: if δ is 0 with Gaussian releases, or out of range.

    Guarantee:
        Every ε comes from the ledger, unrounded. It holds no count of a single record and no path.

    Example:
        >>> ledger = Ledger(p=2, radius=0.1)
        >>> ledger.record(channel="activations", mechanism="gaussian", noise_multiplier=3.7307, round=0, records=[0])
        >>> record = statement_record(ledger, facts=StatementFacts(delta=1e-5, num_records=1797))
        >>> round(record["total"]["record"]["epsilon"], 3)
        1.0
    """
    counts, delta = ledger.counts, facts.delta
    total = {"record": _bracket(ledger.epsilon(delta=delta))}
    if ledger.clients is not None:
        total["client"] = _bracket(ledger.epsilon(delta=delta, unit="client"))
    for channel in ledger.channels:
        total[channel] = _bracket(ledger.epsilon(delta=delta, channel=channel))
    releases = {channel: _json(ledger.largest_release(delta=delta, channel=channel)) for channel in ledger.channels}
    return {
        "format": FORMAT,
        "version": VERSION,
        "reproduce_only": ledger.is_reproducible,
        "privacy_unit": ledger.privacy_unit,
        "relation": ledger.relation,
        "adversary": ADVERSARY,
        "mechanisms": {
            channel: sorted({event.mechanism for event in ledger.event_classes if event.channel == channel})
            for channel in ledger.channels
        },
        "samplers": list(ledger.samplers),
        "placement": facts.placement,
        "noise": facts.noise,
        "released": {"records": counts.records, "releases": counts.releases, "largest": counts.max_releases_per_record},
        "delta": ledger.delta_used(delta),
        "per_release": {"largest": _json(ledger.largest_release(delta=delta)), **releases},
        "claimed_epsilon": facts.claimed_epsilon,
        "total": total,
        "distances": _distances(ledger, delta=delta),
        "budget": facts.total_epsilon,
        "records_held_back": facts.held_back,
        "certificate": {
            "method": facts.certificate_method,
            "tightness": facts.certificate_tightness,
            "rounding": facts.rounding,
        },
        "assumptions": assumptions_of(ledger, facts=facts),
        "not_covered": not_covered_of(facts),
        "warnings": warnings_of(ledger, facts=facts),
    }


def statement(ledger: Ledger, *, facts: StatementFacts) -> str:
    """The statement in Markdown; see ``statement_record``, from which alone it is written.

    Guarantee:
        Every figure is printed rounded up.

    Example:
        >>> ledger = Ledger(p=2, radius=0.1)
        >>> ledger.record(channel="activations", mechanism="gaussian", noise_multiplier=3.7307, round=0, records=[0])
        >>> text = statement(ledger, facts=StatementFacts(delta=1e-5, num_records=1797))
        >>> [line for line in text.splitlines() if line.startswith("- Per release")]
        ['- Per release: ε = 1, δ = 1e-05']
    """
    record = statement_record(ledger, facts=facts)
    lines = ["# Privacy statement", ""]
    if record["reproduce_only"]:
        lines += [f"**{REPRODUCE_ONLY}**", ""]
    lines += ["## What is promised", "", *(f"- {line}" for line in _promised(record)), ""]
    lines += _scale_lines(record)
    for title, name in (("Assumptions", "assumptions"), ("Not covered", "not_covered"), ("Warnings", "warnings")):
        if record[name]:
            lines += [f"## {title}", "", *(f"- {line}" for line in record[name]), ""]
    return "\n".join(lines)


def _promised(record: dict[str, Any]) -> list[str]:
    mechanisms = list(dict.fromkeys(name for names in record["mechanisms"].values() for name in names))
    where = f", placed at {record['placement']}" if record["placement"] else ""
    delta = number_words(record["delta"])
    found = [
        f"Privacy unit: {record['privacy_unit']}.",
        f"Neighbouring relation: {record['relation']}.",
        f"Adversary: {record['adversary']}.",
        f"Mechanism: {', '.join(mechanisms) or 'none'}{where}.",
        _released_words(record),
        f"Per release: ε = {_up(record['per_release']['largest'])}, δ = {delta}",
    ]
    if record["claimed_epsilon"] is not None:
        found.append(
            f"Claimed per release by the published formula: ε = {number_words(record['claimed_epsilon'])}, which is not "
            "proven; the line above is."
        )
    total = record["total"]
    found.append(f"Total, largest over records: {_total_words(total['record'])}")
    if "client" in total:
        found.append(f"Total, largest over clients, all records of a client replaced: {_total_words(total['client'])}")
    channels = [name for name in total if name not in ("record", "client")]
    if len(channels) > 1:
        found += [f"Of it by the channel {name} alone: {_total_words(total[name])}" for name in channels]
    if record["budget"] is not None:
        found.append(f"Budget asked for the whole run: ε = {number_words(record['budget'])}.")
    if record["records_held_back"]:
        found.append(
            f"Records held back: {record['records_held_back']} had spent their budget before the run ended; from then on "
            "they were not used, and training went on with the others."
        )
    certificate = record["certificate"]
    if certificate["method"] is not None:
        tightness = certificate["tightness"]
        near = "" if tightness is None else f", at most {_up(tightness)} times the largest ratio that a search found"
        found.append(f"Sensitivity: certified by {certificate['method']}{near}.")
    return found


def _released_words(record: dict[str, Any]) -> str:
    released = record["released"]
    most = f"at most {released['largest']} of one record"
    if record["noise"] == "once" and set(record["mechanisms"]) <= {"activations"}:
        return f"Released: {released['releases']} noised inputs, {most}; every activation sent was computed from them."
    what = "activations" if set(record["mechanisms"]) <= {"activations"} else "noised values"
    return f"Released: {released['releases']} {what} of {released['records']} records, {most}."


def _scale_lines(record: dict[str, Any]) -> list[str]:
    lines = ["## Both scales", ""]
    if not record["distances"]:
        return [*lines, "The figures above hold for any two records of the input box.", ""]
    lines += ["| distance of the two records | ε per release | ε in total |", "|---|---|---|"]
    for entry in record["distances"]:
        distance = entry["distance"]
        words = "any two records of the input box" if distance == "inf" else f"{distance:g}·R"
        lines.append(f"| {words} | {_up(entry['per_release'])} | {_up(entry['total'])} |")
    return [*lines, ""]


def _distances(ledger: Ledger, *, delta: float) -> list[dict[str, Any]]:
    if ledger.radius == "any":
        return []
    return [
        {
            "distance": _json(distance),
            "per_release": _json(ledger.largest_release(delta=delta, distance=distance)),
            "total": _json(ledger.epsilon(delta=delta, distance=distance).high),
        }
        for distance in DISTANCES
    ]


def _bracket(bracket: EpsilonBracket) -> dict[str, Any]:
    return {"epsilon": _json(bracket.high), "epsilon_low": _json(bracket.low), "delta": bracket.delta}


def _json(number: float) -> float | str:
    return "inf" if math.isinf(number) else number


def _total_words(total: dict[str, Any]) -> str:
    high, low = float(total["epsilon"]), float(total["epsilon_low"])
    if math.isinf(high):
        return f"ε = unbounded, δ = {number_words(total['delta'])} (so much was released that no useful bound is left)"
    exact = high - low <= 1e-9 * high
    near = "exact" if exact else f"proven; at least {low:.4g} would be due by any accounting"
    return f"ε = {_up(total['epsilon'])}, δ = {number_words(total['delta'])} ({near})"


def _up(value: float | str) -> str:
    """Four significant digits, rounded up.

    Example:
        >>> _up(0.99999), _up(1.0001), _up(0.0), _up("inf")
        ('1', '1.001', '0', 'unbounded')
    """
    number = float(value)
    if math.isinf(number):
        return "unbounded"
    if number == 0.0:
        return "0"
    step = Fraction(10) ** (math.floor(math.log10(number)) - 3)
    return f"{float(math.ceil(Fraction(number) / step) * step):.4g}"
