"""Rows in, tables, figures and pages out: this room reads rows and never the code that made them.

Reports and tables are imported from `report` and `display`, so that code that only writes rows does not load the
plotting and table libraries.
"""

from asfl_privacy.reporting.atomic import write_atomic
from asfl_privacy.reporting.rows import COLUMNS, Row, complete_row, failed_status, read_rows, write_rows

__all__ = ["COLUMNS", "Row", "complete_row", "failed_status", "read_rows", "write_atomic", "write_rows"]
