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
from asfl_privacy.accounting.journal import Journal, is_journal
from asfl_privacy.accounting.sampled import sampled_epsilon
from asfl_privacy.accounting.statement import statement as write_statement
from asfl_privacy.accounting.statement import statement_record
from asfl_privacy.accounting.statement_facts import StatementFacts
from asfl_privacy.cells import DEFAULT_DELTA
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
    ledger: Annotated[
        Path | None, typer.Argument(metavar="[LEDGER]", help="ledger.json of a run, or --ledger's.")
    ] = None,
    mech: Annotated[str, typer.Option("--mech", metavar="gaussian|laplace", help="Without a ledger.")] = "gaussian",
    noise_multiplier: Annotated[
        float | None, typer.Option("--noise-multiplier", metavar="Z", help="σ/Δ or b/Δ, without a ledger.")
    ] = None,
    releases: Annotated[int, typer.Option("--releases", metavar="T", help="Releases, without a ledger.")] = 1,
    sampling: Annotated[
        float | None, typer.Option("--sampling", metavar="Q", help="Chance to receive each release, no collusion.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option("--delta", metavar="D", help="δ. [the run's, else 1e-5; pure mechanisms: 0]")
    ] = None,
    distance: Annotated[float, typer.Option("--distance", metavar="K", help="In multiples of R; inf: any two.")] = 1.0,
    statement: Annotated[bool, typer.Option("--statement", help="Print the run's statement, made anew.")] = False,
    as_json: Json = False,
) -> None:
    """What has been spent: of a run's ledger, of a data set's, or of T releases at one noise multiplier.

    Examples: asfl-privacy account runs/…/ledger.json --statement

    asfl-privacy account --noise-multiplier 10 --releases 1000 --delta 1e-5
    """
    if (ledger is None) == (noise_multiplier is None):
        raise ValueError("account needs either a ledger file or --noise-multiplier, and not both; give one of them")
    if sampling is not None:
        if ledger is not None or mech != "gaussian" or distance != 1.0 or statement:
            raise ValueError(
                "sampling is for Gaussian releases without a ledger: a ledger counts what was released; give "
                "--noise-multiplier and --releases alone beside it"
            )
        show(_sampled(noise_multiplier or 0.0, releases, sampling, delta), as_json=as_json)
        return
    book, journal = _book(ledger, mech=mech, noise_multiplier=noise_multiplier, releases=releases)
    facts = None if book.facts is None else StatementFacts.from_dict(book.facts)
    if statement:
        if facts is None:
            raise ValueError("statement needs the ledger.json of a run, which holds the run's facts; give that file")
        if as_json:
            print(to_json(statement_record(book, facts=facts)))  # noqa: T201
        else:
            print(write_statement(book, facts=facts), end="")  # noqa: T201 - byte for byte as statement.md
        return
    asked_delta = delta if delta is not None else _default_delta(book, facts)
    bracket = book.epsilon(delta=asked_delta, distance=distance)
    numbers: dict[str, object] = {
        "epsilon": bracket.high,
        "epsilon_low": bracket.low,
        "epsilon_high": bracket.high,
        "delta": bracket.delta,
        "method": _method(book, asked_delta),
        "distance": distance,
        "releases_of_one_record": book.counts.max_releases_per_record,
    }
    if len(book.channels) > 1:
        for channel in book.channels:
            numbers[f"epsilon_{channel}"] = book.epsilon(delta=asked_delta, distance=distance, channel=channel).high
    if book.clients is not None:
        numbers["epsilon_client"] = book.epsilon(delta=asked_delta, distance=distance, unit="client").high
    if ledger is not None:
        numbers |= {"relation": book.relation, "guarantee": "none: reproduce only" if book.is_reproducible else "yes"}
    if journal is not None:
        numbers["runs"] = len(journal.runs)
        if journal.is_cut:
            numbers["note"] = "the last line is cut short and left out: what it charged, if anything, was not sent"
    show(numbers, as_json=as_json)


def _book(
    ledger: Path | None, *, mech: str, noise_multiplier: float | None, releases: int
) -> tuple[Ledger, Journal | None]:
    """The ledger asked about, and the journal it is the sum of where it is a data set's."""
    if ledger is not None:
        if is_journal(ledger):
            journal = Journal.read(ledger)
            return journal.ledger(), journal
        return Ledger.load(ledger), None
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
    return book, None


def _sampled(noise_multiplier: float, releases: int, sampling: float, delta: float | None) -> dict[str, object]:
    """What one recipient learns that gets each release with a given chance and sees whether it did."""
    asked = DEFAULT_DELTA if delta is None else delta
    bracket = sampled_epsilon(noise_multiplier, num_rounds=releases, sampling_probability=sampling, delta=asked)
    return {
        "epsilon": bracket.high,
        "epsilon_low": bracket.low,
        "epsilon_high": bracket.high,
        "delta": bracket.delta,
        "method": "mixture over the releases received; for recipients that do not collude",
    }


def _default_delta(book: Ledger, facts: StatementFacts | None) -> float:
    """The δ of the run; without one 0 where every mechanism is pure, else the default."""
    if facts is not None:
        return facts.delta
    return (
        0.0
        if "gaussian" not in book.mechanisms and not any(e.tail_probability for e in book.event_classes)
        else DEFAULT_DELTA
    )


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


def _method(book: Ledger, delta: float) -> str:
    """How the total was found."""
    if not book.mechanisms:
        return "nothing released"
    if book.mechanisms == ("gaussian",):
        return "Gaussian closed form"
    if delta == 0.0:
        return "sum of pure ε"
    return "privacy loss distribution, or the sum of pure ε and the Gaussian closed form where that is less"
