"""Committed reports: each one is what its tables and run.json make, to the byte, and nothing in it was typed by hand."""

import shutil
from pathlib import Path

import pytest

from asfl_privacy.reporting.exhibits.folder import exhibit_of, read_material, write_exhibit

REPORTS = Path(__file__).resolve().parents[1] / "reports"
FOLDERS = sorted(path.parent for path in REPORTS.glob("*/run.json") if exhibit_of(path.parent) is not None)
TEXTS = ("report.md", "report.html", "table.tex", "run.json", "rows.csv")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_committed_report_is_made_anew_from_its_tables(folder, tmp_path):
    """Pictures apart, whose bytes are the plotting library's."""
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("runs"))
    before = {name: (copy / name).read_bytes() for name in TEXTS if (copy / name).is_file()}
    write_exhibit(copy, read_material(copy))
    after = {name: (copy / name).read_bytes() for name in before}
    html = {name: _without_pictures(content) for name, content in after.items()}
    assert html == {name: _without_pictures(content) for name, content in before.items()}


def test_there_are_committed_reports():
    assert FOLDERS


def _without_pictures(content: bytes) -> bytes:
    """An HTML page without its drawings."""
    start, end = b"<svg", b"</svg>"
    while start in content:
        head, _, rest = content.partition(start)
        content = head + rest.partition(end)[2]
    return content
