"""Table 3 from hand-made rows: what is shown of ε is never too small, and each reference is found by method."""

import pytest

from asfl_privacy.reporting.exhibits.exhibit import Material
from asfl_privacy.reporting.exhibits.folder import read_material, write_exhibit
from asfl_privacy.reporting.exhibits.privacy import privacy_exhibit
from asfl_privacy.reporting.rows import complete_row

INFO = {
    "title": "Privacy",
    "exhibit": "privacy",
    "command": "run",
    "commit": None,
    "started": "2026-01-01",
    "config": {},
    "versions": {},
}
FEDAVG = (0.80, 0.82, 0.79)
# in points above FedAvg; over 3 seeds the interval of m − 1, m, m + 1 is m ± 2.484
NOISED = {1.0: -4.0, 4.0: 2.0, 16.0: 3.0}


def material(rows, **info):
    return Material(info={**INFO, **info}, rows=[complete_row(row) for row in rows])


def runs(make, above, **changes):
    """Three seeds whose distances to FedAvg are above − 1, above and above + 1 points."""
    return [make(seed=seed, accuracy=base + (above + seed - 1) / 100, **changes) for seed, base in enumerate(FEDAVG)]


@pytest.fixture
def clean(fedavg, unnoised):
    """FedAvg, ASFL 4 points above, SCAFFOLD exactly 1 point above, each with its own learning rate."""
    scaffold = {"method": "scaffold", "lr": 0.2, "options": "server_lr 0.5"}
    return [
        *(fedavg(seed=seed, accuracy=base, lr=0.3) for seed, base in enumerate(FEDAVG)),
        *runs(unnoised, 4.0, lr=0.05),
        *(fedavg(seed=seed, accuracy=base + 0.01, **scaffold) for seed, base in enumerate(FEDAVG)),
    ]


@pytest.fixture
def noised(gaussian):
    def made(**changes):
        return [
            row
            for epsilon, above in NOISED.items()
            for row in runs(
                gaussian,
                above,
                **{
                    "target_epsilon": epsilon,
                    "epsilon_release": epsilon,
                    "epsilon_total": 6 * epsilon,
                    "labels": "clear",
                    "updates": "none",
                    "reproducible": "no",
                    **changes,
                },
            )
        ]

    return made


def column(exhibit, heading, *, run="ASFL, Gaussian"):
    at = exhibit.table.headings.index(heading)
    return [line[at] for line in exhibit.table.lines if line[0] == run]


def test_each_line_holds_its_differences_and_the_methods_it_beats(clean, noised):
    """By hand. Catches: references of equal learning rate only (all blank), differences the other way round."""
    shown = privacy_exhibit(material(clean + noised()))
    assert column(shown, "ε per release") == ["16", "4", "1"]
    assert column(shown, "ε total") == ["96", "24", "6"]
    assert column(shown, "points above FedAvg") == ["+3.0", "+2.0", "-4.0"]
    assert column(shown, "95 % interval of that") == ["+0.5 to +5.5", "-0.5 to +4.5", "-6.5 to -1.5"]
    assert column(shown, "points above ASFL without noise") == ["-1.0", "-2.0", "-8.0"]
    assert column(shown, "methods without noise beaten") == ["2 of 2", "2 of 2", "0 of 2"]
    assert column(shown, "not beaten") == ["none", "none", "FedAvg, SCAFFOLD"]
    assert column(shown, "points above FedAvg", run="SCAFFOLD, no noise") == ["+1.0"]
    assert column(shown, "ε total", run="ASFL, no noise") == ["—"]


def test_break_even_is_stated_per_release_and_in_total_for_each_way_of_drawing(clean, noised):
    """Catches: one series of both, the smallest ε with a positive mean (4), the total of another cell."""
    both = clean + noised() + [{**row, "epsilon_total": row["epsilon_release"]} for row in noised(noise="once")]
    found = [one for one in privacy_exhibit(material(both)).findings if one.startswith("Break-even")]
    assert len(found) == 2
    fresh, once = found
    assert "drawn fresh, at input, R = 1, ℓ2, δ = 1e-5: ε per release 16, ε total 96: from there to 16" in fresh
    assert "drawn once, at input, R = 1, ℓ2, δ = 1e-5: ε per release 16, ε total 16: from there to 16" in once
    assert "+3.0 points over 3 paired seeds, 95 % interval +0.5 to +5.5" in fresh


def test_a_failed_run_that_moves_the_break_even_is_named(clean, noised):
    """Three runs above at ε = 4 and one that diverged. Catches: an ε whose interval is above 0 passed over in silence."""
    better = {row["seed"]: row["accuracy"] + 0.03 for row in noised() if row["target_epsilon"] == 4.0}
    rows = [row | {"accuracy": better[row["seed"]]} if row["target_epsilon"] == 4.0 else row for row in noised()]
    lost = {**rows[3], "seed": 3, "status": "failed: training diverged", "accuracy": None, "epsilon_release": None}
    (silent,) = [x for x in privacy_exhibit(material(clean + rows)).findings if x.startswith("Break-even")]
    (named,) = [x for x in privacy_exhibit(material([*clean, *rows, lost])).findings if x.startswith("Break-even")]
    assert "ε per release 4, " in silent
    assert "failed" not in silent
    assert "ε per release 16, " in named
    assert "At ε per release 4 1 run failed, which counts as not above." in named


def test_methods_are_beaten_by_the_mean_over_common_seeds(clean, noised):
    """A method with one lucky seed more. Catches: means over different seeds, counting ASFL among the others."""
    lucky = {**clean[-1], "seed": 7, "accuracy": 0.99}
    shown = privacy_exhibit(material([*clean, lucky, *noised()]))
    assert column(shown, "methods without noise beaten") == ["2 of 2", "2 of 2", "0 of 2"]
    (found,) = [one for one in shown.findings if one.startswith("Methods without noise")]
    assert "it beats all 2 by mean accuracy from ε per release 4 on (ε total 24)" in found
    assert "at ε per release 1 not FedAvg, SCAFFOLD" in found


def test_no_epsilon_shown_is_below_the_largest_of_its_seeds(clean, noised):
    """Catches: the first seed, a mean, rounding to nearest."""
    rows = noised()
    rows[-1] |= {"epsilon_release": 16.00001, "epsilon_total": 96.0404, "delta_total": 1.00001e-5}
    shown = privacy_exhibit(material(clean + rows))
    assert column(shown, "ε per release")[0] == "16.01"
    assert column(shown, "ε total")[0] == "96.05"
    assert column(shown, "δ")[0] == "1.001e-5"
    assert any("ε per release 16.01, ε total 96.05" in one for one in shown.findings)
    promise = shown.sections[-1]
    assert promise.lines[0][promise.headings.index("ε total")] == "96.05"


def test_what_is_not_promised_stands_beside_the_figures(clean, noised):
    """Catches: a mark lost on one of the pages: page, table.tex, findings."""
    shown = privacy_exhibit(material(clean + noised(reproducible="yes")))
    text = " ".join(shown.sections[0].sentences)
    for said in (
        "Reproduce only, no guarantee: the noise came from a seed",
        "ℓ2 norm at most 1",
        "labels are sent in the clear",
        "model updates are sent without clipping or noise",
        "A line without noise makes no privacy promise",
    ):
        assert said in text
    assert "Reproduce only, no guarantee" in shown.findings[-1]
    for said in ("Reproduce only", "ℓ2 norm at most 1", "labels are sent in the clear", "model updates"):
        assert said in shown.note
    fresh = privacy_exhibit(material(clean + noised(labels="randomized:4", updates="dp-sgd")))
    text = " ".join([*fresh.sections[0].sentences, fresh.note, *fresh.findings])
    for silent in ("Reproduce only", "labels are sent in the clear", "updates are sent without"):
        assert silent not in text


def test_what_was_not_recorded_counts_as_in_the_clear(clean, noised):
    shown = privacy_exhibit(material(clean + noised(labels=None, updates=None)))
    assert "labels are sent in the clear." in shown.note
    assert "without clipping or noise;" in shown.note


def test_records_held_back_and_any_two_records_are_spoken_of(clean, noised):
    """Catches: a filter's cost left out, the mean over seeds, a table that travels alone with the ε at R only."""
    rows = noised(held_back=0, epsilon_whole_record=50.0)
    rows[0] |= {"held_back": 7, "epsilon_whole_record": 70.004}
    shown = privacy_exhibit(material(clean + rows))
    promise = shown.sections[-1]
    assert [line[promise.headings.index("records held back, at most")] for line in promise.lines].count("7") == 1
    assert "For any two records, however far apart, ε total is up to 70.01." in shown.note
    quiet = privacy_exhibit(material(clean + noised(held_back=0, epsilon_whole_record=None)))
    assert "records held back, at most" not in quiet.sections[-1].headings
    assert "However far apart".lower() not in quiet.note


def test_a_claim_that_is_not_proven_has_a_column_of_its_own(clean, noised):
    rows = noised(calibration="paper", epsilon_claimed=0.5)
    promise = privacy_exhibit(material(clean + rows)).sections[-1]
    assert [line[promise.headings.index("ε claimed, not proven")] for line in promise.lines] == ["0.5"] * 3
    assert [line[promise.headings.index("ε per release")] for line in promise.lines] == ["16", "4", "1"]
    assert any("PixelDP" in sentence for sentence in promise.sentences)
    assert "ε claimed, not proven" not in privacy_exhibit(material(clean + noised())).sections[-1].headings


def test_radii_are_never_one_series(clean, noised):
    wide = noised(radius=2.0)
    shown = privacy_exhibit(material(clean + noised() + wide))
    assert column(shown, "radius R") == ["1"] * 3 + ["2"] * 3
    assert len([one for one in shown.findings if one.startswith("Break-even")]) == 2
    assert any("different promises" in sentence for sentence in shown.sections[0].sentences)


def test_a_ladder_of_delta_says_from_which_delta_on_it_is_above(clean, noised, gaussian):
    """By hand: 4 points are above with certainty, 2 are not. Catches: a break-even of single cells."""
    ladder = [
        row
        for delta, above in ((1e-7, 2.0), (1e-3, 4.0), (1e-2, 4.0))
        for row in runs(gaussian, above, target_epsilon=16.0, epsilon_release=16.0, delta=delta, delta_total=delta)
    ]
    rows = [{**row, "labels": None, "updates": None, "reproducible": None} for row in noised()]
    found = privacy_exhibit(material(clean + rows + ladder)).findings
    assert len([one for one in found if one.startswith("Break-even")]) == 1
    (line,) = [one for one in found if one.startswith("δ from")]
    assert line.startswith("δ from 1e-7 to 1e-2")
    assert line.endswith("above FedAvg with 95 % confidence from δ 1e-5 on, not at 1e-7.")


def test_a_failed_run_is_named_and_counted(clean, noised):
    rows = noised()
    rows[-1] |= {"status": "failed: loss is NaN", "accuracy": None}
    shown = privacy_exhibit(material(clean + rows))
    assert column(shown, "runs")[0] == "2, 1 failed"
    assert any("ε asked, per release 16, seed 2: failed: loss is NaN" in one for one in shown.sections[0].sentences)
    assert any("runs failed at the largest ε measured" in one for one in shown.findings)


def test_cells_without_epsilon_are_not_passed_over(clean, noised):
    shown = privacy_exhibit(material(clean + noised(epsilon_release=None)))
    assert "3 of 3 cells with noise have no ε in their rows: read no promise into them." in shown.findings
    assert column(shown, "ε per release") == ["—"] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [({"rounds": 5}, "rounds is"), ({"full_steps": 7}, "local steps are"), ({"data": "mnist5k"}, "data is")],
)
def test_other_tasks_are_refused(clean, noised, change, message):
    with pytest.raises(ValueError, match=message):
        privacy_exhibit(material(clean + noised(**change)))


def test_references_and_noise_are_needed(clean, noised):
    with pytest.raises(ValueError, match="fedavg has 0 cells"):
        privacy_exhibit(material([row for row in clean if row["method"] != "fedavg"] + noised()))
    with pytest.raises(ValueError, match="no finished run with noise"):
        privacy_exhibit(material(clean))


def test_one_seed_gives_a_report_without_break_even(clean, noised):
    """The size of a smoke run."""
    rows = [row for row in clean + noised() if row["seed"] == 0]
    shown = privacy_exhibit(material(rows))
    assert any("1 paired seed: an interval needs at least two" in one for one in shown.findings)
    assert column(shown, "95 % interval of that") == ["—"] * 3


def test_the_folder_makes_the_same_report_again(tmp_path, clean, noised):
    write_exhibit(tmp_path, material(clean + noised(reproducible="yes")))
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    write_exhibit(tmp_path, read_material(tmp_path))
    assert {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()} == before
    assert tmp_path / "figures" / "privacy.svg" in before
    assert "Reproduce only, no guarantee" in (tmp_path / "table.tex").read_text()
    assert "ε total" in (tmp_path / "figures" / "privacy.svg").read_text()
