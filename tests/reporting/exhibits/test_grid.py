"""A grid from hand-made rows: every setting that varies is shown, and no two cells share a place."""

import pytest

from asfl_privacy.reporting.cells import gather_cells
from asfl_privacy.reporting.exhibits.exhibit import Material
from asfl_privacy.reporting.exhibits.folder import read_material, write_exhibit
from asfl_privacy.reporting.exhibits.grid import grid_exhibit
from asfl_privacy.reporting.exhibits.grid_picture import picture_of
from asfl_privacy.reporting.rows import complete_row

INFO = {
    "title": "Grid",
    "exhibit": "grid",
    "command": "run",
    "commit": None,
    "started": "2026-01-01",
    "config": {},
    "versions": {},
}


def shown(rows, **config):
    return grid_exhibit(Material(info={**INFO, "config": config}, rows=[complete_row(row) for row in rows]))


def places(picture):
    return {line.label: [(point.place, point.accuracies) for point in line.points] for line in picture.lines}


@pytest.fixture
def exchanged(unnoised, fedavg):
    """τ′ of 2, 4, 8 at τ = 10 − τ′ and at τ = 10, with the FedAvg of as many steps, over two seeds."""
    rows = [
        unnoised(seed=seed, tail_steps=tail, full_steps=full, accuracy=0.8 + tail / 100 + seed / 50)
        for seed in (0, 1)
        for tail in (2, 4, 8)
        for full in (10 - tail, 10)
    ]
    return rows + [
        fedavg(seed=seed, full_steps=steps, accuracy=0.7 + steps / 100 + seed / 50, lr=0.2)
        for seed in (0, 1)
        for steps in (10, 12, 14, 18)
    ]


@pytest.fixture
def by_layer(gaussian, unnoised):
    return [
        gaussian(
            seed=seed,
            exchange_layer=layer,
            target_epsilon=epsilon,
            epsilon_release=epsilon,
            own=own,
            labels="clear",
            updates="none",
            accuracy=0.7 + epsilon / 100 - (own == "released") * (seed + 1) / 100,
        )
        for seed in (0, 1, 2)
        for layer in ("conv1", "conv2")
        for epsilon in (1.0, 16.0)
        for own in ("clean", "released")
    ]


def test_each_cell_is_held_against_the_fedavg_of_as_many_steps(exchanged):
    """By hand: .8 + τ′/100 − .7 − (τ′+τ)/100 = 10 − τ points. Catches: one FedAvg for all, equal learning rates asked."""
    exhibit = shown(exchanged)
    at = {name: exhibit.table.headings.index(name) for name in ("tail steps τ′", "full steps τ", "points above FedAvg")}
    found = {
        (line[at["tail steps τ′"]], line[at["full steps τ"]]): line[at["points above FedAvg"]]
        for line in exhibit.table.lines
        if line[0] == "ASFL, no noise"
    }
    assert found == {
        ("2", "8"): "+2.0", ("4", "6"): "+4.0", ("8", "2"): "+8.0",
        ("2", "10"): "+0.0", ("4", "10"): "+0.0", ("8", "10"): "+0.0",
    }  # fmt: skip
    assert [line[0] for line in exhibit.table.lines if line[0].startswith("FedAvg")] == [
        f"FedAvg, no noise, {steps} full steps" for steps in (10, 12, 14, 18)
    ]


def test_steps_that_change_with_the_axis_alone_are_one_line(exchanged):
    """Catches: three lines of one point, FedAvg standing at no exchange."""
    falling = [row for row in exchanged if row["tail_steps"] + row["full_steps"] == 10]
    picture = picture_of(gather_cells(falling), x=None, series=None)
    assert picture.x_label == "tail steps τ′"
    (line,) = picture.lines
    assert [(point.place, round(point.mean, 6)) for point in line.points] == [(2.0, 83.0), (4.0, 85.0), (8.0, 89.0)]
    assert [label for label, _ in picture.references] == ["FedAvg, no noise"]


def test_the_columns_that_the_configuration_names_are_obeyed(by_layer):
    """Catches: the first varying setting taken all the same; options not looked into."""
    cells = [row for row in by_layer if row["own"] == "clean"]
    for config in ({"x": "exchange_layer", "series": ["target_epsilon"]}, {"options": {"x": "exchange_layer"}}):
        svg = shown(cells, **config).figures["grid.svg"]
        assert ">exchange layer<" in svg
        assert ">conv2<" in svg
        assert ">ASFL, Gaussian, ε asked, per release 16<" in svg
    picture = picture_of(gather_cells(cells), x="epsilon_release", series=["exchange_layer"])
    found = places(picture)
    assert list(found) == [f"ASFL, Gaussian, exchange layer conv{i}" for i in (1, 2)]
    assert found["ASFL, Gaussian, exchange layer conv1"] == [
        (1.0, pytest.approx((71.0,) * 3)),
        (16.0, pytest.approx((86.0,) * 3)),
    ]
    assert picture.is_log


def test_two_cells_in_one_place_are_refused(by_layer):
    """Catches: the last one taken, a zigzag line."""
    with pytest.raises(ValueError, match="holds two cells of ASFL, Gaussian that differ in own"):
        shown(by_layer, x="target_epsilon", series=["exchange_layer"])
    with pytest.raises(ValueError, match="x 'epsilon' is no column"):
        shown(by_layer, x="epsilon")
    with pytest.raises(ValueError, match="series 'layer' is no setting"):
        shown(by_layer, series=["layer"])
    with pytest.raises(ValueError, match="series 3 is no list of columns"):
        shown(by_layer, series=3)


def test_an_option_beside_none_makes_a_line_and_a_column_of_its_own(by_layer):
    """Noise in training or not. Catches: no option taken for an option unknown, so that both stand in one place."""
    plain = [row for row in by_layer if (row["own"], row["exchange_layer"]) == ("clean", "conv1")]
    rows = plain + [{**row, "options": "noisy_training yes", "accuracy": row["accuracy"] - 0.05} for row in plain]
    found = places(picture_of(gather_cells(rows), x="target_epsilon", series=None))
    name = "ASFL, Gaussian, steps and method noisy_training yes"
    assert set(found) == {"ASFL, Gaussian", name}
    assert found[name][0] == (1.0, pytest.approx((66.0,) * 3))
    table = shown(rows).table
    assert {line[table.headings.index("steps and method")] for line in table.lines} == {"—", "noisy_training yes"}


def test_a_radius_of_any_stands_last_on_an_axis_of_names(gaussian):
    rows = [gaussian(radius=radius, accuracy=0.5) for radius in ("any", 2.0, 0.5)]
    picture = picture_of(gather_cells(rows), x="radius", series=None)
    assert [picture.ticks[place] for place in sorted(picture.ticks)] == ["0.5", "2", "any"]
    assert not picture.is_numeric
    assert not picture.is_log


def test_rates_that_were_tuned_by_method_are_no_axis(unnoised, fedavg):
    exhibit = shown([unnoised(lr=0.1), fedavg(lr=0.3)])
    assert exhibit.figures == {}
    assert any("No figure" in sentence for sentence in exhibit.sections[0].sentences)


def test_own_activations_are_compared_where_all_else_is_equal(by_layer):
    """By hand: released is 1, 2 and 3 points below in the three seeds: −2 ± 2.484. Catches: clean − released, unpaired."""
    section = shown(by_layer).sections[1]
    assert section.title == "Own activations: clean or released"
    at = {name: i for i, name in enumerate(section.headings)}
    assert len(section.lines) == 4
    assert {line[at["points released above clean"]] for line in section.lines} == {"-2.0"}
    assert {line[at["95 % interval"]] for line in section.lines} == {"-4.5 to +0.5"}
    assert [line[at["ε per release, clean"]] for line in section.lines] == ["16", "1", "16", "1"]


def test_noised_lines_carry_epsilon_and_its_marks(by_layer, unnoised):
    """Catches: a grid that shows ε without what it means."""
    exhibit = shown([*({**row, "reproducible": "yes"} for row in by_layer), unnoised()])
    at = exhibit.table.headings.index("ε per release")
    assert [line[at] for line in exhibit.table.lines] == ["—", *(["16", "1"] * 4)]
    assert "Reproduce only, no guarantee" in exhibit.sections[0].sentences[0]
    assert "labels are sent in the clear" in exhibit.note
    assert exhibit.sections[-1].title == "What the noise promises"
    plain = shown([unnoised(rounds=rounds) for rounds in (10, 20)])
    assert plain.note == ""
    assert "ε per release" not in plain.table.headings
    assert [section.title for section in plain.sections] == ["Grid"]


def test_findings_count_what_is_certain(unnoised, fedavg):
    """m ± 2.484 over three seeds: 3 points are above with certainty, 2 are not, −3 are below."""
    rows = [fedavg(seed=seed, accuracy=0.8, rounds=rounds) for seed in range(3) for rounds in (5, 10, 20)]
    rows += [
        unnoised(seed=seed, rounds=rounds, accuracy=0.8 + (above + seed - 1) / 100)
        for seed in range(3)
        for rounds, above in ((5, 3.0), (10, 2.0), (20, -3.0))
    ]
    found = shown(rows).findings
    assert "ASFL, no noise: 83.0 % at rounds 5, 77.0 % at 20." in found
    assert found[-1].startswith("Of 3 cells without noise that have a FedAvg to compare with, 1 are above it")
    assert "and 1 below" in found[-1]


def test_no_finished_run_is_refused(unnoised):
    with pytest.raises(ValueError, match="no run has finished"):
        shown([{**unnoised(), "status": "failed: x", "accuracy": None}])


def test_the_folder_makes_the_same_report_again(tmp_path, by_layer, unnoised, fedavg):
    rows = [complete_row(row) for row in [*by_layer, unnoised(), fedavg()]]
    write_exhibit(tmp_path, Material(info=INFO, rows=rows))
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    write_exhibit(tmp_path, read_material(tmp_path))
    assert {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()} == before
    assert "ℓ" in (tmp_path / "report.md").read_text()
    assert "Not covered" in (tmp_path / "table.tex").read_text()
