"""The table for a paper: booktabs, escaped."""

from typing import Final

from asfl_privacy.reporting.display import Display

_ESCAPES: Final[dict[int, str]] = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "{": r"\{",
        "}": r"\}",
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "[": "{[}",  # a line that starts with [ or * would be read as an argument of the \\\\ before it
        "*": "{*}",
        "ε": r"$\varepsilon$",
        "δ": r"$\delta$",
        "τ": r"$\tau$",
        "ℓ": r"$\ell$",
        "′": r"$'$",
        "±": r"$\pm$",
        "−": r"$-$",
        "×": r"$\times$",
        "∞": r"$\infty$",
        "—": "---",
    }
)


def escape_latex(text: str) -> str:
    r"""Text that LaTeX sets as it reads, whatever it contains.

    Example:
        >>> print(escape_latex("50% of A_1 & ε"))
        50\% of A\_1 \& $\varepsilon$
    """
    return text.translate(_ESCAPES)


def latex_table(table: Display, *, caption: str, label: str = "tab:privacy-utility") -> str:
    r"""A complete table environment to \input into a document that loads booktabs.

    Args:
        table: What to show; its first column is set left, all others right.
        caption: Plain text; escaped here.
        label: For \ref; plain letters, digits, colons and hyphens.

    Returns:
        LaTeX with a line end after its last line.

    Guarantee:
        Every line of the tabular has as many cells as there are headings, and no text from rows is read as LaTeX.

    Example:
        >>> table = Display(headings=("run", "accuracy %"), lines=(("ASFL", "90.0 ± 0.1"),), shared=())
        >>> print(latex_table(table, caption="Privacy and accuracy."), end="")
        % needs \usepackage{booktabs}
        \begin{table}
        \centering
        \small
        \caption{Privacy and accuracy.}
        \label{tab:privacy-utility}
        \begin{tabular}{lr}
        \toprule
        run & accuracy \% \\
        \midrule
        ASFL & 90.0 $\pm$ 0.1 \\
        \bottomrule
        \end{tabular}
        \end{table}
    """
    columns = "l" + "r" * (len(table.headings) - 1)
    return "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            r"\begin{table}",
            r"\centering",
            r"\small",
            rf"\caption{{{escape_latex(caption)}}}",
            rf"\label{{{label}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            _line(table.headings),
            r"\midrule",
            *(_line(line) for line in table.lines),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _line(cells: tuple[str, ...]) -> str:
    return " & ".join(escape_latex(cell) for cell in cells) + r" \\"
