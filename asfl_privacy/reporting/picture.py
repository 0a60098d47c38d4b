"""The attack picture: rows of images, originals above what was rebuilt of them, drawn without global plotting state."""

from collections.abc import Mapping
from typing import Final

import numpy as np
import seaborn as sns
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from asfl_privacy.reporting.drawing import as_element, render
from asfl_privacy.reporting.numerals import spread

MOST_IMAGES: Final = 12
"""Images drawn of each row."""
_TILE_INCHES: Final = 0.62
_GAP: Final = 0.08  # of a tile, between images


def reconstruction_figure(
    rows: Mapping[str, NDArray[np.floating]],
    *,
    image_format: str = "svg",
    value_range: tuple[float, float] = (0.0, 1.0),
) -> bytes:
    """Rows of images with their labels at the left, on white.

    Args:
        rows: Label (see `row_label`) to images (n, height, width) or (n, channels, height, width) with 1 or 3 channels,
            of one shape in all rows, and column for column of one record; the first 12 are drawn. By convention the
            originals come first, then those rebuilt without noise, then those rebuilt at each ε.
        image_format: "svg" or "png" (160 dots an inch).
        value_range: Values drawn black and white; those outside are drawn as the nearer one.

    Returns:
        The file.

    Raises:
        ValueError: No rows, shapes that differ or are no images, NaN or inf, a range without width, another format.

    Guarantee:
        Equal rows give equal bytes with the same matplotlib: no date, no random ids. All rows share one scale: none is
        stretched to its own darkest and brightest pixel. Text stays text in the SVG.

    Example:
        >>> reconstruction_figure({"originals": np.zeros((2, 8, 8))})[:5]
        b'<?xml'
    """
    if image_format not in ("svg", "png"):
        raise ValueError(f"image_format is {image_format!r}: the picture is drawn as svg or png; pass 'svg'")
    return _draw(_tiles(rows, value_range=value_range), image_format=image_format, transparent=False)


def reconstruction_inline_svg(
    rows: Mapping[str, NDArray[np.floating]], *, value_range: tuple[float, float] = (0.0, 1.0)
) -> str:
    """The picture as an svg element for an HTML page: no background, its labels in the page's text colour.

    Args:
        rows: See `reconstruction_figure`.
        value_range: See `reconstruction_figure`.

    Guarantee:
        No address in it points outside the page: the images are in it as data.
    """
    svg = _draw(_tiles(rows, value_range=value_range), image_format="svg", transparent=True).decode("utf-8")
    return as_element(svg)


def row_label(name: str, *, psnr: float | None = None, ssim: float | None = None) -> str:
    r"""What stands beside a row: its name, and how much its images resemble the originals.

    Args:
        name: Such as "originals", "rebuilt without noise" or "rebuilt at ε = 4".
        psnr: Mean in decibels, or None.
        ssim: Mean structural similarity, or None.

    Example:
        >>> row_label("rebuilt at ε = 4", psnr=17.36, ssim=0.914)
        'rebuilt at ε = 4\nPSNR 17.4 dB, SSIM 0.91'
    """
    parts = [] if psnr is None else [f"PSNR {spread(psnr, None)} dB"]
    if ssim is not None:
        parts.append(f"SSIM {ssim:.2f}".replace("-", "−"))
    return "\n".join([name, ", ".join(parts)] if parts else [name])


def describe_picture(rows: Mapping[str, NDArray[np.floating]]) -> str:
    r"""The picture in words, for its caption and for readers who do not see it.

    Args:
        rows: See `reconstruction_figure`.

    Raises:
        ValueError: See `reconstruction_figure`.

    Example:
        >>> describe_picture({"originals": np.zeros((2, 8, 8)), "at ε = 1\nPSNR 9.0 dB": np.zeros((2, 8, 8))})
        'Images of the same 2 records, one a column. Rows from the top: originals; at ε = 1, PSNR 9.0 dB.'
    """
    tiles = _tiles(rows, value_range=(0.0, 1.0))
    count = next(iter(tiles.values())).shape[0]
    records = "record" if count == 1 else f"same {count} records"
    names = "; ".join(label.replace("\n", ", ") for label in tiles)
    return f"Images of the {records}, one a column. Rows from the top: {names}."


def _tiles(
    rows: Mapping[str, NDArray[np.floating]], *, value_range: tuple[float, float]
) -> dict[str, NDArray[np.uint8]]:
    """Grey or colour images as 8-bit RGB, shape (n, height, width, 3), at most 12 a row."""
    low, high = value_range
    if not (np.isfinite([low, high]).all() and low < high):
        raise ValueError(f"value_range is {value_range}: it must be finite with low < high; pass (0, 1)")
    if not rows:
        raise ValueError("rows is empty: a picture has at least one row of images; pass the originals")
    shapes = {label: np.shape(images) for label, images in rows.items()}
    first = next(iter(shapes.values()))
    if len(first) not in (3, 4) or 0 in first or (len(first) == 4 and first[1] not in (1, 3)):
        raise ValueError(
            f"images have shape {first}: (n, height, width) or (n, 1 or 3, height, width) is drawn; leave the picture out "
            "for other records"
        )
    tiles = {}
    for label, images in rows.items():
        if shapes[label] != first:
            raise ValueError(f"row {label!r} has shape {shapes[label]}: the first has {first}; pass the same records")
        values = np.asarray(images, dtype=np.float64)[:MOST_IMAGES]
        if not np.isfinite(values).all():
            raise ValueError(f"row {label!r} holds NaN or inf: only finite pixels can be drawn; check the attack")
        pixels = np.rint(255.0 * np.clip((values - low) / (high - low), 0.0, 1.0)).astype(np.uint8)
        grey = pixels[:, None] if pixels.ndim == 3 else pixels
        tiles[label] = np.ascontiguousarray(
            np.broadcast_to(grey, (len(grey), 3, *grey.shape[2:])).transpose(0, 2, 3, 1)
        )
    return tiles


def _draw(tiles: Mapping[str, NDArray[np.uint8]], *, image_format: str, transparent: bool) -> bytes:
    return render(
        lambda: _figure(tiles),
        salt="asfl-privacy-picture",
        image_format=image_format,
        transparent=transparent,
        style={**sns.axes_style("white"), "image.composite_image": False},
    )


def _figure(tiles: Mapping[str, NDArray[np.uint8]]) -> Figure:
    count, height, width, _ = next(iter(tiles.values())).shape
    aspect = height / width
    label_inches = 0.1 + 0.075 * max(len(line) for label in tiles for line in label.split("\n"))
    step_x, step_y = _TILE_INCHES * (1 + _GAP), _TILE_INCHES * (aspect + _GAP)
    size = (label_inches + count * step_x, len(tiles) * step_y + _TILE_INCHES * _GAP)
    figure = Figure(figsize=size)
    FigureCanvasAgg(figure)
    for row, (label, images) in enumerate(tiles.items()):
        bottom = size[1] - (row + 1) * step_y
        middle = (bottom + _TILE_INCHES * aspect / 2) / size[1]
        figure.text((label_inches - 0.1) / size[0], middle, label, ha="right", va="center", fontsize=8.5)
        for column, image in enumerate(images):
            place = (label_inches + column * step_x, bottom, _TILE_INCHES, _TILE_INCHES * aspect)
            axes = figure.add_axes(tuple(np.divide(place, (*size, *size))))
            axes.set_axis_off()
            axes.imshow(_enlarged(image), interpolation="nearest", aspect="auto")
    return figure


def _enlarged(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Small images with their pixels repeated, so that viewers that smooth enlarged images leave them square."""
    factor = max(1, 64 // max(image.shape[:2]))
    return image.repeat(factor, axis=0).repeat(factor, axis=1)
