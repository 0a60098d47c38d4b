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

    def check(self, federation: Federation) -> None:
        """Refuse a block that does not exist or does not train; see `corrected`."""
        self.corrected(federation)

    def corrected(self, federation: Federation) -> tuple[str, ...]:
        """Names of the corrected parameters: those of `corrected_from` and of the blocks after it.

        A parameter that one of them shares with an earlier block is corrected, under the name of its first place.

        Raises:
            ValueError: No such block, or none of the blocks from it on trains.
        """
        blocks = dict(federation.model.named_children())
        asked = federation.settings.options.corrected_from
        trained = [name for name, block in blocks.items() if any(value.requires_grad for value in block.parameters())]
        first = trained[-1] if asked == "auto" and trained else asked
        if first not in blocks:
            raise ValueError(f"corrected_from {asked!r} names no block; use auto or one of {', '.join(blocks)}")
        names = list(blocks)
        inside = {id(value) for name in names[names.index(first) :] for value in blocks[name].parameters()}
        named = federation.model.named_parameters()
        found = tuple(name for name, value in named if value.requires_grad and id(value) in inside)
        if not found:
            raise ValueError(
                f"corrected_from {asked!r}: no parameter trains from there on, so nothing would be corrected; use one of "
                f"{', '.join(trained)}"
            )
        return found
