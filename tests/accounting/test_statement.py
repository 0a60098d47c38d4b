"""The statement: every figure from the ledger, every assumption said, every gap named."""

import json
import math

import pytest

from asfl_privacy.accounting import Ledger, StatementFacts, calibrate, gaussian_epsilon, statement, warnings_of
from asfl_privacy.accounting.statement import statement_record


def gaussian_ledger(*, radius=0.1, whole=None, sampler="float"):
    facts = calibrate("gaussian", epsilon=1.0, delta=1e-5)
    ledger = Ledger(p=2, radius=radius)
    for number in range(100):
        ledger.record(
            channel="activations",
            mechanism="gaussian",
            noise_multiplier=facts.noise_multiplier,
            round=number,
            records=[0, 1, 2],
            whole_record_multiplier=whole,
            sampler=sampler,
        )
    return ledger


def test_a_statement_names_what_it_must():
    """Catches: a statement without unit, relation, adversary, totals, assumptions or gaps."""
    text = statement(gaussian_ledger(), facts=StatementFacts(delta=1e-5, num_records=1797, placement="input"))
    for words in (
        "one record (example-level, local)",
        "ℓ2 distance at most 0.1",
        "recipients that collude",
        "the server",
        "no amplification",
        "Per release: ε = 1, δ = 1e-05",
        "ideal arithmetic",
        "conditional on the sequence of heads",
        "fixed beforehand",
        "forward pass",
        "Labels: sent in the clear",
        "Model updates",
        "Choices made by looking at private data",
        "at most 100 of one record",
    ):
        assert words in text, words


def test_both_scales_are_printed(golden):
    """(1, 1e-5) at R means 2.15 at 2R, 6.17 at 5R, 14.4 at 10R. Catches: the scale table at one release only."""
    ledger = Ledger(p=2, radius=0.1)
    multiplier = calibrate("gaussian", epsilon=1.0, delta=1e-5).noise_multiplier
    ledger.record(channel="activations", mechanism="gaussian", noise_multiplier=multiplier, round=0, records=[0])
    text = statement(ledger, facts=StatementFacts(delta=1e-5, num_records=1797))
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")][2:]
    printed = {cells[0].strip(): (cells[1].strip(), cells[2].strip()) for cells in rows}
    for row in golden["scales"][:3]:
        release, total = printed[f"{row['distance']:g}·R"]
        assert float(release) == pytest.approx(float(row["epsilon"]), rel=5e-3)
        assert release == total
    assert printed["any two records of the input box"] == ("unbounded", "unbounded")


def test_figures_are_never_printed_below_the_ledger():
    ledger = gaussian_ledger()
    text = statement(ledger, facts=StatementFacts(delta=1e-5, num_records=1797))
    (line,) = [line for line in text.splitlines() if line.startswith("- Total")]
    printed = float(line.split("ε = ")[1].split(",")[0])
    exact = ledger.epsilon(delta=1e-5).high
    assert exact * (1 - 1e-9) <= printed <= exact * 1.002


def test_any_two_records_needs_no_scales():
    text = statement(gaussian_ledger(radius="any"), facts=StatementFacts(delta=1e-5, num_records=1797))
    assert "any other record of the input box" in text
    assert "hold for any two records" in text
    assert "Metric claim" not in text


def test_once_is_said_plainly():
    text = statement(gaussian_ledger(), facts=StatementFacts(delta=1e-5, num_records=1797, noise="once"))
    assert "sharing noised inputs through the head" in text
    assert "post-processing" in text


def test_what_else_leaves_in_the_clear_is_not_covered_and_warned_of():
    """Catches a statement of an ε beside control variates that nobody mentions."""
    text = statement(
        gaussian_ledger(), facts=StatementFacts(delta=1e-5, num_records=1797, also_in_the_clear="control variates")
    )
    assert "Control variates: sent without clipping or noise." in text
    assert "Control variates leave as they are" in text
    assert "ontrol" not in statement(gaussian_ledger(), facts=StatementFacts(delta=1e-5, num_records=1797))


def test_facts_of_files_that_know_of_nothing_else_in_the_clear_are_read():
    facts = StatementFacts(delta=1e-5, num_records=1797)
    kept = facts.to_dict()
    assert StatementFacts.from_dict(kept) == facts
    del kept["also_in_the_clear"]
    assert StatementFacts.from_dict(kept) == facts
    with pytest.raises(ValueError, match="labels"):
        StatementFacts.from_dict({name: value for name, value in kept.items() if name != "labels"})


def test_pure_laplace_is_stated_at_delta_zero():
    ledger = Ledger(p=1, radius=0.5)
    ledger.record(channel="activations", mechanism="laplace", noise_multiplier=1.0, round=0, records=[0, 0])
    text = statement(ledger, facts=StatementFacts(delta=0.0, num_records=100))
    assert "Total, largest over records: ε = 2, δ = 0 (exact)" in text
    assert "Per release: ε = 1, δ = 0" in text


@pytest.mark.parametrize(
    ("change", "words", "present"),
    [
        ({"delta": 1e-2}, "1/n or more", True),
        ({"delta": 1e-5}, "1/n or more", False),
        ({"delta": 1 / 1797}, "1/n or more", True),
        ({"labels": "clear"}, "Labels travel in the clear", True),
        ({"labels": "none"}, "Labels travel in the clear", False),
        ({"updates": "clear"}, "not protected", True),
        ({"updates": "none"}, "not protected", False),
        ({}, "seed", False),
        ({}, "float arithmetic", True),
    ],
)
def test_warnings_appear_when_due(change, words, present):
    facts = StatementFacts(**({"delta": 1e-5, "num_records": 1797} | change))
    assert any(words in line for line in warnings_of(gaussian_ledger(), facts=facts)) == present


def test_choices_made_on_private_data_are_listed():
    facts = StatementFacts(delta=1e-5, num_records=10**6, unaccounted_choices=("learning rate tuned on it",))
    assert "not accounted for: learning rate tuned" in statement(gaussian_ledger(), facts=facts)


@pytest.mark.parametrize(
    "change", [{"delta": math.nan}, {"num_records": 0}, {"noise": "twice"}, {"labels": "secret"}, {"updates": "dp"}]
)
def test_bad_facts_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        StatementFacts(**({"delta": 1e-5, "num_records": 10} | change))


@pytest.mark.parametrize(
    "change",
    [
        {"held_back": -1},
        {"total_epsilon": 0.0},
        {"claimed_epsilon": math.nan},
        {"certificate_tightness": -1.0},
        {"rounding": "hoped"},
        {"placement": "input\n## What is promised"},
        {"unaccounted_choices": ["a list"]},
        {"unaccounted_choices": ("two\nlines",)},
    ],
)
def test_facts_that_could_forge_a_line_or_a_figure_are_refused_in_one_line(change):
    with pytest.raises(ValueError, match=next(iter(change))) as caught:
        StatementFacts(**({"delta": 1e-5, "num_records": 10} | change))
    assert "\n" not in str(caught.value)


def test_every_delta_of_one_over_n_is_flagged():
    """Catches: δ·n ≥ 1 in floats, which misses n = 49 and many more."""
    ledger = gaussian_ledger()
    for n in range(2, 500):
        for delta, due in ((1 / n, True), (math.nextafter(1 / n, 1.0), True), (math.nextafter(1 / n, 0.0), False)):
            found = warnings_of(ledger, facts=StatementFacts(delta=delta, num_records=n))
            assert any("1/n or more" in line for line in found) == due, (n, delta)
    pure = Ledger(p=1, radius=0.5)
    assert not any("1/n" in line for line in warnings_of(pure, facts=StatementFacts(delta=0.5, num_records=10)))


def test_radius_and_delta_are_written_without_rounding():
    """Catches: six digits, by which the text promises more than the ledger proves (a larger R, a smaller δ)."""
    radius, delta = 0.12345659999, 1.23456749e-5
    text = statement(gaussian_ledger(radius=radius), facts=StatementFacts(delta=delta, num_records=10))
    assert f"distance at most {radius!r} (raw input units)" in text
    assert f"inputs at distance at most {radius!r} look alike" in text
    assert text.count(f"δ = {delta!r}") == 2
    flagged = statement(gaussian_ledger(), facts=StatementFacts(delta=0.12345649, num_records=1797))
    assert flagged.count("δ = 0.12345649") == 3


LATTICE, FLOAT, SEED = "drawn on a lattice", "ideal arithmetic", "REPRODUCE ONLY, no guarantee"


@pytest.mark.parametrize(
    ("samplers", "present", "absent"),
    [
        (["lattice"], [LATTICE], [FLOAT, SEED, "seed"]),
        (["float"], [FLOAT], [LATTICE, SEED, "seed"]),
        (["seeded"], [SEED, "seeded generator"], [LATTICE, FLOAT]),
        (["lattice", "lattice", "seeded"], [SEED, LATTICE], [FLOAT]),
        (["float", "lattice"], [FLOAT, LATTICE], [SEED]),
    ],
)
def test_the_source_of_the_noise_is_told_from_the_ledger(samplers, present, absent):
    """Catches: a flag beside the ledger, the last sampler for all, one seeded release hidden among others."""
    ledger = Ledger(p=2, radius=0.1)
    for number, sampler in enumerate(samplers):
        ledger.record(
            channel="activations",
            mechanism="gaussian",
            noise_multiplier=3.0,
            round=number,
            records=[number],
            sampler=sampler,
        )
    facts = StatementFacts(delta=1e-5, num_records=1797)
    text, record = statement(ledger, facts=facts), statement_record(ledger, facts=facts)
    assert all(words in text for words in present)
    assert not any(words in text for words in absent)
    assert record["reproduce_only"] == ("seeded" in samplers)
    if "seeded" in samplers:
        assert text.splitlines()[2].startswith(f"**{SEED}")
        assert any(line.startswith("Reproduce only") for line in record["warnings"])


def mixed_ledger():
    """100 Gaussian releases at z = 10 and one remembered ε = 1 label of each of three records, two clients."""
    ledger = Ledger(p=2, radius=0.1, clients=[0, 0, 1])
    for number in range(100):
        ledger.record(
            channel="activations", mechanism="gaussian", noise_multiplier=10.0, round=number, records=[0, 1, 2]
        )
    ledger.record(
        channel="labels",
        mechanism="randomized-response",
        noise_multiplier=1.0,
        num_classes=10,
        round=0,
        records=[0, 1, 2],
    )
    return ledger


def test_channels_are_told_apart_and_jointly():
    """4.377 and 1 are together 5.03, not 5.38 (golden). Catches: the sum, one channel as the whole, record for client."""
    facts = StatementFacts(delta=1e-5, num_records=3, labels="randomized")
    record = statement_record(mixed_ledger(), facts=facts)
    total = {name: value["epsilon"] for name, value in record["total"].items()}
    assert total["activations"] == pytest.approx(4.377, abs=5e-4)
    assert total["labels"] == pytest.approx(1.0, abs=1e-3)
    assert total["record"] == pytest.approx(5.03, abs=5e-3)
    # client 0 has two records: 200 Gaussians alone are those of z = 10/√2 a hundred times, and two labels add to it
    two = gaussian_epsilon(1e-5, noise_multiplier=10.0 / math.sqrt(200))
    assert two < total["client"] <= two + 2.0
    assert record["per_release"] == {
        "largest": pytest.approx(1.0, abs=1e-9),
        "activations": pytest.approx(0.341, abs=5e-4),
        "labels": pytest.approx(1.0, abs=1e-9),
    }
    text = statement(mixed_ledger(), facts=facts)
    assert "Of it by the channel labels alone" in text
    assert "all records of a client replaced" in text
    assert "Labels: sent in the clear" not in text
    assert "randomised once and remembered" in text


def test_a_statement_is_recomputed_from_the_ledgers_file_alone(tmp_path):
    """Catches: facts that the file lacks. And it holds no path, no record's id and no count of a single record."""
    ledger = mixed_ledger()
    facts = StatementFacts(
        delta=1e-5,
        num_records=3,
        labels="randomized",
        updates="dp-sgd",
        placement="input",
        total_epsilon=8.0,
        held_back=2,
        certificate_method="semidefinite",
        certificate_tightness=1.25,
        rounding="included",
        unaccounted_choices=("clip tuned",),
    )
    ledger.facts = facts.to_dict()
    ledger.save(tmp_path / "ledger.json")
    read = Ledger.load(tmp_path / "ledger.json")
    again = StatementFacts.from_dict(read.facts)
    assert again == facts
    assert statement_record(read, facts=again) == statement_record(ledger, facts=facts)
    text = json.dumps(statement_record(read, facts=again))
    assert statement(read, facts=again) == statement(ledger, facts=facts)
    assert str(tmp_path) not in text
    assert set(statement_record(read, facts=again)["released"]) == {"records", "releases", "largest"}
    for broken in ({**read.facts, "seeded": True}, {k: v for k, v in read.facts.items() if k != "delta"}):
        with pytest.raises(ValueError, match="exactly"):
            StatementFacts.from_dict(broken)


def test_budget_held_back_claim_and_certificate_are_printed_as_they_are():
    """Catches: a published claim printed as if it were the proven figure."""
    facts = StatementFacts(
        delta=1e-5,
        num_records=1797,
        total_epsilon=64.0,
        held_back=7,
        claimed_epsilon=0.5,
        certificate_method="composed",
        certificate_tightness=1.5001,
    )
    text = statement(gaussian_ledger(), facts=facts)
    assert "Per release: ε = 1, δ = 1e-05" in text
    assert "ε = 0.5, which is not proven; the line above is." in text
    assert "Budget asked for the whole run: ε = 64." in text
    assert "Records held back: 7 had spent their budget" in text
    assert "certified by composed, at most 1.501 times" in text
    assert "its own past releases and on public facts alone" in text
    silent = statement(gaussian_ledger(), facts=StatementFacts(delta=1e-5, num_records=1797))
    assert not any(words in silent for words in ("Records held back", "Budget asked", "not proven", "certified by"))


@pytest.mark.parametrize(
    ("updates", "conditional", "open_channel"),
    [("clear", True, True), ("none", True, False), ("dp-sgd", False, False), ("dp-fedavg", False, False)],
)
def test_the_total_is_conditional_on_heads_unless_updates_are_noised(updates, conditional, open_channel):
    """Catches: an unconditional claim beside raw updates."""
    text = statement(gaussian_ledger(), facts=StatementFacts(delta=1e-5, num_records=1797, updates=updates))
    assert ("conditional on the sequence of heads" in text) == conditional
    assert ("The total is unconditional" in text) == (not conditional)
    assert ("Model updates: sent without clipping or noise" in text) == open_channel
