"""What a statement needs to know beside the counts of the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from asfl_privacy.accounting.checks import check_choice, check_delta, check_integer, check_real

LABELS = ("clear", "randomized", "none")
UPDATES = ("clear", "dp-sgd", "dp-fedavg", "none")
ROUNDING = ("included", "unknown", "none")


@dataclass(frozen=True, kw_only=True)
class StatementFacts:
    """What a statement needs to know beside the ledger; plain values, kept in the ledger's file.

    Args:
        delta: δ at which totals are stated, in (0, 1); 0 is allowed where only pure mechanisms were used.
        num_records: n, the records of the whole data set; δ is compared with 1/n.
        noise: "fresh" (a draw per release) or "once" (one draw per record, re-used).
        labels: "clear", "randomized" (drawn once per record and remembered) or "none" (not sent).
        updates: "clear", "dp-sgd", "dp-fedavg", or "none" where no model updates are sent.
        also_in_the_clear: what else the clients send without noise, e.g. "control variates"; empty for nothing.
        unaccounted_choices: choices made by looking at private data, e.g. "learning rate tuned on the training data".
        placement: where the noise sits, for the text.
        total_epsilon: ε that the run was calibrated for, all channels together; None where none was asked.
        held_back: records whose budget was spent before the run ended, so that they were no longer used.
        certificate_method: how the sensitivity was proven; None where no weights come before the noise.
        certificate_tightness: certificate over the largest ratio found by search, or None where none was searched.
        rounding: whether the rounding of the head's forward pass is in the sensitivity: "included", "unknown", or
            "none" where nothing runs before the noise.
        claimed_epsilon: ε per release that a published formula claims (`paper` mode); None elsewhere.

    Raises:
        ValueError: for a value out of range.
    """

    delta: float
    num_records: int
    noise: str = "fresh"
    labels: str = "clear"
    updates: str = "clear"
    also_in_the_clear: str = ""
    unaccounted_choices: tuple[str, ...] = ()
    placement: str | None = None
    total_epsilon: float | None = None
    held_back: int = 0
    certificate_method: str | None = None
    certificate_tightness: float | None = None
    rounding: str = "unknown"
    claimed_epsilon: float | None = None

    def __post_init__(self) -> None:
        check_delta(self.delta, zero_allowed=True)
        check_integer("num_records", self.num_records, minimum=1)
        check_choice("noise", self.noise, ("fresh", "once"))
        check_choice("labels", self.labels, LABELS)
        check_choice("updates", self.updates, UPDATES)
        check_choice("rounding", self.rounding, ROUNDING)
        check_integer("held_back", self.held_back, minimum=0)
        for name in ("total_epsilon", "certificate_tightness", "claimed_epsilon"):
            value = getattr(self, name)
            if value is not None:
                check_real(name, value, minimum=0.0, exclusive=True, fix=f"pass e.g. {name}=1.0, or None")
        for name in ("placement", "certificate_method"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value.isprintable()):
                raise ValueError(f"{name} is {value!r}: it must be one printable line; pass a name, or None")
        also = self.also_in_the_clear
        if not isinstance(also, str) or (also and not also.isprintable()):
            raise ValueError(f"also_in_the_clear is {also!r}: it must be one printable line; pass a name, or ''")
        choices = self.unaccounted_choices
        if not isinstance(choices, tuple) or not all(isinstance(c, str) and c.isprintable() for c in choices):
            raise ValueError(f"unaccounted_choices is {choices!r}: it must be a tuple of printable lines; pass ('…',)")

    def to_dict(self) -> dict[str, object]:
        """Plain values, as the ledger's file keeps them."""
        return asdict(self) | {"unaccounted_choices": list(self.unaccounted_choices)}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> StatementFacts:
        """The facts of a ledger's file.

        Raises:
            ValueError: for keys that are missing or unknown, or values out of range.
        """
        known = {field.name for field in fields(cls)}
        given = {"also_in_the_clear", *values}  # files of before have no such key, and nothing else was sent
        if given != known:
            odd = sorted(known.symmetric_difference(given))
            raise ValueError(f"the facts hold or lack {odd}: exactly {sorted(known)} are due; restore the file")
        choices = values["unaccounted_choices"]
        return cls(**{**values, "unaccounted_choices": tuple(choices) if isinstance(choices, list) else choices})  # type: ignore[arg-type]  # checked by the class
