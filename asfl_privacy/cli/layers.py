"""`layers`: what each possible exchange layer would cost, save and hide, before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from asfl_privacy.cells import Cell
from asfl_privacy.cli.budget import to_json
from asfl_privacy.cli.one_cell import one_cell
from asfl_privacy.config import SweepConfig
from asfl_privacy.configured_data import load_data
from asfl_privacy.exchange_layers import NUM_TRIALS, LayerFacts, PrivacyFacts, compare_layers
from asfl_privacy.reporting.numerals import BLANK, bound, exact, nearest

COLUMNS = (
    "exchange layer",
    "activations",
    "labels",
    "model",
    "exchange/model",
    "trained in tail",
    "tail step saves",
    "sensitivity",
    "placement",
    "noise stddev",
    "signal/noise",
)
UNPRIVATE = (BLANK,) * 4


def layers(*, config: SweepConfig, as_json: bool) -> int:
    """Compare the blocks after which activations could leave: bytes, savings, sensitivity, noise; before training.

    Takes the flags of train. --exchange-layer auto takes the earliest block whose activations take at most half of the
    bytes of the largest and which leaves at least half of the parameters to the tail round, or else the earliest, among
    the blocks with parameters up to them and in the next. Bytes are those of one client and round. Shapes, initial
    weights, clients' sizes and constants are all that is looked at: no record is, so this costs no privacy. Examples:

    asfl-privacy layers --epsilon 4 --radius 1

    asfl-privacy layers --model lenet --mech none --json
    """
    wanted, cell = one_cell(config, command="layers")
    data = load_data(wanted)
    torch.set_num_threads(1)
    progress = Console(stderr=True)
    with progress.status("exchange layers") as status:
        found = compare_layers(wanted, cell, data=data, on_layer=lambda name: status.update(f"exchange layer {name}"))
    if as_json:
        print(to_json([layer.to_dict() for layer in found]))  # noqa: T201
    else:
        _print(found, cell=cell)
    return 0


def _print(found: Sequence[LayerFacts], *, cell: Cell) -> None:
    """The table and what belongs to it."""
    console = Console(soft_wrap=True)
    if not console.is_terminal:  # a pipe has no width: nothing may be cut off
        console = Console(soft_wrap=True, width=10_000)
    table = Table(box=SIMPLE_HEAD)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("exchange layer", "placement") else "right", no_wrap=True)
    for layer in found:
        marks = {"auto": layer.is_automatic, "asked for": layer.exchange_layer == cell.exchange_layer}
        shown = ", ".join(word for word, holds in marks.items() if holds)
        name = layer.exchange_layer + (f" ← {shown}" if shown else "")
        table.add_row(name, *_costs(layer), *(_hidden(layer.privacy) if layer.privacy else UNPRIVATE))
    console.print(table, highlight=False, markup=False)
    lines = [f"bytes of a client and round, {nearest(found[0].records)} records shared on average"]
    private = next((layer.privacy for layer in found if layer.privacy), None)
    if cell.target is not None and private is not None:
        budget = cell.target.epsilon if cell.target.epsilon is not None else cell.target.total_epsilon
        per = "a release" if cell.target.epsilon is not None else "the whole run"
        delta = f", δ {exact(cell.target.delta)}" if cell.target.delta else ""
        radius = "any two records" if private.radius == "any" else f"records within {exact(private.radius)}"
        lines += [
            f"sensitivity: certified, ℓ{exact(private.p)}→ℓ{exact(private.q)}, for {radius}, of all blocks up to the exchange "
            "layer at the initial weights",
            f"noise: {cell.mech}, ε {exact(budget)} {per}{delta}; signal/noise at the exchange layer is an estimate on "
            f"{NUM_TRIALS} made-up inputs",
        ]
    lines += [f"{layer.exchange_layer} is refused: {layer.refused}" for layer in found if layer.refused is not None]
    lines += [f"auto takes {layer.exchange_layer}: {layer.reason}" for layer in found if layer.is_automatic]
    for line in lines:
        console.print(line, highlight=False, markup=False)


def _costs(layer: LayerFacts) -> tuple[str, ...]:
    return (
        _bytes(layer.activation_bytes),
        _bytes(layer.label_bytes),
        _bytes(layer.model_bytes),
        nearest(layer.exchange_to_model),
        _share(layer.trained_in_tail),
        _share(layer.saved_by_tail),
    )


def _hidden(privacy: PrivacyFacts) -> tuple[str, ...]:
    return (
        bound(privacy.head_sensitivity),
        privacy.placement,
        nearest(privacy.noise_stddev),
        nearest(privacy.signal_to_noise),
    )


def _bytes(value: float | None) -> str:
    return BLANK if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return BLANK if value is None else f"{100 * value:.1f} %"
