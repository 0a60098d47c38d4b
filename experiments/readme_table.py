"""Put the table of a finished sweep into README.md: `python experiments/readme_table.py reports/gaussian-digits`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from asfl_privacy.reporting import read_rows
from asfl_privacy.reporting.cells import gather_cells
from asfl_privacy.reporting.display import display_table

COLUMNS = ("run", "accuracy %", "ε per release", "ε total", "δ", "ε whole record", "points below ASFL")
README = Path(__file__).resolve().parents[1] / "README.md"


def main(folder: Path) -> None:
    """Replace what stands between the README's two table comments."""
    rows = read_rows(folder / "rows.csv")
    shown = display_table(gather_cells(rows))
    wanted = [shown.headings.index(name) for name in COLUMNS]
    lines = ["| " + " | ".join(COLUMNS) + " |", "|:--" + "|--:" * (len(COLUMNS) - 1) + "|"]
    lines += ["| " + " | ".join(line[number] for number in wanted) + " |" for line in shown.lines]
    seeds = len({row["seed"] for row in rows})
    first = next(row for row in rows if row["mech"] != "none")
    lines += [
        "",
        f"`asfl-privacy sweep --mech {first['mech']}` on {first['data']}: {first['clients']} clients "
        f"({first['partition']}), {first['cohort']} a round, {first['rounds']} rounds, {seeds} seeds; images within an "
        f"ℓ{first['p']:g} distance of {first['radius']:g} (pixels from 0 to 1) look alike; noise at placement "
        f"{first['placement']}. Labels and model updates are not covered. Differences of a point or less are within the seeds' "
        "spread.",
    ]
    text = README.read_text(encoding="utf-8")
    pattern = re.compile(r"(<!-- table:.*?-->\n).*?(\n<!-- end of table -->)", re.DOTALL)
    README.write_text(pattern.sub(lambda found: found[1] + "\n".join(lines) + found[2], text), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
