"""The privacy statement: what a run promises, to whom, under which assumptions, and what it does not cover."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from asfl_privacy.accounting.bracket import EpsilonBracket
from asfl_privacy.accounting.checks import check_choice, check_delta, check_integer, number_words
from asfl_privacy.accounting.ledger import Ledger

_SCALES = (2.0, 5.0, 10.0)


@dataclass(frozen=True, kw_only=True)
class StatementFacts:
    """What a statement needs to know beside the ledger.

    Args:
        delta: δ at which Gaussian totals are stated, in (0, 1); 0 is allowed where no Gaussian was released.
        num_records: n, the records of the whole data set; δ is compared with 1/n.
        noise: "fresh" (a draw per release) or "once" (one draw per record, re-used).
        labels: "clear" or "none" (not sent).
        updates: "clear", or "none" where no model updates are sent.
        seeded: whether the noise came from a seeded generator.
        unaccounted_choices: choices made by looking at private data, e.g. "learning rate tuned on the training data".
        placement: where the noise sits, for the text.
    """

    delta: float
    num_records: int
    noise: str = "fresh"
    labels: str = "clear"
    updates: str = "clear"
    seeded: bool = False
    unaccounted_choices: Sequence[str] = ()
    placement: str | None = None

    def __post_init__(self) -> None:
        check_delta(self.delta, zero_allowed=True)
        check_integer("num_records", self.num_records, minimum=1)
        check_choice("noise", self.noise, ("fresh", "once"))
        check_choice("labels", self.labels, ("clear", "none"))
        check_choice("updates", self.updates, ("clear", "none"))


def statement(ledger: Ledger, *, facts: StatementFacts) -> str:
    """Write the statement of what was released, in markdown.

    Args:
        ledger: what was released.
        facts: what the ledger does not know.

    Returns:
        Markdown: unit, relation, adversary, (ε, δ) per release and in total, both scales, assumptions, what is not
        covered, warnings.

    Raises:
        ValueError: if δ is 0 with Gaussian releases, or out of range.

    Guarantee:
        Every figure comes from the ledger and is printed rounded up.

    Example:
        >>> ledger = Ledger(p=2, radius=0.1)
        >>> ledger.record(channel="activations", mechanism="gaussian", noise_multiplier=3.7307, round=0, records=[0])
        >>> text = statement(ledger, facts=StatementFacts(delta=1e-5, num_records=1797))
        >>> [line for line in text.splitlines() if line.startswith("- Per release")]
        ['- Per release: ε = 1, δ = 1e-05']
    """
    delta = ledger.delta_used(facts.delta)
    total = ledger.epsilon(delta=facts.delta)
    adversary = (
        "every recipient of activations, any number of recipients that collude, and the server. All releases of a "
        "record are counted; no amplification by sampling is claimed, because a recipient sees what it received."
    )
    lines = [
        "# Privacy statement",
        "",
        "## What is promised",
        "",
        f"- Privacy unit: {ledger.privacy_unit}.",
        f"- Neighbouring relation: {ledger.relation}.",
        f"- Adversary: {adversary}",
        f"- Mechanism: {', '.join(ledger.mechanisms) or 'none'}"
        + (f", placed at {facts.placement}." if facts.placement else "."),
        _released_words(ledger, noise=facts.noise),
        f"- Per release: ε = {_up(ledger.largest_release(delta=facts.delta))}, δ = {number_words(delta)}",
        f"- Total, largest over records: ε = {_up(total.high)}, δ = {number_words(delta)} {_bracket_words(total)}",
        "",
        *_scale_lines(ledger, facts.delta),
        "## Assumptions",
        "",
        *(f"- {line}" for line in _assumptions(ledger, facts)),
        "",
        "## Not covered",
        "",
        *(f"- {line}" for line in _not_covered(facts)),
        "",
    ]
    flagged = warnings_of(ledger, facts=facts)
    if flagged:
        lines += ["## Warnings", "", *(f"- {line}" for line in flagged), ""]
    return "\n".join(lines)


def warnings_of(ledger: Ledger, *, facts: StatementFacts) -> list[str]:
    """What a reader must be warned of, one line each.

    Args:
        ledger: what was released.
        facts: what the ledger does not know.

    Returns:
        Lines; empty where nothing is to be flagged.
    """
    found = []
    delta = ledger.delta_used(facts.delta)
    if delta >= 1 / facts.num_records:  # 1/n rounds to the nearest float, so every δ from the true 1/n on is met
        found.append(
            f"δ = {number_words(delta)} is 1/n or more (n = {facts.num_records}): publishing one record outright would "
            "satisfy it; choose δ well below 1/n."
        )
    if not isinstance(ledger.radius, str):
        found.append(
            f"Metric claim only: inputs at distance at most {number_words(ledger.radius)} look alike; records further apart are "
            "protected as the table of scales says, and no more."
        )
    if facts.labels == "clear":
        found.append("Labels travel in the clear.")
    if facts.updates == "clear":
        found.append("Model updates are not protected: they carry information on the same records.")
    if facts.seeded:
        found.append("The noise came from a seeded generator: whoever knows or guesses the seed can remove it.")
    return found


def _released_words(ledger: Ledger, *, noise: str) -> str:
    counts = ledger.counts
    most = f"at most {counts.max_releases_per_record} of one record"
    if noise == "once":
        return f"- Released: {counts.releases} noised inputs, {most}; every activation sent was computed from them."
    return f"- Released: {counts.releases} activations of {counts.records} records, {most}."


def _scale_lines(ledger: Ledger, delta: float) -> list[str]:
    lines = ["## Both scales", ""]
    if ledger.radius == "any":
        return [*lines, "The figures above hold for any two records of the input box.", ""]
    distances = [(f"{scale:g}·R", scale) for scale in (1.0, *_SCALES)] + [
        ("any two records of the input box", math.inf)
    ]
    lines += ["| distance of the two records | ε per release | ε in total |", "|---|---|---|"]
    for words, distance in distances:
        release = ledger.largest_release(delta=delta, distance=distance)
        lines.append(f"| {words} | {_up(release)} | {_up(ledger.epsilon(delta=delta, distance=distance).high)} |")
    return [*lines, ""]


def _assumptions(ledger: Ledger, facts: StatementFacts) -> list[str]:
    found = [
        "Noise multipliers and the number of releases are fixed beforehand.",
        f"The total is {ledger.heads_note}.",
        f"Noise is drawn in {ledger.arithmetic}: float sampling leaks through low-order bits, and the rounding of the "
        "head's forward pass is not part of the sensitivity.",
        "Random numbers come from a pseudo-random generator; a seeded one, as in experiments, voids the guarantee "
        "towards whoever knows the seed.",
        "Every raw input lies in the declared input box; inputs outside are refused.",
        "The figures are for this run alone: other runs on the same records add up.",
    ]
    if facts.noise == "once":
        found.append(
            "Noise is drawn once per record and kept: this amounts to sharing noised inputs through the head, and "
            "every later round is post-processing of that one release. Drawing again for a record is a new release."
        )
    return found


def _not_covered(facts: StatementFacts) -> list[str]:
    found = []
    if facts.labels == "clear":
        found.append("Labels: sent in the clear beside the activations.")
    if facts.updates == "clear":
        found.append("Model updates: sent without clipping or noise.")
    found.append("Which records a client holds, how many, and in which rounds it took part.")
    found.append("A client's data as a whole: the figures are per record, and records that are duplicates add up.")
    if facts.unaccounted_choices:
        found += [f"Choice made on private data, not accounted for: {choice}." for choice in facts.unaccounted_choices]
    else:
        found.append(
            "Choices made by looking at private data (placement, clip, exchange layer, learning rate, pilot "
            "runs), if any were."
        )
    return found


def _bracket_words(bracket: EpsilonBracket) -> str:
    if bracket.high - bracket.low <= 1e-9 * bracket.high:
        return "(exact)"
    return f"(proven; at least {bracket.low:.4g} would be due by any accounting)"


def _up(epsilon: float) -> str:
    """Four significant digits, rounded up.

    Example:
        >>> _up(0.99999), _up(1.0001), _up(0.0), _up(math.inf)
        ('1', '1.001', '0', 'unbounded')
    """
    if math.isinf(epsilon):
        return "unbounded"
    if epsilon == 0.0:
        return "0"
    step = 10.0 ** (math.floor(math.log10(epsilon)) - 3)
    return f"{math.ceil(epsilon / step * (1.0 - 1e-12)) * step:.4g}"
