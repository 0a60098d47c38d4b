"""An account in a folder: ledger, filter, and which records were held back or charged for good, to the last bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from asfl_privacy.accounting import Ledger
from asfl_privacy.accounting.filter import RecordFilter
from asfl_privacy.accounting.storage import read_document, write_document
from asfl_privacy.execution.charging import Account
from asfl_privacy.federated.tensor_file import decode_tensors, encode_tensors

LEDGER_FILE, MASKS_FILE, ACCOUNT_FILE = "ledger.json", "masks.safetensors", "account.json"
FORMAT, VERSION = "asfl-privacy account", 1
_KEPT = "kept."


def write_account(folder: Path, account: Account) -> None:
    """Write an account but for its journal, which is a file of its own.

    Args:
        folder: An existing folder, in which three files are written; the caller brings the folder itself to the disk.
        account: What has been spent.

    Raises:
        OSError: A file cannot be written.
    """
    account.ledger.save(folder / LEDGER_FILE)
    masks = {"held_back": torch.from_numpy(account.held_back)}
    masks |= {_KEPT + channel: torch.from_numpy(mask) for channel, mask in account.kept.items()}
    (folder / MASKS_FILE).write_bytes(encode_tensors(masks))
    budget = None if account.budget is None else account.budget.state()
    write_document(
        folder / ACCOUNT_FILE, name=FORMAT, version=VERSION, body={"run_id": account.run_id, "budget": budget}
    )


def read_account(folder: Path) -> Account:
    """The account of `write_account`, without a journal.

    Raises:
        ValueError: A file is damaged, or the files do not belong together.
        OSError: A file cannot be read.

    Guarantee:
        Ledger, filter and masks are equal to those written, so what is charged next is charged to the same account.
    """
    body = read_document(folder / ACCOUNT_FILE, name=FORMAT, version=VERSION)
    tensors = decode_tensors((folder / MASKS_FILE).read_bytes(), name=str(folder / MASKS_FILE))
    masks = {name: value.numpy() for name, value in tensors.items()}
    budget = None if body["budget"] is None else RecordFilter.from_state(body["budget"])
    lengths = {len(mask) for mask in masks.values()} | ({budget.num_records} if budget is not None else set())
    if "held_back" not in masks or len(lengths) != 1 or any(mask.dtype != np.bool_ for mask in masks.values()):
        raise ValueError(f"{folder / MASKS_FILE} does not fit {ACCOUNT_FILE}: one flag a record is due; restore a copy")
    return Account(
        ledger=Ledger.load(folder / LEDGER_FILE),
        held_back=masks.pop("held_back"),
        budget=budget,
        run_id=body["run_id"],
        kept={name.removeprefix(_KEPT): mask for name, mask in masks.items()},
    )
