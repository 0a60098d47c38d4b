"""Reading a run folder back: the run as it was asked for, its network as it ended, and its account."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asfl_privacy.accounting import Ledger
from asfl_privacy.cells import make_cells
from asfl_privacy.config import SweepConfig, load_config
from asfl_privacy.configured_data import load_data
from asfl_privacy.data import Dataset
from asfl_privacy.federated import Federation, build_federation
from asfl_privacy.federated.sharing import plan_head
from asfl_privacy.federated.tensor_file import decode_tensors
from asfl_privacy.mechanisms import ReleasePlan
from asfl_privacy.run import Run, prepare_run, training_settings
from asfl_privacy.run_files import CHECKPOINT_FILE, CONFIG_FILE, LEDGER_FILE, ROW_FILE


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A run as its folder tells it.

    Attributes:
        folder: Where it lies.
        config: Its configuration, nothing left to decide.
        run: The run prepared anew from it.
        federation: Clients and network, with the weights of the last round loaded, in evaluation mode.
        ledger: What was released, or None of a run without noise.
        plan: The release of the last head, or None where no private activations are shared.
    """

    folder: Path
    config: SweepConfig
    run: Run
    federation: Federation
    ledger: Ledger | None
    plan: ReleasePlan | None

    @property
    def data(self) -> Dataset:
        """The data set."""
        return self.federation.data


def read_run(folder: Path) -> FinishedRun:
    """Load a run folder.

    Args:
        folder: As `train` or a sweep wrote it.

    Raises:
        ValueError: A folder that holds no finished run, or whose files do not fit each other.
        OSError: Files that cannot be read.
    """
    for name in (CONFIG_FILE, ROW_FILE, CHECKPOINT_FILE):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds no finished run ({name} is missing); give a folder that train wrote")
    config = load_config(folder / CONFIG_FILE, overrides={})
    data = load_data(config)
    private = (folder / LEDGER_FILE).is_file()
    cells = [
        cell for cell in make_cells(config) if cell.method == config.methods[0] and (cell.target is not None) == private
    ]
    if len(cells) != 1:
        raise ValueError(f"{folder / CONFIG_FILE} gives {len(cells)} runs where one is due; restore the file")
    run = prepare_run(config, cells[0], data=data)
    federation = build_federation(
        data,
        model_name=config.model,
        partition=config.partition,
        settings=training_settings(config, run.cell),
        privacy=run.privacy,
    )
    weights = decode_tensors((folder / CHECKPOINT_FILE).read_bytes(), name=str(folder / CHECKPOINT_FILE))
    try:
        federation.load(weights, training=False)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder / CHECKPOINT_FILE} does not fit the network ({reason}); restore the file") from None
    plan = None
    if run.privacy is not None and run.privacy.shares_activations:
        plan = plan_head(federation, run.privacy)
    ledger = Ledger.load(folder / LEDGER_FILE) if private else None
    return FinishedRun(folder=folder, config=config, run=run, federation=federation, ledger=ledger, plan=plan)
