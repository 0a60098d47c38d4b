"""Put the tables of finished reports into README.md, each between the two comments that name it.

python experiments/readme_tables.py sweep reports/gaussian-digits
python experiments/readme_tables.py table1 reports/table1-fashion-mnist-03
python experiments/readme_tables.py table3 reports/table3-fashion-mnist-03
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from asfl_privacy.reporting import read_rows
from asfl_privacy.reporting.cells import gather_cells
from asfl_privacy.reporting.display import Display, display_table
from asfl_privacy.reporting.exhibits import EXHIBITS
from asfl_privacy.reporting.exhibits.folder import read_material

README = Path(__file__).resolve().parents[1] / "README.md"
SWEEP_COLUMNS = ("run", "accuracy %", "ε per release", "ε total", "δ", "ε whole record", "points below ASFL")
TABLE1_COLUMNS = ("method", "accuracy %", "points above FedAvg", "95 % interval", "rounds to target", "MB a round")
TABLE3_COLUMNS = (
    *(
        "run",
        "noise drawn",
        "ε per release",
        "ε total",
        "δ",
        "accuracy %",
        "points above FedAvg",
        "95 % interval of that",
    ),
)


def sweep_block(folder: Path) -> list[str]:
    """The privacy–utility table of a sweep, and its setting in a sentence."""
    rows = read_rows(folder / "rows.csv")
    seeds = len({row["seed"] for row in rows})
    first = next(row for row in rows if row["mech"] != "none")
    return [
        *_table(display_table(gather_cells(rows)), SWEEP_COLUMNS),
        "",
        f"`asfl-privacy sweep --mech {first['mech']}` on {first['data']}: {first['clients']} clients "
        f"({first['partition']}), {first['cohort']} a round, {first['rounds']} rounds, {seeds} seeds; images within an "
        f"ℓ{first['p']:g} distance of {first['radius']:g} (pixels from 0 to 1) look alike; noise at placement "
        f"{first['placement']}. Labels and model updates are not covered. Differences of a point or less are within the seeds' "
        "spread.",
    ]


def table1_block(folder: Path) -> list[str]:
    """Table 1 and what follows from it."""
    return _exhibit_block(folder, TABLE1_COLUMNS)


def table3_block(folder: Path) -> list[str]:
    """Table 3, its picture, and what follows from it."""
    lines = _exhibit_block(folder, TABLE3_COLUMNS)
    return [*lines, "", f"![Accuracy against ε per release, ε total and δ]({folder.as_posix()}/figures/privacy.svg)"]


def _exhibit_block(folder: Path, columns: Sequence[str]) -> list[str]:
    material = read_material(folder)
    info = material.info
    shown = EXHIBITS[str(info["exhibit"])].build(material)
    setting = "; ".join(f"{name}: {value}" for name, value in shown.table.shared)
    missing = info.get("missing") or []
    late = [f"- {len(missing)} runs are not there yet."] if isinstance(missing, list) and missing else []
    return [
        *_table(shown.table, columns),
        "",
        f"{material.title} ([the whole report]({folder.as_posix()}/report.md)). {setting}.",
        "",
        *late,
        *(f"- {finding}" for finding in shown.findings),
    ]


def _table(shown: Display, columns: Sequence[str]) -> list[str]:
    wanted = [shown.headings.index(name) for name in columns]
    head = ["| " + " | ".join(columns) + " |", "|:--" + "|--:" * (len(columns) - 1) + "|"]
    return head + ["| " + " | ".join(line[number] for number in wanted) + " |" for line in shown.lines]


BLOCKS: dict[str, Callable[[Path], list[str]]] = {
    "sweep": sweep_block,
    "table1": table1_block,
    "table3": table3_block,
}


def with_block(text: str, name: str, lines: Sequence[str]) -> str:
    """The text with these lines between the two comments of a block.

    Raises:
        ValueError: No such block in the text.
    """
    pattern = re.compile(rf"(<!-- {name}:.*?-->\n).*?(\n<!-- end of {name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"{name}: the text has no block of this name; add <!-- {name}: --> and <!-- end of {name} -->")
    return pattern.sub(lambda found: found[1] + "\n".join(lines) + found[2], text)


def main(name: str, folder: Path) -> None:
    """Replace a block of the README."""
    text = README.read_text(encoding="utf-8")
    README.write_text(with_block(text, name, BLOCKS[name](folder)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
