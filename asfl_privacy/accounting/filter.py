"""Individual privacy filters: which records may still be released within budgets fixed beforehand.

Conditions of the guarantee (budget.py has its proof): charges use the declared sensitivity Δ, never a record's own norm;
whether a record is released depends on that record's own past charges and on public facts alone.
"""

import base64
import math
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from asfl_privacy.accounting.budget import BUDGET_OF, TOLERANCE, UNITS, RecordBudget
from asfl_privacy.accounting.checks import check_choice, check_integer, check_multiplier, check_real
from asfl_privacy.accounting.event import check_vector
from asfl_privacy.accounting.totals import Ints

_CAPACITY = UNITS + int(UNITS * TOLERANCE)
_STATE_VERSION = 1


class RecordFilter:
    """Which records may still be released: individual budgets, fixed beforehand.

    Args:
        num_records: n ≥ 1; record ids are 0…n − 1.
        gaussian_budget: see ``RecordBudget``.
        pure_budget: see ``RecordBudget``.
        excess_budget: see ``RecordBudget``.
        tail_budget: see ``RecordBudget``.

    Raises:
        ValueError: if a value is out of range.

    Guarantee:
        The exact sum of the charges admitted of a record never exceeds its budget times 1 + ``TOLERANCE``, and
        ``total`` is that of this upper end. Up to 10**6 charges whose exact sum is within the budget times 1 + 2**-50
        are admitted, so ten times .1, or .1 and .9, fit into 1.0 although their floats do not add up to it.

    Example:
        >>> guard = RecordFilter(3, pure_budget=1.0)
        >>> for _ in range(10):
        ...     guard.charge([0, 1], mechanism="laplace", noise_multiplier=10.0)
        >>> guard.admit([0, 1, 2], mechanism="laplace", noise_multiplier=10.0).tolist()
        [False, False, True]
        >>> guard.num_exhausted("laplace", 10.0)
        2
    """

    def __init__(
        self,
        num_records: int,
        *,
        gaussian_budget: Fraction | float = 0.0,
        pure_budget: Fraction | float = 0.0,
        excess_budget: Fraction | float = 0.0,
        tail_budget: Fraction | float = 0.0,
    ) -> None:
        self.num_records = check_integer("num_records", num_records, minimum=1)
        self.budget = RecordBudget(
            gaussian_budget=gaussian_budget,
            pure_budget=pure_budget,
            excess_budget=excess_budget,
            tail_budget=tail_budget,
        )
        self._spent = {name: np.zeros(self.num_records, dtype=np.int64) for name in RecordBudget.__dataclass_fields__}

    @classmethod
    def within(cls, budget: RecordBudget, *, num_records: int) -> "RecordFilter":
        """A fresh filter with this budget."""
        return cls(num_records, **asdict(budget))

    def total(self, *, delta: float, distance: float = 1.0) -> float:
        """The preset total, whatever has been spent: see ``RecordBudget.total``."""
        return self.budget.total(delta=delta, distance=distance)

    def admit(
        self,
        records: ArrayLike,
        *,
        mechanism: str,
        noise_multiplier: float,
        epsilon_excess: float = 0.0,
        tail_probability: float = 0.0,
    ) -> NDArray[np.bool_]:
        """Which of these may be released; charges nothing.

        Args:
            records: ids, shape (n,), integers in 0…num_records − 1, n ≥ 1.
            mechanism: "gaussian", "laplace" or "randomized-response".
            noise_multiplier: z > 0; 1/ε0 for randomised response.
            epsilon_excess: error of one release by the noise sampler, ≥ 0; see ``EventClass``.
            tail_probability: the same, ≥ 0.

        Returns:
            Mask, shape (n,): the entry and all earlier ones of the same record fit together, so ``charge`` never
            refuses what the mask leaves. An entry depends on the past of its own record alone.

        Raises:
            ValueError: if a value is out of range.
        """
        ids, counts = self._named(records)
        room = self._room(self._units(mechanism, noise_multiplier, epsilon_excess, tail_probability))
        if counts.max() == 1 or bool(np.all((room >= counts) | (counts == 0))):
            return np.asarray(room[ids] >= 1)
        order = np.argsort(ids, kind="stable")
        first = np.cumsum(counts) - counts
        rank = np.empty(len(ids), dtype=np.int64)
        rank[order] = np.arange(1, len(ids) + 1) - first[ids[order]]
        return np.asarray(room[ids] >= rank)

    def charge(
        self,
        records: ArrayLike,
        *,
        mechanism: str,
        noise_multiplier: float,
        epsilon_excess: float = 0.0,
        tail_probability: float = 0.0,
    ) -> None:
        """Spend one release of each record named; a record named twice is charged twice.

        Args:
            records: see ``admit``, as the other arguments.
            mechanism: see ``admit``.
            noise_multiplier: see ``admit``.
            epsilon_excess: see ``admit``.
            tail_probability: see ``admit``.

        Raises:
            ValueError: if a value is out of range or a record would exceed its budget; nothing is charged then.
        """
        _, counts = self._named(records)
        units = self._units(mechanism, noise_multiplier, epsilon_excess, tail_probability)
        over = int(np.count_nonzero(counts > np.maximum(self._room(units), 0)))
        if over:
            raise ValueError(
                f"{over} of {np.count_nonzero(counts)} records would exceed their budget with noise_multiplier "
                f"{float(noise_multiplier)!r} ({mechanism}): a release past the budget is refused; release only what "
                "admit() allows"
            )
        for name, unit in units.items():
            self._spent[name] += counts * unit

    def count_past(
        self,
        records: ArrayLike,
        *,
        mechanism: str,
        noise_multiplier: float,
        epsilon_excess: float = 0.0,
        tail_probability: float = 0.0,
    ) -> None:
        """Count releases that were sent already, beyond the budget too: such a record is exhausted from then on.

        Args:
            records: see ``admit``, as the other arguments.
            mechanism: see ``admit``.
            noise_multiplier: see ``admit``.
            epsilon_excess: see ``admit``.
            tail_probability: see ``admit``.

        Raises:
            ValueError: if a value is out of range.
        """
        _, counts = self._named(records)
        for name, unit in self._units(mechanism, noise_multiplier, epsilon_excess, tail_probability).items():
            spent = self._spent[name]
            fits = counts <= np.maximum(_CAPACITY - spent, 0) // unit
            self._spent[name] = np.where(fits, spent + np.where(fits, counts, 0) * unit, _CAPACITY + 1)

    def remaining(
        self,
        *,
        mechanism: str,
        noise_multiplier: float,
        epsilon_excess: float = 0.0,
        tail_probability: float = 0.0,
    ) -> Ints:
        """How many more such releases each record allows, shape (num_records,), ≥ 0; arguments as in ``admit``.

        Example:
            >>> RecordFilter(2, pure_budget=1.0).remaining(mechanism="laplace", noise_multiplier=4.0).tolist()
            [4, 4]
        """
        room = self._room(self._units(mechanism, noise_multiplier, epsilon_excess, tail_probability))
        return np.maximum(room, 0)

    def num_exhausted(
        self,
        mechanism: str,
        noise_multiplier: float,
        *,
        epsilon_excess: float = 0.0,
        tail_probability: float = 0.0,
    ) -> int:
        """How many records cannot be released once more; arguments as in ``admit``."""
        units = self._units(mechanism, noise_multiplier, epsilon_excess, tail_probability)
        return int(np.count_nonzero(self._room(units) < 1))

    def state(self) -> dict[str, Any]:
        """All of the filter as plain JSON values, private like a ledger; ``from_state`` gives an equal filter."""
        budgets = {name: str(value) for name, value in asdict(self.budget).items()}
        spent = {name: _pack(values) for name, values in self._spent.items()}
        return {"version": _STATE_VERSION, "num_records": self.num_records, "budgets": budgets, "spent": spent}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "RecordFilter":
        """The filter whose ``state()`` this is.

        Raises:
            ValueError: if it is no such state.
        """
        try:
            if state["version"] != _STATE_VERSION:
                raise ValueError(f"version {state['version']!r} where {_STATE_VERSION} is due")
            guard = cls(state["num_records"], **{name: Fraction(text) for name, text in state["budgets"].items()})
            if state["spent"].keys() != guard._spent.keys():
                raise ValueError(f"spent holds {sorted(state['spent'])} where {sorted(guard._spent)} are due")
            guard._spent = {name: _unpack(text, guard.num_records) for name, text in state["spent"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, zlib.error) as error:
            raise ValueError(f"the filter state is not valid ({error}): pass what RecordFilter.state() gave") from None
        return guard

    def _named(self, records: ArrayLike) -> tuple[Ints, Ints]:
        """The ids, and how often each of all records is named."""
        ids = check_vector("records", records, minimum=0)
        if int(ids.max()) >= self.num_records:
            raise ValueError(
                f"records holds {int(ids.max())}: ids lie in 0…{self.num_records - 1} for num_records "
                f"{self.num_records}; check the ids"
            )
        return ids, np.bincount(ids, minlength=self.num_records)

    def _units(
        self, mechanism: str, noise_multiplier: float, epsilon_excess: float, tail_probability: float
    ) -> dict[str, int]:
        """What one release costs in units of each budget it draws on, rounded up; above capacity where it never fits."""
        name = BUDGET_OF[check_choice("mechanism", mechanism, tuple(BUDGET_OF))]
        z = Fraction(check_multiplier(noise_multiplier))
        charges = {name: 1 / z**2 if mechanism == "gaussian" else 1 / z}
        for key, label, value in (
            ("excess_budget", "epsilon_excess", epsilon_excess),
            ("tail_budget", "tail_probability", tail_probability),
        ):
            error = check_real(label, value, minimum=0.0, exclusive=False, fix=f"pass {label}=0.0 for ideal arithmetic")
            if error:
                charges[key] = Fraction(error)
        budgets = {key: Fraction(getattr(self.budget, key)) for key in charges}
        return {
            key: min(math.ceil(charge * UNITS / budgets[key]), _CAPACITY + 1) if budgets[key] else _CAPACITY + 1
            for key, charge in charges.items()
        }

    def _room(self, units: dict[str, int]) -> Ints:
        """How many more such releases each record allows, shape (num_records,)."""
        rooms = [(_CAPACITY - self._spent[name]) // unit for name, unit in units.items()]
        return np.asarray(np.minimum.reduce(rooms))


def _pack(values: Ints) -> str:
    return base64.b64encode(zlib.compress(values.astype("<i8").tobytes(), 1)).decode("ascii")


def _unpack(text: str, count: int) -> Ints:
    values = np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), dtype="<i8").astype(np.int64)
    if len(values) != count or int(values.min()) < 0 or int(values.max()) > _CAPACITY + 1:
        raise ValueError(f"{len(values)} entries where {count} in 0…{_CAPACITY + 1} are due")
    return values
