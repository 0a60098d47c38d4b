"""The one cell that commands of a single run take from the flags of a sweep."""

from __future__ import annotations

from asfl_privacy.cells import Cell, make_cells
from asfl_privacy.config import SweepConfig


def one_cell(config: SweepConfig, *, command: str) -> tuple[SweepConfig, Cell]:
    """The configuration with one seed, and its one cell.

    Args:
        config: One value a field.
        command: Who asks, for the messages.

    Raises:
        ValueError: A field with several values, or flags that give several cells.
    """
    for name, value in config.model_dump().items():
        if isinstance(value, tuple) and len(value) > 1:
            raise ValueError(
                f"{name} {', '.join(map(str, value))}: {command} runs one cell; give one value, or use sweep"
            )
    if "seeds" in config.model_fields_set and config.seeds != 1:
        raise ValueError(
            f"seeds {config.seeds}: {command} runs one seed; leave seeds out and name it with --seed, or use sweep"
        )
    wanted = config.model_copy(update={"seeds": 1})
    mech = wanted.mech[0]
    if not wanted.shares_activations:
        mech = "none" if wanted.updates == "none" else "gaussian"
    cells = [cell for cell in make_cells(wanted) if (cell.method, cell.mech) == (wanted.methods[0], mech)]
    if len(cells) != 1:
        raise ValueError(
            f"{command} runs one cell but the flags give {len(cells)}; give one --epsilon or --total-epsilon, one --delta "
            "at most, or --mech none"
        )
    return wanted, cells[0]


def check_workers(workers: int | None) -> None:
    """Refuse a number of workers below 1.

    Raises:
        ValueError: Naming it.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers {workers} must be a whole number from 1 on; give for example 2")


def for_launcher(config: SweepConfig) -> SweepConfig:
    """The configuration with executor torchrun where torchrun started this process.

    Raises:
        ValueError: Another executor under torchrun, whose processes would all run the same, or torchrun without it.
    """
    from asfl_privacy.execution.distributed import is_torchrun  # loads torch.distributed

    if config.launcher != "local":
        raise ValueError(f"launcher {config.launcher} spreads the cells of a sweep; use sweep, or leave launcher out")
    if config.executor == "torchrun" and not is_torchrun():
        raise ValueError(
            "executor torchrun in a process that torchrun did not start; use torchrun --nproc-per-node 2 -m asfl_privacy train …"
        )
    if is_torchrun() and config.executor not in ("auto", "torchrun"):
        raise ValueError(
            f"executor {config.executor} under torchrun: each of its processes would run the whole; use executor torchrun"
        )
    return config.model_copy(update={"executor": "torchrun"}) if is_torchrun() else config
