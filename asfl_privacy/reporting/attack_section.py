"""The section of a report on attacks: a picture of what was rebuilt, and a table beside it with the same names."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asfl_privacy.reporting.numerals import BLANK, bound, exact, spread
from asfl_privacy.reporting.picture import (
    MOST_IMAGES,
    describe_picture,
    reconstruction_figure,
    reconstruction_inline_svg,
    row_label,
)
from asfl_privacy.reporting.section import Section
from asfl_privacy.reporting.words import SETTING_NAMES, mechanism_name

TITLE: Final = "What a curious recipient rebuilds"
HEADINGS: Final = (
    "what the recipient has",
    "ε of one release",
    "ε, any two records",
    "PSNR, dB",
    "SSIM",
    "tells neighbours apart",
    "at most",
    "tells any two apart",
    "at most",
    "label guessed, %",
)
_CHANNELS: Final = (1, 3)
_TELLING: Final = ("mech", "exchange_layer", "placement", "radius", "p", "delta")
"""Settings besides ε that name a run where the runs attacked differ in them."""

Value = str | int | float | None
Images = NDArray[np.floating]


@dataclass(frozen=True, kw_only=True, eq=False)
class Attacked:
    """A run attacked, as a report sees it.

    Attributes:
        row: Its line of attack.csv.
        originals: Records attacked, the same of every run, shape (n, ...).
        without_noise: Rebuilt from activations without noise.
        with_noise: Rebuilt from releases; None of a run without noise.
    """

    row: Mapping[str, Value]
    originals: Images
    without_noise: Images
    with_noise: Images | None


def picture_rows(attacked: Sequence[Attacked]) -> dict[str, Images]:
    """The rows of the picture by label: originals, and for each exchange layer without noise and from weak to strong ε."""
    rows: dict[str, Images] = {"originals": attacked[0].originals}
    for name, likeness, images, _ in _lines(attacked):
        rows[row_label(f"rebuilt {name}", psnr=likeness[0], ssim=likeness[2])] = images
    return rows


def draw_pictures(attacked: Sequence[Attacked], *, value_range: tuple[float, float]) -> dict[str, bytes]:
    """attack.svg and attack.png; nothing where the records are no images.

    Args:
        attacked: As for `attack_section`.
        value_range: Values drawn black and white.
    """
    if not _is_drawable(attacked):
        return {}
    rows = picture_rows(attacked)
    return {
        f"attack.{ending}": reconstruction_figure(rows, image_format=ending, value_range=value_range)
        for ending in ("svg", "png")
    }


def attack_section(
    attacked: Sequence[Attacked], *, value_range: tuple[float, float], figure: str, breaches: Sequence[str] = ()
) -> Section:
    """What a report says about attacks.

    Args:
        attacked: At least one run, all attacked on the same records.
        value_range: Values drawn black and white.
        figure: Where attack.svg lies, seen from the report.
        breaches: Guesses that refute a claimed ε, one line each.

    Raises:
        ValueError: No runs, or runs attacked on different records.

    Guarantee:
        Upper bounds are shown rounded up; the section says that attacks bound nothing from above.
    """
    if not attacked:
        raise ValueError("attacked is empty: a section shows at least one run; leave the section out")
    if any(not np.array_equal(one.originals, attacked[0].originals) for one in attacked):
        raise ValueError(
            "the runs were attacked on different records: one picture shows the same; use one seed for all"
        )
    first = attacked[0].row
    drawable = _is_drawable(attacked)
    rows = picture_rows(attacked)
    return Section(
        title=TITLE,
        sentences=_sentences(first, shown=min(len(attacked[0].originals), MOST_IMAGES) if drawable else 0),
        breaches=tuple(breaches),
        caption=f"Means over {first['records']} test records ± standard errors; in brackets 95 % intervals.",
        headings=HEADINGS,
        lines=(_line("no release: the mean record", (*_likeness(first, "mean_record"),), None, label=_majority(first)),
               *(_line(name, likeness, row, label=_label(row, first_of_layer))
                 for name, likeness, _, (row, first_of_layer) in _lines(attacked))),
        svg=reconstruction_inline_svg(rows, value_range=value_range) if drawable else None,
        figure=figure if drawable else None,
        alt=describe_picture(rows) if drawable else "",
    )  # fmt: skip


def _sentences(row: Mapping[str, Value], *, shown: int) -> tuple[str, ...]:
    columns = f"The {shown} columns of the picture" if shown > 1 else "The column of the picture"
    subject = f"{columns} are" if shown > 1 else f"{columns} is"
    what = f"{subject} test records" if shown > 1 else f"{subject} a test record"
    if not shown:
        what = "Attacked were test records"
    return (
        f"{what} that no client trained on, each rebuilt from one release under the run's last head, once without its noise "
        f"and once at each ε: by inversion with the head known and by a decoder trained on {row['auxiliary_records']} other "
        "test records, the better of them picked record by record.",
        "Attacks bound nothing from above: another attacker may do better, and one who holds several releases of a record "
        "does; what is promised is ε alone.",
    )


Likeness = tuple[float | None, float | None, float | None, float | None]
_Line = tuple[str, Likeness, Images, tuple[Mapping[str, Value] | None, Mapping[str, Value]]]


def _lines(attacked: Sequence[Attacked]) -> list[_Line]:
    """Name, likeness, images and the row (None without noise) of every line, exchange layer by exchange layer."""
    layers: dict[Value, list[Attacked]] = {}
    for one in attacked:
        layers.setdefault(one.row["exchange_layer"], []).append(one)
    lines: list[_Line] = []
    for layer, runs in layers.items():
        ordered = sorted(runs, key=_weakness)
        where = f", {SETTING_NAMES['exchange_layer']} {layer}" if len(layers) > 1 else ""
        weakest = ordered[0]
        lines.append((f"without noise{where}", _likeness(weakest.row, "without_noise"), weakest.without_noise,
                      (None, weakest.row)))  # fmt: skip
        for run in ordered:
            if run.with_noise is not None:
                name = _run_name(run.row, among=attacked)
                lines.append((name, _likeness(run.row, "with_noise"), run.with_noise, (run.row, run.row)))
    return lines


def _weakness(attacked: Attacked) -> tuple[str, float]:
    epsilon = attacked.row["epsilon_release"]
    return str(attacked.row["mech"]), -float(math.inf if epsilon is None else epsilon)


def _run_name(row: Mapping[str, Value], *, among: Sequence[Attacked]) -> str:
    """`at ε = 4`, with whatever else tells the runs attacked apart; the run's whole name where that is not enough."""
    telling = [name for name in _TELLING if len({one.row[name] for one in among if one.with_noise is not None}) > 1]

    def name_of(one: Mapping[str, Value]) -> str:
        words = {"mech": mechanism_name(one["mech"]), "delta": f"δ {exact(one['delta'])}"}
        more = [words.get(name, f"{SETTING_NAMES[name]} {exact(one[name])}") for name in telling]
        return ", ".join([f"at ε = {bound(_number(one, 'epsilon_release'))}", *more])

    name = name_of(row)
    twins = [one for one in among if one.with_noise is not None and name_of(one.row) == name]
    return name if len(twins) == 1 else f"{name} ({row['run']})"


def _line(name: str, likeness: Likeness, row: Mapping[str, Value] | None, *, label: str) -> tuple[str, ...]:
    psnr, psnr_se, ssim, ssim_se = likeness
    similarity = BLANK if ssim is None else f"{ssim:.2f} ± {ssim_se or 0.0:.2f}".replace("-", "−")
    shown = [name, BLANK, BLANK, spread(psnr, psnr_se), similarity, BLANK, BLANK, BLANK, BLANK, label]
    if row is not None:
        shown[1] = bound(_number(row, "epsilon_release"))
        shown[2] = bound(_number(row, "epsilon_release_any_two"))
        shown[5:7] = _guess(row, "neighbours")
        shown[7:9] = _guess(row, "any_two")
    return tuple(shown)


def _guess(row: Mapping[str, Value], name: str) -> list[str]:
    """Advantage with its interval, widened to the digits shown, and what ε allows."""
    advantage, low, high = (_number(row, f"{name}_{end}") for end in ("advantage", "low", "high"))
    if advantage is None or low is None or high is None:
        return [BLANK, BLANK]
    text = f"{advantage:.2f} [{math.floor(100 * low) / 100:.2f}, {math.ceil(100 * high) / 100:.2f}]"
    return [text.replace("-", "−"), bound(_number(row, f"{name}_bound"))]


def _label(row: Mapping[str, Value] | None, own: Mapping[str, Value]) -> str:
    if row is None:
        return f"{100 * float(own['property_without_noise'] or 0.0):.0f}"
    rate, low, high = (100 * float(row[f"property_{end}"] or 0.0) for end in ("accuracy", "low", "high"))
    return f"{rate:.0f} [{math.floor(low)}, {math.ceil(high)}]"


def _majority(row: Mapping[str, Value]) -> str:
    return f"{100 * float(row['property_majority_rate'] or 0.0):.0f}"


def _likeness(row: Mapping[str, Value], name: str) -> Likeness:
    psnr, psnr_se, ssim, ssim_se = (
        _number(row, f"{measure}_{name}{end}") for measure in ("psnr", "ssim") for end in ("", "_se")
    )
    return psnr, psnr_se, ssim, ssim_se


def _number(row: Mapping[str, Value], name: str) -> float | None:
    value = row[name]
    return None if value is None else float(value)


def _is_drawable(attacked: Sequence[Attacked]) -> bool:
    shape = attacked[0].originals.shape
    return len(shape) == 3 or (len(shape) == 4 and shape[1] in _CHANNELS)
