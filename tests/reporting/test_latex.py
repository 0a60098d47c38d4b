import re

import pytest

from asfl_privacy.reporting.cells import gather_cells
from asfl_privacy.reporting.display import Display, display_table
from asfl_privacy.reporting.latex import escape_latex, latex_table


def test_every_special_character_is_set_as_it_reads():
    # Catches: any character left out of the escapes.
    assert escape_latex(r"\{}&%$#_~^") == (r"\textbackslash{}\{\}\&\%\$\#\_\textasciitilde{}\textasciicircum{}")
    assert escape_latex("ε ± δ − ∞ —") == r"$\varepsilon$ $\pm$ $\delta$ $-$ $\infty$ ---"


def test_the_tabular_has_the_shape_of_the_table(grid):
    table = display_table(gather_cells(grid))
    text = latex_table(table, caption="50% of A_1")
    columns = re.search(r"\\begin\{tabular\}\{(l?r+)\}", text)
    assert columns is not None
    assert len(columns[1]) == len(table.headings)
    body = [line for line in text.splitlines() if line.endswith(r" \\")]
    assert len(body) == 1 + len(table.lines)
    assert {len(re.findall(r"(?<!\\)&", line)) for line in body} == {len(table.headings) - 1}
    for name in ("table", "tabular"):
        assert text.count(rf"\begin{{{name}}}") == text.count(rf"\end{{{name}}}") == 1
    assert [text.count(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")] == [1, 1, 1]
    assert r"\caption{50\% of A\_1}" in text
    assert text.isascii()


@pytest.mark.parametrize("cell", ["[1]", "*", "a & b", r"\input{x}", "50%"])
def test_no_cell_can_end_its_line_or_start_a_command(cell):
    table = Display(headings=("run", "x"), lines=(("first", "1"), (cell, "2")), shared=())
    line = next(line for line in latex_table(table, caption="").splitlines() if line.endswith(r"& 2 \\"))
    assert line[0] not in "[*"
    unescaped = line.removesuffix(r" \\").replace(r"\&", "").replace(r"\%", "").replace(r"\textbackslash{}", "")
    assert unescaped.count("&") == 1
    assert "%" not in unescaped
    assert r"\input" not in unescaped
