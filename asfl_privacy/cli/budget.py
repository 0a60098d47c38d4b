"""`calibrate` and `account`: the numbers alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from asfl_privacy.accounting import Ledger
from asfl_privacy.accounting import calibrate as calibrate_noise
from asfl_privacy.cells import DEFAULT_DELTA
from asfl_privacy.config import load_config
from asfl_privacy.mechanisms import make_mechanism
from asfl_privacy.mechanisms.mechanism import scale_for

Json = Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")]


def calibrate(
    *,
    mech: Annotated[str, typer.Option("--mech", metavar="gaussian|laplace", help="Mechanism.")] = "gaussian",
    epsilon: Annotated[float | None, typer.Option("--epsilon", metavar="E", help="ε of one release.")] = None,
    total_epsilon: Annotated[float | None, typer.Option("--total-epsilon", metavar="E", help="ε of all.")] = None,
    delta: Annotated[float | None, typer.Option("--delta", metavar="D", help="δ; Laplace: 0. [1e-5]")] = None,
    sensitivity: Annotated[float, typer.Option("--sensitivity", metavar="Δ", help="ℓ2, or ℓ1 for Laplace.")] = 1.0,
    releases: Annotated[int, typer.Option("--releases", metavar="T", help="Releases of one record.")] = 1,
    method: Annotated[str, typer.Option("--method", metavar="analytic|classic", help="Gaussian formula.")] = "analytic",
    as_json: Json = False,
) -> None:
    """How much noise a promise needs.

    Example: asfl-privacy calibrate --epsilon 1 --delta 1e-5 --sensitivity 0.5
    """
    if (epsilon is None) == (total_epsilon is None):
        raise ValueError(
            "calibrate needs --epsilon of one release or --total-epsilon of all, and not both; give one of them"
        )
    asked_delta = delta if delta is not None else (0.0 if mech == "laplace" else DEFAULT_DELTA)
    found = calibrate_noise(
        mech, epsilon=epsilon, total_epsilon=total_epsilon, delta=asked_delta, num_releases=releases, method=method
    )
    scale = scale_for(found.noise_multiplier, sensitivity=sensitivity)
    mechanism = make_mechanism(mech, scale=scale, sensitivity=sensitivity)
    numbers: dict[str, object] = {
        "mech": mech,
        "scale" if mech == "laplace" else "noise_stddev": scale,
        "noise_multiplier": found.noise_multiplier,
        "method": found.method,
        "epsilon_release": found.epsilon_release,
        "epsilon_total": found.epsilon_total,
        "delta": found.delta,
        "releases": releases,
        "sensitivity": sensitivity,
    }
    if mech == "laplace":
        numbers["noise_stddev"] = mechanism.noise_stddev
    show(numbers, as_json=as_json)


def account(
    *,
    ledger: Annotated[Path | None, typer.Argument(metavar="[LEDGER]", help="ledger.json of a run.")] = None,
    mech: Annotated[str, typer.Option("--mech", metavar="gaussian|laplace", help="Without a ledger.")] = "gaussian",
    noise_multiplier: Annotated[
        float | None, typer.Option("--noise-multiplier", metavar="Z", help="σ/Δ or b/Δ, without a ledger.")
    ] = None,
    releases: Annotated[int, typer.Option("--releases", metavar="T", help="Releases, without a ledger.")] = 1,
    delta: Annotated[
        float | None, typer.Option("--delta", metavar="D", help="δ. [the run's, else 1e-5; pure Laplace: 0]")
    ] = None,
    distance: Annotated[float, typer.Option("--distance", metavar="K", help="In multiples of R; inf: any two.")] = 1.0,
    as_json: Json = False,
) -> None:
    """What has been spent: of a run's ledger, or of T releases at one noise multiplier.

    Example: asfl-privacy account --noise-multiplier 10 --releases 1000 --delta 1e-5
    """
    if (ledger is None) == (noise_multiplier is None):
        raise ValueError("account needs either a ledger file or --noise-multiplier, and not both; give one of them")
    if ledger is not None:
        book = Ledger.load(ledger)
    else:
        if not 1 <= releases <= 10_000_000:
            raise ValueError(f"releases {releases} must be a whole number from 1 to 10,000,000; give for example 100")
        book = Ledger(p=2.0, radius=1.0)
        book.record(
            channel="activations",
            mechanism=mech,
            noise_multiplier=float(noise_multiplier or 0.0),
            round=0,
            records=[0] * releases,
        )
    asked_delta = delta if delta is not None else _delta_of_run(ledger)
    if "gaussian" not in book.mechanisms:
        asked_delta = 0.0
    bracket = book.epsilon(delta=asked_delta, distance=distance)
    numbers: dict[str, object] = {
        "epsilon": bracket.high,
        "epsilon_low": bracket.low,
        "epsilon_high": bracket.high,
        "delta": bracket.delta,
        "method": _method(book),
        "distance": distance,
        "releases_of_one_record": book.counts.max_releases_per_record,
    }
    if ledger is not None:
        numbers["relation"] = book.relation
    show(numbers, as_json=as_json)


def _delta_of_run(ledger: Path | None) -> float:
    """The δ that the run beside a ledger was calibrated for; the default where there is no such run."""
    config = None if ledger is None else ledger.parent / "config.toml"
    if config is None or not config.is_file():
        return DEFAULT_DELTA
    deltas = load_config(config, overrides={}).delta
    return deltas[0] if len(deltas) == 1 else DEFAULT_DELTA


def show(numbers: dict[str, object], *, as_json: bool) -> None:
    """Print numbers as aligned lines, every digit there is, or as one JSON object."""
    if as_json:
        print(to_json(numbers))  # noqa: T201
        return
    width = max(len(name) for name in numbers)
    for name, value in numbers.items():
        print(f"{name:<{width}}  {value}")  # noqa: T201 - rounded figures could claim more than was proven


def to_json(numbers: Mapping[str, object] | Sequence[Mapping[str, object]]) -> str:
    """JSON of one or several records; infinity becomes "inf", as JSON has no word for it."""
    records = [numbers] if isinstance(numbers, Mapping) else list(numbers)
    plain = [
        {name: "inf" if isinstance(value, float) and math.isinf(value) else value for name, value in record.items()}
        for record in records
    ]
    return json.dumps(plain[0] if isinstance(numbers, Mapping) else plain, ensure_ascii=False, allow_nan=False)


def _method(book: Ledger) -> str:
    if not book.mechanisms:
        return "nothing released"
    ways = {"gaussian": "Gaussian closed form", "laplace": "Laplace sum"}
    return " + ".join(ways[mechanism] for mechanism in book.mechanisms)
