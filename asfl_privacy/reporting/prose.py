"""Plain Markdown: text escaped for it, and a small part of it turned into safe HTML."""

import re
from typing import Final

from markupsafe import Markup, escape

_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]|#~$!])")
_HEADING: Final = re.compile(r"(#{1,6})\s+(.*?)\s*#*$")
_BULLET: Final = re.compile(r"\s*[-*+]\s+(.*)$")
_NUMBERED: Final = re.compile(r"\s*\d{1,9}[.)]\s+(.*)$")
_RULE: Final = re.compile(r"\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$")
_CODE: Final = re.compile(r"(`[^`]+`)")
_BOLD: Final = re.compile(r"\*\*(?=\S)(.+?)(?<=\S)\*\*")
_ITALIC: Final = re.compile(r"(?<![*\w])\*(?=[^\s*])([^*]+?)(?<=\S)\*(?![*\w])")
_SIXTH: Final = 6


def escape_markdown(text: str) -> Markup:
    r"""One line of text that Markdown shows as it reads; line ends become spaces.

    Example:
        >>> print(escape_markdown("a|b_c <script> & more"))
        a\|b\_c &lt;script&gt; &amp; more
    """
    one_line = " ".join(text.split())
    safe = one_line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return Markup(_SPECIAL.sub(r"\\\1", safe))


def demote_headings(markdown: str, *, top: int) -> str:
    """Shift headings so that the highest one has level `top`; HTML tags in the text are made harmless.

    Args:
        markdown: Markdown of the plain part (see `to_html`).
        top: Level of the highest heading, 1 to 6; deeper ones follow, at most 6.

    Example:
        >>> demote_headings("# What <b> holds", top=3)
        '### What &lt;b> holds'
    """
    lines = markdown.strip().splitlines()
    shift = _shift(lines, top=top)
    shown = []
    for line in lines:
        heading = _HEADING.match(line)
        if heading:
            line = f"{'#' * min(_SIXTH, len(heading[1]) + shift)} {heading[2]}"
        parts = _CODE.split(line)
        shown.append("".join(part if _CODE.fullmatch(part) else part.replace("<", "&lt;") for part in parts))
    return "\n".join(shown)


def to_html(markdown: str, *, top: int) -> Markup:
    """Headings, paragraphs, flat lists, pipe tables, bold, italic and code spans as HTML; all else as plain text.

    Args:
        markdown: The text. Links, images, HTML and nesting are not read: they show as they are written.
        top: Level that the highest heading becomes, 1 to 6.

    Guarantee:
        The result holds no tag or attribute from the text: everything is escaped before a tag is put around it.

    Example:
        >>> print(to_html("Holds for **all** <b>.", top=3))
        <p>Holds for <strong>all</strong> &lt;b&gt;.</p>
    """
    lines = markdown.strip().splitlines()
    shift = _shift(lines, top=top)
    blocks: list[str] = []
    start = 0
    while start < len(lines):
        if not lines[start].strip():
            start += 1
            continue
        block, start = _block(lines, start, shift)
        blocks.append(block)
    return Markup("\n".join(blocks))


def _shift(lines: list[str], *, top: int) -> int:
    levels = [len(heading[1]) for heading in map(_HEADING.match, lines) if heading]
    return top - min(levels, default=top)


def _block(lines: list[str], start: int, shift: int) -> tuple[str, int]:
    """The HTML of the block that begins at a line, and the line after it."""
    heading = _HEADING.match(lines[start])
    if heading:
        level = min(_SIXTH, len(heading[1]) + shift)
        return f"<h{level}>{_inline(heading[2])}</h{level}>", start + 1
    if _is_table(lines, start):
        return _table(lines, start)
    for tag, pattern in (("ul", _BULLET), ("ol", _NUMBERED)):
        if pattern.match(lines[start]):
            return _list(lines, start, tag, pattern)
    end = start + 1
    while end < len(lines) and not _starts_block(lines, end):
        end += 1
    return f"<p>{_inline(' '.join(line.strip() for line in lines[start:end]))}</p>", end


def _starts_block(lines: list[str], index: int) -> bool:
    line = lines[index]
    return (
        not line.strip()
        or any(pattern.match(line) for pattern in (_HEADING, _BULLET, _NUMBERED))
        or _is_table(lines, index)
    )


def _list(lines: list[str], start: int, tag: str, pattern: re.Pattern[str]) -> tuple[str, int]:
    items: list[str] = []
    end = start
    while end < len(lines) and lines[end].strip():
        item = pattern.match(lines[end])
        if item:
            items.append(item[1])
        elif lines[end].startswith(" ") and not _starts_block(lines, end):
            items[-1] += " " + lines[end].strip()
        else:
            break
        end += 1
    return f"<{tag}>" + "".join(f"<li>{_inline(item)}</li>" for item in items) + f"</{tag}>", end


def _is_table(lines: list[str], index: int) -> bool:
    return "|" in lines[index] and index + 1 < len(lines) and "|" in lines[index + 1] and bool(
        _RULE.match(lines[index + 1])
    )  # fmt: skip


def _table(lines: list[str], start: int) -> tuple[str, int]:
    head = "".join(f'<th scope="col">{_inline(cell)}</th>' for cell in _cells(lines[start]))
    end = start + 2
    body = ""
    while end < len(lines) and "|" in lines[end]:
        body += "<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in _cells(lines[end])) + "</tr>"
        end += 1
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>', end


def _cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|")
    if inner.endswith("|") and not inner.endswith("\\|"):
        inner = inner[:-1]
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", inner)]


def _inline(text: str) -> str:
    shown = []
    for part in _CODE.split(text):
        if _CODE.fullmatch(part):
            shown.append(f"<code>{escape(part[1:-1])}</code>")
        else:
            bold = _BOLD.sub(r"<strong>\1</strong>", str(escape(part)))
            shown.append(_ITALIC.sub(r"<em>\1</em>", bold))
    return "".join(shown)
