"""What a table of noised runs must say beside its figures: what ε promises, and what it leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from asfl_privacy.reporting.cells import Cell
from asfl_privacy.reporting.display import varying_settings
from asfl_privacy.reporting.numerals import bound, exact, nearest
from asfl_privacy.reporting.rows import Value
from asfl_privacy.reporting.section import Section
from asfl_privacy.reporting.words import SETTING_NAMES, cell_name, how_to_read, radius_in_words

FROM_A_SEED: Final = "Reproduce only, no guarantee: the noise came from a seed"
ROUNDED: Final = "ε, δ and sensitivity are the largest over seeds, rounded up to 4 digits; — is blank."
_UPDATES_ONLY: Final = "updates"  # placement of runs that share neither activations nor labels
_OF_ACCURACY: Final = frozenset({"Runs", "MB sent", "Points below", "Personal accuracy", "Unit"})
_BOUNDS: Final = {
    "epsilon_release": "ε per release",
    "epsilon_total": "ε total",
    "delta_total": "δ",
    "epsilon_whole_record": "ε whole record",
    "epsilon_activations": "ε of activations",
    "epsilon_labels": "ε of labels",
    "epsilon_updates": "ε of updates",
    "epsilon_client": "ε of a client",
    "sensitivity": "sensitivity",
}
_NOT_TWICE: Final = frozenset({"target_epsilon", "target_total_epsilon", "delta", "q"})
_SETTINGS: Final = ("radius", "p", "placement", "noise", "own", "labels", "updates", "calibration", "reproducible")


def marks(cells: Sequence[Cell]) -> tuple[str, ...]:
    """The sentences that stand above a table with noised cells; none without one.

    Args:
        cells: All of the table.

    Guarantee:
        Every radius and norm of the cells is named; noise from a seed, and labels or updates in the clear, are said
        wherever one cell has them. What was not recorded counts as being in the clear.
    """
    noised = [cell for cell in cells if cell.is_noised]
    if not noised:
        return ()
    found = (
        [f"{FROM_A_SEED}; whoever knows or guesses it can remove the noise."]
        if _has(noised, "reproducible", "yes")
        else []
    )
    found += dict.fromkeys(radius_in_words(cell.settings["radius"], cell.settings["p"]) for cell in noised)
    if len({(cell.settings["radius"], cell.settings["p"]) for cell in noised}) > 1:
        found.append("Each ε holds at its own line's radius: ε of different radii or norms are different promises.")
    found.append(
        "ε is of one record: per release for one noised activation sent once, total for all of one run and all recipients "
        f"together; runs on the same data add up. {ROUNDED}"
    )
    if len(noised) < len(cells):
        found.append("A line without noise makes no privacy promise at all.")
    return (*found, *not_covered(noised))


def not_covered(noised: Sequence[Cell]) -> tuple[str, ...]:
    """What the figures leave out, one sentence each."""
    found = []
    sharing = [cell for cell in noised if cell.settings["placement"] != _UPDATES_ONLY]
    if _has(sharing, "labels", "clear", None):
        found.append(f"Not covered: labels are sent in the clear{_where(noised, 'labels', 'clear', None)}.")
    if _has(noised, "updates", "none", None):
        found.append(
            f"Not covered: model updates are sent without clipping or noise{_where(noised, 'updates', 'none', None)}; they carry "
            "information on the same records."
        )
    if any(cell.settings["radius"] != "any" for cell in noised):
        found.append(
            "Records further apart than the radius are protected less: ε whole record is the total for any two, where it is "
            "known."
        )
    if any("evaluate_on validation" in str(cell.settings["options"]) for cell in noised):
        found.append("Not covered: accuracies are of training records that were held out, and are not noised.")
    found.append(
        "Not covered: which records a client holds, how many, in which rounds it took part, and choices made by looking at "
        "private data (learning rate, exchange layer, placement, ε itself)."
    )
    return tuple(found)


def tex_note(cells: Sequence[Cell]) -> str:
    """The same for a table that travels alone; empty without noise."""
    noised = [cell for cell in cells if cell.is_noised]
    if not noised:
        return ""
    found = [ROUNDED, *dict.fromkeys(radius_in_words(cell.settings["radius"], cell.settings["p"]) for cell in noised)]
    if len({(cell.settings["radius"], cell.settings["p"]) for cell in noised}) > 1:
        found.append("ε of different radii or norms are different promises.")
    whole = [cell.largest("epsilon_whole_record") for cell in noised]
    known = [value for value in whole if value is not None]
    if len(known) == len(whole):
        found.append(f"For any two records, however far apart, ε total is up to {bound(max(known))}.")
    found += ["Runs on the same data add up.", *not_covered(noised)]
    if any(cell.settings["calibration"] == "paper" for cell in noised):
        found.append("Calibration paper: the noise is PixelDP's, and ε is what it proves, not what was claimed.")
    return " ".join(found + ([f"{FROM_A_SEED}."] if _has(noised, "reproducible", "yes") else []))


def promise_section(cells: Sequence[Cell]) -> Section:
    """What each noised cell promises, in full.

    Args:
        cells: From `gather_cells`, at least one of them noised.

    Guarantee:
        Every ε, δ and sensitivity shown is at least the largest in the rows, to 1 part in 10⁹; a claim that is not
        proven has a column of its own.
    """
    noised = [cell for cell in cells if cell.is_noised]
    bounds = [
        column
        for column in _BOUNDS
        if column in ("epsilon_release", "epsilon_total", "delta_total", "epsilon_whole_record", "sensitivity")
        or any(cell.by_seed(column) for cell in noised)
    ]
    further = [column for column in varying_settings(noised) if column not in (*_SETTINGS, *_NOT_TWICE)]
    claims = any(cell.by_seed("epsilon_claimed") for cell in noised)
    held_back = any(_held_back(cell) for cell in noised)
    return Section(
        title="What the noise promises",
        sentences=tuple(
            f"{term}: {text}" for term, text in how_to_read(cells) if term not in _OF_ACCURACY and term != "No noise"
        ),
        caption=f"One line a cell with noise. {ROUNDED}",
        headings=(
            "run",
            *(_BOUNDS[column] for column in bounds),
            *(("ε claimed, not proven",) if claims else ()),
            *(("records held back, at most",) if held_back else ()),
            "noise sd",
            *(SETTING_NAMES[column] for column in (*_SETTINGS, *further)),
        ),
        lines=tuple(
            (
                cell_name(cell.settings),
                *(bound(cell.largest(column)) for column in bounds),
                *((nearest(cell.largest("epsilon_claimed")),) if claims else ()),
                *((str(_held_back(cell)),) if held_back else ()),
                nearest(cell.largest("noise_stddev")),
                *(exact(cell.settings[column]) for column in (*_SETTINGS, *further)),
            )
            for cell in noised
        ),
        svg=None,
        figure=None,
        alt="",
    )


def _held_back(cell: Cell) -> int:
    """The most records of a run that had spent their budget before it ended."""
    return int(max(cell.by_seed("held_back").values(), default=0))


def _has(cells: Sequence[Cell], column: str, *values: Value) -> bool:
    return any(cell.settings[column] in values for cell in cells)


def _where(cells: Sequence[Cell], column: str, *values: Value) -> str:
    """Blank where it is so in all cells."""
    return "" if all(cell.settings[column] in values for cell in cells) else " in some of the lines"
