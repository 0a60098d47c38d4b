"""Rows in, tables, figures and pages out: this room reads rows and never the code that made them."""

from asfl_privacy.reporting.atomic import write_atomic
from asfl_privacy.reporting.cells import gather_cells
from asfl_privacy.reporting.display import display_table
from asfl_privacy.reporting.report import write_report
from asfl_privacy.reporting.rows import COLUMNS, Row, complete_row, failed_status, read_rows, write_rows

__all__ = [
    "COLUMNS",
    "Row",
    "complete_row",
    "display_table",
    "failed_status",
    "gather_cells",
    "read_rows",
    "write_atomic",
    "write_report",
    "write_rows",
]
