"""`audit`: evidence that noise is what it claims to be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asfl_privacy import audit as audit_room
from asfl_privacy.accounting import calibrate as calibrate_noise
from asfl_privacy.cells import DEFAULT_DELTA
from asfl_privacy.cli.budget import Json, to_json
from asfl_privacy.mechanisms import NoiseLayer, make_mechanism
from asfl_privacy.mechanisms.mechanism import scale_for
from asfl_privacy.run_audit import audit_run
from asfl_privacy.run_folder import read_run

NUM_VALUES = 64


def audit(
    *,
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="Folder of a finished run.")] = None,
    mech: Annotated[str | None, typer.Option("--mech", metavar="gaussian|laplace", help="Without a run.")] = None,
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", metavar="E", help="ε of one release, without a run. [1]")
    ] = None,
    delta: Annotated[float | None, typer.Option("--delta", metavar="D", help="δ; Laplace: 0. [1e-5]")] = None,
    sensitivity: Annotated[
        float | None, typer.Option("--sensitivity", metavar="Δ", help="ℓ2, or ℓ1 for Laplace. [1]")
    ] = None,
    alpha: Annotated[float, typer.Option("--alpha", metavar="A", help="Probability of a false alarm.")] = 1e-6,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Of the test inputs, not of the noise.")] = 0,
    as_json: Json = False,
) -> int:
    """Test noise against its claim: a lower bound on ε beside it, and any breach with the part that saw it.

    Of a run: the noise of every protected channel, the statement against the ledger, the certificate against a search.
    Exit code 1 if anything does not hold. Passing is no proof. Examples:

    asfl-privacy audit runs/asfl-gaussian-eps4-…

    asfl-privacy audit --mech gaussian --epsilon 1 --delta 1e-5
    """
    if (run is None) == (mech is None):
        raise ValueError("audit needs either the folder of a run or --mech, and not both; give one of them")
    if run is not None:
        if (epsilon, delta, sensitivity) != (None, None, None):
            raise ValueError(
                "epsilon, delta and sensitivity of a run are those of its ledger; leave them out, or give --mech without a run"
            )
        outcome = audit_run(read_run(run), alpha=alpha, seed=seed)
        if as_json:
            print(to_json(outcome.to_dict()))  # noqa: T201
        else:
            for channel, report in outcome.reports.items():
                print(f"{channel}\n{_indented(report.summary())}")  # noqa: T201
            for line in outcome.checked:
                print(f"holds: {line}")  # noqa: T201
            for line in outcome.findings:
                print(f"BREACH: {line}")  # noqa: T201
            print(f"audit {'passed' if outcome.passed else 'FAILED'}")  # noqa: T201
        return 0 if outcome.passed else 1
    assert mech is not None
    asked = delta if delta is not None else (0.0 if mech == "laplace" else DEFAULT_DELTA)
    z = calibrate_noise(mech, epsilon=1.0 if epsilon is None else epsilon, delta=asked).noise_multiplier
    moved = 1.0 if sensitivity is None else sensitivity
    layer = NoiseLayer(make_mechanism(mech, scale=scale_for(z, sensitivity=moved), sensitivity=moved))
    report = audit_room.run(
        layer, audit_room.claim_of(layer, input_shape=(NUM_VALUES,), delta=asked), alpha=alpha, seed=seed
    )
    print(to_json(report.to_dict()) if as_json else report.summary())  # noqa: T201
    return 0 if report.passed else 1


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
