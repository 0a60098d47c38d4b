"""`report`: tables and figures made anew from the rows of runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from asfl_privacy.cli.budget import Json, to_json
from asfl_privacy.provenance import provenance
from asfl_privacy.run_files import ROW_FILE
from asfl_privacy.run_rows import CELLS, gather


def report(
    *,
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS…", help="Report, or folders of runs and sweeps.")],
    shown_as: Annotated[
        str | None, typer.Option("--as", metavar="EXHIBIT", help="What to make; --as help lists them.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder of the report.")] = None,
    title: Annotated[str | None, typer.Option("--title", metavar="TEXT", help="Of the report.")] = None,
    as_json: Json = False,
) -> int:
    """Make a table or figure anew, from the rows of runs alone: nothing is trained.

    A report made of a recipe is made anew where it lies, or in --out. Folders of runs and of sweeps, finished or not, are
    gathered, a run that is in several of them once; the report says which runs of a sweep are missing. Examples:

    asfl-privacy report reports/table2-digits

    asfl-privacy report reports/gaussian-digits --as privacy --out reports/table3

    asfl-privacy report runs --as methods --out reports/methods
    """
    from asfl_privacy.reporting.exhibits import EXHIBITS, Material  # loads the plotting libraries
    from asfl_privacy.reporting.exhibits.folder import exhibit_of, read_material, write_exhibit
    from asfl_privacy.reporting.run_info import plain_run_info

    if shown_as is not None and shown_as not in EXHIBITS:
        known = "; ".join(f"{name}: {kind.about}" for name, kind in EXHIBITS.items())
        raise ValueError(f"as {shown_as!r} is no exhibit; give one of {known}")
    if len(runs) == 1 and shown_as in (None, exhibit_of(runs[0])) and exhibit_of(runs[0]) is not None:
        material, folder = read_material(runs[0]), runs[0] if out is None else out
    else:
        if shown_as is None:
            raise ValueError(
                f"as is missing: {', '.join(map(str, runs))} can be shown in several ways; give --as with one of "
                f"{', '.join(EXHIBITS)}"
            )
        if out is None:
            raise ValueError("out is missing: a report of gathered runs gets a folder of its own; give --out DIR")
        if (out / ROW_FILE).exists() or (out / CELLS).exists():
            raise ValueError(f"out {out} holds a run or a sweep; a report gets a folder of its own; give another --out")
        found = gather(runs)
        info = provenance(
            title=" ".join((title or "").split())
            or f"{EXHIBITS[shown_as].about[:1].upper()}{EXHIBITS[shown_as].about[1:]}",
            command=shlex.join(["asfl-privacy", *sys.argv[1:]]),
            config={"runs": [str(path) for path in runs]},
        )
        material = Material(
            info=plain_run_info({**info, "exhibit": shown_as, "missing": list(found.missing)}),
            rows=found.rows,
            tables={"evaluations": found.evaluations} if found.evaluations else {},
        )
        folder = out
    shown = write_exhibit(folder, material)
    page = folder / "report.html"
    if as_json:
        missing = material.info.get("missing", [])
        print(to_json({"report": str(page), "findings": list(shown.findings), "missing": missing}))  # noqa: T201
        return 0
    for line in (*shown.findings, f"report: {page}"):
        print(line)  # noqa: T201
    return 0
