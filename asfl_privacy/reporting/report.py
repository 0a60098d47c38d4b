"""A report is a folder: rows, table, figure, pages and the record of what made them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from asfl_privacy.reporting.atomic import write_atomic
from asfl_privacy.reporting.figures import curve_png, curve_svg
from asfl_privacy.reporting.html import html_page
from asfl_privacy.reporting.latex import latex_table
from asfl_privacy.reporting.markdown import markdown_page
from asfl_privacy.reporting.page import build_page
from asfl_privacy.reporting.rows import Row, complete_row, write_rows
from asfl_privacy.reporting.run_info import plain_run_info, to_json
from asfl_privacy.reporting.section import Section


def write_report(
    out_dir: Path,
    *,
    rows: Sequence[Mapping[str, object]],
    run_info: Mapping[str, object],
    statement: str,
    warnings: Sequence[str],
    pictures: Sequence[Section] = (),
) -> None:
    """Write rows.csv, report.md, report.html, table.tex, figures/privacy_utility.svg and .png, and run.json.

    Args:
        out_dir: The report's folder; made if it is missing. Files of these names in it are replaced.
        rows: Runs, as for `write_rows`, in the order that rows.csv keeps.
        run_info: command (str), commit (str or None), started (ISO date), config and versions (mappings); optional
            title; anything else is shown as provenance.
        statement: What is guaranteed and what is not, in plain Markdown (see `prose.to_html`).
        warnings: One sentence each, shown above the table.
        pictures: Sections with a picture, shown after the results; the files that they name lie there already.

    Raises:
        ValueError: No rows, a row that `complete_row` refuses, two runs of one cell and seed, a blank statement, an
            incomplete run_info. Nothing is written.
        OSError: The folder cannot be made or written.

    Guarantee:
        Everything is computed before the first file is written, and each file is replaced in one step. Equal
        arguments give equal bytes with the same library versions.

    Edge cases:
        One seed, one cell, infinite or blank ε and a grid whose runs all failed give a report that says so.

    Example:
        >>> import tempfile
        >>> out_dir = Path(tempfile.mkdtemp()) / "report"
        >>> write_report(
        ...     out_dir,
        ...     rows=[{"status": "ok", "method": "asfl", "mech": "none", "seed": 0, "accuracy": 0.9}],
        ...     run_info={"command": "c", "commit": None, "started": "2026-01-01", "config": {}, "versions": {}},
        ...     statement="No noise: nothing is guaranteed.",
        ...     warnings=[],
        ... )
        >>> sorted(entry.name for entry in out_dir.iterdir())
        ['figures', 'report.html', 'report.md', 'rows.csv', 'run.json', 'table.tex']
    """
    runs = [complete_row(row) for row in rows]
    info = plain_run_info(run_info)
    page = build_page(runs, info=info, statement=statement, warnings=warnings, pictures=pictures)
    contents: dict[str, str | bytes] = {
        "run.json": to_json(info),
        "table.tex": latex_table(page.table, caption=f"{page.title}. {page.order}{_mark(runs)}"),
        "figures/privacy_utility.svg": curve_svg(page.curve),
        "figures/privacy_utility.png": curve_png(page.curve),
        "report.md": markdown_page(page),
        "report.html": html_page(page),
    }
    (out_dir / "figures").mkdir(parents=True, exist_ok=True)
    write_rows(out_dir / "rows.csv", runs)
    for name, content in contents.items():
        write_atomic(out_dir / name, content)


def _mark(runs: Sequence[Row]) -> str:
    """What a table that travels alone must say of runs whose noise can be repeated."""
    if any(run["reproducible"] == "yes" for run in runs):
        return " Reproduce only, no guarantee: the noise came from a seed."
    return ""
