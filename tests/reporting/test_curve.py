import math

import pytest

from asfl_privacy.reporting.cells import gather_cells
from asfl_privacy.reporting.curve import curve_of, describe


def xs_of(panel):
    return {line.label: [point.x for point in line.points] for line in panel.lines}


def test_panels_show_what_was_spent_and_the_delta_ladder(grid):
    curve = curve_of(gather_cells(grid))
    release, total, delta = curve.panels
    assert xs_of(release) == {"Gaussian, δ = 1e-5": [1.0, 4.0, 16.0, 64.0]}
    assert xs_of(total) == {"Gaussian, δ = 1e-5": [6.0, 24.0, 96.0, 384.0]}
    assert xs_of(delta) == {"Gaussian, ε = 16 per release": [1e-7, 1e-5, 1e-2]}
    # grid: cell index 1 is ε = 4, accuracies 0.65 and 0.67; at ε = 1 only seed 1 ended well.
    points = release.lines[0].points
    assert points[1].accuracies == pytest.approx((65.0, 67.0))
    assert points[0].accuracies == pytest.approx((62.0,))
    assert [(r.label, r.accuracies) for r in curve.references] == [
        ("ASFL, no noise", pytest.approx((93.0, 94.0))),
        ("FedAvg, no noise", pytest.approx((88.0, 89.0))),
    ]


def test_the_x_of_a_point_is_the_largest_epsilon_spent(gaussian):
    # Catches: the mean, or the ε asked.
    rows = [gaussian(seed=0, epsilon_release=3.0, epsilon_total=20.0), gaussian(seed=1, epsilon_release=3.5)]
    release, total = curve_of(gather_cells(rows)).panels
    assert [release.lines[0].points[0].x, total.lines[0].points[0].x] == [3.5, 30.0]


def test_lines_differ_by_the_settings_that_vary_and_cells_never_merge(gaussian):
    rows = [
        gaussian(radius=radius, placement=placement, target_epsilon=epsilon, epsilon_release=epsilon)
        for radius in (1.0, "any")
        for placement in ("input", "exchange")
        for epsilon in (1.0, 4.0)
    ]
    release = curve_of(gather_cells(rows)).panels[0]
    assert list(xs_of(release)) == [
        "Gaussian, δ = 1e-5, R = 1, at exchange",
        "Gaussian, δ = 1e-5, R = 1, at input",
        "Gaussian, δ = 1e-5, R = any, at exchange",
        "Gaussian, δ = 1e-5, R = any, at input",
    ]


@pytest.mark.parametrize("epsilon", [None, math.inf, 0.0])
def test_a_cell_that_has_no_place_on_a_log_axis_is_counted(gaussian, epsilon):
    # Catches: a cell dropped in silence.
    rows = [gaussian(), gaussian(target_epsilon=9.0, epsilon_release=9.0, epsilon_total=epsilon)]
    curve = curve_of(gather_cells(rows))
    assert [panel.omitted for panel in curve.panels] == [0, 1]
    assert describe(curve).endswith("Not drawn: 1 cell with a blank, zero or infinite ε total.")


def test_failed_cells_leave_the_figure_and_a_figure_may_be_empty(gaussian):
    curve = curve_of(gather_cells([gaussian(status="failed: x", accuracy=None)]))
    assert [panel.lines for panel in curve.panels] == [(), ()]
    assert "no finished run with noise" in describe(curve)
