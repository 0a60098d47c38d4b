"""A part of a report: a table, with a picture where there is one, and what they show."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Section:
    """A table, with the picture that belongs to it; plain text but for `svg`, which goes into an HTML page as it is.

    Attributes:
        title: Heading.
        sentences: What it shows, and what it does not, one paragraph each.
        breaches: What refutes a promise of the report, one line each.
        caption: Of the table.
        headings: Of the table's columns.
        lines: Of the table, the first cell naming the line.
        svg: The picture as an svg element that loads nothing, or None.
        figure: The same as a file, its address relative to the report, or None.
        alt: The picture in words.
    """

    title: str
    sentences: tuple[str, ...]
    breaches: tuple[str, ...] = ()
    caption: str
    headings: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    svg: str | None
    figure: str | None
    alt: str
