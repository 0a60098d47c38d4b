"""The sentences of a statement: assumptions, gaps and warnings, each said when it is due."""

from __future__ import annotations

from asfl_privacy.accounting.checks import number_words
from asfl_privacy.accounting.ledger import Ledger
from asfl_privacy.accounting.statement_facts import StatementFacts

SAMPLER_SENTENCES = {
    "lattice": (
        "Noise is drawn on a lattice whose spacing is a power of two, by integer tables from the operating system's "
        "cryptographic source; the tables' error is part of ε and δ."
    ),
    "float": (
        "Noise is drawn in ideal arithmetic: float sampling leaks through low-order bits, which the figures leave out."
    ),
    "seeded": (
        "Noise is drawn from a seeded generator: the figures hold only towards whoever neither knows nor guesses the seed."
    ),
}


def assumptions_of(ledger: Ledger, *, facts: StatementFacts) -> list[str]:
    """What the figures rest on, one line each."""
    found = [
        "Noise multipliers and the number of releases are fixed beforehand, or bounded by budgets fixed beforehand."
    ]
    if facts.updates in ("dp-sgd", "dp-fedavg"):
        found.append(
            "The total is unconditional: heads are learned through model updates that are noised and counted too, so "
            "releases compose adaptively."
        )
    elif "activations" in ledger.channels:
        found.append(f"The total is {ledger.heads_note}.")
    found += [SAMPLER_SENTENCES[sampler] for sampler in ledger.samplers]
    if facts.rounding == "unknown":
        found.append(
            "The rounding of the head's forward pass is not part of the sensitivity: no error model is known for it."
        )
    elif facts.rounding == "included":
        found.append("The rounding of the head's forward pass is part of the sensitivity.")
    found += [
        "Every raw input lies in the declared input box; inputs outside are refused.",
        "The figures are for this run alone: other runs on the same records add up (--ledger keeps their sum).",
    ]
    if facts.noise == "once":
        found.append(
            "Noise is drawn once per record and kept: this amounts to sharing noised inputs through the head, and every "
            "later round is post-processing of that one release. Drawing again for a record is a new release."
        )
    if facts.labels == "randomized":
        found.append(
            "A record's label is randomised once and remembered: later rounds send the same answer and cost nothing. "
            "Neighbours may differ in their label, so its ε counts at every distance."
        )
    if facts.updates == "dp-sgd":
        found.append(
            "DP-SGD counts each step in which a record took part, at sensitivity 2C (one record replaced by any other), "
            "without amplification by sampling."
        )
    if facts.updates == "dp-fedavg":
        found.append(
            "Each client clips its update to C and noises it itself, at sensitivity 2C (all its records replaced)."
        )
    if facts.held_back:
        found.append("Whether a record is held back depends on its own past releases and on public facts alone.")
    return found


def not_covered_of(facts: StatementFacts) -> list[str]:
    """What the figures leave out, one line each."""
    found = []
    if facts.labels == "clear":
        found.append("Labels: sent in the clear beside the activations.")
    if facts.updates == "clear":
        found.append("Model updates: sent without clipping or noise.")
    if facts.also_in_the_clear:
        also = facts.also_in_the_clear
        found.append(f"{also[0].upper()}{also[1:]}: sent without clipping or noise.")
    found.append("Which records a client holds, how many, and in which rounds it took part.")
    found.append("Records that are duplicates of one another, or describe one person, beyond the client-level figure.")
    if facts.unaccounted_choices:
        found += [f"Choice made on private data, not accounted for: {choice}." for choice in facts.unaccounted_choices]
    else:
        found.append(
            "Choices made by looking at private data (placement, clip, exchange layer, learning rate, pilot runs), if any "
            "were."
        )
    return found


def warnings_of(ledger: Ledger, *, facts: StatementFacts) -> list[str]:
    """What a reader must be warned of, one line each.

    Args:
        ledger: what was released.
        facts: what the ledger does not know.

    Returns:
        Lines; empty where nothing is to be flagged.
    """
    found = []
    if not ledger.event_classes:
        found.append("Nothing was noised and sent in this run: the figures say nothing of what else left the clients.")
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
    if facts.also_in_the_clear:
        also = facts.also_in_the_clear
        found.append(f"{also[0].upper()}{also[1:]} leave as they are: they carry information on the same records.")
    if ledger.is_reproducible:
        found.append(
            "Reproduce only, no guarantee: the noise came from a seeded generator; whoever knows or guesses the seed can "
            "remove it."
        )
    elif "float" in ledger.samplers:
        found.append("Noise was drawn in float arithmetic: the figures hold in ideal arithmetic only.")
    return found
