"""Rows and page of the privacy benchmarks: a figure on the wrong side is never shown without its flag."""

import math

import pytest

PEER = "dp-accounting PLD"
FACTS = {"command": "run", "commit": None, "started": "now", "config": {"counts": 1}, "versions": {"python": "3"}}


@pytest.fixture
def row(scripts):
    def make(tool, value, kind, **change):
        facts = {"benchmark": "accountants", "case": "Gaussian, σ/Δ = 10", "quantity": "ε", "at": 100.0}
        return scripts.rows.Row(**{**facts, **change}, tool=tool, value=value, kind=kind)

    return make


def test_only_claims_on_the_wrong_side_are_flagged(scripts, row):
    """Catches: < and > exchanged, a lower bound judged as an upper one, and NaN passing for a valid bound."""
    rows = scripts.rows
    judge = lambda kind, value: rows.wrong_side(row("x", value, kind), low=2.0, high=3.0)  # noqa: E731
    assert [judge(rows.UPPER, value) for value in (1.9, 2.5, 3.5, math.inf)] == ["TOO LOW", "", "", ""]
    assert [judge(rows.LOWER, value) for value in (1.9, 2.5, 3.5)] == ["", "", "TOO HIGH"]
    assert [judge(rows.ESTIMATE, value) for value in (1.9, 3.5)] == ["TOO LOW", ""]
    assert judge(rows.UPPER, 2.0 * (1 - 1e-12)) == ""
    assert judge(rows.UPPER, math.nan) == "TOO LOW"
    assert judge(rows.MISSING, None) == ""


def test_rows_survive_their_file(scripts, row, tmp_path):
    rows = [row("a", 1.5, scripts.rows.UPPER), row("b", None, scripts.rows.MISSING, at=None, note="no, not here")]
    rows.append(row("c", math.inf, scripts.rows.UPPER))
    scripts.rows.write_rows(tmp_path / "new" / "rows.csv", rows)
    assert scripts.rows.read_rows(tmp_path / "new" / "rows.csv") == rows
    (tmp_path / "other.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="other columns"):
        scripts.rows.read_rows(tmp_path / "other.csv")


def accounts(scripts, row, *, truth, low, high, peer):
    kinds = scripts.rows
    found = [row("ours, low", low, kinds.LOWER), row("ours, high", high, kinds.UPPER), row(PEER, peer, kinds.UPPER)]
    found += [row("ours, high", 0.25, kinds.MEASURED, quantity="s"), row(PEER, 0.5, kinds.MEASURED, quantity="s")]
    return found + ([row("truth", truth, kinds.EXACT)] if truth else [])


def test_a_figure_below_the_truth_is_flagged_ours_too(scripts, row):
    """Catches: our own high end exempted from the comparison."""
    page = scripts.report.report_of(accounts(scripts, row, truth=4.0, low=4.0, high=4.1, peer=3.0), facts=FACTS)
    assert "**TOO LOW** 3 (-25 %)" in page
    assert "| 4.1 (+2.5 %) |" in page
    assert "0.5 (2×)" in page
    ours = scripts.report.report_of(accounts(scripts, row, truth=4.0, low=3.8, high=3.9, peer=4.0), facts=FACTS)
    assert "**TOO LOW** 3.9 (-2.5 %)" in ours
    none = scripts.report.report_of(accounts(scripts, row, truth=None, low=3.8, high=3.9, peer=4.0), facts=FACTS)
    assert "None." in none


def test_a_fault_is_judged_by_the_truth_beside_it(scripts, row):
    facts = {"benchmark": "faults", "case": "GDP", "at": None}
    rows = [row("GDP", 0.458, scripts.rows.ESTIMATE, **facts)]
    rows += [row(scripts.faults.AT_LEAST, 0.717, scripts.rows.LOWER, **facts)]
    rows += [row(scripts.faults.AT_MOST, 0.718, scripts.rows.UPPER, **facts)]
    assert "**TOO LOW**, 0.638 of the truth" in scripts.report.report_of(rows, facts=FACTS)
    alone = [row("GDP", None, scripts.rows.MISSING, **facts, note="not here")]
    assert "| not installed |" in scripts.report.report_of(alone, facts=FACTS)


def test_a_sampler_that_is_not_installed_is_shown(scripts, row):
    facts = {"benchmark": "release", "case": "rate", "quantity": "M values/s", "at": None}
    rows = [row(scripts.release_speed.TORCH, 200.0, "measured", **facts), row("ours", 50.0, "measured", **facts)]
    page = scripts.report.report_of([*rows, row("opendp", None, "not installed", **facts)], facts=FACTS)
    assert "| ours | 50 | 0.25 |" in page
    assert "| opendp | not installed |" in page


def test_the_figures_are_images_that_repeat(scripts, row):
    """Catches: dates and random ids in a generated file."""
    rows = accounts(scripts, row, truth=4.0, low=4.0, high=4.1, peer=3.0)
    rows += [row("a sampler", 50.0, "measured", benchmark="release", quantity="M values/s", at=None)]
    rows += [
        row(code, 0.3, "measured", benchmark="payload", case="gaussian", at=2.0) for code in ("payload", "entropy")
    ]
    first = scripts.figure.draw_accountants(rows, image_format="svg")
    assert b"</svg>" in first
    assert b"on the wrong side" in first
    assert first == scripts.figure.draw_accountants(rows, image_format="svg")
    assert scripts.figure.draw_releases(rows, image_format="png").startswith(b"\x89PNG")


def test_every_benchmark_has_a_quick_and_a_whole_setting_and_a_part_of_the_page(scripts):
    assert set(scripts.run.QUICK) == set(scripts.run.FULL)
    named = set(scripts.run.benchmarks(scripts.run.QUICK))
    assert named == {"release", "payload", "ledger", "accountants", "faults", "audit"}
