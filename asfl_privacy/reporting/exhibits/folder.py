"""The folder of an exhibit: what it is made from, and the pages made of that."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from markupsafe import Markup

from asfl_privacy.reporting.atomic import write_atomic
from asfl_privacy.reporting.exhibits import EXHIBITS
from asfl_privacy.reporting.exhibits.exhibit import Exhibit, Material
from asfl_privacy.reporting.latex import latex_table
from asfl_privacy.reporting.prose import escape_markdown
from asfl_privacy.reporting.records import TABLES, read_records, write_records
from asfl_privacy.reporting.rows import read_rows, write_rows
from asfl_privacy.reporting.run_info import Plain, flatten, plain_run_info, to_json
from asfl_privacy.reporting.template import load_template

ROWS_FILE, INFO_FILE = "rows.csv", "run.json"


def exhibit_of(folder: Path) -> str | None:
    """The exhibit that a folder holds, or None."""
    try:
        info = json.loads((folder / INFO_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    name = info.get("exhibit") if isinstance(info, dict) else None
    return name if isinstance(name, str) else None


def read_material(folder: Path) -> Material:
    """What an exhibit's folder holds, its pages aside.

    Raises:
        ValueError: run.json is missing or incomplete, or a table cannot be read.
    """
    try:
        stored = json.loads((folder / INFO_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder} holds no report ({INFO_FILE}: {reason}); give a folder that has one") from None
    rows = read_rows(folder / ROWS_FILE) if (folder / ROWS_FILE).is_file() else []
    paths = {kind: folder / f"{kind}.csv" for kind in TABLES}
    tables = {kind: read_records(path, table=kind) for kind, path in paths.items() if path.is_file()}
    return Material(info=plain_run_info(stored), rows=rows, tables=tables)


def write_exhibit(out: Path, material: Material) -> Exhibit:
    """Write an exhibit: what it is made from (run.json, rows.csv and other tables), and its pages.

    Args:
        out: The folder; made if it is missing. Files of these names in it are replaced.
        material: Its info names the exhibit.

    Returns:
        What was shown.

    Raises:
        ValueError: An unknown exhibit, or material that it cannot be made of; nothing is written.
        OSError: The folder cannot be written.

    Guarantee:
        Everything is computed before the first file is written, each file is replaced in one step, and equal material
        gives equal bytes with the same library versions: `write_exhibit(out, read_material(out))` changes nothing.
    """
    info = json.loads(to_json(plain_run_info(material.info)))  # in the order in which it will be read back
    name = info.get("exhibit")
    if not isinstance(name, str) or name not in EXHIBITS:
        raise ValueError(f"exhibit {name!r} is unknown; use one of {', '.join(EXHIBITS)}")
    shown = EXHIBITS[name].build(material)
    caption = f"{material.title}. {shown.note}" if shown.note else material.title
    contents: dict[str, str | bytes] = {
        INFO_FILE: to_json(info),
        "table.tex": latex_table(shown.table, caption=caption, label=f"tab:{name}"),
        "report.md": _markdown(shown, info),
        "report.html": _html(shown, info),
        **{f"figures/{file}": content for file, content in shown.figures.items()},
    }
    out.mkdir(parents=True, exist_ok=True)
    if shown.figures:
        (out / "figures").mkdir(exist_ok=True)
    if material.rows:
        write_rows(out / ROWS_FILE, material.rows)
    for kind, records in material.tables.items():
        write_records(out / f"{kind}.csv", records, table=kind)
    for file, content in contents.items():
        write_atomic(out / file, content)
    return shown


def _markdown(shown: Exhibit, info: Mapping[str, Plain]) -> str:
    command = "\n".join("    " + line for line in str(info["command"]).splitlines())
    return load_template("exhibit.md").render(
        shown=shown, md=escape_markdown, command=Markup(command), **_provenance(info)
    )


def _html(shown: Exhibit, info: Mapping[str, Plain]) -> str:
    return load_template("exhibit.html").render(
        shown=shown, pictures=shown.sections, command=str(info["command"]), **_provenance(info)
    )


def _provenance(info: Mapping[str, Plain]) -> dict[str, object]:
    missing = info.get("missing") or []
    config, versions = info["config"], info["versions"]
    return {
        "title": str(info["title"]),
        "commit": str(info["commit"] or "not known"),
        "started": str(info["started"]),
        "missing": [str(one) for one in missing] if isinstance(missing, list) else [str(missing)],
        "config": flatten(config) if isinstance(config, dict) else [],
        "versions": sorted(flatten(versions)) if isinstance(versions, dict) else [],
    }
