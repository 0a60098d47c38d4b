import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asfl_privacy.reporting.prose import demote_headings, escape_markdown, to_html


def test_the_plain_part_of_markdown_becomes_html():
    text = """# Unit

One record at **R = 1**,
in `raw` pixels and *ℓ2*.

## Not covered
- labels
- updates,
  all of them

1. first
2. second

| k | ε |
|:--|--:|
| 2 | 2.15 |
| a\\|b | < 3 |
"""
    assert to_html(text, top=3) == (
        "<h3>Unit</h3>\n"
        "<p>One record at <strong>R = 1</strong>, in <code>raw</code> pixels and <em>ℓ2</em>.</p>\n"
        "<h4>Not covered</h4>\n"
        "<ul><li>labels</li><li>updates, all of them</li></ul>\n"
        "<ol><li>first</li><li>second</li></ol>\n"
        '<div class="scroll"><table><thead><tr><th scope="col">k</th><th scope="col">ε</th></tr></thead><tbody>'
        "<tr><td>2</td><td>2.15</td></tr><tr><td>a|b</td><td>&lt; 3</td></tr></tbody></table></div>"
    )


def test_products_and_bare_stars_are_no_emphasis():
    assert to_html("a * b * c, 2*3*4, ** x", top=3) == "<p>a * b * c, 2*3*4, ** x</p>"


ALLOWED = re.compile(
    r'</?(h[3-6]|p|ul|ol|li|strong|em|code|table|thead|tbody|tr|td)>|<th scope="col">|</th>|<div class="scroll">|</div>'
)


@given(st.text(alphabet="<>\"'&ab #-*`|:\n1._=/!", max_size=80))
def test_no_tag_or_quote_of_the_text_survives(text):
    # Catches: escape() left out of any branch.
    rest = ALLOWED.sub("", to_html(text, top=3))
    assert not set(rest) & set("<>\"'")


@given(st.text(alphabet="<>\"'&ab #-*`|:\n1._=/!", max_size=80))
def test_no_word_of_the_text_is_lost(text):
    html = to_html(text, top=3)
    shown = re.sub(r"&[#\w]+;|<[^>]+>", "", html)
    assert [c for c in shown if c in "ab"] == [c for c in text if c in "ab"]


def test_a_script_in_the_statement_shows_as_text():
    attack = "<script>alert(1)</script> [x](javascript:alert(1)) ![y](//evil) **<b onclick=x>**"
    html = to_html(attack, top=3)
    assert "<script" not in html
    assert "<b" not in html
    assert "<a" not in html
    assert "<img" not in html
    assert "&lt;script&gt;" in html


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("<script>", "&lt;script&gt;"),
        ("a|b", r"a\|b"),
        ("snake_case *x*", r"snake\_case \*x\*"),
        ("50% & more", "50% &amp; more"),
        ("[x](y)", r"\[x\](y)"),
        ("two\nlines", "two lines"),
        ("back\\slash `tick`", r"back\\slash \`tick\`"),
        ("# no heading", r"\# no heading"),
    ],
)
def test_markdown_shows_text_as_it_reads(text, safe):
    assert escape_markdown(text) == safe


def test_headings_sink_below_the_page_and_tags_do_not_work():
    text = "## A\n\nx <script> `a<b`\n\n### B"
    assert demote_headings(text, top=3) == "### A\n\nx &lt;script> `a<b`\n\n#### B"
