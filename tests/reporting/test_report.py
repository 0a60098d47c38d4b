import json
import re
from html.parser import HTMLParser

import pytest

from asfl_privacy.reporting.report import write_report
from asfl_privacy.reporting.rows import complete_row, read_rows

FILES = {
    *("rows.csv", "report.md", "report.html", "table.tex", "run.json"),
    *("figures/privacy_utility.svg", "figures/privacy_utility.png"),
}
ARGUMENTS = {
    "run_info": {
        "command": "asfl-privacy sweep --mech gaussian --model a_b:<c>",
        "commit": "0123abc",
        "started": "2026-01-02T03:04:05+00:00",
        "config": {"epsilon": [1, 4], "note": "<i>|50%"},
        "versions": {"torch": "2.14.1"},
        "host <x>": "16 CPUs & more",
    },
    "statement": "# Unit\n\nOne record & its <script>alert(1)</script> neighbours.\n\n- labels are **not** covered",
    "warnings": ["δ = 1e-2 is 1/n or more <b>"],
}


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.words = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture
def report(tmp_path, grid):
    out_dir = tmp_path / "deep" / "report"
    write_report(out_dir, rows=grid, **ARGUMENTS)
    return out_dir


def test_the_folder_is_whole_and_the_same_twice(report, tmp_path, grid):
    # Catches: a date, a random id, an unsorted key anywhere.
    assert {str(path.relative_to(report)) for path in report.rglob("*") if path.is_file()} == FILES
    write_report(tmp_path / "again", rows=grid, **ARGUMENTS)
    for name in FILES:
        assert (report / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name
    assert read_rows(report / "rows.csv") == [complete_row(row) for row in grid]
    assert json.loads((report / "run.json").read_text())["commit"] == "0123abc"


def test_the_page_loads_nothing(report):
    # Catches: a font, script, image or style from elsewhere.
    text = (report / "report.html").read_text()
    page = Page(text)
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "video", "audio", "base", "form", "image"}
    addresses = [value for _, attributes in page.tags for name, value in attributes.items()
                 if name in ("src", "href", "xlink:href", "action", "data", "srcset")]  # fmt: skip
    assert {address for address in addresses if not address.startswith("#")} == {"rows.csv", "table.tex", "run.json"}
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    assert (
        "meta",
        {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"},
    ) in page.tags
    assert "prefers-color-scheme: dark" in text


def test_all_text_is_escaped_in_the_page(report):
    # Catches: autoescape off, or Markup around text from outside.
    text = (report / "report.html").read_text()
    page = Page(text)
    assert not {tag for tag, _ in page.tags} & {"b", "i", "c", "script"}
    words = " ".join(page.words)
    for shown in (
        *("<b>round</b> 3 | 50% of a_b & c", "<script>alert(1)</script> neighbours", "1/n or more <b>"),
        *("--model a_b:<c>", "<i>|50%", "host <x>: 16 CPUs & more"),
    ):
        assert shown in words


def test_the_table_says_what_its_cells_are(report, grid):
    page = Page((report / "report.html").read_text())
    table = (report / "report.html").read_text().split('<table class="results">')[1].split("</table>")[0]
    assert table.count("<caption") == 1
    assert table.count('scope="col"') == 12
    assert table.count('scope="row"') == 8
    assert ("html", {"lang": "en"}) in page.tags
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    labels = [attributes["aria-labelledby"] for _, attributes in page.tags if "aria-labelledby" in attributes]
    assert set(labels) <= set(ids)


def test_the_markdown_has_whole_tables_and_no_live_tag(report):
    text = (report / "report.md").read_text()
    assert not re.search(
        r"<(script|b|i|c|x)\b", text.replace("    asfl-privacy sweep --mech gaussian --model a_b:<c>", "")
    )
    lines = [line for line in text.split("## Failed runs")[0].splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 8
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {13}
    assert "loss is NaN in &lt;b&gt;round&lt;/b&gt; 3 \\| 50% of a\\_b &amp; c" in text
    assert "1 of 14 runs failed" not in text
    assert "1 of 16 runs failed" in text
    assert "### Unit" in text
    assert "- labels are **not** covered" in text
    assert "![" in text
    assert "](figures/privacy_utility.svg)" in text


def test_unknown_provenance_is_shown_and_a_missing_commit_is_said(tmp_path, unnoised):
    info = {**ARGUMENTS["run_info"], "commit": None, "title": "A <title>", "seconds": {"total": 12.5}}
    write_report(tmp_path, rows=[unnoised()], run_info=info, statement="None.", warnings=[])
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# A &lt;title&gt;\n")
    assert "- commit: not known\n" in text
    assert "- seconds.total: 12.5\n" in text
    assert "Warnings" not in text
    assert "## Failed runs" not in text


def test_a_grid_whose_runs_all_failed_is_reported(tmp_path, gaussian):
    rows = [gaussian(seed=seed, status="failed: no memory", accuracy=None) for seed in (0, 1)]
    write_report(tmp_path, rows=rows, **ARGUMENTS)
    text = (tmp_path / "report.md").read_text()
    assert "2 of 2 runs failed" in text
    assert "no finished run with noise" in text
    assert "| ASFL, Gaussian | 4 | 1e-5 | — | — | — | — | — | — | — | — | 0 of 2, 2 failed | — | — |" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": []}, "rows is empty"),
        ({"statement": " \n"}, "statement is blank"),
        ({"run_info": {}}, "run_info lacks 'command'"),
    ],
)
def test_a_report_that_would_say_too_little_is_refused_and_writes_nothing(tmp_path, unnoised, changes, message):
    out_dir = tmp_path / "report"
    with pytest.raises(ValueError, match=message):
        write_report(out_dir, **{"rows": [unnoised()], **ARGUMENTS, **changes})
    assert not out_dir.exists()
