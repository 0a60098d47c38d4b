"""The statement: every figure from the ledger, every assumption said, every gap named."""

import math

import pytest

from asfl_privacy.accounting import Ledger, StatementFacts, calibrate, statement, warnings_of


def gaussian_ledger(*, radius=0.1, whole=None):
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
        "seed",
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


def test_pure_laplace_is_stated_at_delta_zero():
    ledger = Ledger(p=1, radius=0.5)
    ledger.record(channel="activations", mechanism="laplace", noise_multiplier=1.0, round=0, records=[0, 0])
    text = statement(ledger, facts=StatementFacts(delta=1e-5, num_records=100))
    assert "Total, largest over records: ε = 2, δ = 0 " in text


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
        ({"seeded": True}, "seed", True),
        ({"seeded": False}, "seed", False),
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
