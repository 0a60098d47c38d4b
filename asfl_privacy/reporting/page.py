"""What a report says, gathered once for the Markdown and the HTML page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asfl_privacy.reporting.cells import Cell, gather_cells
from asfl_privacy.reporting.curve import Curve, curve_of, describe
from asfl_privacy.reporting.display import ORDER, Display, display_table
from asfl_privacy.reporting.rows import Row
from asfl_privacy.reporting.run_info import REQUIRED, Plain, flatten
from asfl_privacy.reporting.section import Section
from asfl_privacy.reporting.words import cell_name, how_to_read, mechanism_name, setting_texts

CAPTION = "Privacy spent and accuracy reached, one line a cell of the grid."


@dataclass(frozen=True)
class Page:
    """Plain text throughout, but for the drawings of `pictures`: whoever writes it out escapes it."""

    title: str
    command: str
    provenance: tuple[tuple[str, str], ...]
    config: tuple[tuple[str, str], ...]
    versions: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]
    caption: str
    order: str
    table: Display
    curve: Curve
    figure_text: str
    how_to_read: tuple[tuple[str, str], ...]
    statement: str
    failed: tuple[tuple[str, str], ...]
    failed_of: str
    pictures: tuple[Section, ...]


def build_page(
    rows: Sequence[Row],
    *,
    info: Mapping[str, Plain],
    statement: str,
    warnings: Sequence[str],
    pictures: Sequence[Section] = (),
) -> Page:
    """Gather everything a report says.

    Args:
        rows: Completed runs.
        info: From `plain_run_info`; a "title", if there is one, replaces the built title.
        statement: What is guaranteed, to whom and what is not covered, in plain Markdown.
        warnings: One sentence each.
        pictures: Sections with a picture, after the results.

    Raises:
        ValueError: No rows, or a blank statement.
    """
    if not statement.strip():
        raise ValueError("statement is blank: a report says what is guaranteed and what is not; hand in the statement")
    cells = gather_cells(rows)
    table, curve = display_table(cells), curve_of(cells)
    commit = info["commit"]
    more = {key: value for key, value in info.items() if key not in (*REQUIRED, "title")}
    config, versions = info["config"], info["versions"]
    failed = [(_run_name(cell, run), str(run["status"]).removeprefix("failed: ")) for cell in cells
              for run in cell.failed]  # fmt: skip
    return Page(
        title=str(info.get("title") or _title(cells)),
        command=str(info["command"]),
        provenance=(
            ("commit", str(commit) if commit else "not known"),
            ("started", str(info["started"])),
            *flatten(more),
        ),
        config=tuple(flatten(config)) if isinstance(config, dict) else (),
        versions=tuple(sorted(flatten(versions))) if isinstance(versions, dict) else (),
        warnings=tuple(warnings),
        caption=CAPTION,
        order=ORDER,
        table=table,
        curve=curve,
        figure_text=describe(curve),
        how_to_read=tuple(how_to_read(cells)),
        statement=statement,
        failed=tuple(failed),
        failed_of=f"{len(failed)} of {len(rows)} runs failed" if failed else "",
        pictures=tuple(pictures),
    )


def _title(cells: Sequence[Cell]) -> str:
    mechanisms = list(dict.fromkeys(mechanism_name(cell.settings["mech"]) for cell in cells if cell.is_noised))
    data = list(dict.fromkeys(str(cell.settings["data"]) for cell in cells if cell.settings["data"] is not None))
    title = "Privacy and accuracy"
    if mechanisms:
        title += ": " + " and ".join(mechanisms) + " noise"
    return title + (" on " + ", ".join(data) if data else "")


def _run_name(cell: Cell, run: Row) -> str:
    return ", ".join([cell_name(cell.settings), *setting_texts(cell.settings), f"seed {run['seed']}"])
