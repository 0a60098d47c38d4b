"""report.html: one file that needs no network."""

from markupsafe import Markup

from asfl_privacy.reporting.figures import curve_inline_svg
from asfl_privacy.reporting.page import Page
from asfl_privacy.reporting.prose import to_html
from asfl_privacy.reporting.section import Section
from asfl_privacy.reporting.template import load_template


def html_page(page: Page) -> str:
    """The report as one HTML file: style and figure inside, light and dark, readable on a phone.

    Args:
        page: From `build_page`.

    Guarantee:
        The page loads nothing: no script, no outside address; its content security policy forbids them. All text is
        escaped; of the statement, only what `to_html` reads becomes markup.
    """
    return load_template("report.html").render(
        page=page,
        title=page.title,
        pictures=page.pictures,
        statement=to_html(page.statement, top=3),
        wide=Markup(curve_inline_svg(page.curve, stacked=False)),
        stacked=Markup(curve_inline_svg(page.curve, stacked=True)),
    )


def html_pictures(section: Section, *, title: str, statement: str, command: str) -> str:
    """A section alone as one HTML file, with the statement of what it is about.

    Args:
        section: Picture and table.
        title: Of the page.
        statement: What is guaranteed and what is not, in plain Markdown (see `prose.to_html`).
        command: What made the page.

    Guarantee:
        As `html_page`.
    """
    return load_template("attack.html").render(
        pictures=[section], title=title, statement=to_html(statement, top=3), command=command
    )
