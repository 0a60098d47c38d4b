"""What a table or figure of the paper is made from, and what it becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from asfl_privacy.reporting.display import Display
from asfl_privacy.reporting.records import Record
from asfl_privacy.reporting.rows import Row
from asfl_privacy.reporting.run_info import Plain
from asfl_privacy.reporting.section import Section


@dataclass(frozen=True, kw_only=True)
class Material:
    """All that an exhibit may read.

    Attributes:
        info: run.json: title, command, commit, config (the recipe, resolved), versions, started, missing.
        rows: rows.csv, in its order; empty for none.
        tables: The other files by kind, of `records.TABLES`.
    """

    info: Mapping[str, Plain]
    rows: Sequence[Row] = ()
    tables: Mapping[str, Sequence[Record]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Of the report."""
        return str(self.info["title"])

    def table(self, kind: str) -> Sequence[Record]:
        """A table that the exhibit cannot do without.

        Raises:
            ValueError: It is not there, or empty.
        """
        found = self.tables.get(kind, ())
        if not found:
            raise ValueError(f"{kind}.csv is missing or empty, and this exhibit is made of it; make the report again")
        return found


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """A table or figure as it is shown.

    Attributes:
        findings: What the figures say, one sentence each, computed from them.
        sections: Tables and pictures, in order; a picture's `figure` is figures/NAME.svg.
        table: What table.tex holds.
        figures: Files below figures/, by name.
        note: What table.tex, which travels alone, says after the title.
    """

    findings: tuple[str, ...]
    sections: tuple[Section, ...]
    table: Display
    figures: Mapping[str, str | bytes] = field(default_factory=dict)
    note: str = ""
