"""report.md: the page for a terminal or a repository."""

from markupsafe import Markup

from asfl_privacy.reporting.page import Page
from asfl_privacy.reporting.prose import demote_headings, escape_markdown
from asfl_privacy.reporting.template import load_template


def markdown_page(page: Page) -> str:
    """The report as Markdown; it shows figures/privacy_utility.svg, which lies beside it.

    Args:
        page: From `build_page`.

    Guarantee:
        Text from rows, configuration and warnings shows as it reads: it opens no table cell, tag or heading. The
        statement keeps its Markdown, but its HTML tags do not work.
    """
    command = "\n".join("    " + line for line in page.command.splitlines())
    return load_template("report.md").render(
        page=page,
        md=escape_markdown,
        command=Markup(command),
        statement=Markup(demote_headings(page.statement, top=3)),
    )
