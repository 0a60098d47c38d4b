"""FedPVR: SCAFFOLD's correction on the last layers only (Li et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass

from asfl_privacy.federated.federation import Federation
from asfl_privacy.federated.methods.scaffold import Scaffold


@dataclass(frozen=True)
class FedPVR(Scaffold):
    """SCAFFOLD that corrects the parameters of a block and of all blocks after it, and leaves the others to FedAvg.

    Guarantee:
        With the first block it is SCAFFOLD, bit for bit. Control variates of P_mask bytes travel each way.

    Source:
        Li, Schmidt, Alstrøm & Stich 2023, `On the effectiveness of partial variance reduction in federated learning with
        heterogeneous data`, Algorithm 1.
    """

    name: str = "fedpvr"

    def corrected(self, federation: Federation) -> tuple[str, ...]:
        """Names of the corrected parameters: those of `corrected_from` and of the blocks after it.

        Raises:
            ValueError: No such block, or none of the blocks from it on trains.
        """
        names = [name for name, _ in federation.model.named_children()]
        trained = [name for name, value in federation.model.named_parameters() if value.requires_grad]
        asked = federation.settings.options.corrected_from
        with_parameters = [block for block in names if any(_lies_in(name, block) for name in trained)]
        first = with_parameters[-1] if asked == "auto" and with_parameters else asked
        if first not in names:
            raise ValueError(f"corrected_from {asked!r} names no block; use auto or one of {', '.join(names)}")
        blocks = names[names.index(first) :]
        found = tuple(name for name in trained if any(_lies_in(name, block) for block in blocks))
        if not found:
            raise ValueError(
                f"corrected_from {asked!r}: no parameter trains from there on, so nothing would be corrected; use one of "
                f"{', '.join(with_parameters)}"
            )
        return found


def _lies_in(name: str, block: str) -> bool:
    return name.startswith(block + ".")
