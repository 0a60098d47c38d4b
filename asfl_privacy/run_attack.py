"""Attacks on a run: what a curious recipient gets from one release of records that nobody trained on."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from asfl_privacy.accounting import Ledger
from asfl_privacy.accounting.checks import check_integer
from asfl_privacy.attacks import AttackResult, Effort, MembershipGuess, RecipientView, Reconstruction, attack_release
from asfl_privacy.cells import Cell
from asfl_privacy.federated.streams import SERVER, numpy_stream
from asfl_privacy.mechanisms import ReleasePlan, apply_release, run_stateless, split_head
from asfl_privacy.mechanisms.lattice import SeededSource
from asfl_privacy.run_folder import FinishedRun

NUM_RECORDS = 12
MOST_AUXILIARY = 2000
"""Records that the attacker has of its own, at most: more add time and no strength."""
LEAST_AUXILIARY = 10
QUICK = Effort(inversion_steps=60, restarts=0, decoder_steps=80, search_steps=10, membership_pairs=4)

Value = str | int | float | None


@dataclass(frozen=True, kw_only=True, eq=False)
class RunAttack:
    """An attack on one run.

    Attributes:
        cell: What was run.
        epsilon_release: ε of one release at the radius, by the run's ledger; None without noise.
        epsilon_any_two: The same for any two records; inf where it is not known.
        noise_stddev: Of each coordinate of what is noised, under the last head; None without noise.
        seed: Of records, noise and attacks.
        num_auxiliary: The attacker's own records.
        result: Figures and rebuilt records.
    """

    cell: Cell
    epsilon_release: float | None
    epsilon_any_two: float | None
    noise_stddev: float | None
    seed: int
    num_auxiliary: int
    result: AttackResult

    @property
    def breaches(self) -> tuple[str, ...]:
        """Guesses that refute the claimed ε, one line each."""
        found = []
        guesses = (("neighbours", self.result.neighbours), ("any two records", self.result.any_two))
        epsilons = (self.epsilon_release, self.epsilon_any_two)
        for (who, guess), epsilon in zip(guesses, epsilons, strict=True):
            if guess is not None and guess.bound is not None and guess.low > guess.bound:
                found.append(
                    f"{self.cell.label}: {who} are told apart with advantage {guess.advantage:.4f}, at least {guess.low:.4f} "
                    f"with {100 * guess.confidence:g} % confidence, and the claimed ε {epsilon:.6g} allows {guess.bound:.4f}"
                )
        return tuple(found)

    def row(self) -> dict[str, Value]:
        """The run's line of attack.csv; blank where a column has no meaning. Rebuilt records are the best of each record."""
        target, result = self.cell.target, self.result
        rebuilt = None if self.noise_stddev is None else result.best
        return {
            "run": self.cell.label,
            "mech": self.cell.mech,
            "exchange_layer": self.cell.exchange_layer,
            "placement": None if target is None else target.placement,
            "radius": None if target is None else target.radius,
            "p": None if target is None else target.p,
            "delta": None if target is None else target.delta,
            "run_seed": self.cell.seed,
            "attack_seed": self.seed,
            "records": len(result.originals),
            "auxiliary_records": self.num_auxiliary,
            "epsilon_release": self.epsilon_release,
            "epsilon_release_any_two": self.epsilon_any_two,
            "noise_stddev": self.noise_stddev,
            **_likeness("mean_record", result.baseline),
            **_likeness("without_noise", result.best_without_noise),
            **_likeness("with_noise", rebuilt),
            **_guess("neighbours", result.neighbours),
            **_guess("any_two", result.any_two),
            "property_accuracy": None if rebuilt is None else result.property_guess.accuracy,
            "property_low": None if rebuilt is None else result.property_guess.low,
            "property_high": None if rebuilt is None else result.property_guess.high,
            "property_without_noise": result.property_without_noise.accuracy,
            "property_majority_rate": result.property_guess.majority_rate,
            "breach": "yes" if self.breaches else "no",
        }

    def figures(self) -> dict[str, object]:
        """Everything but the images, as JSON holds it: the row, and the figures of every attack."""
        row = {name: "inf" if value == math.inf else value for name, value in self.row().items()}
        return {**row, "breaches": list(self.breaches), "attacks": self.result.figures()}


def attack_run(
    run: FinishedRun, *, num_records: int = NUM_RECORDS, seed: int, effort: Effort | None = None
) -> RunAttack:
    """Attack one release of some test records under a run's last head.

    Args:
        run: From `read_run`.
        num_records: Test records attacked; other test records, at most 2,000, are the attacker's own.
        seed: Chooses the records, and draws the attacked noise and everything else, so that the attack repeats.
        effort: How hard the attacker works.

    Returns:
        The attack. Without noise it is on clean activations.

    Raises:
        ValueError: A run that shares no activations, or too few test records.

    Guarantee:
        No training record is looked at, and what is attacked is drawn by `apply_release` with the run's own plan. The ε
        beside it is that of the strongest release that the run's ledger holds; for any two records also that of the last
        head, under which the run released nothing, where it is larger.

    Edge cases:
        A run releases a record in several rounds, under other heads: this attacks one release.
    """
    num_records, seed = check_integer("records", num_records, minimum=1), check_integer("seed", seed, minimum=0)
    _check_shares(run)
    data, head = run.data, run.federation.split.head
    num_test = len(data.test_inputs)
    if num_records > num_test - LEAST_AUXILIARY:
        raise ValueError(
            f"records {num_records}: {data.name} has {num_test} test records, and the attacker needs {LEAST_AUXILIARY} of "
            f"them; give at most {max(num_test - LEAST_AUXILIARY, 0)}"
        )
    order = torch.from_numpy(numpy_stream(seed, round=-1, client=SERVER, purpose="attack").permutation(num_test))
    attacked, own = order[:num_records], order[num_records : num_records + MOST_AUXILIARY]
    plan, target, source = run.plan, run.run.cell.target, SeededSource(f"attack|{seed}".encode())

    def release(inputs: Tensor) -> Tensor:
        return run_stateless(head, inputs) if plan is None else apply_release(plan, head, inputs, source=source)

    at_radius, any_two = _claims(run)
    metric = plan is not None and not isinstance(plan.radius, str)
    result = attack_release(
        release,
        _view(plan, head),
        held_out_inputs=data.test_inputs[attacked],
        held_out_labels=data.test_labels[attacked],
        auxiliary_inputs=data.test_inputs[own],
        auxiliary_labels=data.test_labels[own],
        input_box=data.input_box,
        epsilon=at_radius if metric else None,
        epsilon_any_two=any_two,
        delta=0.0 if target is None else target.delta,
        radius=float(plan.radius) if plan is not None and metric else None,
        p=2.0 if plan is None else plan.p,
        seed=seed,
        effort=effort,
    )
    return RunAttack(
        cell=run.run.cell,
        epsilon_release=at_radius,
        epsilon_any_two=any_two,
        noise_stddev=None if plan is None else plan.noise_stddev,
        seed=seed,
        num_auxiliary=len(own),
        result=result,
    )


def attack_json(attacks: Sequence[RunAttack]) -> str:
    """The text of attack.json: the figures of every run attacked and every breach."""
    record = {
        "runs": [attack.figures() for attack in attacks],
        "breaches": [line for attack in attacks for line in attack.breaches],
    }
    return json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def attack_csv(attacks: Sequence[RunAttack]) -> str:
    """The text of attack.csv: one line a run attacked."""
    rows = [attack.row() for attack in attacks]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


class _Copied(nn.Module):
    """A part of the head on a copy of its input, which blocks that work in place would change."""

    def __init__(self, part: nn.Sequential) -> None:
        super().__init__()
        self.part = part
        self.training = part.training

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.part(inputs.clone())
        return outputs


def _view(plan: ReleasePlan | None, head: nn.Sequential) -> RecipientView:
    """What a recipient knows of the release."""
    if plan is None:
        return RecipientView(before_noise=_Copied(head), after_noise=nn.Identity())
    before, after = split_head(head, plan.placement)
    return RecipientView(
        before_noise=_Copied(before),
        after_noise=_Copied(after) if len(after) else nn.Identity(),
        mechanism=plan.mechanism.family,
        noise_stddev=plan.noise_stddev,
        clip=plan.clip,
    )


def _check_shares(run: FinishedRun) -> None:
    """Refuse a run of which no recipient received activations."""
    shares = run.run.cell.exchange_layer is not None and run.config.tail_steps > 0
    if run.run.cell.target is not None:
        shares = run.plan is not None and run.ledger is not None and "activations" in run.ledger.channels
    if not shares:
        raise ValueError(
            f"{run.folder} holds a run that shared no activations ({run.run.cell.label}): there is nothing to attack; give a "
            "run of method asfl"
        )


def _claims(run: FinishedRun) -> tuple[float | None, float | None]:
    """ε of one release at the radius and for any two records; None without noise."""
    plan, ledger, target = run.plan, run.ledger, run.run.cell.target
    if plan is None or ledger is None or target is None:
        return None, None

    def claimed(book: Ledger, distance: float) -> float:
        return book.largest_release(delta=target.delta, distance=distance, channel="activations")

    any_two = claimed(ledger, math.inf)
    if plan.radius != "any":  # else the multiplier was fixed before the run, and the ledger's claim is put to the test
        last = Ledger(p=plan.p, radius=plan.radius)
        last.record(
            channel="activations",
            mechanism=plan.mechanism.family,
            noise_multiplier=plan.noise_multiplier,
            whole_record_multiplier=plan.whole_record_multiplier,
            round=0,
            records=[0],
            sampler="lattice",
            epsilon_excess=plan.epsilon_excess,
            tail_probability=plan.tail_probability,
        )
        any_two = max(any_two, claimed(last, math.inf))
    return claimed(ledger, 1.0), any_two


def _likeness(name: str, rebuilt: Reconstruction | None) -> dict[str, Value]:
    """Mean and standard error of PSNR in decibels and of SSIM."""
    columns: dict[str, Value] = {}
    for measure, found in (
        ("psnr", None if rebuilt is None else rebuilt.psnr),
        ("ssim", None if rebuilt is None else rebuilt.ssim),
    ):
        columns[f"{measure}_{name}"] = None if found is None else found.mean
        columns[f"{measure}_{name}_se"] = None if found is None else found.standard_error
    return columns


def _guess(name: str, guess: MembershipGuess | None) -> dict[str, Value]:
    ends = ("advantage", "low", "high", "bound")
    return {f"{name}_{end}": None if guess is None else getattr(guess, end) for end in ends}
