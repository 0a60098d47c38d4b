import io
import math
import re
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from matplotlib.image import imread

from asfl_privacy.reporting.picture import (
    MOST_IMAGES,
    describe_picture,
    reconstruction_figure,
    reconstruction_inline_svg,
    row_label,
)

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    labels = ["originals", row_label("rebuilt without noise", psnr=41.26, ssim=0.999), "rebuilt at ε = 1 <$&>"]
    return {label: rng.random((5, 1, 8, 8)) for label in labels}


@pytest.mark.parametrize("image_format", ["svg", "png"])
def test_the_picture_is_the_same_twice(rows, image_format):
    # Catches: no hash salt, a date in the metadata.
    picture = reconstruction_figure(rows, image_format=image_format)
    assert picture == reconstruction_figure(rows, image_format=image_format)
    changed = {**rows, "originals": 1.0 - rows["originals"]}
    assert picture != reconstruction_figure(changed, image_format=image_format)


def test_the_svg_holds_its_labels_as_text_and_one_image_each(rows):
    svg = reconstruction_figure(rows).decode("utf-8")
    root = ET.fromstring(svg)
    texts = " ".join("".join(element.itertext()) for element in root.iter(f"{SVG}text"))
    for wanted in ("originals", "rebuilt without noise", "PSNR 41.3 dB, SSIM 1.00", "rebuilt at ε = 1 <$&>"):
        assert wanted in texts
    assert len(list(root.iter(f"{SVG}image"))) == 15
    assert "<dc:date>" not in svg


def test_pixels_are_drawn_on_one_scale_in_place():
    # Catches: each image stretched to its own range, rows or columns swapped, upside-down images.
    images = np.full((2, 8, 8), 0.5)
    images[0, :4] = 0.25  # the upper half of the first record
    png = imread(
        io.BytesIO(reconstruction_figure({"originals": images, "rebuilt": np.ones((2, 8, 8))}, image_format="png"))
    )
    grey = np.rint(255 * png[..., 0]).astype(int)
    assert np.ptp(png[..., :3], axis=2).max() == 0.0
    places = [np.argwhere(grey == value).mean(axis=0) for value in (64, 128)]
    assert (grey == 64).sum() > 1000
    assert (grey == 128).sum() == pytest.approx(3 * (grey == 64).sum(), rel=0.1)
    assert places[0][0] < places[1][0]
    assert places[0][1] < places[1][1]


def test_values_outside_the_range_are_clamped_and_the_range_is_the_boxs():
    def grey(value, value_range):
        images = {"originals": np.full((1, 8, 8), value)}
        png = imread(io.BytesIO(reconstruction_figure(images, image_format="png", value_range=value_range)))
        values, counts = np.unique(np.rint(255 * png[-40:, -60:, 0]), return_counts=True)
        return values[np.argmax(counts)]

    assert grey(0.0, (-1.0, 1.0)) == 128
    assert grey(-7.0, (0.0, 1.0)) == 0


def test_colour_images_and_many_records_are_drawn():
    images = {"originals": np.random.default_rng(0).random((40, 3, 8, 6))}
    root = ET.fromstring(reconstruction_figure(images))
    assert len(list(root.iter(f"{SVG}image"))) == MOST_IMAGES
    assert describe_picture(images).startswith(f"Images of the same {MOST_IMAGES} records")


def test_the_inline_svg_reaches_nowhere(rows):
    svg = reconstruction_inline_svg(rows)
    assert svg.startswith("<svg ")
    assert svg.endswith("</svg>")
    assert "http" not in svg
    assert "currentColor" in svg
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in re.findall(r'href="([^"]*)"', svg))


def test_the_alternative_text_names_every_row(rows):
    assert describe_picture(rows) == (
        "Images of the same 5 records, one a column. Rows from the top: originals; rebuilt without noise, "
        "PSNR 41.3 dB, SSIM 1.00; rebuilt at ε = 1 <$&>."
    )
    assert row_label("a", ssim=-0.125) == "a\nSSIM −0.12"
    assert row_label("a") == "a"


def test_drawing_a_picture_leaves_no_global_state(rows):
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    reconstruction_figure(rows, image_format="png")
    assert dict(mpl.rcParams) == before
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "rows is empty"),
        ({"a": np.zeros((2, 64))}, "leave the picture out"),
        ({"a": np.zeros((0, 8, 8))}, "leave the picture out"),
        ({"a": np.zeros((2, 2, 8, 8))}, "leave the picture out"),
        ({"a": np.zeros((2, 8, 8)), "b": np.zeros((3, 8, 8))}, "the same records"),
        ({"a": np.full((2, 8, 8), math.nan)}, "NaN"),
    ],
)
def test_rows_that_cannot_be_drawn_are_refused_in_one_line(change, words):
    with pytest.raises(ValueError, match=words) as caught:
        reconstruction_figure(change)
    assert "\n" not in str(caught.value)


def test_other_formats_and_ranges_are_refused(rows):
    with pytest.raises(ValueError, match="svg or png"):
        reconstruction_figure(rows, image_format="pdf")
    with pytest.raises(ValueError, match="low < high"):
        reconstruction_figure(rows, value_range=(1.0, 0.0))
