import io
import math
import re
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from matplotlib.image import imread

from asfl_privacy.reporting.cells import gather_cells
from asfl_privacy.reporting.curve import curve_of
from asfl_privacy.reporting.figures import curve_inline_svg, curve_png, curve_svg

SVG = "{http://www.w3.org/2000/svg}"


def texts_of(svg):
    return ["".join(element.itertext()) for element in ET.fromstring(svg).iter(f"{SVG}text")]


def test_the_svg_is_the_same_twice_and_holds_no_date(grid):
    # Catches: no hash salt (random ids), a date in the metadata.
    curve = curve_of(gather_cells(grid))
    svg = curve_svg(curve)
    assert svg == curve_svg(curve)
    assert "<dc:date>" not in svg
    assert "Matplotlib" not in svg


def test_the_svg_is_readable_text_with_axes_and_legend(grid):
    texts = texts_of(curve_svg(curve_of(gather_cells(grid))))
    assert texts.count("accuracy (%)") == 1
    for wanted in (
        *("ε per release (smaller is more private)", "ε total (smaller is more private)"),
        *("δ (smaller is more private)", "Gaussian, δ = 1e-5", "Gaussian, ε = 16 per release"),
        *("ASFL, no noise", "FedAvg, no noise", "1", "4", "16", "64", "384", "1e-7"),
    ):
        assert wanted in texts


def test_means_lie_where_the_axis_says(grid):
    # Read back from the drawing: markers of the ε line against the y ticks. Catches: fractions drawn as per cent, the
    # median or one seed in place of the mean.
    curve = curve_of(gather_cells(grid))
    root = ET.fromstring(curve_svg(curve))
    axes = next(element for element in root.iter(f"{SVG}g") if element.get("id") == "axes_1")
    ticks = {}
    for tick in axes.iter(f"{SVG}g"):
        if re.fullmatch(r"ytick_\d+", tick.get("id", "")):
            height = float(next(tick.iter(f"{SVG}path")).get("d").split()[2])  # its grid line: M x y L …
            ticks[float("".join(next(tick.iter(f"{SVG}text")).itertext()))] = height
    slope, offset = np.polyfit(list(ticks.values()), list(ticks), deg=1)
    groups = [
        [float(mark.get("y")) for mark in group.iter(f"{SVG}use")]
        for group in axes
        if group.get("id", "").startswith("line2d")
    ]
    (heights,) = [group for group in groups if len(group) == 4]
    # conftest's grid: ε = 1 has seed 1 alone (62), then means over two seeds of 65/67, 70/72 and 75/77.
    assert [slope * height + offset for height in heights] == pytest.approx([62.0, 66.0, 71.0, 76.0], abs=0.01)


def test_the_inline_svg_reaches_nowhere_and_the_two_layouts_share_no_id(grid):
    curve = curve_of(gather_cells(grid))
    wide, stacked = curve_inline_svg(curve, stacked=False), curve_inline_svg(curve, stacked=True)
    for svg in (wide, stacked):
        assert svg.startswith("<svg ")
        assert svg.endswith("</svg>")
        assert "http" not in svg
        assert "#262626" not in svg
        assert "currentColor" in svg
        assert all(link.startswith("#") for link in re.findall(r'href="([^"]*)"', svg))
    used = [set(re.findall(r'(?:url\(|href=")#([\w-]+)', svg)) for svg in (wide, stacked)]
    assert used[0]
    assert used[1]
    assert not used[0] & used[1]


def test_the_png_is_the_same_twice_and_shows_something(grid):
    curve = curve_of(gather_cells(grid))
    png = curve_png(curve)
    assert png == curve_png(curve)
    pixels = imread(io.BytesIO(png))
    assert pixels.shape[1] > 1500
    assert 0.02 < np.mean(pixels[..., :3].min(axis=2) < 0.9) < 0.6


@pytest.mark.parametrize("case", ["one cell", "references only", "all failed", "nothing finite", "equal x"])
def test_thin_grids_draw_without_a_warning(case, unnoised, gaussian):
    rows = {
        "one cell": [gaussian()],
        "references only": [unnoised()],
        "all failed": [gaussian(status="failed: x", accuracy=None)],
        "nothing finite": [gaussian(epsilon_release=math.inf, epsilon_total=math.inf)],
        "equal x": [gaussian(), gaussian(target_epsilon=5.0)],
    }[case]
    svg = curve_svg(curve_of(gather_cells(rows)))
    assert ("no finished run with noise" in svg) == (case in ("references only", "all failed", "nothing finite"))


def test_text_from_rows_is_drawn_as_it_reads(gaussian):
    # Catches: $…$ read as mathematics, < left unescaped.
    rows = [gaussian(placement="after:a$b$<c>&d"), gaussian()]
    assert "Gaussian, δ = 1e-5, at after:a$b$<c>&d" in texts_of(curve_svg(curve_of(gather_cells(rows))))


def test_drawing_leaves_no_global_state(grid):
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    curve_png(curve_of(gather_cells(grid)))
    assert dict(mpl.rcParams) == before
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()
