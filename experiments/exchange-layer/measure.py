"""Accuracy and bytes for every exchange layer: what the rule of `--exchange-layer auto` is judged by.

    python experiments/exchange-layer/measure.py --data digits --model small-cnn --seeds 3

Noise-free ASFL is trained with each block as the exchange layer. The table shows, for each, the mean accuracy over seeds,
the paired difference to the best block and its standard deviation, and activation bytes and all bytes as a share of the
largest block's; the block that `auto` takes is marked.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch

from asfl_privacy.cells import make_cells
from asfl_privacy.cli.one_cell import one_cell
from asfl_privacy.config import SweepConfig
from asfl_privacy.data import Dataset, load_dataset
from asfl_privacy.exchange_layers import LayerFacts, compare_layers
from asfl_privacy.reporting import Row
from asfl_privacy.run import execute_run, prepare_run


@dataclass(frozen=True, kw_only=True)
class Line:
    """One block.

    Attributes:
        name: The block.
        accuracy: Per cent, mean over seeds.
        difference: To the block of the highest mean, in points, paired by seed: mean and standard deviation.
        activation_share: Activation bytes over those of the largest block.
        byte_share: Model, activation and label bytes over those of the costliest block.
    """

    name: str
    accuracy: float
    difference: tuple[float, float]
    activation_share: float
    byte_share: float


def train_all(config: SweepConfig, *, data: Dataset) -> list[Row]:
    """One row for every block and seed."""
    cells = [cell for cell in make_cells(config) if cell.exchange_layer is not None]
    return [execute_run(config, prepare_run(config, cell, data=data), data=data, folder=None).row for cell in cells]


def lines_of(rows: list[Row]) -> list[Line]:
    """The rows by block, compared with the best one."""
    names = list(dict.fromkeys(str(row["exchange_layer"]) for row in rows))
    by_name = {name: [row for row in rows if row["exchange_layer"] == name] for name in names}
    accuracy = {name: [100 * row["accuracy"] for row in found] for name, found in by_name.items()}
    sent = {name: sum(row["bytes_activations"] for row in found) for name, found in by_name.items()}
    channels = ("bytes_model", "bytes_activations", "bytes_labels")
    total = {name: sum(row[channel] for row in found for channel in channels) for name, found in by_name.items()}
    best = max(names, key=lambda name: statistics.mean(accuracy[name]))
    lines = []
    for name in names:
        apart = [one - other for one, other in zip(accuracy[name], accuracy[best], strict=True)]
        lines.append(
            Line(
                name=name,
                accuracy=statistics.mean(accuracy[name]),
                difference=(statistics.mean(apart), statistics.stdev(apart) if len(apart) > 1 else float("nan")),
                activation_share=sent[name] / max(sent.values()),
                byte_share=total[name] / max(total.values()),
            )
        )
    return lines


def table(lines: list[Line], *, automatic: LayerFacts) -> str:
    """Markdown."""
    heading = "| exchange layer | accuracy | to the best, points | activation bytes | all bytes |"
    shown = [heading, "|---|---|---|---|---|"]
    for line in lines:
        mark = " ← auto" if line.name == automatic.exchange_layer else ""
        mean, stddev = line.difference
        shown.append(
            f"| {line.name}{mark} | {line.accuracy:.1f} | {mean:+.1f} ± {stddev:.1f} | {line.activation_share:.0%} "
            f"| {line.byte_share:.0%} |"
        )
    return "\n".join([*shown, "", f"auto takes {automatic.exchange_layer}: {automatic.reason}"])


def main() -> None:
    """Train, keep the rows beside the table where that is asked, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--model", default="small-cnn")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--rows", type=Path, help="JSON file to write the rows to")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    fields = {"data": asked.data, "model": asked.model, "rounds": asked.rounds, "lr": asked.lr, "mech": "none"}
    data = load_dataset(asked.data, root=asked.data_root)
    config, cell = one_cell(SweepConfig(**fields), command="measure")
    found = compare_layers(config, cell, data=data)
    usable = tuple(layer.exchange_layer for layer in found if layer.refused is None)
    rows = train_all(SweepConfig(**fields, exchange_layer=usable, seeds=asked.seeds), data=data)
    if asked.rows is not None:
        asked.rows.write_text(json.dumps(rows), encoding="utf-8")
    automatic = next(layer for layer in found if layer.is_automatic)
    print(table(lines_of(rows), automatic=automatic))


if __name__ == "__main__":
    main()
