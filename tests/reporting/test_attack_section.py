"""The section on attacks: what the picture and its table say, and that a report with it still loads nothing."""

import dataclasses
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from asfl_privacy.reporting.attack_section import HEADINGS, Attacked, attack_section, draw_pictures, picture_rows
from asfl_privacy.reporting.html import html_pictures
from asfl_privacy.reporting.report import write_report

INFO = {"command": "c", "commit": None, "started": "2026-01-01", "config": {}, "versions": {}}
FIGURE = "attack/figures/attack.svg"


def attacked(epsilon, *, images=(1, 8, 8), **changes):
    """A run attacked; figures are made up."""
    rng = np.random.default_rng(0)
    row = {
        "run": f"asfl-eps{epsilon}", "mech": "gaussian", "exchange_layer": "conv1", "placement": "input", "radius": 1.0,
        "p": 2.0, "delta": 1e-5, "run_seed": 0, "attack_seed": 0, "records": 3, "auxiliary_records": 500,
        "epsilon_release": epsilon, "epsilon_release_any_two": 8.00001, "noise_stddev": 1.0,
        "property_accuracy": 0.5, "property_low": 0.118, "property_high": 0.882, "property_without_noise": 1.0,
        "property_majority_rate": 1 / 3, "breach": "no",
    }  # fmt: skip
    for name, psnr in (("mean_record", 11.0), ("without_noise", 46.0), ("with_noise", 10.0 + (epsilon or 0.0) / 10)):
        row |= {f"psnr_{name}": psnr, f"psnr_{name}_se": 0.25, f"ssim_{name}": psnr / 50, f"ssim_{name}_se": 0.01}
    for name, bound in (("neighbours", 0.46212), ("any_two", 1.0)):
        row |= {f"{name}_advantage": 0.2, f"{name}_low": 0.1999, f"{name}_high": 0.2001, f"{name}_bound": bound}
    pictures = [rng.random((3, *images)) for _ in range(2)]
    originals = np.random.default_rng(7).random((3, *images))
    return Attacked(row={**row, **changes}, originals=originals, without_noise=pictures[0],
                    with_noise=None if epsilon is None else pictures[1])  # fmt: skip


def section(*runs, **arguments):
    return attack_section(runs, value_range=(0.0, 1.0), figure=FIGURE, **arguments)


def test_rows_run_from_the_originals_over_no_noise_to_the_strongest_privacy():
    runs = [attacked(1.0), attacked(64.0), attacked(4.0)]
    names = [label.split("\n")[0] for label in picture_rows(runs)]
    assert names == [
        "originals", "rebuilt without noise", "rebuilt at ε = 64", "rebuilt at ε = 4", "rebuilt at ε = 1"
    ]  # fmt: skip
    found = section(*runs)
    assert [line[0] for line in found.lines] == [
        "no release: the mean record", "without noise", "at ε = 64", "at ε = 4", "at ε = 1"
    ]  # fmt: skip
    assert {len(line) for line in found.lines} == {len(HEADINGS)}
    assert found.lines[1][3] == "46.0 ± 0.2"
    assert "other test records" in found.sentences[0]
    assert "bound nothing from above" in found.sentences[1]


def test_figures_are_rounded_to_the_side_that_promises_less():
    # Catches: ε or the allowed advantage rounded to nearest, an interval rounded inward.
    line = section(attacked(1.00001)).lines[-1]
    assert line[1:3] == ("1.001", "8.001")
    assert line[5:9] == ("0.20 [0.19, 0.21]", "0.4622", "0.20 [0.19, 0.21]", "1")
    assert line[9] == "50 [11, 89]"
    assert section(attacked(1.0, epsilon_release_any_two=math.inf)).lines[-1][2] == "∞"


def test_runs_of_equal_epsilon_are_told_apart_by_what_differs():
    # Catches: one image row replacing another of the same name.
    runs = [attacked(4.0), attacked(4.0, delta=1e-7), attacked(4.0, exchange_layer="conv2")]
    names = [label.split("\n")[0] for label in picture_rows(runs)]
    assert len(names) == 6
    assert "rebuilt at ε = 4, exchange layer conv1, δ 1e-7" in names
    assert "rebuilt without noise, exchange layer conv2" in names
    twins = picture_rows([attacked(4.0, run="one"), attacked(4.0, run="two")])
    assert [label.split("\n")[0] for label in twins][2:] == ["rebuilt at ε = 4 (one)", "rebuilt at ε = 4 (two)"]


def test_a_run_without_noise_shows_no_epsilon():
    blank = dict.fromkeys(["epsilon_release", "epsilon_release_any_two", "property_accuracy", "radius", "delta"])
    found = section(attacked(None, mech="none", **blank))
    assert [line[0] for line in found.lines] == ["no release: the mean record", "without noise"]


def test_records_that_are_no_images_have_a_table_and_no_picture():
    run = attacked(1.0, images=(64,), ssim_with_noise=None)
    found = section(run)
    assert (found.svg, found.figure) == (None, None)
    assert draw_pictures([run], value_range=(0.0, 1.0)) == {}
    assert found.lines[-1][4] == "—"
    assert set(draw_pictures([attacked(1.0)], value_range=(0.0, 1.0))) == {"attack.svg", "attack.png"}


def test_runs_attacked_on_other_records_are_refused():
    other = attacked(4.0)
    moved = dataclasses.replace(other, originals=other.originals[::-1])
    with pytest.raises(ValueError, match="different records"):
        section(attacked(1.0), moved)
    with pytest.raises(ValueError, match="empty"):
        section()


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)


def addresses(page):
    names = ("src", "href", "xlink:href", "action", "data", "srcset")
    found = [value for _, attributes in page.tags for name, value in attributes.items() if name in names]
    return {address for address in found if not address.startswith(("#", "data:image/png;base64,"))}


def test_a_report_shows_the_section_and_still_loads_nothing(tmp_path, grid):
    found = section(attacked(1.0), attacked(16.0), breaches=["<b>x</b> beats ε"])
    write_report(tmp_path, rows=grid, run_info=INFO, statement="S.", warnings=[], pictures=[found])
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert addresses(page) == {"rows.csv", "table.tex", "run.json"}
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    policies = [attributes["content"] for tag, attributes in page.tags if "http-equiv" in attributes]
    assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]
    assert sum(tag == "image" for tag, _ in page.tags) == 4 * 3  # catches: a policy or a drawing without its images
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    used = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"|aria-labelledby="([^"]+)"', text))
    assert {ids.count(name) for names in used for name in names if name} == {1}  # catches: drawings that share an id
    words = " ".join(page.words)
    for shown in (found.title, *found.sentences, "Breach: <b>x</b> beats ε", found.alt, "at ε = 16"):
        assert shown in words
    markdown = (tmp_path / "report.md").read_text()
    assert f"]({FIGURE})" in markdown
    assert "**Breach:** &lt;b&gt;x&lt;/b&gt; beats ε" in markdown
    table = [line for line in markdown.split(found.title)[1].split("## ")[0].splitlines() if line.startswith("|")]
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in table] == [11] * (2 + len(found.lines))


def test_a_report_without_attacks_has_no_empty_section(tmp_path, grid):
    write_report(tmp_path, rows=grid, run_info=INFO, statement="S.", warnings=[])
    for name in ("report.html", "report.md"):
        text = (tmp_path / name).read_text()
        assert "recipient rebuilds" not in text
        assert "img-src" not in text
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", (tmp_path / "report.html").read_text())
    assert headings == [
        "Results", "Failed runs", "How to read this", "What is guaranteed, and what is not", "What was run"
    ]  # fmt: skip


def test_a_section_alone_is_a_page_with_its_statement():
    text = html_pictures(section(attacked(1.0)), title="A <run>", statement="# Unit\n\nOne & all.", command="x <y>")
    page = Page(text)
    assert addresses(page) == {"attack.csv", "attack.json"}
    assert {"A <run>", "Unit", "One & all.", "x <y>"} <= set(page.words)
    assert "image" in {tag for tag, _ in page.tags}
