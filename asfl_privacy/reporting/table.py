"""The table: one line a cell, with spread over seeds and loss against the references."""

import statistics
from collections.abc import Mapping, Sequence

import pandas as pd

from asfl_privacy.reporting.cells import BOUNDS, SETTINGS, Cell, gather_cells, reference_cell
from asfl_privacy.reporting.rows import PERSONAL


def summarise(rows: Sequence[Mapping[str, object]]) -> pd.DataFrame:
    """One line a cell of the grid: accuracy over seeds, loss against the references, privacy spent.

    Args:
        rows: Runs, as for `write_rows`.

    Returns:
        A frame in the order of `gather_cells` with the settings and
        runs, failed: numbers of runs that ended well and that failed;
        accuracy_mean, accuracy_sd, accuracy_min, accuracy_max: fractions from 0 to 1, the deviation with n - 1;
        personal_accuracy_mean, personal_accuracy_sd, and so for each of `PERSONAL`: likewise;
        loss_asfl_mean, loss_asfl_sd, loss_asfl_pairs: points (100 × accuracy) lost against the unnoised ASFL cell,
        paired by seed, negative for a gain; loss_fedavg_… against FedAvg;
        sensitivity, noise_scale, noise_stddev, epsilon_release, epsilon_total, delta_total, epsilon_whole_record:
        the largest over the runs.
        All cells are Python objects; None is blank.

    Raises:
        ValueError: As `gather_cells`.

    Guarantee:
        A failed run enters no mean. Every ε, δ and sensitivity holds for each run of its cell; it is blank where a
        run left it blank.

    Edge cases:
        One run has no deviation. A cell whose runs all failed keeps its line with blanks. A cell without exactly one
        matching reference, or without a seed in common, has no loss; nor has one without a global network.

    Example:
        >>> run = {"status": "ok", "method": "asfl", "mech": "none"}
        >>> frame = summarise([{**run, "seed": 0, "accuracy": 0.5}, {**run, "seed": 1, "accuracy": 0.7}])
        >>> round(frame.loc[0, "accuracy_mean"], 9), round(frame.loc[0, "accuracy_sd"], 9)
        (0.6, 0.141421356)
    """
    return frame_of(gather_cells(rows))


def frame_of(cells: Sequence[Cell]) -> pd.DataFrame:
    """`summarise` for cells that are already gathered."""
    return pd.DataFrame([_line(cell, cells) for cell in cells], dtype=object)


def _line(cell: Cell, cells: Sequence[Cell]) -> dict[str, object]:
    accuracies = list(cell.accuracy_by_seed.values())
    line: dict[str, object] = {column: cell.settings[column] for column in SETTINGS}
    line |= {"runs": len(cell.runs), "failed": len(cell.failed)}
    line["accuracy_mean"], line["accuracy_sd"] = _mean_and_sd(accuracies)
    line["accuracy_min"] = min(accuracies, default=None)
    line["accuracy_max"] = max(accuracies, default=None)
    for column in PERSONAL:
        line[f"{column}_mean"], line[f"{column}_sd"] = _mean_and_sd(list(cell.by_seed(column).values()))
    for method in ("asfl", "fedavg"):
        losses = _paired_losses(cell, reference_cell(cell, cells, method=method))
        line[f"loss_{method}_mean"], line[f"loss_{method}_sd"] = _mean_and_sd(losses)
        line[f"loss_{method}_pairs"] = len(losses)
    return line | {column: cell.largest(column) for column in BOUNDS}


def _paired_losses(cell: Cell, reference: Cell | None) -> list[float]:
    if reference is None or reference is cell:
        return []
    own, other = cell.accuracy_by_seed, reference.accuracy_by_seed
    return [100.0 * (other[seed] - own[seed]) for seed in own if seed in other]


def _mean_and_sd(values: Sequence[float]) -> tuple[float | None, float | None]:
    if not values:
        return None, None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
