"""What a measuring module hands back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asfl_privacy.reporting import Row
from asfl_privacy.reporting.records import Record


@dataclass(frozen=True)
class Measured:
    """Rows and tables for a report.

    Attributes:
        rows: Of runs.
        tables: Other measurements by kind, of `asfl_privacy.reporting.records.TABLES`.
        decided: What was chosen on the way, for run.json.
        missing: Runs that were not begun, as the time for runs was over.
    """

    rows: Sequence[Row] = ()
    tables: Mapping[str, Sequence[Record]] = field(default_factory=dict)
    decided: Mapping[str, Any] = field(default_factory=dict)
    missing: Sequence[str] = ()
